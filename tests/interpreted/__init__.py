"""Kernels under Triton's interpreter: in a process of their own, as triton decides at its import."""
