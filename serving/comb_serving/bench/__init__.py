"""`comb bench serve`: `comb serve` against plain vLLM, over HTTP, in one run."""
