"""`comb bench serve` (`serve`): `comb serve` against plain vLLM, over HTTP, in one run.

`options` are the command's, `workload` draws the requests, `client` sends and times them, `servers` are the two
processes, `figures` makes rows of records, `tables` shows them.
"""
