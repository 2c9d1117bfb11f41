"""Exact prefixes: what stands in front of documents, and for method `prefix` the documents too, computed once for all.

A system prompt, examples and what a chat template writes are the same at every question. They are cached exactly, for
every method and engine on a backbone, whatever a method does with the documents behind, as serving engines do today.
On a hybrid a prefix is HYPIC's leading segment, kept whole (sec. 4.2).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from comb.backbones.forward import counted_passes
from comb.backbones.identity import exclusive, notice_rows, weights_fingerprint
from comb.cache.picache import DecoderPICache
from comb.hybrid.caches import is_hybrid, run
from comb.hybrid.compile import extend, restore
from comb.hybrid.support import find_hybrid_support
from comb.linking.passes import cache_of, compile_tokens
from comb.locks import lock_of
from comb.methods.base import LinkRequest, Method
from comb.methods.decode_state import DecodeState, PastState, SegmentUse, common_length, pass_size, why_not_continue
from comb.methods.full import TokensOnly, inlined, token_ids, why_not_decoded
from comb.methods.registry import register

PREFIX_BYTES = 4 * 2**30
"""What the prefixes of one backbone may take of its device; as much as a store takes by default."""
_MOST = 256


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, and what the backbone computes of them."""

    token_ids: tuple[int, ...] = ()
    pieces: tuple[Any, ...] = ()  # PICaches; prefixes that begin alike share those that they have in common

    @property
    def nbytes(self) -> int:
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
        self._lock = threading.RLock()
        self._found: OrderedDict[tuple[tuple[str, ...], tuple[int, ...]], Prefix] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes that all of them keep alive, each piece once."""
        with self._lock:
            return sum(piece.alive_nbytes for piece in set(chain(*(each.pieces for each in self._found.values()))))

    def find(self, model: Any, token_ids: Sequence[int], salt: str = "") -> tuple[Prefix, int]:
        """The prefix of these tokens, computed behind the longest beginning that is here, and how long that is.

        It stays valid when it is evicted meanwhile. The caller holds the model's lock.
        """
        wanted = tuple(token_ids)
        notice_rows(model, wanted)
        fingerprint = weights_fingerprint(model)
        scope = fingerprint, str(model.dtype), salt
        found = self._longest(scope, wanted)
        reused = len(found.token_ids)
        if reused < len(wanted):
            rest = wanted[reused:]
            if is_hybrid(model):
                piece: Any = extend(model, find_hybrid_support(model), fingerprint, found.pieces, rest)
            else:
                computed = compile_tokens(model, fingerprint, rest, found.pieces)
                # copies: what they were computed in holds what is in front of them, too, and room behind
                keys, values = (tuple(map(torch.clone, tensors)) for tensors in (computed.keys, computed.values))
                piece = DecoderPICache(fingerprint, keys, values)
            found = Prefix(wanted, (*found.pieces, piece))
        with self._lock:
            if (name := (scope, wanted)) in self._found:
                self._found.move_to_end(name)
            elif sum(piece.alive_nbytes for piece in found.pieces) <= PREFIX_BYTES:  # else used, but not kept
                self._found[name] = found
                while len(self._found) > _MOST or self.nbytes > PREFIX_BYTES:
                    self._found.popitem(last=False)
        return found, reused

    def _longest(self, scope: tuple[str, ...], wanted: tuple[int, ...]) -> Prefix:
        with self._lock:
            found, used = self._found.get((scope, wanted), Prefix()), None
            for name, prefix in self._found.items() if not found.token_ids else ():
                common = common_length(name[1], wanted) if name[0] == scope else 0
                if common > len(found.token_ids):
                    beginning = prefix.beginning(common)
                    if len(beginning.token_ids) > len(found.token_ids):
                        found, used = beginning, name
            if used is not None:
                self._found.move_to_end(used)
            return found

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._found.clear()

    # copies of the model, and pickles of it, have an empty one

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[()]]:
        return PrefixCache, ()


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
    if past is not None or not row.prefix_ids or not (row.picaches or row.query_ids) or method.why_not_continue():
        return past, 0, row
    found, reused = prefixes_of(method.backbone).find(method.backbone, row.prefix_ids, row.salt)
    documents = 0 if method.uses_encoder else sum(picache.num_tokens for picache in row.picaches)
    length = documents + sum(map(len, row.fresh))
    return found.past(method.backbone, length), reused, replace(row, prefix_ids=())


@register("prefix")
class PrefixMethod(TokensOnly):
    """Reuses keys and values (and a hybrid's states) of what is in front + doc1 + ... + docN; gives what `full` gives.

    `compile` keeps a segment's token ids, for there is nothing position-independent to keep. `link` computes what no
    earlier prompt of the backbone has begun with, and keeps it; `continue_row` stores nothing.

    Raises:
        ValueError: when the model's own forward pass doesn't go on from its cache as from the tokens in it, or its keys
            depend on the length of the prompt.
    """

    unquantizable = "promises what full recompute gives, bit for bit"

    def __init__(self, model: Any, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        self._check()

    def _check(self) -> None:
        if reason := why_not_continue(self.backbone) or why_not_decoded(self.backbone):
            raise ValueError(f"method 'prefix' can't be used with this model: {reason}; use method='full'")

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.backbone)

    def link_row(self, row: LinkRequest) -> DecodeState:
        self._check()  # a model may have changed
        prompt, documents = inlined(row)
        self.check_prompt(documents, len(prompt) - documents)
        segments = [token_ids(picache) for picache in row.picaches]
        pieces = [gap + segment for gap, segment in zip([[], *row.fresh[1:-1]], segments, strict=False)]
        # the last token is always computed anew: its logits are what decoding starts from
        prefix = list(row.prefix_ids) if segments or row.query_ids else []
        input_ids, attention_mask = self.tensors([prompt])
        state, uses = DecodeState(self.backbone, input_ids, attention_mask), list[SegmentUse]()
        with exclusive(self.backbone), counted_passes() as passed:
            found, known = Prefix(), prefixes_of(self.backbone)
            if prefix:
                found, state.prefix_tokens = known.find(self.backbone, prefix, row.salt)
            for piece in pieces if row.query_ids else pieces[:-1]:
                before = found.nbytes
                found, reused = known.find(self.backbone, [*found.token_ids, *piece], row.salt)
                nbytes = found.nbytes - before
                uses.append(SegmentUse("hit" if reused == len(found.token_ids) else "compiled", "device", nbytes))
            if found.token_ids:
                state.past_key_values = found.past(self.backbone, len(prompt)).cache
                state.step = pass_size(self.backbone)
                if state.step is not None:  # `generate` would take the rest of the prompt at once
                    start = len(found.token_ids)
                    run(self.backbone, prompt[start:-1], state.past_key_values, start, step=state.step)
            state.passed = passed.tokens
        uses += [SegmentUse("inlined")] * (len(segments) - len(uses))
        state.uses = [uses]
        anew = (len(ids) for ids, use in zip(segments, uses, strict=True) if use.state != "hit")
        state.recomputed = (sum(anew),)
        return state
