"""Serving comb checkpoints on vLLM (the plug-in, the pool and the encoder process come with the serving release)."""
