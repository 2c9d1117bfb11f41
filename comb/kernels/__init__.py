"""Triton kernels, each with its plain-torch twin: MAC attention (`mac`) and attention to paged documents (`paged`).

Importing this package imports no triton; `mac.dispatch` and `paged.attention` say where it is taken. The twins are
`mac.algebra.attend_ranges` and `paged.attention.attend_plain`.
"""
