"""How vLLM reads a comb checkpoint: its configuration, and weights from two places."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from comb.backbones.adapter import fingerprint
from comb.backbones.identity import weights_fingerprint
from tests.helpers.engines import checkpoint
from tests.helpers.families import tiny

pytest.importorskip("vllm")

from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from comb_serving.vllm import OP
from comb_serving.vllm.checkpoint import CombConfigParser, encoder_config
from comb_serving.vllm.fixed_weights import FixedWeights
from comb_serving.vllm.models import CombMixin
from comb_serving.vllm.setup import SCHEDULER, current_platform, set_up

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    checkpoint(tmp_path / "adapter", tmp_path / "backbone")
    return tmp_path / "adapter"


def parse(folder: Path) -> Any:
    return CombConfigParser().parse(folder, trust_remote_code=False)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_configuration_is_the_backbones_with_the_adapter_beside_it(folder: Path) -> None:
    read, config = parse(folder)
    plain, backbone = parse(folder.parent / "backbone")
    assert backbone.architectures == ["LlamaForCausalLM"]
    assert config.architectures == ["CombLlamaForCausalLM"]
    assert read == plain
    assert type(config) is type(backbone)
    assert config.comb["backbone"] == str(folder.parent / "backbone")
    assert config.comb["layers"] == [1, 3]
    assert encoder_config(config).num_key_value_heads == backbone.num_key_value_heads
    json.loads(config.to_json_string())


def test_a_backbone_of_another_shape_or_none_is_refused(folder: Path) -> None:
    change(folder.parent / "backbone" / "config.json", num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"num_hidden_layers 4, .*backbone has 5"):
        parse(folder)
    change(folder / "config.json", backbone_name_or_path="")
    with pytest.raises(ValueError, match="doesn't name its backbone"):
        parse(folder)


def test_a_backbone_is_found_beside_the_adapter(folder: Path) -> None:
    change(folder / "config.json", backbone_name_or_path="./../backbone")
    assert parse(folder)[1].comb["backbone"] == str(folder.parent / "backbone")


def options(**changed: Any) -> Any:
    def part(**defaults: Any) -> Any:
        return SimpleNamespace(**{name: changed.pop(name, value) for name, value in defaults.items()})

    connector, fuse = changed.pop("kv_connector", None), changed.pop("fuse", False)
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=part(**sizes, worker_cls="auto", enable_dbo=False),
        scheduler_config=part(scheduler_cls=None),
        cache_config=part(kv_offloading_size=None, kv_offloading_backend="native"),
        kv_transfer_config=None if connector is None else SimpleNamespace(kv_connector=connector),
        model_config=part(
            enable_sleep_mode=False, enable_cumem_allocator=False, enforce_eager=False,
            hf_config=SimpleNamespace(model_type=changed.pop("model_type", "llama")),
        ),
        compilation_config=part(splitting_ops=None, pass_config=SimpleNamespace(fuse_attn_quant=fuse)),
        **{"speculative_config": None, "use_v2_model_runner": False, **changed},
    )  # fmt: skip


def test_what_an_instance_is_set_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    v1, v2 = options(), options(use_v2_model_runner=True)
    for given in (v1, v2, v1):
        set_up(given)
    assert v1.parallel_config.worker_cls == "comb_serving.vllm.cpu_worker.CombCPUWorker"
    assert v2.parallel_config.worker_cls == "auto"  # on a CPU
    for v2_runner, worker in ((False, "CombGPUWorker"), (True, "CombGPUWorkerV2")):
        on_gpu = options(use_v2_model_runner=v2_runner)
        with monkeypatch.context() as gpu:
            gpu.setattr(current_platform, "is_cpu", lambda: False)
            gpu.setattr(current_platform, "is_cuda_alike", lambda: True)
            set_up(on_gpu)
        assert on_gpu.parallel_config.worker_cls == f"comb_serving.vllm.gpu_worker.{worker}"
        assert locate(on_gpu.parallel_config.worker_cls) is not None
    assert v1.scheduler_config.scheduler_cls == v2.scheduler_config.scheduler_cls == SCHEDULER
    refused = {
        "pipeline_parallel_size 1, not 2": {"pipeline_parallel_size": 2},
        "data_parallel_size 1, not 2": {"data_parallel_size": 2},
        "without sleep mode": {"enable_sleep_mode": True},
        "can't be shared": {"enable_cumem_allocator": True},
        "speculative": {"speculative_config": object()},
        "without weight_transfer_config": {"weight_transfer_config": object()},
        "need their own worker, not mine.Worker": {"worker_cls": "mine.Worker"},
        "need their own scheduler, not mine.Scheduler": {"scheduler_cls": "mine.Scheduler"},
        "without the KV connector ExampleConnector": {"kv_connector": "ExampleConnector"},
        "without the KV connector LMCacheConnectorV1": {"kv_connector": "LMCacheConnectorV1"},
        "without the KV connector lmcache": {"kv_offloading_size": 4.0, "kv_offloading_backend": "lmcache"},
        "add vllm::comb_cross_block to splitting_ops": {"splitting_ops": ["vllm::unified_attention"]},
        "without fuse_attn_quant": {"fuse": True},
        "gpt-oss": {"model_type": "gpt_oss"},
        "without enable_dbo": {"enable_dbo": True},
    }
    for message, changed in refused.items():
        with pytest.raises(ValueError, match=message):
            set_up(options(**changed))
    for changed in (
        {"kv_connector": "OffloadingConnector"}, {"kv_offloading_size": 4.0}, {"splitting_ops": [f"vllm::{OP}"]},
        {"splitting_ops": [], "enforce_eager": True},
    ):  # fmt: skip
        set_up(options(**changed))


class Plain(nn.Module):
    """Stands for a backbone's class."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        self.got = dict(weights)
        return set(self.got)


def loading(expected: Any, text: Any = None) -> Any:
    class Model(CombMixin, Plain):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.layer = nn.Linear(2, 3)
            self.comb_blocks = {"cross_blocks.0.": self.layer}
            adapter = {"fingerprint": expected, "layers": [4], "lora_rank": 2}
            config = SimpleNamespace(dtype=torch.float32, hf_config=SimpleNamespace(comb=adapter), hf_text_config=text)
            self._comb_vllm_config = SimpleNamespace(model_config=config)
            self.secondary_weights = [SimpleNamespace(model_or_path="there")]

    return Model()


def test_weights_go_where_they_belong() -> None:
    backbone = tiny("llama")
    table = backbone.get_input_embeddings().weight.detach()
    weight, bias = torch.randn(3, 2), torch.randn(3)
    given = [
        ("cross_blocks.0.weight", weight),
        ("encoder.norm.weight", torch.ones(1)),
        ("cross_blocks.0.bias", bias),
        ("comb_backbone.encoder.weight", torch.ones(2)),
        ("comb_backbone.embed.weight", table.bfloat16()),
    ]
    model = loading(fingerprint(backbone))
    assert model.load_weights(given) == {"encoder.weight", "embed.weight", "layer.weight", "layer.bias"}
    assert torch.equal(model.layer.weight, weight)
    assert torch.equal(model.layer.bias, bias)
    assert model.got.keys() == {"encoder.weight", "embed.weight"}
    with pytest.raises(ValueError, match="lacks 1 weights of its cross blocks"):
        loading(None).load_weights(given[:2])
    with pytest.raises(ValueError, match="belongs to no part"):
        loading(None).load_weights([("decoder.weight", weight)])
    with pytest.raises(ValueError, match="NaN or infinity"):
        loading(None).load_weights([("cross_blocks.0.bias", bias * float("nan"))])
    with pytest.raises(ValueError, match="embedding in there differs"):
        model.load_weights([*given[:4], ("comb_backbone.embed.weight", table + 0.1)])


def test_matrices_with_lora_are_those_of_the_backbone_and_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comb_serving.vllm.block.get_tensor_model_parallel_rank", lambda: 0)
    gate, up, down = torch.randn(3, 2), torch.randn(3, 2), torch.randn(2, 3)
    fused = torch.cat((gate, up))
    lora = {f"cross_blocks.0.mlp.{name}.lora_{which}.weight": torch.randn(*shape)
            for name, outputs, inputs in (("gate_proj", 3, 2), ("up_proj", 3, 2), ("down_proj", 2, 3))
            for which, shape in (("A", (2, inputs)), ("B", (outputs, 2)))}  # fmt: skip

    def beside(name: str) -> torch.Tensor:
        a, b = (lora[f"cross_blocks.0.mlp.{name}.lora_{which}.weight"] for which in "AB")
        return 8 * b @ a

    def model() -> Any:
        made = loading(None, SimpleNamespace(residual_multiplier=0.5))
        sizes = {"gate_up_proj": (2, 6), "down_proj": (3, 2)}
        made.layer = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        made.comb_blocks = {"cross_blocks.0.mlp.": made.layer}
        return made

    def of_layer(index: int, place: str = "model") -> list[tuple[str, torch.Tensor]]:
        start = f"comb_backbone.{place}.layers.{index}.mlp."
        return [(f"{start}gate_up_proj.weight", fused), (f"{start}down_proj.weight", down)]

    made = model()
    made.load_weights([*lora.items(), *((name, tensor + 1) for name, tensor in of_layer(3)), *of_layer(4)])
    found = made.layer["gate_up_proj"].weight
    torch.testing.assert_close(found, fused + torch.cat((beside("gate_proj"), beside("up_proj"))))
    torch.testing.assert_close(made.layer["down_proj"].weight, down / 2 + beside("down_proj"))
    assert len(made.got) == 4
    with pytest.raises(ValueError, match=r"lacks 3 .*beside which there is LoRA, and which there hasn't got"):
        model().load_weights([*lora.items(), *of_layer(3)])
    with pytest.raises(ValueError, match=r"two matrices that cross_blocks.0.mlp.gate_proj.weight could"):
        model().load_weights([*lora.items(), *of_layer(4, "vision"), *of_layer(4)])
    damaged = [(name, tensor * math.nan) for name, tensor in lora.items()]
    with pytest.raises(ValueError, match="NaN"):
        model().load_weights([*damaged, *of_layer(4)])


def packed(change: float | None = None, quantization: str | None = None, at_once: bool = False) -> Any:
    """A model as a worker has it, of one matrix, a number of which was written.

    vLLM packs it for a CPU while it loads, and nobody can read it afterwards.
    """

    class Loads:
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            config = SimpleNamespace(quantization=quantization, model="the/model")
            self.vllm_config = SimpleNamespace(model_config=config)

        def load_model(self) -> None:
            if at_once:  # as of vLLM 0.33's latent attention on CPUs with AMX
                self.model[1].weight.data = torch.empty(0)
            dispatch_cpu_unquantized_gemm(self.model[1], remove_weight=True)

        def get_model(self) -> nn.Module:
            return self.model

    class Worker(FixedWeights, Loads):
        pass

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64, bias=False)).requires_grad_(False)
    model.config = LlamaConfig()
    if change is not None:
        model[1].weight[5, 7] = change
    Worker(model).load_model()
    assert model[1].weight.numel() == 0
    return model


@pytest.mark.parametrize("change", [math.nan, math.inf, -math.inf])
def test_packed_weights_are_of_numbers(change: float) -> None:
    with pytest.raises(ValueError, match=r"the/model has NaN or infinity in 1 weight \(1.weight\): .* download"):
        packed(change)
    assert packed(change, "int8")  # a quantiser's own


def test_weights_that_nobody_has_looked_at_name_no_documents() -> None:
    with pytest.raises(ValueError, match=r"^1\.weight was packed by vLLM before it was looked at"):
        packed(at_once=True)
    assert packed(quantization="int8", at_once=True)


def test_documents_are_named_by_packed_weights() -> None:
    """A fine-tune may have the same embeddings and norms, and finds the other's documents on its disk."""
    names = [weights_fingerprint(packed(change), settings=False) for change in (None, None, 0.5)]
    assert names[0] == names[1] != names[2]


def test_nothing_listens_behind_a_load() -> None:
    packed()
    with pytest.raises(ValueError, match="NaN"):
        packed(math.nan)
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.empty(0))
    assert not list(module.buffers())
