"""Documents and a request's own tokens in one softmax, where the attention to the latter is computed already.

One softmax over several sets of keys is all their softmaxes, weighted by their denominators. A document's comes with
the attention to it (`comb.kernels.paged`). A server's own attention doesn't tell its denominator, so the own keys are
read once more: they are few, as documents aren't among them.

Shapes: T tokens of the step, S of them read; H query heads, G key/value heads, D head_dim; N readings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from comb.kernels.joint.batch import JointBatch, OwnKeys
from comb.kernels.paged.attention import attend, masses, why_plain
from comb.kernels.paged.layout import PagedLayer

_AT_ONCE = 2**24
"""Scores of own keys that the plain way computes at a time."""


def join_(
    output: Tensor, query: Tensor, layer: PagedLayer, own: OwnKeys, batch: JointBatch,
    turning: Callable[[Tensor], tuple[Tensor, Tensor]], scale: float = 1.0,
) -> None:  # fmt: skip
    """Mixes what tokens read of their documents into `output` [T, H, D], which holds attention to their own tokens.

    Args:
        query: as that attention had them, turned by the tokens' places. [T, H, D]
        turning: cosine and sine of rotary angles (`JointBatch.turned`).
        scale: of the scores, beside 1 / sqrt(D).
    """
    mass = torch.empty(len(batch.readers), query.shape[1], dtype=torch.float32, device=query.device)
    read = attend(query, layer, batch.batch, mass=mass, turned=batch.turned(turning, scale))
    if why_plain(query, layer) or own.keys is None or own.keys.dtype != query.dtype:
        join_plain_(output, own_masses(query, own, batch, scale), read, mass, batch)
        return
    from comb.kernels.joint.kernel import join_by_kernels_

    join_by_kernels_(output, query, own, read, mass, batch, scale)


def join_plain_(output: Tensor, own_mass: Tensor, read: Tensor, mass: Tensor, batch: JointBatch) -> None:
    """The specification of what is behind the readings.

    own_mass [S, H]; read [N, H, D] and mass [N, H], what attention to the documents gave
    """
    tokens, readers = batch.tokens.long(), batch.readers.long()
    most = own_mass.scatter_reduce(0, readers[:, None].expand_as(mass), mass, "amax")
    kept, more = torch.exp(own_mass - most), torch.exp(mass - most.index_select(0, readers))
    total = kept.index_add(0, readers, more)
    mixed = output.index_select(0, tokens).to(torch.promote_types(output.dtype, torch.float32)) * kept[..., None]
    mixed = mixed.index_add(0, readers, (read * more[..., None]).to(mixed))
    output.index_copy_(0, tokens, (mixed / total[..., None]).to(output))


def own_masses(query: Tensor, own: OwnKeys, batch: JointBatch, scale: float = 1.0) -> Tensor:
    """Log of the denominators that attention to own tokens had for the tokens that read: query [T, H, D] -> [S, H]."""
    tokens, longest = batch.tokens, batch.longest
    found = torch.empty(len(tokens), query.shape[1], dtype=torch.float32, device=query.device)
    # runs of equal length at once; a long one in parts
    by_count: dict[int, list[int]] = {}
    begin = 0
    for run in batch.runs:
        by_count.setdefault(run.count, []).append(begin)
        begin += run.count
    for count, begins in by_count.items():
        wide = max(1, _AT_ONCE // (query.shape[1] * longest))  # tokens at once
        rows, columns = max(1, wide // count), min(count, wide)
        for row in range(0, len(begins), rows):
            for column in range(0, count, columns):
                first = torch.tensor(begins[row : row + rows], device=query.device)[:, None] + column
                at = first + torch.arange(min(columns, count - column), device=query.device)
                found[at] = _masses(query, own, batch, at, scale)
    return found


def _masses(query: Tensor, own: OwnKeys, batch: JointBatch, at: Tensor, scale: float) -> Tensor:
    """Of the reading tokens `at` [runs, tokens] -> [runs, tokens, H]"""
    keys_at = torch.arange(batch.longest, device=query.device)
    blocks = own.table[batch.rows[at[:, 0]].long()][:, keys_at // own.block_size].long()
    # slots behind a run's end are read somewhere else, and hidden
    keys = own.read(blocks * own.block_size + keys_at % own.block_size)
    places = batch.places[at][..., None]
    hidden = keys_at > places
    if own.window is not None:
        hidden |= keys_at <= places - own.window
    return masses(query[batch.tokens[at].long()] * scale, keys, hidden)
