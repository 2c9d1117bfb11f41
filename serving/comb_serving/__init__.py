"""Serving comb checkpoints on vLLM. Empty so far: today comb answers in process, through `comb.PICEngine`."""
