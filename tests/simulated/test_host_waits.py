"""How often the host would wait for a GPU, and what it launches there, by method.

Of its own process, as the simulated device is. Ceilings are what was counted when they were written down (transformers
5.19); a number may sink, and is then to be written down anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from comb import CombForCausalLM, PICEngine, methods
from comb.backbones.identity import one_walk
from comb.cache.picache import DecoderPICache
from comb.cache.quantization import quantize
from comb.cache.store import PICacheStore
from comb.linking import recomputed
from comb.linking.cache import ScatteredRows
from comb.mac import mac, session
from comb.methods.base import LinkRequest, Method
from tests.helpers.families import open_gates, tiny
from tests.helpers.hybrids import tiny_hybrid
from tests.helpers.simulated_device import DEVICE, SimulatedDevice, move
from tests.helpers.tiny_engine import BOOK, CITY, LAKE, QUESTION, TEMPLATE, make_backbone, make_comb, make_tokenizer

LAYERS = 4
DOCUMENTS = [list(range(3, 30)), list(range(40, 60)), list(range(5, 40))]
SMALL_TIER = 16 * 2**10  # of the device's memory: room for some of the engine's documents
QUERY, PREFIX = list(range(60, 70)), [1, 2, 3]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def llama() -> Any:
    return tiny("llama", max_position_embeddings=512)


def comb() -> Any:
    made = CombForCausalLM.from_backbone(llama(), cross_attention_layers=[1, 2, 3], num_encoder_layers=2)
    return open_gates(made, 0.3, 0.3).eval()


@dataclass(frozen=True)
class Ceiling:
    """At most: waits of compiling three documents, of linking them, and launches of linking and of a step.

    One wait and seven launches of each are the look at the weights that an engine's call begins with. transformers
    waits once for each of its own passes over a prompt with a mask, and once for each token: whether all rows have
    ended. No method adds to the latter.
    """

    compile: int
    link: int
    link_launches: int
    step_launches: int


CEILINGS = {
    "full": Ceiling(0, 1, 9, 245),
    "prefix": Ceiling(1, 1, 47, 249),  # all but the query was computed before
    "naive": Ceiling(7, 1, 117, 249),
    "legolink-0": Ceiling(7, 1, 117, 249),
    "legolink:4": Ceiling(7, 1, 367, 249),
    "attnlink:4": Ceiling(7, 1, 367, 249),
    "cacheblend:0.3": Ceiling(7, 2, 479, 249),  # the host has to know which tokens it has chosen
    "focus:0.2": Ceiling(7, 2, 662, 249),
    "comb": Ceiling(2, 2, 38, 386),  # three cross blocks; the backbone's weights are looked at, too, for its prefix
    "hypic:4": Ceiling(7, 1, 1466, 355),  # of a hybrid, whose scans are transformers' plain ones here
}


def linked(method: Method) -> Any:
    return method.link_batch([LinkRequest(method.compile(DOCUMENTS), QUERY, PREFIX)])


@torch.no_grad()
def counts(name: str, make: Callable[[], Any]) -> tuple[list[int], list[int], Ceiling, Counter[str]]:
    """Tokens on the CPU and on the device; what was counted there, and the waits of four steps by place."""
    expected = linked(methods.create(name, make())).generate(max_new_tokens=6, **GREEDY)
    with SimulatedDevice() as device:
        model = move(make())
        linked(methods.create(name, model)).generate(max_new_tokens=3, **GREEDY)  # what is found out once for a model
        method = methods.create(name, model)
        with device.counted(), one_walk():
            picaches = method.compile(DOCUMENTS)
            compile_waits = device.waits.total()
        with device.counted(), one_walk():
            state = method.link_batch([LinkRequest(picaches, QUERY, PREFIX)])
            link_waits, link_launches = device.waits.total(), device.launches.total()
        steps = []
        for tokens in (2, 6):
            with device.counted():
                found = state.generate(max_new_tokens=tokens, **GREEDY)
                steps.append((device.launches.total(), device.waits.copy()))
        ids = found.tolist()
    launches = (steps[1][0] - steps[0][0]) // 4
    return (
        expected.tolist(),
        ids,
        Ceiling(compile_waits, link_waits, link_launches, launches),
        steps[1][1] - steps[0][1],
    )


@pytest.mark.parametrize("name", CEILINGS)
def test_nothing_waits_for_a_gpu_but_what_has_to(name: str) -> None:
    make = {"comb": comb, "hypic:4": lambda: tiny_hybrid("qwen3_5")}.get(name, llama)
    expected, found, counted, waits = counts(name, make)
    assert found == expected
    ceiling = CEILINGS[name]
    assert counted.compile <= ceiling.compile
    assert counted.link <= ceiling.link
    assert counted.link_launches <= ceiling.link_launches
    assert counted.step_launches <= ceiling.step_launches
    assert waits.total() == 8  # transformers' own, and the look whether logits are numbers, for each token


def test_a_wait_for_each_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScatteredRows, "on", lambda self, device: self.positions.to(device))
    assert counts("legolink:4", llama)[2].link >= LAYERS


def test_runs_as_varlen_attention_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy of where runs begin and end for all layers; the kernel is stood in for by the plain way, uncounted."""
    entered: list[SimulatedDevice] = []
    calls: list[torch.device] = []
    enter = SimulatedDevice.__enter__

    def entering(device: SimulatedDevice) -> SimulatedDevice:
        entered.append(device)
        return enter(device)

    def stand_in(*tensors: Any, **given: Any) -> Any:
        calls.append(tensors[0].device)
        with entered[-1].uncounted() if entered else nullcontext():
            return recomputed.varlen_plain(*tensors, **given)

    monkeypatch.setattr(SimulatedDevice, "__enter__", entering)
    monkeypatch.setattr(recomputed, "chosen", lambda rows, device: recomputed.VarlenAttention)
    monkeypatch.setattr(recomputed, "function_for", lambda *tensors, **kind: stand_in)
    expected, found, counted, _ = counts("legolink:4", llama)
    assert found == expected
    assert calls.count(DEVICE) >= LAYERS
    assert counted.link == 1  # for the look at the weights


@torch.no_grad()
def test_mac_waits_once_for_a_prompt_and_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its mask; kernels are stood in for by the plain step, which counts for nothing."""
    plain = session.computed_step
    ids = torch.tensor([DOCUMENTS[2] + QUERY])
    config: dict[str, Any] = {"window": 32, "band": 8, "min_length": 0, "max_chain": None}
    with mac(llama(), **config) as running:
        expected = running.backbone.generate(ids, max_new_tokens=7, **GREEDY)
    with SimulatedDevice() as device:
        model, ids = move(llama()), ids.to(DEVICE)

        def uncounted(*given: Any) -> Any:
            with device.uncounted():
                return plain(*given)

        monkeypatch.setattr(session, "computed_step", uncounted)
        waits = []
        with mac(model, **config) as running:
            for tokens in (3, 3, 7):
                with device.counted():
                    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **GREEDY)
                    waits.append(Counter(device.waits))
        assert found.tolist() == expected.tolist()
        assert running.report().hit_rate > 0
    own = [sum(count for place, count in one.items() if "transformers/" not in place) for one in waits]
    assert own[2] - own[1] <= 4
    assert own[1] <= 3 + 1


ENGINES: dict[str, dict[str, Any]] = {
    "prefix": {}, "legolink:3": {}, "naive": {"quantize": "int8"}, "cacheblend:0.3": {"mac": "generation"}, "comb": {},
}  # fmt: skip


def answered(method: str, model: Any, **options: Any) -> list[Any]:
    """Of single questions, some of them over documents that came from host memory, a batch, and a conversation."""
    store = PICacheStore(device=model.device, device_bytes=SMALL_TIER, host_bytes=2**24)
    engine = PICEngine(model, make_tokenizer(template=TEMPLATE), method=method, store=store, **options)
    asked = [engine.ask(QUESTION, documents, max_new_tokens=3) for documents in ([LAKE, CITY], [BOOK], [CITY, LAKE])]
    asked += engine.ask_batch([(QUESTION, [LAKE]), ("Who?", [BOOK])], max_new_tokens=3)
    chat = engine.conversation([LAKE])
    asked += [chat.ask(QUESTION, max_new_tokens=3), chat.ask("And the city?", [CITY], max_new_tokens=3)]
    tiers = [[document.tier for document in answer.report.documents] for answer in asked[:3]]
    return [[answer.token_ids for answer in asked], tiers]


@pytest.mark.parametrize("method", ENGINES)
def test_an_engine_answers_on_the_device_as_on_the_cpu(method: str) -> None:
    make, options = make_comb if method == "comb" else make_backbone, ENGINES[method]
    expected = answered(method, make(), **options)
    with SimulatedDevice():
        assert answered(method, move(make()), **options) == expected


def test_a_document_goes_between_tiers_in_one_copy() -> None:
    """Down with one wait, up with none; token ids stay on the host."""
    tensors = {
        f"{kind}.{layer}": torch.randn(2, 7, 3 + layer) for kind in ("keys", "values") for layer in range(LAYERS)
    }
    ids = torch.arange(7)
    picache = DecoderPICache.from_tensors("x", {**tensors, "token_ids": ids})
    with SimulatedDevice() as device:
        with device.counted():
            above = picache.to(DEVICE)
            assert (device.waits.total(), device.launches.total()) == (0, 1)
        with device.counted():
            below = above.to("cpu")
            assert device.waits.total() == 1
            assert device.launches.total() <= 3  # gaps that align, all behind one another, the copy
        assert below.keys[0].untyped_storage().data_ptr() == below.values[-1].untyped_storage().data_ptr()
        with device.counted():
            again = below.to(DEVICE)
            assert (device.waits.total(), device.launches.total()) == (0, 1)
        assert above.token_ids is ids
        assert above.to(DEVICE) is above
        with device.counted():  # the control: tensor by tensor
            [tensor.to("cpu") for tensor in above.keys]
            assert device.waits.total() == LAYERS
        last = again.to("cpu").tensors()
    for name, tensor in tensors.items():
        assert torch.equal(last[name], tensor), name


def test_quantising_waits_once_for_a_tensor() -> None:
    with SimulatedDevice() as device:
        tensor = torch.randn(5, 8).to(DEVICE)
        with device.counted():
            quantize(tensor, "fp8")
            assert device.waits.total() == 1


def test_what_the_device_counts() -> None:
    with SimulatedDevice() as device:
        one = torch.arange(6.0).to(DEVICE)
        for wait in (
            lambda: float(one[0]), lambda: bool(one.any()), lambda: one.nonzero(), lambda: one[one > 2], one.cpu,
            one.tolist, lambda: torch.equal(one, one), lambda: torch.arange(3).to(DEVICE), lambda: one[torch.arange(2)],
            lambda: torch.tensor([1, 2], device=DEVICE), lambda: torch.unique_consecutive(one),
        ):  # fmt: skip
            with device.counted():
                wait()
                assert device.waits.total() == 1
        with device.counted():
            other = one.view(2, 3).transpose(0, 1) * 2 + torch.arange(2, device=DEVICE)
            other[:, 0].mul_(2)
            torch.arange(3).to(DEVICE, non_blocking=True)
            assert device.waits.total() == 0
            assert device.launches.total() == 5
        assert other.tolist() == [[0.0, 7.0], [4.0, 9.0], [8.0, 11.0]]
        with pytest.raises(RuntimeError, match="of the host beside some of the device"):
            torch.arange(6.0) + one
