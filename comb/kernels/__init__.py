"""Triton kernels, each with its plain-torch twin: MAC attention (`mac`) and attention to paged documents (`paged`).

Importing this package imports no triton; `dispatch` says where it is taken. The twins are `mac.step` and
`paged.attention.attend_plain`.
"""
