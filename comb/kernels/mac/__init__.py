"""One decode step of Match-Amend-Complete attention: the plain `step`, the `kernel`s that compute the same, what both
take (`mac_config`), and what earlier queries and prompts leave for them (`state`). `comb.mac` is on top.
"""
