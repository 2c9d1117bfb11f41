"""Encoders: token ids of documents in, keys and values into the pool, one answer for each document.

The manager asks through `protocol.Encoders`: processes that are watched and started again (`supervisor`, whose child is
`process`), or the encoder in the same process (`local`). The work itself is `worker`'s.
"""
