"""Hybrids linked inside a real vLLM, against the library's hypic; and the algebra without an engine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comb.hybrid.transition import ScalarTransition
from comb_serving.linking.layout import LinkingLayout, plan_interiors
from comb_serving.linking.methods import LinkMethod
from comb_serving.pool.capability import PoolHandle, pack, unpack
from tests.helpers.linked import adapter, largest_difference
from tests.helpers.linked_hybrid import PROMPTS, ask_hybrid, documents, error, library, tiny_model
from tests.helpers.processes import wait_for
from tests.helpers.recurrences import dense_of, recurrence
from tests.helpers.served import TEXTS, logprobs, serve
from tests.helpers.tiny_engine import TEMPLATE, make_tokenizer

pytest.importorskip("vllm")

from comb_serving.vllm.linking.cache_access import TokenCodes
from comb_serving.vllm.linking.connector import LinkingConnector
from comb_serving.vllm.linking.document_pool import DocumentPool
from comb_serving.vllm.linking.links import CaptureCommand, ComposeCommand
from comb_serving.vllm.linking.states import DenseLayer, DocumentStates, StateLayer, state_layer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

NOISE = {"float32": 1e-4, "bfloat16": 0.08}  # of logits, relative: plain vLLM against transformers in float32


CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "method", "options"),
    [
        ("falcon_h1", "float32", "hypic:8", {}),
        ("falcon_h1", "float32", "hypic:0", CHUNKS),  # no seams
        ("falcon_h1", "float32", "hypic:4,front=prose", CHUNKS),
        ("qwen3_next", "bfloat16", "hypic:4", CHUNKS),
        ("qwen3_next", "bfloat16", "hypic:4,front=prose", {}),
        ("falcon_h1", "float32", "hypic:4,front=adapter", CHUNKS),
        ("qwen3_next", "bfloat16", "hypic:4,front=adapter", CHUNKS),
        ("falcon_h1", "float32", "hypic:8", {"tensor_parallel_size": 2}),
        ("qwen3_next", "bfloat16", "hypic:4", {"tensor_parallel_size": 2, **CHUNKS}),
    ],
)
def test_a_hybrid_is_linked_as_in_the_library(
    family: str, dtype: str, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ranks = options.get("tensor_parallel_size", 1)
    changes = {f"linear_num_{each}_heads": 2 * count for each, count in (("key", 1), ("value", 2))}
    model = tiny_model(family, tmp_path, **(changes if ranks > 1 and family == "qwen3_next" else {}))
    linking = model
    if "adapter" in method:
        linking = adapter(model, tmp_path / "links", num_link_tokens=19)
        options = {**options, "link_tokens": str(tmp_path / "links")}
    said = ask_hybrid(tmp_path, method, dtype=dtype, **options)
    bound = NOISE[dtype]
    full = [library(model, "full", prompt) for prompt in PROMPTS]
    expected = [library(linking, method, prompt) for prompt in PROMPTS]

    def furthest(found: list[Any], wanted: list[Tensor]) -> float:
        return max(error(*pair) for pair in zip(found, wanted, strict=True))

    assert furthest(said["plain"], full) < bound
    assert furthest(said["linked"], expected) < bound
    # a batch of plain and linked rows; then again, when requests have left at every moment of theirs
    for found in (said["together"], said["afterwards"]):
        assert furthest(found[::2], expected) < bound
        assert furthest(found[1::2], full) < bound
    if dtype == "float32":  # compiled alone they are other documents
        alone = [library(model, method.partition(",")[0], prompt) for prompt in PROMPTS]
        assert (furthest(said["linked"], alone) > 3 * bound) == ("front" in method)
    # controls: linking isn't full recompute, but for one document at the start, compiled alone; and transitions matter
    for number, prompt in enumerate(PROMPTS):
        if len(prompt.names) > 1 or "front" not in method:
            assert (error(said["linked"][number], full[number]) > bound) == (len(prompt.names) > 1)
        if ranks == 1:
            assert error(said["without transitions"][number], expected[number]) > 3 * bound
    layout = LinkingLayout(1, 16, 1, "", dtype, 1, 1, columns=3)
    for prompt, (linked, computed) in zip(PROMPTS, said["reports"], strict=True):
        ids, spans = prompt.built(documents())
        loads = layout.plan(LinkMethod.parse(method), len(ids), spans).loads
        assert linked == sum(load.end - load.start for load in loads)
        assert linked + computed == len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_preempted_and_fetched_states_are_those_of_before(eager: bool, tmp_path: Path) -> None:
    """With fewer blocks than all requests take; and over documents that have been on the host and on the disk."""
    model = tiny_model("falcon_h1", tmp_path)
    options = {"num_gpu_blocks_override": 24, "max_model_len": 224, "enforce_eager": eager}
    options["kept"] = {"disk_path": str(tmp_path / "kept")}
    said = ask_hybrid(tmp_path, "hypic:4", pressure=True, dtype="float32", **options)
    assert said["preemptions"] > 0
    assert said["tiers"] == ["disk", "host"]
    for name in ("together", "fetched"):
        for one, other in zip(said[name], said["alone"], strict=True):
            assert largest_difference(one, other) < 1e-3
    for number, prompt in enumerate(PROMPTS):
        for found, method in zip(said["alone"][2 * number :], ("hypic:4", "full"), strict=False):
            assert found[1][0] == pytest.approx(library(model, method, prompt)[found[0][0]].item(), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hypic:4", "hypic:8,front=adapter"])
def test_what_stands_in_front_of_documents_is_kept_with_its_states(method: str, tmp_path: Path) -> None:
    """Exactly: the answer is that of a server which has computed it."""
    model = tmp_path / "model"
    tiny = tiny_model("falcon_h1", model, vocab_size=259, max_position_embeddings=2048)
    served: list[Any] = [model, tmp_path, "--method", method]
    if "adapter" in method:
        adapter(tiny, tmp_path / "links", num_link_tokens=19)
        served = [tmp_path / "links", tmp_path, "--backbone", model]  # what it has learned is its method
    for folder in tmp_path.iterdir():
        make_tokenizer(template=TEMPLATE).save_pretrained(folder)
    system = {"role": "system", "content": "You are told where everybody is, and answer in a few words. " * 2}

    def asked(question: str, texts: list[str], **more: Any) -> dict[str, Any]:
        messages = [system, {"role": "user", "content": question}]
        return {"messages": messages, "documents": texts, "max_tokens": 6, "ignore_eos": True, **more}

    with serve(*served, "--max-model-len", "2048", pool="16MiB") as server:

        def logs(*given: Any, **more: Any) -> tuple[int, list[float]]:
            answer = server.chat(**asked(*given, **more))
            assert answer[1]["comb"]["method"] in (method, "full")
            return answer[1]["comb"].get("prefix_tokens", 0), logprobs(answer)

        cases = [("Where is Ada?", TEXTS), ("Who has the ball?", TEXTS[::-1]), ("Where?", [TEXTS[0][:6]])]
        before = [logs(*case) for case in cases[:2]]
        assert [prefix for prefix, _ in before] == [0, 0]
        wait_for(lambda: logs("Where is Bob?", TEXTS)[0] > 0)
        for case, (_, expected) in zip(cases, before, strict=False):
            prefix, found = logs(*case)
            assert prefix > len(system["content"])
            assert found == pytest.approx(expected, abs=1e-4)
        # a document without an interior: the beginning is all that is there
        prefix, found = logs(*cases[2])
        assert prefix > len(system["content"])
        assert found == pytest.approx(logs(*cases[2], comb={"method": "full"})[1], abs=1e-4)
        assert logs("Where is Ada?", TEXTS, comb={"method": "full"})[1] != pytest.approx(before[0][1], abs=1e-3)
        assert logs(*cases[0], key="bob")[0] == 0  # nobody else's
        server.wait_until_idle()


def test_documents_are_named_by_the_dtype_of_their_columns() -> None:
    """--mamba-cache-dtype float16 in place of bfloat16: as many bytes on the disk, and other numbers."""
    pool: Any = SimpleNamespace(codes={"layer": TokenCodes(torch.bfloat16)}, states=None)
    name = DocumentPool.dtype_name.fget
    assert name is not None
    assert name(pool) == "bfloat16"
    pool.states = SimpleNamespace(layers={"linear": SimpleNamespace(columns_dtype=torch.float16)})
    assert name(pool) == "bfloat16+torch.float16"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=4), st.integers(0, 3),
       st.integers(3, 8), st.integers(0, 8))  # fmt: skip
def test_interiors_are_loaded_whole_or_not_at_all(
    parts: list[tuple[int, int]], behind: int, first: int, last: int
) -> None:
    spans, position = [], 0
    for gap, tokens in parts:
        spans.append((position + gap, tokens))
        position += gap + tokens
    length = position + behind
    found = plan_interiors(length, spans, (first, last))
    whole = [(start + first, start + tokens - last) for start, tokens in spans if first + last + 1 < tokens]
    assert [(load.start, load.end) for load in found.loads] == [each for each in whole if each[1] < length]
    # in front of each interior there is a seam, and together they are all that is in front of the request
    assert [end for _, end in found.seams] == [load.start for load in found.loads]
    assert [start for start, _ in found.seams] == [0, *(load.end for load in found.loads)][: len(found.seams)]
    assert found.query == (found.loads[-1].end if found.loads else 0)
    assert all(load.offset == first for load in found.loads)


def test_states_take_blocks_behind_the_tokens_of_a_document() -> None:
    layout = LinkingLayout(64, 4, 8, "", "float32", 100, 100, state_rows=10, columns=3)
    assert [layout.blocks_for(tokens) for tokens in (1, 2, 3)] == [3, 3, 4]
    assert layout.seams(LinkMethod.parse("hypic:0")) == (3, 0)
    numbers = pack([PoolHandle(3, (1, 2, 3, 4))])
    assert unpack(numbers, layout)[0].tokens == 3
    with pytest.raises(ValueError, match="3 tokens in 4 blocks"):
        unpack(numbers, replace(layout, state_rows=0))


@settings(deadline=None)  # vLLM's modules are imported in it
@given(st.integers(3, 8), st.integers(2, 40), st.integers(0, 8), st.lists(st.integers(1, 12), max_size=80))
def test_steps_end_at_both_ends_of_an_interior(first: int, inside: int, last: int, rooms: list[int]) -> None:
    """Whatever room each step has; and none computes one token of it alone."""
    border, length = first + inside, first + inside + last
    scheduler: Any = SimpleNamespace(links={"compiling": SimpleNamespace(interior=(first, border))})
    ends, computed = [0], 0
    for room in [*rooms, *[8] * length]:  # in the end there is room
        if computed < length:
            computed += LinkingConnector.chunk(scheduler, "compiling", computed, min(room, length - computed))
            ends.append(computed)
    assert computed == length
    assert {first, border} <= set(ends)
    assert not any(end - start == 1 for start, end in itertools.pairwise(ends) if first <= start < border)
    assert LinkingConnector.chunk(scheduler, "another", 0, 99) == 99


class _Mamba:
    """A linear layer as vLLM has it, with two slots of its cache."""

    def __init__(self) -> None:
        self.kv_cache = torch.randn(2, 3, 7), torch.randn(2, 4, 6, 5)
        self.mamba_type = SimpleNamespace(name="MAMBA2")

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None: ...

    def get_state_shape(self) -> Any:
        return (3, 7), (4, 6, 5)

    def get_state_dtype(self) -> Any:
        return torch.float32, torch.float32


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_states_are_captured_chunk_by_chunk_and_composed(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the loop over tokens; with an interior that is shorter than the convolution, and one that isn't."""
    monkeypatch.setattr("comb_serving.vllm.linking.states.is_conv_state_dim_first", lambda: False)
    mamba: Any = _Mamba()
    layer: StateLayer = state_layer("layer", mamba)
    states = DocumentStates({"layer": layer})
    states.attach({"layer": 0})
    memory = torch.full((states.nbytes,), 255, dtype=torch.uint8)
    handle, blocks = PoolHandle(tokens + 3, (0,)), ([1],)
    gates, keys = -torch.rand(tokens, 4), torch.randn(tokens, 4, 6)
    values, raw = torch.randn(tokens, 4, 5), torch.randn(tokens, 7)
    columns, state = mamba.kv_cache[0][1], mamba.kv_cache[1][1]
    states.capture(CaptureCommand(handle, blocks, True, False), memory)
    first = tokens // 2
    for start, end in ((0, first), (first, tokens)):
        if start == end:
            continue
        command = CaptureCommand(handle, blocks, False, end == tokens)
        states.listen([command])
        assert states.wanted == {1: 0}
        cut = slice(start, end)
        state.copy_(recurrence(gates[cut], keys[cut], values[cut], state))
        columns.copy_(torch.cat([columns, raw[cut]])[-3:])
        states.heard["layer", 1] = ScalarTransition(gates[cut].sum(dim=0))
        states.capture(command, memory)
    assert states.damaged(memory) == ""
    before, others = torch.randn(4, 6, 5), torch.randn(3, 7)
    mamba.kv_cache[1][0], mamba.kv_cache[0][0] = before, others
    states.compose(ComposeCommand(handle, tokens, ([0],)), memory)
    torch.testing.assert_close(mamba.kv_cache[1][0], recurrence(gates, keys, values, before), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mamba.kv_cache[0][0], torch.cat([others, raw])[-3:])
    with pytest.raises(RuntimeError, match="layer has computed tokens of a document, and its scan was not heard"):
        states.capture(CaptureCommand(handle, blocks, False, True), memory)
    memory[:4] = torch.tensor([float("nan")]).view(torch.uint8)
    assert "NaN" in states.damaged(memory)
    states.close()
    assert "conv_ssm_forward" not in vars(mamba)


@pytest.mark.parametrize("width", [64, 128])
def test_a_dense_transition_is_heard_from_vllms_scan(width: int) -> None:
    """Against the product of single tokens; its inputs are in bfloat16."""
    ops = pytest.importorskip("vllm._custom_ops")
    # vLLM has loaded its kernels for this CPU; those of another kind beside them (vllm._C: AVX-512) abort the process
    if not hasattr(torch.ops._C, "chunk_gated_delta_rule_cpu"):
        pytest.skip("vLLM's kernels for this CPU have no gated delta rule")
    torch.manual_seed(0)
    heads, tokens, half = 4, 37, torch.bfloat16
    shapes = SimpleNamespace(
        get_state_shape=lambda: ((3, 9), (heads, width, width)), get_state_dtype=lambda: (half, torch.float32)
    )
    given: dict[str, Any] = {name: torch.randn(1, tokens, 2, width).to(half) for name in ("query", "key")}
    given["value"] = torch.randn(1, tokens, heads, width).to(half)
    given |= {"g": -0.1 * torch.rand(1, tokens, heads), "beta": torch.rand(1, tokens, heads).to(half)}
    given |= {"initial_state": torch.zeros(2, heads, width, width), "output_final_state": True, "head_first": False}
    given |= {"cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32), "use_qk_l2norm_in_kernel": True}
    given["initial_state_indices"] = torch.ones(1, dtype=torch.int32)
    layer = DenseLayer(shapes)
    parts = [layer.run_cpu(ops.chunk_gated_delta_rule_cpu, given, *cut) for cut in ((0, 17), (17, tokens), (0, tokens))]
    keys = torch.nn.functional.normalize(given["key"][0].float(), dim=-1).repeat_interleave(2, dim=1)
    expected = dense_of(given["g"][0], given["beta"][0].float(), keys).tensor
    for found in (parts[2], parts[1].after(parts[0])):
        assert (found.tensor - expected).norm() / expected.norm() < 1e-2
    assert (parts[0].after(parts[1]).tensor - expected).norm() / expected.norm() > 5e-2  # the other way
    assert not given["initial_state"].any()


def test_a_dense_transition_is_heard_from_a_scan_as_gpus_have_it() -> None:
    """Without a GPU: a plain twin of its scan, with states [V, K], and fewer value channels than key channels."""

    def scan(*, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **_: Any) -> Any:
        state = recurrence(g[0], k[0], v[0], initial_state[0].transpose(-1, -2), betas=beta[0])
        return q, state.transpose(-1, -2)[None]

    heads, tokens, keys, values = 2, 9, 6, 4
    layer = DenseLayer(
        SimpleNamespace(
            get_state_shape=lambda: ((3, 9), (heads, values, keys)), get_state_dtype=lambda: (torch.float32,) * 2
        )
    )
    key = torch.nn.functional.normalize(torch.randn(1, tokens, heads, keys), dim=-1)
    given = {
        "q": key, "k": key, "v": torch.randn(1, tokens, heads, values), "g": -torch.rand(1, tokens, heads),
        "beta": torch.rand(1, tokens, heads), "initial_state": torch.randn(3, heads, values, keys),
        "cu_seqlens": torch.tensor([0, tokens]),
    }  # fmt: skip
    found = layer.run_gpu(scan, given, 2, tokens).tensor
    torch.testing.assert_close(found, dense_of(given["g"][0, 2:], given["beta"][0, 2:], key[0, 2:]).tensor)
