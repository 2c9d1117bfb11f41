"""The equivalence gate: what must hold on a model that nobody tried before, checked on the model in hand.

`run_checks` is about COMB's encoder, `check_methods` about the exactness that each method promises; its reference is
`full`. A check that can't fail says nothing, so a control must come out different: documents that were compiled apart
and linked without recomputation. `random_model` stands in where the weights are too large, or not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from comb import methods
from comb.backbones.forward import run_decoder
from comb.backbones.identity import backbone_of, exclusive
from comb.backbones.rotary import compile_limit, length_limit, prompt_limit
from comb.backbones.torch_private import pre_hooks_of
from comb.cache.picache import CrossPICache, DecoderPICache, content_key, deserialize, serialize
from comb.hybrid.caches import attention_layers
from comb.methods.base import Method
from comb.methods.decode_state import DecodeState
from comb.methods.hypic import Hypic
from comb.methods.linked import Linked
from comb.model.cross_attention import CrossBlock
from comb.model.modeling import CombForCausalLM

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


@torch.no_grad()
def run_checks(model: CombForCausalLM) -> list[Check]:
    """Whether an encoder and its cross blocks do what they must, tried on a few made-up documents.

    Gates that are still zero are opened while the checks run, and set back.
    """
    generator = torch.Generator().manual_seed(0)
    query = torch.randint(1, model.info.vocab_size, (2, 7), generator=generator).to(model.device)
    counts = (min(count, model.max_document_tokens) for count in (11, 5, 8))
    segments = [torch.randint(1, model.info.vocab_size, (count,), generator=generator).tolist() for count in counts]
    tolerance = max(map(tolerance_for, (model.backbone.dtype, next(model.encoder.parameters()).dtype)))

    def round_trip(picache: CrossPICache) -> CrossPICache:
        key = content_key([0], fingerprint=picache.fingerprint, method="doctor", dtype=str(picache.keys.dtype))
        loaded = deserialize(serialize(picache, key), key, picache.keys.device)
        assert isinstance(loaded, CrossPICache)
        return loaded

    gates = [gate for block in model.cross_blocks if isinstance(block, CrossBlock) for gate in block.gates]
    before, was_training = [gate.detach().clone() for gate in gates], model.training
    model.eval()
    try:
        bare = model.backbone(input_ids=query).logits
        with model.encoder_disabled():
            off = model(input_ids=query).logits
        hooks = sum(pre_hooks_of(layer) for layer in model.backbone.get_submodule(model.info.layers_path))
        for gate in gates:
            if float(gate) == 0.0:  # behind closed gates nothing could fail
                gate.fill_(0.5)
        a, b, c = model.encode(segments)
        plain = model(input_ids=query).logits
        linked = model(input_ids=query, documents=[[a, b, c], []]).logits
        alone = model(input_ids=query[:1], documents=[[a, b, c]]).logits
        cached = model(input_ids=query, documents=[[round_trip(p) for p in (a, b, c)], []]).logits
        fresh = model(input_ids=query, documents=[[model.encode([s])[0] for s in segments], []]).logits
        shuffled = model(input_ids=query, documents=[[c, a, b], []]).logits
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.copy_(value)
        model.train(was_training)
    effect = relative_gap(linked[:1], plain[:1])
    return [
        Check("encoder off == backbone", bool(torch.equal(bare, off)), f"max |diff| {gap(bare, off):.1e}, bitwise"),
        Check("no hooks left behind", hooks == 0, f"{hooks} hooks on the decoder layers"),
        close("order of documents doesn't matter", linked, shuffled, tolerance),
        close("cached == fresh (file round trip, encoded alone)", cached, fresh, tolerance),
        close("row of a batch == row alone", linked[:1], alone, tolerance),
        close("row without documents == backbone", linked[1:], plain[1:], tolerance),
        Check("documents change the answer (control)", effect > 0, f"max |diff| {effect:.1e} of the largest logit"),
    ]


_DOCUMENTS = (11, 7, 13)
_PREFIX, _GAPS, _QUERY = 3, (2, 0), 5
_SHORT = 512


@dataclass(frozen=True)
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
    """Tries `specs` (all registered methods by default) on `model`, an encoder's or a plain backbone. Raises ValueError
    for an unknown method or parameter."""
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
        # a random model has no tokenizer to read a passage with
        self.passage = [] if getattr(backbone, "name_or_path", "") else ids(min(_QUERY, longest))
        # beyond the limit of a rotary embedding where that costs little; a document alone stays below
        self.prefix = ids(limit if limit is not None and limit <= _SHORT and limit < (positions or 0) // 2 else _PREFIX)
        self.tolerance = tolerance_for(backbone.dtype)
        self.full = methods.create("full", model)
        self.reference = self._link(self.full).logits
        self.reference_alone = self._alone(self.full).logits

    def __call__(self, spec: str) -> Verdict:
        name, parameters = methods.parse(spec)
        front = parameters.get("front", getattr(methods.get(name), "default_front", None))
        fronted = {"front": self.passage} if front == "prose" and self.passage else {}
        try:
            method = methods.create(spec, self.model, **fronted)
        except ValueError as error:
            # a wrong parameter is the caller's fault, a model that lacks something is a finding
            if parameters:
                raise
            return Verdict(spec, refused=str(error))
        except Exception as error:
            return Verdict(spec, [_broken(error)])
        try:
            return Verdict(spec, self._checks(name, method, fronted))
        except Exception as error:
            return Verdict(spec, [_broken(error)])

    def _checks(self, name: str, method: Method, fronted: dict[str, Any]) -> list[Check]:
        if name in ("full", "prefix"):
            return self._exact(method)
        if isinstance(method, Linked):
            return self._decoder(name, method, fronted)
        checks = [self._finite(method)]
        if isinstance(method, Hypic):
            checks += [self._alone_is_full(method), self._pure(method)]
            if method.mode == "seam":
                checks.append(self._all_recomputed(methods.create("hypic", self.model, w=max(_DOCUMENTS))))
        return checks

    def _exact(self, method: Method) -> list[Check]:
        first, again = self._link(method), self._link(method)
        if method.name == "full":
            own = method.backbone(input_ids=first.input_ids, use_cache=False).logits[:, -1]
            return [self._close("equals the model's own pass", first.logits, own)]
        return [
            self._close("equals full recompute", first.logits, self.reference),
            self._close("equals full recompute again, from the cache", again.logits, self.reference),
        ]

    def _decoder(self, name: str, method: Linked, fronted: dict[str, Any]) -> list[Check]:
        linked = self._link(method).logits
        checks = [self._finite(method)]
        everything = method.rule.everything
        whole: Any = methods.create(name, self.model, **everything, **fronted) if everything else method
        if everything:
            checks.append(self._all_recomputed(whole))
        if not method.front.token_ids and method.rotate:
            checks.append(self._alone_is_full(method))
        # what looks chooses may depend on all tokens
        checks.append(self._no_future(method if method.rule.from_places else whole))
        checks.append(self._pure(method))
        if name == "naive" and (limit := method.support.positions.limit) is not None:
            checks.append(self._moved_beyond(method, limit))
        if name == "naive":
            effect = relative_gap(linked, self.reference)
            floor = 3 * relative_gap(self._alone(method).logits, self.reference_alone)  # what rounding makes of one
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

    def _no_future(self, method: Linked) -> Check:
        """Another query behind another end of the last document: what is cached in front of them must stay the same."""
        *others, last = self.documents
        kept = last[: -min(2, len(last))]
        end = len(self.prefix) + sum(map(len, others)) + sum(_GAPS) + len(kept)
        held = []
        for ids, query in ((last[len(kept) :], self.query), (others[0][: len(last) - len(kept)], self.query[::-1])):
            picaches = method.compile([*others, [*kept, *ids]])
            state: Any = method.link(picaches, query, prefix_ids=self.prefix, gaps=self.gaps)
            more = state.past_key_values.get_seq_length() - end
            layers = attention_layers(state.past_key_values).values()
            tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
            # of layers with a window, what is left of the first `end` tokens
            held.append([tensor[:, :, : tensor.shape[2] - more] for tensor in tensors])
        worst = max(relative_gap(b, a) for a, b in zip(*held, strict=True))
        return Check("nothing sees what comes later", worst <= self.tolerance, f"max |diff| {worst:.1e}")

    def _pure(self, method: Method) -> Check:
        alone = method.compile(self.documents[1:2])[0].tensors()
        among = method.compile(self.documents)[1].tensors()
        same = all(torch.equal(among[name], tensor) for name, tensor in alone.items())
        return Check("a PICache depends on its document alone", same, "bitwise")

    def _finite(self, method: Method) -> Check:
        finite = bool(torch.isfinite(self._link(method).logits).all())
        return Check("logits are finite", finite, "with a prefix, gaps and three documents")

    def _link(self, method: Method) -> DecodeState:
        return method.link(method.compile(self.documents), self.query, prefix_ids=self.prefix, gaps=self.gaps)

    def _alone(self, method: Method) -> DecodeState:
        return method.link(method.compile(self.documents[:1]), self.query)

    def _all_recomputed(self, whole: Method) -> Check:
        return self._close("everything recomputed == full", self._link(whole).logits, self.reference)

    def _alone_is_full(self, method: Method) -> Check:
        return self._close("one document == full", self._alone(method).logits, self.reference_alone)

    def _close(self, name: str, left: Tensor, right: Tensor) -> Check:
        return close(name, left, right, self.tolerance)


_LAYERS = 4
_LIMITS = {
    "vocab_size": 1024, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
}  # fmt: skip
_STD = 0.1


def random_model(config: Any, *, seed: int = 0) -> Any:
    """A random model of `config`'s architecture in float32: same heads, positions and layer kinds, few layers.

    Layers are cut to the first few that show every kind; vocabulary, MLP and number of experts are made small. Its
    matrices are larger than usual at initialisation, so that attention looks at something.

    Raises:
        ValueError: when the shrunken configuration doesn't make a model.
    """
    config = config.get_text_config(decoder=True)
    values = config.to_dict()
    own_name = getattr(config, "attribute_map", {})  # GPT-2 says n_layer
    depth = int(config.num_hidden_layers)
    kinds = values.get("layer_types") or []
    layers = min(depth, max(_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))) if kinds else min(depth, _LAYERS)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == depth:
            values[name] = value[:layers]
    for name, limit in ((own_name.get(name, name), limit) for name, limit in _LIMITS.items()):
        if isinstance(values.get(name), int):
            values[name] = min(values[name], limit)
    if isinstance(values.get("num_experts_per_tok"), int):
        values["num_experts_per_tok"] = min(values["num_experts_per_tok"], 2)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(values.get(name), int):
            values[name] = min(values[name], values["vocab_size"] - 1)
        elif isinstance(values.get(name), list):
            values[name] = [min(token, values["vocab_size"] - 1) for token in values[name]]
    values.update({own_name.get("num_hidden_layers", "num_hidden_layers"): layers, "dtype": "float32"})
    values["_name_or_path"] = ""  # whose tokenizer has ids beyond this vocabulary
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(type(config).from_dict(values)).eval()
    except Exception as error:
        raise ValueError(
            f"no small random model of {config.model_type!r} can be made ({type(error).__name__}: {error}); try the "
            "model's own weights, without --random"
        ) from error
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=_STD)
    return model
