"""Attention to documents that lie in blocks of a shared pool, as the server's cross blocks read them.

`layout` says where documents lie, `attention.attend` computes (plainly, or by `kernel` where there is a GPU), `plan` is
who does what of a step's work.
"""
