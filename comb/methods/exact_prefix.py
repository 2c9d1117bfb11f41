"""Exact prefixes: what the backbone computes at the start of a prompt, kept in pieces, each behind those before it.

A piece holds its own tokens only (and, on a hybrid backbone, the states at its end), under a key of *everything before
and including it*. So it is found again only behind the very same tokens, whichever method or engine asks, and prompts
that begin alike share what they have in common. Nothing is moved or composed: it is what serving engines do today, here
for method `prefix`, and for what position-independent caching leaves over, the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from comb.backbones.identity import weights_fingerprint
from comb.cache.picache import DecoderPICache, PICache, content_key
from comb.cache.store import PICacheRef, PICacheStore
from comb.hybrid.picache import HybridPICache
from comb.hybrid.snapshot import extend, restore
from comb.hybrid.support import find_hybrid_support, is_hybrid
from comb.linking.compile import cache_of, compile_tokens
from comb.methods.past_state import PastState


@dataclass(frozen=True)
class PrefixPieces:
    """The pieces that stand in front of a token, from the prompt's start on, and all of their tokens."""

    token_ids: tuple[int, ...] = ()
    picaches: tuple[Any, ...] = ()

    def and_then(self, piece: Sequence[int], picache: PICache) -> PrefixPieces:
        """These, and `piece` behind them."""
        return PrefixPieces((*self.token_ids, *piece), (*self.picaches, picache))

    def past(self, model: Any, length: int) -> PastState:
        """A cache over all of them, of copies, with room for a prompt of `length` tokens."""
        cache = (restore if is_hybrid(model) else cache_of)(model, self.picaches, length)
        return PastState(self.token_ids, cache)


def piece_key(model: Any, before: Sequence[int], piece: Sequence[int], salt: str) -> str:
    """The key of `piece` behind `before`; where it starts belongs to it: the same tokens may be cut otherwise."""
    return content_key(
        [*before, *piece], fingerprint=weights_fingerprint(model), method=f"prefix@{len(before)}",
        dtype=model.dtype, salt=salt,
    )  # fmt: skip


def compute_piece(model: Any, before: PrefixPieces, piece: Sequence[int]) -> PICache:
    """What `piece` leaves behind `before`, by a pass over `piece` alone. The caller holds the model's lock."""
    fingerprint = weights_fingerprint(model)
    if is_hybrid(model):
        return extend(model, find_hybrid_support(model), fingerprint, before.picaches, piece)
    picache = compile_tokens(model, fingerprint, piece, before.picaches)
    return replace(picache, token_ids=None)  # they are in its key


def acquire_piece(
    store: PICacheStore,
    model: Any,
    before: PrefixPieces,
    piece: Sequence[int],
    salt: str,
    compute: Callable[[], PICache] | None = None,
) -> PICacheRef:
    """A reference to `piece` behind `before`, found in `store` or computed (by `compute`, where that is given).

    The caller holds the model's lock. It comes first, so that nobody who has it waits for a piece that somebody else
    is computing, who waits for the lock.

    Raises:
        ValueError: when the store has something else under its key.
        PICacheTooLargeError, StoreFullError: no room.
    """
    key = piece_key(model, before.token_ids, piece, salt)
    reference = store.acquire(
        [key], lambda missing: [compute_piece(model, before, piece) if compute is None else compute()]
    )[0]
    found = reference.picache
    if not isinstance(found, HybridPICache if is_hybrid(model) else DecoderPICache) or found.num_tokens != len(piece):
        reference.release()
        raise ValueError(f"the store holds something else under {key[:12]}: {found!r}")
    return reference
