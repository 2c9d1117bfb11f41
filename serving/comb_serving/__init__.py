"""Serving comb checkpoints on vLLM: `comb serve` (docs/serving-http.md) and what runs inside vLLM (docs/serving.md)."""
