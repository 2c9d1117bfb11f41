"""The memory that encoders write and vLLM's workers read: one paged tensor of cross keys and values for each rank.

In: keys and values of one document, and the blocks that it was given (`capability.PoolHandle`). Out: the same, in
another process (`shared_pool.SharedPool`), from shared memory of the host or of a GPU (`memory`).
"""
