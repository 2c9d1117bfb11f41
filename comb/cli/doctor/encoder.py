"""What must hold for an encoder on any backbone, checked on the model in hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from comb.backbones.torch_private import pre_hooks_of
from comb.cache.picache import CrossPICache, content_key, deserialize, serialize
from comb.cli.doctor.exactness import Check, close, gap, relative_gap, tolerance_for
from comb.model.cross_attention import CrossBlock
from comb.model.modeling import CombForCausalLM


@torch.no_grad()
def run_checks(model: CombForCausalLM) -> list[Check]:
    """Runs every check on a few made-up documents.

    Gates that are still zero are opened while the checks run (and set back), since behind closed gates nothing
    could fail.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.info.vocab_size
    query = torch.randint(1, vocabulary, (2, 7), generator=generator).to(model.device)
    counts = (min(count, model.max_document_tokens) for count in (11, 5, 8))
    segments = [torch.randint(1, vocabulary, (count,), generator=generator).tolist() for count in counts]
    was_training = model.training
    model.eval()
    try:
        checks = _check_off(model, query)
        with _open_gates(model):
            checks += _check_on(model, query, segments)
    finally:
        model.train(was_training)
    return checks


def _check_off(model: CombForCausalLM, query: Tensor) -> list[Check]:
    plain = model.backbone(input_ids=query).logits
    with model.encoder_disabled():
        off = model(input_ids=query).logits
    hooks = sum(pre_hooks_of(layer) for layer in model.backbone.get_submodule(model.info.layers_path))
    return [
        Check("encoder off == backbone", bool(torch.equal(plain, off)), f"max |diff| {gap(plain, off):.1e}, bitwise"),
        Check("no hooks left behind", hooks == 0, f"{hooks} hooks on the decoder layers"),
    ]


def _check_on(model: CombForCausalLM, query: Tensor, segments: list[list[int]]) -> list[Check]:
    tolerance = tolerance_for(model.backbone.dtype)
    a, b, c = model.encode(segments)
    plain = model(input_ids=query).logits
    linked = model(input_ids=query, documents=[[a, b, c], []]).logits
    alone = model(input_ids=query[:1], documents=[[a, b, c]]).logits
    cached = model(input_ids=query, documents=[[_round_trip(p) for p in (a, b, c)], []]).logits
    fresh = model(input_ids=query, documents=[[model.encode([s])[0] for s in segments], []]).logits

    effect = relative_gap(linked[:1], plain[:1])
    shuffled = model(input_ids=query, documents=[[c, a, b], []]).logits
    return [
        close("order of documents doesn't matter", linked, shuffled, tolerance),
        close("cached == fresh (file round trip, encoded alone)", cached, fresh, tolerance),
        close("row of a batch == row alone", linked[:1], alone, tolerance),
        close("row without documents == backbone", linked[1:], plain[1:], tolerance),
        Check("documents change the answer (control)", effect > 0, f"max |diff| {effect:.1e} of the largest logit"),
    ]


def _round_trip(picache: CrossPICache) -> CrossPICache:
    key = content_key([0], fingerprint=picache.fingerprint, method="doctor", dtype=str(picache.keys.dtype))
    loaded = deserialize(serialize(picache, key), key, picache.keys.device)
    assert isinstance(loaded, CrossPICache)
    return loaded


@contextmanager
def _open_gates(model: CombForCausalLM) -> Iterator[None]:
    gates = [gate for block in model.cross_blocks if isinstance(block, CrossBlock) for gate in block.gates]
    before = [gate.detach().clone() for gate in gates]
    for gate in gates:
        if float(gate) == 0.0:
            gate.fill_(0.5)
    try:
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.copy_(value)
