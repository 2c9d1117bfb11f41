"""What linking takes from vLLM, without an engine: rotary modules, what questions look at, seams' rows, refusals."""

from __future__ import annotations

import pickle
import pickletools
from itertools import count, product
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comb_serving.linking.layout import plan
from comb_serving.linking.methods import LinkMethod

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as phi3

from comb_serving.vllm.linking import looks
from comb_serving.vllm.linking.cache_access import cached_layers
from comb_serving.vllm.linking.connector import LinkingConnector
from comb_serving.vllm.linking.positions import find_positions
from comb_serving.vllm.linking.scheduler import LinkingScheduler
from comb_serving.vllm.linking.setup import check_engine, check_groups
from comb_serving.vllm.linking.states import state_layer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

MOST, SIZE, ORIGINAL = 128, 16, 32
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0 + n for n in range(8)],
         "original_max_position_embeddings": ORIGINAL}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"partial_rotary_factor": 0.5},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "longrope": _LONG,
    "longrope, magnitudes": {**_LONG, "short_mscale": 1.1, "long_mscale": 1.4},
}  # fmt: skip


class OneLayer(nn.Module):
    """Brings keys of two heads to one attention layer."""

    def __init__(self, rotary: nn.Module, attention: Any, step: int = 1) -> None:
        super().__init__()
        self.rotary, self.attention, self.step = rotary, [attention], step
        generator = torch.Generator().manual_seed(0)
        self.key = nn.Parameter(torch.randn(1, 2 * SIZE, generator=generator))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        key = self.key.expand(len(positions), -1).contiguous()
        query, key = self.rotary(positions // self.step, key.clone(), key.clone())
        return self.attention[0].forward(query, key, key.new_ones(key.shape))


def found(monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any], length: int, step: int = 1) -> tuple[Any, OneLayer]:
    config: Any = VllmConfig()
    text = SimpleNamespace(to_dict=lambda: {"rope_parameters": rope})
    config.model_config = SimpleNamespace(max_model_len=length, hf_text_config=text)
    monkeypatch.setattr(phi3, "get_current_vllm_config", lambda: config)
    layer: Any = Attention.__new__(Attention)
    nn.Module.__init__(layer)
    layer.num_heads = layer.num_kv_heads = 2
    layer.head_size = SIZE
    with set_current_vllm_config(config):
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
        parameters = {"rope_theta": 1e4, **rope}
        rotary = rotary_embedding.get_rope(SIZE, MOST, rope_parameters=parameters, dtype=torch.float32)
        config.compilation_config.static_forward_context = {"layer": layer}
        model = OneLayer(rotary, layer, step)
        return find_positions(model, {"layer": layer}, config), model


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [ORIGINAL - 8, MOST])
def test_keys_are_taken_to_where_the_module_turns_them(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions, model = found(monkeypatch, ROPES[name], length)
    compiled, linked = torch.arange(8), torch.arange(length - 8, length)
    key = model.key.detach().expand(8, -1).contiguous()
    here, there = (model.rotary(at, key.clone(), key.clone())[1].reshape(8, 2, SIZE) for at in (compiled, linked))
    moved = positions.rerotation(compiled, linked).apply(here.clone(), positions.layers["layer"])
    assert float((moved - there).abs().max()) < 1e-4
    assert float((here - there).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ROPES)
def test_documents_are_named_after_how_their_keys_were_turned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, longer, long = (found(monkeypatch, ROPES[name], length)[0] for length in (ORIGINAL - 8, ORIGINAL, MOST))
    assert short.digest() == longer.digest()
    # vLLM takes LongRoPE's other factors where a prompt may be longer than the original length
    assert (short.digest() != long.digest()) is name.startswith("longrope")


def test_positions_that_the_table_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no rotary embedding of the model explains"):
        found(monkeypatch, ROPES["default"], MOST, step=3)


@pytest.mark.parametrize("window", [None, 3])
def test_a_long_question_is_seen_in_portions(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    query, keys = torch.randn(5, 4, 8, generator=draw), torch.randn(12, 2, 8, generator=draw)
    wanted = torch.zeros(12, dtype=torch.float64)
    for number, head in product(range(5), range(4)):
        first = 0 if window is None else number + 7 - window + 1
        seen = keys[first : number + 8, head // 2].double() @ query[number, head].double() * 0.3
        wanted[first : number + 8] += seen.softmax(0)
    for room in (10**6, 4 * 12 * 2, 1):
        monkeypatch.setattr(looks, "_SCORES", room)
        torch.testing.assert_close(
            looks.attention_paid(query, keys, 7, 0.3, window).double(), wanted, atol=1e-5, rtol=0
        )


DOCUMENT, SEAM = 24, 4


def rows_for(documents: int) -> tuple[list[Any], list[int]]:
    """The rows that compute the seams of so many documents, in steps of eight rows, and their prompt."""
    prompt = [5 + index % 1000 for index in range(documents * DOCUMENT + 9)]
    spans = [(index * DOCUMENT, DOCUMENT) for index in range(documents)]
    planned = plan(len(prompt), spans, LinkMethod.parse(f"legolink:{SEAM}").recomputed(spans))
    connector: Any = LinkingConnector.__new__(LinkingConnector)
    connector.jobs, connector.behind_seams, connector._loads = {}, {}, []
    connector.started, connector.layout = LinkMethod.parse(f"legolink:{SEAM}"), SimpleNamespace(front=())
    connector._matched = {"r": (0, planned, False)}
    link = SimpleNamespace(
        plan=planned, method=connector.started, looks=False, handles=[None] * documents, length=len(prompt), snapshot=0
    )
    connector.links = {"r": link}
    request = SimpleNamespace(request_id="r", prompt_token_ids=prompt, lora_request=None, num_preemptions=1)
    blocks = SimpleNamespace(get_block_ids=lambda: ([0],))
    connector.update_state_after_alloc(request, blocks, planned.query)
    scheduler: Any = LinkingScheduler.__new__(LinkingScheduler)
    scheduler.connector, scheduler._numbers, scheduler.running = connector, count(), []
    scheduler.max_num_running_reqs, scheduler.use_v2_model_runner = 8, False
    scheduler.finished_req_ids, scheduler.finished_recving_kv_req_ids = set(), set()
    rows = []
    while connector.jobs:
        metadata = SimpleNamespace(composes=[])
        output = SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens={}, total_num_scheduled_tokens=0, kv_connector_metadata=metadata
        )
        scheduler._add_seams(output, 64)
        rows += output.scheduled_new_reqs
    return rows, prompt


def test_rows_are_told_their_tokens_without_a_number_for_each() -> None:
    def words(documents: int) -> int:
        """Of what is sent to a worker."""
        return sum(1 for _ in pickletools.genops(pickle.dumps(rows_for(documents)[0])))

    rows, prompt = rows_for(40)
    assert len(rows) == 39  # the first document has no seam
    for index, row in enumerate(rows, 1):
        assert list(row.prompt_token_ids) == prompt[: index * DOCUMENT + SEAM + 1]
        assert row.num_computed_tokens == index * DOCUMENT
    assert words(80) < 2.2 * words(40)


def config(**given: str) -> Any:
    """vLLM's, of an engine that links documents; `given`: its connector's options."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, tensor_parallel_size=1, enable_dbo=False
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, is_multimodal_model=False, runner_type="generate", enable_sleep_mode=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False, mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8), speculative_config=None, lora_config=None,
        kv_transfer_config=SimpleNamespace(get_from_extra_config=given.get),
    )  # fmt: skip


HYPIC = {"method": "hypic:8"}


@pytest.mark.parametrize(
    ("given", "name", "value", "message"),
    [
        ({}, "parallel_config.pipeline_parallel_size", 2, "documents are linked"),
        ({}, "parallel_config.data_parallel_size", 2, "documents are linked"),
        ({}, "parallel_config.decode_context_parallel_size", 2, "documents are linked"),
        ({}, "parallel_config.prefill_context_parallel_size", 2, "documents are linked"),
        ({}, "parallel_config.enable_dbo", True, "documents are linked"),
        ({}, "model_config.is_multimodal_model", True, "documents are linked.*: use --method full"),
        ({}, "model_config.enable_sleep_mode", True, "documents are linked"),
        ({}, "speculative_config", object(), "documents are linked"),
        ({}, "weight_transfer_config", object(), "documents are linked"),
        ({"link_tokens": "FOLDER"}, "lora_config", object(), "linked beside LoRA by methods of attention layers"),
        (HYPIC, "lora_config", object(), "linked beside LoRA by methods of attention layers"),
        (HYPIC, "cache_config.enable_prefix_caching", True, "hypic links states with"),
        (HYPIC, "cache_config.mamba_cache_mode", "align", "hypic links states with"),
        (HYPIC, "scheduler_config.max_num_batched_tokens", 7, "hypic links states with"),
        ({**HYPIC, "link_tokens": "FOLDER"}, "parallel_config.tensor_parallel_size", 2, "aren't divided among ranks"),
    ],
)
def test_engines_that_cant_link_are_refused(given: dict[str, str], name: str, value: Any, message: str) -> None:
    """Not by engines: vLLM for CPUs starts none in a process in which an n-gram speculator's numba was imported."""
    changed = config(**given)
    check_engine(changed)
    part, _, attribute = name.rpartition(".")
    setattr(attrgetter(part)(changed) if part else changed, attribute, value)
    with pytest.raises(ValueError, match=message):
        check_engine(changed)


@pytest.mark.parametrize("method", ["naive", "hypic:8"])
def test_a_cache_of_another_kind_is_refused_with_what_serves_it(method: str) -> None:
    groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace())])
    with pytest.raises(ValueError, match=r"not .*SimpleNamespace.* use --method full"):
        check_groups(groups, LinkMethod.parse(method))


def test_layers_that_cant_be_linked_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by an engine: vLLM for CPUs starts no second one in a process that has loaded a hybrid's kernels."""
    mixer = SimpleNamespace(get_kv_cache_spec=lambda config: "a state's")
    layers: Any = {"layers.0.mixer": mixer}
    made: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    with pytest.raises(ValueError, match=r"documents are linked in attention layers; layers.0.mixer is a"):
        cached_layers(made)
    layers.clear()
    with pytest.raises(ValueError, match="no attention layer with a KV cache to link: use --method full"):
        cached_layers(made)
    for kind in ("MAMBA1", "SHORT_CONV", "LINEAR", "GDN_ATTN"):
        mixer.mamba_type = SimpleNamespace(name=kind)
        with pytest.raises(ValueError, match=rf"layers\.0\.mixer is a SimpleNamespace \({kind}\): use --method full"):
            state_layer("layers.0.mixer", mixer)
    layers["layers.0.mixer"] = mixer
    monkeypatch.setattr("comb_serving.vllm.linking.cache_access.is_linear", lambda layer: True)
    for given, front in (({"link_tokens": "FOLDER"}, "adapter"), ({}, "prose")):
        made.kv_transfer_config = config(**given).kv_transfer_config
        with pytest.raises(ValueError, match=f"keeps a state: use --method hypic:8,front={front}"):
            cached_layers(made)
