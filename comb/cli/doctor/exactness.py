"""Which methods are safe on a model: the exactness that each of them promises, tried on made-up documents.

The reference is `full`. A check that can't fail says nothing, so a control must come out different: documents that were
compiled apart and linked without recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from comb import methods
from comb.backbones.forward import run_decoder
from comb.backbones.identity import backbone_of, exclusive
from comb.backbones.rotary import compile_limit, length_limit, prompt_limit
from comb.cache.picache import DecoderPICache
from comb.methods.base import DecodeState, Method
from comb.methods.hypic import Hypic
from comb.methods.linked import Linked

# Relative to the largest logit. Batched attention sums in another order than a row alone, so equality is to
# rounding: 1e-4 in float32, and about the size of one rounding step of the 16-bit types.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2}
_COARSEST = 6e-2


@dataclass(frozen=True)
class Check:
    """One line of the gate: what was compared, whether it held, and the number that decided."""

    name: str
    passed: bool
    detail: str


def tolerance_for(dtype: torch.dtype) -> float:
    """Largest difference that still counts as equal, relative to the largest logit."""
    return _TOLERANCES.get(dtype, _COARSEST)


def gap(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference."""
    return float((left.float() - right.float()).abs().max())


def relative_gap(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference, as a share of `right`'s largest value."""
    return gap(left, right) / float(right.abs().max().clamp_min(1e-12))


def close(name: str, left: Tensor, right: Tensor, tolerance: float) -> Check:
    """Whether logits are those of the reference `right`."""
    error = relative_gap(left, right)
    return Check(name, error <= tolerance, f"max |diff| {error:.1e} of the largest logit, at most {tolerance:.0e}")


_DOCUMENTS = (11, 7, 13)
_HEAD, _GAPS, _QUERY = 3, (2, 0), 5
_SHORT = 512


@dataclass
class Verdict:
    """What came out for one method: its checks, or the reason why the model can't have it."""

    method: str
    checks: list[Check] = field(default_factory=list)
    refused: str | None = None

    @property
    def passed(self) -> bool:
        """False only where a check failed; a refusal is not a failure."""
        return all(check.passed for check in self.checks)


@torch.no_grad()
def check_methods(model: Any, specs: Sequence[str] = ()) -> list[Verdict]:
    """Tries `specs` (all registered methods by default) on `model`, an encoder's or a plain backbone.

    Raises:
        ValueError: for an unknown method or parameter.
    """
    try:
        trial = _Trial(model)
    except Exception as error:  # without a reference nothing can be said about the others
        return [Verdict("full", [_broken(error)])]
    return [trial(spec) for spec in specs or methods.names()]


def _broken(error: Exception) -> Check:
    """Whatever was raised, it is what this model does: a finding like any other."""
    return Check("runs", False, f"{type(error).__name__}: {error}")


class _Trial:
    def __init__(self, model: Any) -> None:
        self.model = model
        backbone = backbone_of(model)
        generator = torch.Generator().manual_seed(0)
        vocabulary = backbone.get_input_embeddings().weight.shape[0]

        def ids(count: int) -> list[int]:
            return torch.randint(min(3, vocabulary - 1), vocabulary, (count,), generator=generator).tolist()

        limit, positions, room = length_limit(backbone), prompt_limit(backbone), compile_limit(backbone)
        # as long as the model takes behind a front that has half of its positions
        longest = max(1, max(_DOCUMENTS) if room is None else min(room // 2 - 1, (positions or room) // 5))
        self.documents = [ids(min(count, longest)) for count in _DOCUMENTS]
        self.gaps, self.query = [ids(count) for count in _GAPS], ids(_QUERY)
        # beyond the limit of a rotary embedding where that costs little; a document alone stays below
        self.head = ids(limit if limit is not None and limit <= _SHORT and limit < (positions or 0) // 2 else _HEAD)
        self.tolerance = tolerance_for(backbone.dtype)
        self.full = methods.create("full", model)
        self.reference = self._link(self.full).logits
        self.reference_alone = self._alone(self.full).logits

    def __call__(self, spec: str) -> Verdict:
        name, parameters = methods.parse(spec)
        verdict = Verdict(spec)
        try:
            method = methods.create(spec, self.model)
        except ValueError as error:
            # a wrong parameter is the caller's fault, a model that lacks something is a finding
            if parameters:
                raise
            verdict.refused = str(error)
            return verdict
        except Exception as error:
            verdict.checks = [_broken(error)]
            return verdict
        try:
            verdict.checks = self._checks(name, method)
        except Exception as error:
            verdict.checks = [_broken(error)]
        return verdict

    def _checks(self, name: str, method: Method) -> list[Check]:
        if name in ("full", "prefix"):
            return self._exact(method)
        if isinstance(method, Linked):
            return self._decoder(name, method)
        if isinstance(method, Hypic):
            return self._hybrid(method)
        return [self._finite(method)]

    def _exact(self, method: Method) -> list[Check]:
        first, again = self._link(method), self._link(method)
        try:
            if method.name == "full":
                own = method.backbone(input_ids=first.input_ids, use_cache=False).logits[:, -1]
                return [self._close("equals the model's own pass", first.logits, own)]
            return [
                self._close("equals full recompute", first.logits, self.reference),
                self._close("equals full recompute again, from the cache", again.logits, self.reference),
            ]
        finally:
            first.release()
            again.release()

    def _decoder(self, name: str, method: Linked) -> list[Check]:
        linked = self._link(method).logits
        checks = [self._finite(method)]
        everything = method.rule.everything
        whole: Any = methods.create(name, self.model, **everything) if everything else method
        if everything:
            checks.append(self._close("everything recomputed == full", self._link(whole).logits, self.reference))
        if not method.front.token_ids and method.rotate:
            checks.append(self._close("one document == full", self._alone(method).logits, self.reference_alone))
        # what looks chooses may depend on all tokens
        checks.append(self._no_future(method if method.rule.from_places else whole))
        checks.append(self._pure(method))
        if name == "naive" and (limit := method.support.positions.limit) is not None:
            checks.append(self._moved_beyond(method, limit))
        if name == "naive":
            effect = relative_gap(linked, self.reference)
            floor = 10 * relative_gap(self._alone(method).logits, self.reference_alone)
            checks.append(Check("several documents differ (control)", effect > floor, f"max |diff| {effect:.1e}"))
        return checks

    def _moved_beyond(self, method: Linked, limit: int) -> Check:
        """A document moved beyond the limit of a rotary embedding, in the first layer that knows positions."""
        model, positions, ids = method.backbone, method.support.positions, self.documents[0]
        number, pair = next(each for each in enumerate(positions.layers) if any(each[1]))
        picache: Any
        (picache,) = method.compile([ids])
        assert isinstance(picache, DecoderPICache)
        at, place = torch.arange(len(ids)), torch.arange(limit + 3, limit + 3 + len(ids))
        rerotation = positions.rerotation(at, place, int(place[-1]) + 1, model.get_input_embeddings().weight.device)
        moved = [
            rerotation.apply(tensors[number].clone(), rotation)
            for tensors, rotation in zip((picache.keys, picache.values), pair, strict=True)
        ]
        there: Any = DynamicCache()
        with exclusive(model):
            run_decoder(model, torch.tensor([ids]), there, position_ids=place[None])
        own = there.layers[number]
        return self._close(
            f"turned beyond {limit} tokens as the model turns",
            torch.cat([tensor.flatten() for tensor in moved]), torch.cat([own.keys.flatten(), own.values.flatten()]),
        )  # fmt: skip

    def _hybrid(self, method: Hypic) -> list[Check]:
        checks = [
            self._finite(method),
            self._close("one document == full", self._alone(method).logits, self.reference_alone),
            self._pure(method),
        ]
        if method.mode == "seam":
            whole = methods.create("hypic", self.model, w=max(_DOCUMENTS))
            checks.append(self._close("everything recomputed == full", self._link(whole).logits, self.reference))
        return checks

    def _no_future(self, method: Linked) -> Check:
        """Another query behind another end of the last document: what is cached in front of them must stay the same."""
        *others, last = self.documents
        kept, end = last[: -min(2, len(last))], len(self.head) + sum(map(len, self.documents)) + sum(_GAPS)
        held = [
            self._in_front(method, [*others, [*kept, *ids]], query, end - len(last) + len(kept))
            for ids, query in ((last[len(kept) :], self.query), (others[0][: len(last) - len(kept)], self.query[::-1]))
        ]
        worst = max(relative_gap(b, a) for a, b in zip(*held, strict=True))
        return Check("nothing sees what comes later", worst <= self.tolerance, f"max |diff| {worst:.1e}")

    def _in_front(self, method: Linked, documents: Any, query: list[int], end: int) -> list[Tensor]:
        """What the prompt's cache holds of its first `end` tokens; of layers with a window, what is left of them."""
        state: Any = method.link(method.compile(documents), query, head_ids=self.head, gaps=self.gaps)
        more = state.past_key_values.get_seq_length() - end
        held = [tensor for layer in state.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return [tensor[:, :, : tensor.shape[2] - more] for tensor in held]

    def _pure(self, method: Method) -> Check:
        alone = method.compile(self.documents[1:2])[0].tensors()
        among = method.compile(self.documents)[1].tensors()
        same = all(torch.equal(among[name], tensor) for name, tensor in alone.items())
        return Check("a PICache depends on its document alone", same, "bitwise")

    def _finite(self, method: Method) -> Check:
        finite = bool(torch.isfinite(self._link(method).logits).all())
        return Check("logits are finite", finite, "with a head, gaps and three documents")

    def _link(self, method: Method) -> DecodeState:
        return method.link(method.compile(self.documents), self.query, head_ids=self.head, gaps=self.gaps)

    def _alone(self, method: Method) -> DecodeState:
        return method.link(method.compile(self.documents[:1]), self.query)

    def _close(self, name: str, left: Tensor, right: Tensor) -> Check:
        return close(name, left, right, self.tolerance)
