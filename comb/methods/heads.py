"""Heads: what stands in front of the first document is an ordinary prefix, computed once for everybody.

A head (a system prompt, examples, a chat template) is the same at every question, so it is cached exactly, whatever a
method does with the documents behind it; on a hybrid it is HYPIC's leading segment, kept whole (sec. 4.2).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from comb.backbones.identity import notice_rows, weights_fingerprint
from comb.cache.picache import DecoderPICache, PICache
from comb.cache.store import PICacheStore, PICacheTooLargeError
from comb.hybrid.support import is_hybrid
from comb.locks import lock_of
from comb.methods.base import LinkRequest, Method
from comb.methods.exact_prefix import PrefixPieces, acquire_piece, compute_piece, piece_key
from comb.methods.past_state import PastState, common_length

HEAD_BYTES = 2**30
"""What the heads of one backbone may take of its device."""

_MOST_HEADS = 256
# a piece costs a key, and on a hybrid a whole state: heads that share fewer tokens than this share no piece
_LEAST_SHARED = 16


class HeadCache:
    """The heads of one backbone, at most `HEAD_BYTES`, least recently used first out; made by `head_cache_of`.

    A head that is new is found as far as it begins like one that isn't: from then on a piece ends there. Keys and
    values are cut there; the states of a hybrid can't be, and are computed up to there once.

    Args:
        device: where heads are kept.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.store = PICacheStore(device=device, device_bytes=HEAD_BYTES)
        # where the pieces of a head end, by fingerprint, salt and tokens, least recently used first
        self._lock = threading.Lock()
        self._ends: OrderedDict[tuple[str, str, tuple[int, ...]], tuple[int, ...]] = OrderedDict()

    def find(self, model: Any, token_ids: Sequence[int], salt: str = "") -> tuple[PrefixPieces, int]:
        """The pieces of a head, computed where they aren't there, and how many of its tokens were there.

        They stay valid when they are evicted meanwhile. The caller holds the model's lock.
        """
        head, found, reused = tuple(token_ids), PrefixPieces(), 0
        notice_rows(model, head)
        with self._lock:
            ends, longer = self._plan((weights_fingerprint(model), salt), head, is_hybrid(model))
        for start, end in pairwise((0, *ends)):
            picache, computed = self._piece(model, found, head[start:end], salt, longer)
            found = found.and_then(head[start:end], picache)
            reused += 0 if computed else end - start
        return found, reused

    def clear(self) -> None:
        """Forgets all heads."""
        with self._lock:
            self._ends.clear()
        self.store.clear()

    def _plan(
        self, scope: tuple[str, str], head: tuple[int, ...], states: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the pieces of `head` end; and of the head most like it, if it is new, what is to be cut for it.

        Args:
            scope: fingerprint and salt.
            states: pieces can't be cut, only whole ones are of use.

        Returns:
            The ends, and the other head's tokens up to the end of the piece inside of which both part.
        """
        known = self._ends.get((*scope, head))
        if known is not None:
            self._ends.move_to_end((*scope, head))
            return known, ()
        ends: tuple[int, ...] = ()
        longer: tuple[int, ...] = ()
        reach = shared = 0
        for (*whose, other), theirs in self._ends.items():
            common = common_length(head, other) if tuple(whose) == scope else 0
            usable = tuple(end for end in theirs if end <= common)
            reached = max(usable, default=0) if states else common
            shared = max(shared, common)
            if reached > reach:
                reach, ends = reached, usable
                longer = () if states else other[: next((end for end in theirs if end > common), common)]
        if shared - max(ends, default=0) >= _LEAST_SHARED:
            ends = (*ends, shared)
        if max(ends, default=0) < len(head):
            ends = (*ends, len(head))
        self._ends[*scope, head] = ends
        while len(self._ends) > _MOST_HEADS:
            self._ends.popitem(last=False)
        return ends, longer

    def _piece(
        self, model: Any, before: PrefixPieces, piece: tuple[int, ...], salt: str, longer: tuple[int, ...]
    ) -> tuple[PICache, bool]:
        """`piece` behind `before`, and whether it had to be computed."""
        made: list[PICache] = []
        cut = self._cut(model, before, piece, salt, longer)

        def make() -> PICache:
            made.append(compute_piece(model, before, piece) if cut is None else cut)
            return made[0]

        try:
            with acquire_piece(self.store, model, before, piece, salt, make) as reference:
                return reference.picache, bool(made) and cut is None
        except PICacheTooLargeError:  # used, but not kept
            return made[0], cut is None

    def _cut(
        self, model: Any, before: PrefixPieces, piece: tuple[int, ...], salt: str, longer: tuple[int, ...]
    ) -> PICache | None:
        """`piece` as the beginning of the longer piece that ends with `longer`, where that is here."""
        other = longer[len(before.token_ids) :]
        if len(other) <= len(piece) or other[: len(piece)] != piece:
            return None
        if self.store.lookup(piece_key(model, before.token_ids, other, salt)) is None:
            return None
        with acquire_piece(self.store, model, before, other, salt) as reference:
            held = reference.picache
        assert isinstance(held, DecoderPICache)
        keys, values = ([tensor[:, : len(piece)] for tensor in tensors] for tensors in (held.keys, held.values))
        return DecoderPICache(held.fingerprint, tuple(keys), tuple(values))

    # copies of the model, and pickles of it, have an empty one

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadCache:
        return HeadCache(self.store.device)

    def __reduce__(self) -> tuple[type[HeadCache], tuple[torch.device]]:
        return HeadCache, (self.store.device,)


def head_cache_of(backbone: Any) -> HeadCache:
    """The heads of a backbone, the same for everybody who asks; others once it has moved to another device."""
    device = backbone.get_input_embeddings().weight.device
    with lock_of(backbone):
        heads: HeadCache | None = backbone.__dict__.get("_comb_heads")
        if heads is None or heads.store.device != device:
            heads = backbone.__dict__["_comb_heads"] = HeadCache(device)
        return heads


def behind_head(method: Method, row: LinkRequest, past: PastState | None) -> tuple[PastState | None, int, LinkRequest]:
    """What stands in front of a row's first document, how many of its tokens needn't be computed, and the rest.

    `past`, 0 and the whole row where an earlier turn stands there already, or nothing does, nothing would be left to
    compute, or a cache can't be gone on from. The caller holds the model's lock.
    """
    if past is not None or not row.head_ids or not (row.picaches or row.query_ids) or method.why_not_continue():
        return past, 0, row
    pieces, reused = head_cache_of(method.backbone).find(method.backbone, row.head_ids, row.salt)
    documents = 0 if method.uses_encoder else sum(picache.num_tokens for picache in row.picaches)
    length = documents + sum(map(len, row.fresh))
    return pieces.past(method.backbone, length), reused, replace(row, head_ids=())
