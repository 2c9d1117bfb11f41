"""Rows, the V2 model runner's hook and the pool's size, on stand-ins for what vLLM passes in."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comb.model.config import CombEncoderConfig
from comb_serving.config.serve_options import ServeOptions
from comb_serving.pool.capability import KEY, MARK, Capability, PoolHandle, digest, pack
from comb_serving.pool.shared_pool import PoolLayout, SharedPool
from comb_serving.vllm.decoder_pool import rank_layout
from comb_serving.vllm.rows import RequestDocuments

A, B = PoolHandle(5, (3, 1)), PoolHandle(4, (0,))


@pytest.fixture
def documents(tmp_path: Path) -> RequestDocuments:
    pool = SharedPool.create(tmp_path / "pool-0", PoolLayout(1, 1, 2, num_blocks=6, block_size=4))
    return RequestDocuments(verified, pool)


SECRET = b"of the instance"


def verified(token: object) -> Capability:
    return Capability.verify(token, SECRET)


def token(*handles: PoolHandle, request_id: str = "", secret: bytes = SECRET, **more: Any) -> str:
    return Capability(request_id, MARK, tuple(pack(handles)), **{"prompts": (), **more}).sign(secret)


def rows(
    documents: RequestDocuments, names: list[str], starts: list[int], computed: Sequence[int] = (0, 0, 0)
) -> list[tuple[int, int, list[int]]]:
    """Start, stop and slots of the rows with documents in a step."""
    documents.begin(names, starts, computed)
    return [(row.start, row.stop, row.table.slots().tolist()) for row in documents.step.rows]


OF_A, OF_B = [12, 13, 14, 15, 4], [0, 1, 2, 3]  # slots


def test_rows_follow_requests_through_the_batch(documents: RequestDocuments) -> None:
    documents.add("x", token(A, B))
    documents.add("y", None)
    documents.add("z", token(B))
    assert rows(documents, ["y", "z", "x"], [0, 2, 3, 6]) == [(2, 3, OF_B), (3, 6, OF_A + OF_B)]
    step, cpu = documents.step, torch.device("cpu")
    assert step.tokens(cpu).tolist() == [2, 3, 4, 5]
    assert step.batch.counts == (1, 3)
    # index tensors are made once a step, a request's table once
    assert step.batch is step.batch
    assert step.tokens(cpu) is step.tokens(cpu)
    table = step.batch.tables[1]
    assert rows(documents, ["x", "warm-up"], [0, 1, 5]) == [(0, 1, OF_A + OF_B)]
    assert documents.step.batch is not step.batch
    assert documents.step.batch.tables[0] is table
    assert table.slots() is table.slots()
    documents.begin_without()
    assert documents.step.rows == ()


def test_the_prefix_of_a_prompt_reads_no_documents(documents: RequestDocuments) -> None:
    """In whatever parts it is computed: whole, in chunks, behind what vLLM's cache has of it."""
    prompt, other = [7, 8, 9, 10, 11], [7, 9]
    documents.add("x", token(A, prompts=(digest(other), digest(prompt)), prefixes=(1, 3)), prompt)
    for starts, computed, wanted in (
        ([0, 5], 0, [(3, 5)]), ([0, 2], 0, []), ([0, 3], 2, [(1, 3)]), ([0, 2], 3, [(0, 2)]), ([0, 1], 5, [(0, 1)]),
    ):  # fmt: skip
        assert rows(documents, ["x"], starts, [computed]) == [(*each, OF_A) for each in wanted]
    documents.add("x", token(A, prompts=(digest(other), digest(prompt)), prefixes=(1, 3)), other)
    assert rows(documents, ["y", "x"], [0, 4, 6]) == [(5, 6, OF_A)]


def test_an_id_that_comes_again_has_its_new_documents_or_none(documents: RequestDocuments) -> None:
    documents.add("x", token(A))
    documents.add("x", token(B))
    assert rows(documents, ["x"], [0, 1]) == [(0, 1, OF_B)]
    documents.add("x", None)
    assert not rows(documents, ["x"], [0, 1])
    documents.add("x", token(A))
    documents.keep(["y"])
    assert not rows(documents, ["x"], [0, 1])
    with pytest.raises(ValueError, match="the pool has 6"):
        documents.add("x", token(PoolHandle(1, (6,))))
    with pytest.raises(ValueError, match="no pool"):
        RequestDocuments(verified).add("x", token(A))
    with pytest.raises(ValueError, match="not signed by this instance"):
        documents.add("x", token(A, secret=b"another's"))
    with pytest.raises(ValueError, match="the documents of request y"):
        documents.add("x", token(A, request_id="y"))
    documents.add("x", token())  # documents that stand in its prompt
    assert not rows(documents, ["x"], [0, 1])


def test_a_step_in_which_cross_blocks_were_left_out_is_an_error(documents: RequestDocuments) -> None:
    documents.blocks = 2
    documents.add("x", token(A))
    for mixed in (0, 1):
        documents.begin(["x"], [0, 1], [0])
        documents.mixed = mixed
        with pytest.raises(RuntimeError, match=f"{2 - mixed} of 2 cross blocks were not run"):
            documents.end()
    documents.begin(["x"], [0, 1], [0])
    with pytest.raises(RuntimeError, match="were not run"):
        documents.begin_without()
    documents.begin(["x"], [0, 1], [0])
    documents.mixed = 2
    documents.begin(["y"], [0, 1], [0])  # no documents, nothing to run
    documents.end()


def test_ranks_divide_the_pool() -> None:
    config = CombEncoderConfig(hidden_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    options = ServeOptions("any", pool_bytes=10_000, pool_block=4)

    def layout(ranks: int = 1, **changed: Any) -> PoolLayout:
        return rank_layout(config, replace(options, **changed), cross_layers=3, dtype="bfloat16", ranks=ranks)

    one, two, four = map(layout, (1, 2, 4))
    assert one.nbytes <= 10_000 < one.nbytes + one.bytes_per_token * 4
    assert (two.kv_heads, two.num_blocks, 2 * two.nbytes) == (1, one.num_blocks, one.nbytes)
    assert (four.kv_heads, four.num_blocks) == (1, one.num_blocks // 2)
    small = layout(pool_dtype="fp8")
    assert (small.bytes_per_token, one.bytes_per_token) == (2 * 3 * 2 * (8 + 4), 2 * 3 * 2 * 8 * 2)
    assert small.num_blocks > one.num_blocks
    with pytest.raises(ValueError, match="a pool of 100 bytes is less than one block of 4 tokens, 768 bytes"):
        layout(pool_bytes=100)


@pytest.mark.vllm
def test_documents_that_this_instance_has_not_signed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `vllm serve` alone, where there is no instance, and beside another one."""
    pytest.importorskip("vllm")
    from comb_serving.vllm.scheduler import check_request

    def check(token: object) -> Capability | None:
        given = SimpleNamespace(extra_args={KEY: token})
        return check_request(
            SimpleNamespace(sampling_params=given, request_id="x", cache_salt=MARK, prompt_token_ids=[1])
        )

    monkeypatch.delenv("COMB_INSTANCE_DIR", raising=False)
    for made in (token(A), "made up", ""):
        with pytest.raises(ValueError, match="keeps no documents"):
            check(made)
    monkeypatch.setenv("COMB_INSTANCE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="no instance's folder"):
        check(token(A))
    (tmp_path / "secret").write_bytes(SECRET)
    for made in (token(A, secret=b"another's"), "made up", ""):
        with pytest.raises(ValueError, match="not signed by this instance"):
            check(made)
    assert check(token(A)) is not None
    with pytest.raises(ValueError, match="were lost"):
        check(None)


@pytest.mark.vllm
def test_the_v2_model_state_sets_the_step(documents: RequestDocuments, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    from comb_serving.vllm import gpu_worker

    class Base:
        def __init__(self, *given: Any) -> None:
            self.calls: list[Any] = []

        def add_request(self, req_index: int, new: Any) -> None:
            self.calls.append(("add", new.req_id))

        def remove_request(self, name: str) -> None:
            self.calls.append(("remove", name))

        def prepare_inputs(self, batch: Any, states: Any) -> dict[str, Any]:
            return {"positions": 1}

        def prepare_dummy_inputs(self, requests: int, tokens: int) -> dict[str, Any]:
            return {"positions": 2}

        def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
            return AttentionCGSupport.ALWAYS, None

    monkeypatch.setattr(gpu_worker, "create_pool", lambda model, config: documents.pool)
    model = SimpleNamespace(comb=RequestDocuments(verified))
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE))
    found = gpu_worker.with_documents(Base)(config, model, None, None)

    def new(name: str, token: str | None, prompt: Sequence[int] = (1,)) -> Any:
        sampling = SimpleNamespace(extra_args=None if token is None else {KEY: token})
        return SimpleNamespace(req_id=name, sampling_params=sampling, prompt_token_ids=prompt)

    def batch(names: list[str], starts: list[int]) -> Any:
        return SimpleNamespace(req_ids=names, query_start_loc_np=starts, num_computed_tokens_np=[0] * len(names))

    found.add_request(0, new("x", token(A)))
    found.add_request(1, new("y", None))
    found.add_request(2, SimpleNamespace(req_id="pooling", sampling_params=None, prompt_token_ids=None))
    assert found.prepare_inputs(batch(["y", "x"], [0, 1, 4]), None) == {"positions": 1}
    (row,) = model.comb.step.rows
    assert (row.start, row.stop, len(row.table.slots())) == (1, 4, 5)
    # another request in the batch position of the one before
    found.remove_request("x")
    found.add_request(0, new("w", None))
    found.prepare_inputs(batch(["w"], [0, 3]), None)
    assert not model.comb.step.rows
    found.add_request(0, new("x", token(B)))
    found.prepare_inputs(batch(["x"], [0, 1]), None)
    assert found.prepare_dummy_inputs(4, 8) == {"positions": 2}
    assert not model.comb.step.rows
    assert model.comb.step.dummy
    assert found.get_additional_cg_support() == (AttentionCGSupport.NEVER, "comb")
    model.comb.full_graphs = True  # comb's worker asks for none where there are documents
    assert found.get_additional_cg_support() == (AttentionCGSupport.ALWAYS, None)
    assert found.calls[-2:] == [("add", "w"), ("add", "x")]


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["default.DefaultModelState", "mamba_hybrid.MambaHybridModelState"])
def test_the_v2_model_state_fits_vllms_own(name: str) -> None:
    pytest.importorskip("vllm")
    from comb_serving.vllm.gpu_worker import with_documents

    module, _, cls = name.partition(".")
    base = getattr(import_module(f"vllm.v1.worker.gpu.model_states.{module}"), cls)
    ours = with_documents(base)
    assert not inspect.isabstract(ours)
    changed = [member for member in vars(ours) if inspect.isfunction(vars(ours)[member])]
    assert len(changed) == 6
    for member in changed:
        assert list(inspect.signature(getattr(ours, member)).parameters) == list(
            inspect.signature(getattr(base, member)).parameters
        )
