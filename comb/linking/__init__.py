"""Linking: cached keys and values moved to their places in a prompt, and a few tokens recomputed among them.

`positions` finds where a backbone's cached tensors hold positions and turns them to others, `cache` holds a prompt's
keys and values while it is linked, `passes` compiles segments and recomputes rows, `masks` and `recomputed` say how
these attend, `support` tries all of that on the model in hand before anyone relies on it. On top: `comb.methods`.
"""
