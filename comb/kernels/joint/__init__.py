"""Joint attention over paged documents: attention that a server's own layer has computed over a request's own tokens,
and documents read beside it, in one softmax.

`batch` says which token of a step reads which documents, `attention.join_` computes (plainly, or by `kernel` where
there is a GPU). Documents are read by `comb.kernels.paged`.
"""
