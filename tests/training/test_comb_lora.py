"""LoRA beside what COMB has copied from its backbone: trained, saved without the copies, merged where it is loaded."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from comb import CombForCausalLM
from comb.backbones.loading import load_config as load_adapter_config
from comb.model.lora import LoraLinear, add_lora
from comb.model.weights import check_headers
from comb_training.config import load_config
from comb_training.data.batches import Collator
from comb_training.models import training_method
from comb_training.trainer.accelerator import trained_weights
from tests.helpers.families import tiny
from tests.helpers.training import backbone, comb_model, examples, nano_run, trainer

DOCUMENTS = [[[5, 6, 7, 8, 9], [10, 11]]]


def beside(on: Any, **options: Any) -> CombForCausalLM:
    """With LoRA that has been trained on something."""
    given = {"num_encoder_layers": 3, "cross_attention_layers": [1, 3], "gate": 0.9, "adapter_dtype": torch.float32}
    model = CombForCausalLM.from_backbone(on, **given | options)
    for block in model.cross_blocks:
        torch.nn.init.constant_(block.mlp_gate, 0.9)  # type: ignore[arg-type]  # a parameter
    add_lora(model, rank=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    return model.eval()


def written(model: CombForCausalLM, folder: Path) -> Path:
    """As a run leaves it: what has trained."""
    model.save_pretrained(folder, state_dict=trained_weights(model, sharded=False))
    return folder


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[3, 4, 5]]), documents=DOCUMENTS).logits.float()


@pytest.mark.parametrize("initialization", ["backbone", "first"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "olmo2", "gemma3", "granite"])
def test_loaded_it_is_what_was_trained(family: str, initialization: str, tmp_path: Path) -> None:
    model = beside(tiny(family), initialization=initialization)
    folder = written(model, tmp_path / "adapter")
    held = load_file(folder / "model.safetensors")
    assert not [name for name in held if ".mlp." in name and ".lora_" not in name]
    check_headers(folder, model.config)
    loaded = CombForCausalLM.from_pretrained(folder, backbone=tiny(family))
    torch.testing.assert_close(answers(loaded), answers(model), rtol=1e-4, atol=1e-5)
    norms = [p for n, p in loaded.encoder.layers.named_parameters() if n.endswith("norm.weight")]
    assert all(bool((p == p.bfloat16()).all()) for p in norms)  # ones, exactly, whatever convention the backbone has
    assert loaded.config.lora_rank is None
    assert not any(isinstance(module, LoraLinear) for module in loaded.modules())
    # which is not what the copies say alone
    for name, tensor in held.items():
        if ".lora_B." in name:
            tensor.zero_()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    assert (answers(CombForCausalLM.from_pretrained(folder, backbone=tiny(family))) - answers(model)).abs().max() > 1e-3
    # saved again it is whole, and needs nothing of the backbone's
    loaded.save_pretrained(tmp_path / "whole")
    whole = CombForCausalLM.from_pretrained(tmp_path / "whole", backbone=tiny(family))
    assert torch.equal(answers(whole), answers(loaded))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_is_frozen_is_the_backbone_s_own(family: str) -> None:
    on = tiny(family).to(torch.bfloat16)
    own = {id(parameter) for parameter in on.parameters()}
    model = beside(on)
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert len(layers) == 3 * 7 + 2 * 3
    assert all(id(each.weight) in own and (each.bias is None or id(each.bias) in own) for each in layers)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert not any(name.startswith("backbone.") for name in trained)
    assert all(".lora_" in name for name in trained if name.startswith("encoder.layers.") or ".mlp." in name)
    assert any(name.startswith("encoder.key_value_heads.") for name in trained)
    # a part of a fused matrix is a copy, in the backbone's dtype
    fused = beside(tiny("phi3").to(torch.bfloat16)).encoder.layers[0].self_attn.q_proj
    assert fused.weight.dtype == torch.bfloat16
    assert not fused.weight.requires_grad


def remembered(kept: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    kept.append(tensor)
    return tensor


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_frozen_matrices_are_widened_and_not_kept(family: str) -> None:
    """In float32 beside a backbone in bfloat16: the gradients are those beside the same numbers in float32."""
    gradients = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = beside(tiny(family).to(torch.bfloat16).to(dtype))
        torch.manual_seed(0)
        kept: list[torch.Tensor] = []
        keep = partial(remembered, kept)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            [(keys, values)] = model._encode([(5, 6, 7, 8)])
        (keys.sum() + values.pow(2).sum()).backward()  # type: ignore[no-untyped-call]
        gradients[dtype] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        wide = [tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.shape == (64, 32)]
        assert bool(wide) == (dtype == torch.float32)  # of the MLP's matrices
    first, second = gradients.values()
    assert first.keys() == second.keys()
    assert any(".lora_A." in name for name in first)
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], rtol=1e-4, atol=1e-6)


def test_it_is_merged_beside_layers_that_are_on_a_disk(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    model = beside(tiny("llama"))
    folder = written(model, tmp_path / "adapter")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{index}": "disk" if index == 1 else "cpu" for index in range(4)}
    loaded = CombForCausalLM.from_pretrained(
        folder, backbone=tmp_path / "backbone", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    torch.testing.assert_close(answers(loaded), answers(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "options"), [("llama", {"initialization": "random"}), ("mixtral", {})])
def test_it_stands_beside_copies_alone(family: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"train.lora_rank: encoder.layers.0.* is no copy of a matrix"):
        beside(tiny(family), **options)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = written(beside(tiny("llama")), tmp_path)
    config, held = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    name = "encoder.layers.1.mlp.up_proj.lora_A.weight"

    def refused(match: str, weights: dict[str, torch.Tensor], on: Any = None, **settings: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config | settings))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=match):
            CombForCausalLM.from_pretrained(folder, backbone=on or tiny("llama"))

    refused(r"lacks 1 weights, .*layers.1.mlp.up_proj.weight", {each: held[each] for each in held if each != name})
    refused(r"up_proj has the shapes \(3, 32\)", {**held, name: held[name][:3].clone()})
    refused(r"up_proj.weight holds NaN", {**held, name: held[name] * float("nan")})
    refused(r"lacks \d+ weights", held, lora_rank=None)
    refused("of rank 8 they are", held, lora_rank=8)
    refused("copied_layers must name a layer", held, copied_layers=None)
    for numbers in (torch.int8, torch.float8_e4m3fn):  # as a quantiser leaves them, with scales elsewhere
        quantised = tiny("llama")
        for layer in quantised.model.layers[1:]:  # the first one is run
            layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.to(numbers), requires_grad=False)
        refused(r"beside .*up_proj of the backbone's own layers", held, quantised)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_with_it_goes_on_and_is_published(bf16: bool, tmp_path: Path) -> None:
    def fresh(rank: int = 2) -> CombForCausalLM:
        model = comb_model(gate=0.5, on=backbone().to(torch.bfloat16))
        model._place(torch.float32)
        add_lora(model, rank=rank)
        return model

    settings = {"steps": 10, "batch_size": 6, "learning_rate": 1e-2, "save_steps": 5, "bf16": bf16}
    run = trainer(fresh(), tmp_path, **settings)
    run.train()
    weights = trained_weights(run.model, sharded=False)
    run.save_model(str(tmp_path / "adapter"))
    published = load_file(tmp_path / "adapter" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in published.items()} == dict.fromkeys(weights, torch.bfloat16)
    batch = Collator(0)(examples())
    batch.pop("labels")
    with torch.no_grad():
        # a checkpoint is an adapter, too
        last = CombForCausalLM.from_pretrained(tmp_path / "checkpoint-10", backbone=backbone().to(torch.bfloat16))
        torch.testing.assert_close(
            last(**batch).logits.float(), run.model.eval()(**batch).logits.float(), rtol=0.05, atol=0.05
        )
    # resumed in the middle, it is the same run
    resumed = trainer(fresh(), tmp_path, **settings)
    resumed.train(tmp_path / "checkpoint-5")
    assert resumed.losses == run.losses
    found = trained_weights(resumed.model, sharded=False)
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    with pytest.raises(ValueError, match=r"checkpoint-5 doesn't fit .*of another shape \['cross_blocks.0.mlp.*lora_A"):
        trainer(fresh(rank=3), tmp_path, **settings).train(tmp_path / "checkpoint-5")


def test_another_run_goes_on_from_it(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("")

    def loaded(subfolder: str = "", **changes: Any) -> Any:
        run = nano_run(tmp_path, {"dataset": "jsonl", "path": str(tmp_path / "data.jsonl")}, **changes)
        run["model"] |= {} if changes.get("lora_rank") == 4 and not first else {"init_from": str(first)}
        run["model"] |= {"options": {"subfolder": subfolder}} if subfolder else {}
        (tmp_path / "run.json").write_text(json.dumps(run))
        config = load_config(tmp_path / "run.json")
        return training_method("comb").load(config)

    first: Any = ""
    model = loaded(lora_rank=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name or name.endswith("_gate"):
                parameter.fill_(0.1)
    first = written(model, tmp_path / "first")
    again, whole = loaded(lora_rank=4), loaded()
    found = trained_weights(again, sharded=False)
    assert all(torch.equal(found[name], weight) for name, weight in trained_weights(model, sharded=False).items())
    assert again.config.lora_rank == 4
    assert not any(".lora_" in name for name in trained_weights(whole, sharded=False))
    torch.testing.assert_close(answers(whole.eval()), answers(model.eval()), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="which has LoRA of rank 4: give 4, or train all of it"):
        loaded(lora_rank=8)
    # of the place that its options name
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            if ".lora_" in name:
                parameter.fill_(0.2)
    written(again, first / "checkpoint-7")
    later = trained_weights(loaded(lora_rank=4, subfolder="checkpoint-7"), sharded=False)
    assert all(torch.equal(later[name], weight) for name, weight in trained_weights(again, sharded=False).items())
    whole.save_pretrained(tmp_path / "whole")
    first = tmp_path / "whole"
    with pytest.raises(ValueError, match="which was trained in full: leave it out"):
        loaded(lora_rank=4)


def test_the_committed_adapter_is_whole() -> None:
    folder = Path(__file__).parents[2] / "training" / "adapters" / "comb-smollm2-135m"
    config = load_adapter_config(folder)
    check_headers(folder, config)
    assert config.lora_rank == load_config(folder.parents[2] / "configs" / "comb-smollm2-135m.yaml").train.lora_rank
