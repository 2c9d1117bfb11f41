"""Linking: cached keys and values moved to their places in a prompt, and a few tokens recomputed among them.

`positions` finds where a backbone's cached tensors hold positions, `rotation` re-rotates them, `cache` holds a prompt's
keys and values while it is linked, `masks` builds masks by position, `passes` recomputes rows, `support` tries all of
that on the model in hand before anyone relies on it. The methods on top are in `comb.methods`.
"""
