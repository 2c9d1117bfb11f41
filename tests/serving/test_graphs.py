"""Cross blocks and CUDA graphs, without a GPU: what replays what, and that a replay reads its own step's documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comb_serving.vllm.rows import RequestDocuments, StepDocuments
from tests.helpers.engines import Served, served

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

PROMPT = list(range(20, 29))
MIXED = [(PROMPT, names) for names in ("", "A", "AB", "")]
WORK = {
    *("aten.index_select", "aten.index_copy_", "aten.index_fill_", "aten.add", "aten.mul", "aten.tanh", "aten.addcmul"),
    *("aten.where", "aten.masked_fill_", "aten.linear", "aten.mm", "aten.addmm", "_C.onednn_mm"),
}


def config(mode: CUDAGraphMode) -> Any:
    """vLLM's, as far as it decides about graphs: 1, 2 and 4 tokens are captured."""
    compilation = SimpleNamespace(
        cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4], max_cudagraph_capture_size=4, compile_sizes=[],
        is_attention_compiled_piecewise=lambda: True,
    )  # fmt: skip
    return SimpleNamespace(
        compilation_config=compilation, scheduler_config=SimpleNamespace(max_num_seqs=4), num_speculative_tokens=0,
        lora_config=None, speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )  # fmt: skip


def of_v1(mode: CUDAGraphMode, documents: list[str]) -> Callable[[int, bool], CUDAGraphMode]:
    """Which graph a V1 runner's dispatcher has for so many tokens, all of one request or of as many decoding ones."""
    from comb_serving.vllm.gpu_worker import without_full_v1

    dispatcher = CudagraphDispatcher(config(mode))
    dispatcher.initialize_cudagraph_keys(mode)
    without_full_v1(dispatcher, lambda: bool(documents))
    return lambda tokens, decode: dispatcher.dispatch(tokens, uniform_decode=decode)[0]


def of_v2(mode: CUDAGraphMode, documents: list[str]) -> Callable[[int, bool], CUDAGraphMode]:
    """The same of a V2 runner's manager."""
    from comb_serving.vllm.gpu_worker import without_full_v2

    manager = object.__new__(CudaGraphManager)
    known = config(mode)
    vars(manager).update(
        vllm_config=known, compilation_config=known.compilation_config, cudagraph_mode=mode, max_num_reqs=4,
        decode_query_len=1, varlen_decode=False, ubatch_runner=None, lora_capture_cases=[0], _lora_dispatch_map={},
        _graphs_captured=True, _candidates={}, _capture_descs={},
    )  # fmt: skip
    manager._init_candidates()
    without_full_v2(manager, lambda: bool(documents))

    def mode_of(tokens: int, decode: bool) -> CUDAGraphMode:
        requests = tokens if decode else 1
        found = manager.dispatch(
            requests, tokens, 1 if decode else None, num_active_loras=0, max_query_len=1 if decode else None
        )
        assert found.num_tokens >= tokens
        return found.cg_mode

    return mode_of


@pytest.mark.parametrize("runner", [of_v1, of_v2])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE"])
def test_whole_steps_are_replayed_without_documents_only(runner: Any, mode: str) -> None:
    documents: list[str] = []
    chosen = CUDAGraphMode[mode]
    found = runner(chosen, documents)
    for tokens, decode in ((1, True), (3, True), (4, True), (3, False), (9, False)):
        documents.clear()
        plain = found(tokens, decode)
        documents.append("one")
        mixed = found(tokens, decode)
        assert mixed == (chosen.mixed_mode() if tokens <= 4 and mode != "FULL" else CUDAGraphMode.NONE), (
            tokens,
            decode,
        )
        whole = tokens <= 4 and chosen.decode_mode() == CUDAGraphMode.FULL and (decode or mode == "FULL")
        assert (plain == CUDAGraphMode.FULL) == whole, (tokens, decode)


class Replayed:
    """Stands for vLLM's graph wrapper: computes anew, from where arguments lay at the first call of a size.

    In vLLM the stream itself lies still, too, as a piece before has written it; here it is carried there and back.
    """

    replays = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.kept = function, dict[int, tuple[list[torch.Tensor], Any]]()
        self.carried = {"read": (0, 1), "write": (2, 3)}[function.__name__]

    def __call__(self, *given: torch.Tensor) -> Any:
        Replayed.replays += 1
        with Quiet():
            if len(given[0]) not in self.kept:
                own = [one.clone() if place in self.carried else one for place, one in enumerate(given)]
                self.kept[len(given[0])] = own, self.function(*own)
            inputs, outputs = self.kept[len(given[0])]
            for place, (one, now) in enumerate(zip(inputs, given, strict=True)):
                if place in self.carried:
                    one.copy_(now)
                assert place in self.carried or one.data_ptr() == now.data_ptr(), f"argument {place} has moved"
            found = self.function(*inputs)
            for one, now in zip(outputs or (), found or (), strict=True):
                one.copy_(now)
            for place in self.carried if outputs is None else ():
                given[place].copy_(inputs[place])
        return outputs


class Quiet:
    """What happens in here isn't counted: a replay is one launch, attention is counted elsewhere."""

    depth = 0

    def __enter__(self) -> None:
        Quiet.depth += 1

    def __exit__(self, *_: object) -> None:
        Quiet.depth -= 1


class Launches(TorchDispatchMode):
    """Operators that would start work on a GPU."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        if not Quiet.depth and name in WORK:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def nano(nano_comb: Any) -> Iterator[Served]:
    with served(*nano_comb, max_num_batched_tokens=64) as found:
        yield found


@pytest.fixture
def launches(nano: Served, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each cross block launches beside attention while it is asked; vLLM's fused layers launch one kernel each."""
    from comb_serving.vllm import block

    found: list[list[str]] = []

    def quiet(function: Any, name: str | None) -> Any:
        def run(*given: Any) -> Any:
            if name and not Quiet.depth:
                found[-1].append(name)
            with Quiet():
                return function(*given)

        return run

    def counted(*given: Any) -> None:
        found.append([])
        with Launches(found[-1]):
            mix(*given)

    mix = block.PagedCrossBlock.mix_
    monkeypatch.setattr(block.PagedCrossBlock, "mix_", counted)
    monkeypatch.setattr(block.FusedNorm, "forward", quiet(block.FusedNorm.forward, "norm"))
    monkeypatch.setattr(block, "attend", quiet(block.attend, None))
    # once a step, for all blocks
    monkeypatch.setattr(StepDocuments, "tokens", quiet(StepDocuments.tokens, None))
    monkeypatch.setattr(RequestDocuments, "readers", quiet(RequestDocuments.readers, None))
    for one in model_of(nano).comb_blocks.values():
        fused = one.mlp.act_fn  # vLLM's class, which the backbone's layers use, too
        monkeypatch.setattr(fused, "_forward_method", quiet(fused._forward_method, "activation"))
    return found


@pytest.fixture
def replaying(nano: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Every step is one that vLLM replays in pieces; the model."""
    from comb_serving.vllm import block

    model, real = model_of(nano), block.get_forward_context
    monkeypatch.setattr(
        block,
        "get_forward_context",
        lambda: SimpleNamespace(
            no_compile_layers=real().no_compile_layers, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE
        ),
    )
    model.comb.room = torch.zeros(64, 1, dtype=torch.bool)
    for one in model.comb_blocks.values():
        one.capture(Replayed)
    Replayed.replays = 0
    yield model
    for one in model.comb_blocks.values():
        one.graphs = None


def model_of(nano: Served) -> Any:
    return nano.llm.llm_engine.model_executor.driver_worker.get_model()


def ask(nano: Served) -> Any:
    nano.llm.reset_prefix_cache()
    return nano.ask(MIXED)


@pytest.fixture(scope="module")
def eager(nano: Served) -> Any:
    return ask(nano)


def test_a_replay_reads_the_documents_of_its_own_step(
    nano: Served, eager: Any, replaying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        found = ask(nano)
        for (_, names), one, expected in zip(MIXED, found, eager, strict=True):
            assert one[0] == expected[0]
            assert one[1] == (pytest.approx(expected[1], abs=1e-5) if names else expected[1])
        found = nano.ask([(PROMPT, "")])  # no row has documents: nothing of a block runs
    assert Replayed.replays
    before = Replayed.replays
    nano.ask([(PROMPT, "")])
    assert Replayed.replays == before
    # the control: places that are written once, at the first step
    written: list[torch.Tensor] = []
    readers = RequestDocuments.readers

    def stale(documents: RequestDocuments, count: int) -> torch.Tensor:
        if not written:
            written.append(readers(documents, count))
        return documents.room[:count]  # type: ignore[index]

    monkeypatch.setattr(RequestDocuments, "readers", stale)
    assert ask(nano)[1] != eager[1]


def test_graphs_are_captured_in_vllms_own_passes_and_write_nothing_there(nano: Served, replaying: Any) -> None:
    documents, block = replaying.comb, replaying.comb_blocks["cross_blocks.0."]
    width = block.input_layernorm.weight.shape[0]
    hidden, residual = torch.randn(2, 5, width).unbind()
    before = hidden.clone(), residual.clone()
    documents.room.fill_(True)  # as the last step may have left it
    documents.begin_without()
    with torch.inference_mode(), set_forward_context(None, replaying._comb_vllm_config):
        block.mix_(hidden, residual)
        documents.begin([], [0], [])  # a real step without documents
        block.mix_(hidden, residual)
    assert Replayed.replays == 2
    assert torch.equal(hidden, before[0])
    assert torch.equal(residual, before[1])


def test_what_a_block_launches_beside_attention(nano: Served, launches: list[list[str]], replaying: Any) -> None:
    ask(nano)
    launches.clear()
    ask(nano)
    # two graphs, rows out of queries and into the results
    assert {(*names,) for names in launches} == {("aten.index_select", "aten.index_copy_")}
    for one in replaying.comb_blocks.values():
        one.graphs = None
    launches.clear()
    ask(nano)
    assert max(map(len, launches)) == 17, max(launches, key=len)  # where vLLM replays nothing: long prompts
