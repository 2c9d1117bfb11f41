"""Encoders: token ids of documents in, keys and values into the pool, one answer for each document.

The manager asks through `protocol.Encoders`: an adapter's processes that are watched and started again (`supervisor`,
whose child is `process`), or, for a plain model, vLLM's own engine (`compiler`). `kept` has what leaves the pool.
"""
