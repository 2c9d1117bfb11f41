"""Exact prefixes: what stands in front of documents, and for method `prefix` the documents too, computed once for all.

A system prompt, examples and what a chat template writes are the same at every question. They are cached exactly, for
every method and engine on a backbone, whatever a method does with the documents behind: it is what serving engines do
today. On a hybrid a prefix is HYPIC's leading segment, kept whole (sec. 4.2).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from comb.backbones.identity import notice_rows, weights_fingerprint
from comb.cache.picache import DecoderPICache
from comb.hybrid.caches import is_hybrid
from comb.hybrid.compile import extend, restore
from comb.hybrid.support import find_hybrid_support
from comb.linking.compile import cache_of, compile_tokens
from comb.locks import lock_of
from comb.methods.base import LinkRequest, Method
from comb.methods.past_state import PastState, common_length

PREFIX_BYTES = 4 * 2**30
"""What the prefixes of one backbone may take of its device; as much as a store takes by default."""
_MOST = 256


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, and what the backbone computes of them.

    Args:
        pieces: PICaches one behind the other; prefixes that begin alike share those that they have in common.
    """

    token_ids: tuple[int, ...] = ()
    pieces: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def past(self, model: Any, length: int) -> PastState:
        """A cache over all of it, of copies, with room for a prompt of `length` tokens."""
        return PastState(self.token_ids, (restore if is_hybrid(model) else cache_of)(model, self.pieces, length))

    def beginning(self, length: int) -> Prefix:
        """Its first `length` tokens, of the same memory. Of a hybrid there are states at the ends of pieces alone."""
        kept, position = [], 0
        for piece in self.pieces:
            if position + piece.num_tokens <= length:
                kept.append(piece)
            elif position < length and isinstance(piece, DecoderPICache):
                keys, values = ([t[:, : length - position] for t in each] for each in (piece.keys, piece.values))
                kept.append(DecoderPICache(piece.fingerprint, tuple(keys), tuple(values)))
            else:
                break
            position += kept[-1].num_tokens
        return Prefix(self.token_ids[:position], tuple(kept))


class PrefixCache:
    """The prefixes of one backbone, at most `PREFIX_BYTES`, least recently used first out; made by `prefixes_of`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[tuple[str, ...], tuple[int, ...]], Prefix] = OrderedDict()
        self._holders: Counter[int] = Counter()  # prefixes that share a piece, by its id
        self.nbytes = 0

    def find(self, model: Any, token_ids: Sequence[int], salt: str = "") -> tuple[Prefix, int]:
        """The prefix of these tokens, computed behind the longest beginning that is here, and how long that is.

        It stays valid when it is evicted meanwhile. The caller holds the model's lock.
        """
        wanted = tuple(token_ids)
        notice_rows(model, wanted)
        scope = weights_fingerprint(model), str(model.dtype), salt
        found = self._longest(scope, wanted)
        reused = len(found.token_ids)
        if reused < len(wanted):
            found = Prefix(wanted, (*found.pieces, _compute(model, found, wanted[reused:])))
        self._keep(scope, found)
        return found, reused

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            while self._found:
                self._drop()

    def _longest(self, scope: tuple[str, ...], wanted: tuple[int, ...]) -> Prefix:
        with self._lock:
            if (whole := self._found.get((scope, wanted))) is not None:
                return whole
            best, name = Prefix(), None
            for (whose, token_ids), prefix in self._found.items():
                common = common_length(token_ids, wanted) if whose == scope else 0
                if common > len(best.token_ids):
                    beginning = prefix.beginning(common)
                    if len(beginning.token_ids) > len(best.token_ids):
                        best, name = beginning, (whose, token_ids)
            if name is not None:
                self._found.move_to_end(name)
            return best

    def _keep(self, scope: tuple[str, ...], prefix: Prefix) -> None:
        with self._lock:
            name = scope, prefix.token_ids
            if name in self._found:
                self._found.move_to_end(name)
                return
            if sum(map(_storage, prefix.pieces)) > PREFIX_BYTES:
                return  # used, but not kept
            self._found[name] = prefix
            for piece in prefix.pieces:
                self._holders[id(piece)] += 1
                self.nbytes += _storage(piece) if self._holders[id(piece)] == 1 else 0
            while len(self._found) > _MOST or self.nbytes > PREFIX_BYTES:
                self._drop()

    def _drop(self) -> None:
        _, prefix = self._found.popitem(last=False)
        for piece in prefix.pieces:
            self._holders[id(piece)] -= 1
            if not self._holders[id(piece)]:
                del self._holders[id(piece)]
                self.nbytes -= _storage(piece)

    # copies of the model, and pickles of it, have an empty one

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixCache:
        return PrefixCache()

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[()]]:
        return PrefixCache, ()


def _compute(model: Any, before: Prefix, token_ids: Sequence[int]) -> Any:
    """What `token_ids` leave behind `before`, by a pass over them alone."""
    fingerprint = weights_fingerprint(model)
    if is_hybrid(model):
        return extend(model, find_hybrid_support(model), fingerprint, before.pieces, token_ids)
    piece = compile_tokens(model, fingerprint, token_ids, before.pieces)
    # copies: what they were computed in holds what is in front of them, too, and room behind
    keys, values = (tuple(tensor.clone() for tensor in tensors) for tensors in (piece.keys, piece.values))
    return DecoderPICache(fingerprint, keys, values)


def _storage(piece: Any) -> int:
    """Bytes that a piece keeps alive: of a cut one all that it was cut from."""
    return sum(tensor.untyped_storage().nbytes() for tensor in piece.tensors().values())


def prefixes_of(backbone: Any) -> PrefixCache:
    """The prefixes of a backbone, the same for everybody who asks; others once it has moved to another device."""
    device = backbone.get_input_embeddings().weight.device
    with lock_of(backbone):
        kept: tuple[torch.device, PrefixCache] | None = backbone.__dict__.get("_comb_prefixes")
        if kept is None or kept[0] != device:
            kept = backbone.__dict__["_comb_prefixes"] = device, PrefixCache()
        return kept[1]


def behind_prefix(
    method: Method, row: LinkRequest, past: PastState | None
) -> tuple[PastState | None, int, LinkRequest]:
    """What stands in front of a row's first document, how many of its tokens needn't be computed, and the rest.

    `past`, 0 and the whole row where an earlier turn stands there already, or nothing does, nothing would be left to
    compute, or a cache can't be gone on from. The caller holds the model's lock.
    """
    if past is not None or not row.head_ids or not (row.picaches or row.query_ids) or method.why_not_continue():
        return past, 0, row
    found, reused = prefixes_of(method.backbone).find(method.backbone, row.head_ids, row.salt)
    documents = 0 if method.uses_encoder else sum(picache.num_tokens for picache in row.picaches)
    length = documents + sum(map(len, row.fresh))
    return found.past(method.backbone, length), reused, replace(row, head_ids=())
