"""Triton kernels, each with its plain-torch twin: MAC attention (`mac`) and attention to paged documents (`paged`).

Importing this package imports no triton; `mac.dispatch` and `paged.attention` say where it is taken.
A step of MAC is five launches, none of which waits for the host:

    match     one program per (row, query head, tile of the ring): nearest reusable query of the tile
    select    one program per (row, key/value head): the nearest of all tiles, and how many tiles of keys its heads need
    schedule  one program: where each span begins in the list of all tiles, and tiles per program
    attend    as many programs as the device holds, each an equal share of that list: partial attention, log-sum-exp
    merge     one program per (row, query head): reused summary, band, tail and sink to one output; writes the ring

`mac.step.step` is what they are tested against; the paged ones against `paged.attention.attend_plain`.
"""
