"""Hybrid backbones: what a run of tokens does to the state of a linear-attention layer, kept and composed.

A linear layer updates its state affinely, token by token:  S_i = T_i S_{i-1} + u_i.  So does a whole segment C:
S_after = T_C S_before + S_C, with T_C = T_n ... T_1 and S_C the state that the segment leaves behind an empty one.
With both kept, a segment is put behind any other tokens in time that doesn't depend on its length (HYPIC sec. 4.2).

`transition` has the families of T; layers (and parts of layers) whose only state is the last columns in front of a
short convolution have none.
"""
