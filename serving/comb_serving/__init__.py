"""Serving comb checkpoints on vLLM: the plug-in, and the pool of documents it reads (docs/serving.md)."""
