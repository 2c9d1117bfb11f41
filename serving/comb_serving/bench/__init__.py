"""`comb bench serve` (`serve`): `comb serve` against plain vLLM, over HTTP, in one run.

`workload` has the options and draws the requests, `trace` those of clients that change nothing, `client` sends and
times them, `servers` are the two processes, `tables` makes figures and tables of records.
"""
