"""Training of link tokens: the divergence from full recompute falls, and nothing of the backbone changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from comb import LinkTokensForCausalLM, PICEngine, Prompt
from comb.backbones.tokenizer import front_ids
from comb.linking.masks import visible
from comb_training.config import config_from_dict
from comb_training.data.batches import TrainingExample
from comb_training.models import training_method
from comb_training.models.linktokens import RowCollator, starting_tokens
from comb_training.models.method import trained_options
from comb_training.plan.counting import meta_model
from comb_training.train import run_training
from comb_training.trainer.accelerator import trained_weights
from comb_training.trainer.trainer import CombTrainer
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.hybrids import text_model
from tests.helpers.training import TOKENIZER, backbone, examples, trainer


def link_tokens(**sizes: Any) -> LinkTokensForCausalLM:
    return LinkTokensForCausalLM.from_backbone(backbone(**sizes), num_link_tokens=4, token_ids=[5, 6, 7, 8])


def run(folder: Path, **config: Any) -> CombTrainer:
    settings = {"steps": 30, "learning_rate": 3e-2, "kl_weight": 1.0, "ce_weight": 0.0, "warmup": 0.0, "batch_size": 12}
    model = link_tokens(initializer_range=0.3)  # so that documents matter
    return trainer(model, folder, method="linktokens", **{**settings, **config})


def judged(model: Any, folder: Path) -> dict[str, float]:
    settings = {"method": "linktokens", "kl_weight": 1.0, "ce_weight": 0.0}
    return trainer(model, folder, heldout=examples(), **settings).evaluate()


def test_the_divergence_falls_and_the_backbone_stays(tmp_path: Path) -> None:
    training = run(tmp_path)
    model = training.model
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    fingerprint, start = model.fingerprint, judged(model, tmp_path)
    training.train()
    end = judged(model, tmp_path)
    assert end["eval_kl"] < 0.75 * start["eval_kl"]
    assert end["eval_kl_none"] == pytest.approx(start["eval_kl_none"])
    assert end["eval_closed"] == pytest.approx(1 - end["eval_kl"] / end["eval_kl_none"])
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())
    assert model.fingerprint != fingerprint
    assert {name.partition(".")[0] for name in trained_weights(training.model, sharded=False)} == {"front"}
    control = run(tmp_path, kl_weight=0.0, ce_weight=1.0)  # as many steps, which the teacher has no part in
    control.train()
    assert end["eval_kl"] < 0.9 * judged(control.model, tmp_path)["eval_kl"]


def test_the_divergence_of_a_hybrid_falls(tmp_path: Path) -> None:
    """From 16 tokens' keys, values and states; a rate that was too high for states alone would take it up."""
    generator = torch.Generator().manual_seed(5)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 100, (length,), generator=generator).tolist())

    rows = [TrainingExample(Prompt((2,), (ids(30), ids(26)), ids(4)), ids(6), str(n)) for n in range(4)]
    model = LinkTokensForCausalLM.from_backbone(text_model("qwen3_5")[0], token_ids=ids(16))
    settings: dict[str, Any] = {"method": "linktokens", "kl_weight": 1.0, "ce_weight": 0.0, "warmup": 0.0}
    training = trainer(model, tmp_path, rows, heldout=rows, steps=16, learning_rate=3e-2, **settings)
    before = training.evaluate()
    training.train()
    assert training.evaluate()["eval_kl"] < 0.8 * before["eval_kl"]


def test_documents_of_a_row_see_themselves_and_everything_else_sees_all() -> None:
    prompt = Prompt((3,), ((5, 6), (9,)), (17,), ((20,),))
    rows = RowCollator(0)([TrainingExample(prompt, (30,)), TrainingExample(Prompt((), ((5,),), (17,)), (30,))])
    assert rows["segments"].tolist() == [[0, 1, 1, 0, 2, 0, 0], [1, 0, 0, -1, -1, -1, -1]]
    segments = rows["segments"][:1]
    places = torch.arange(segments.shape[1])[None]
    [mask] = visible(segments, segments, places, places)[0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ]
    [near] = visible(segments, segments, places, places, window=2)[0]
    assert near.int().tolist()[-1] == [0, 0, 0, 0, 0, 1, 1]


def test_fresh_link_tokens_start_as_the_passage(tmp_path: Path) -> None:
    model = backbone(max_position_embeddings=2048)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    whole = front_ids("prose", TOKENIZER)
    for given, ids in ({}, whole), ({"num_link_tokens": 4}, whole[-4:]):
        config = config_from_dict(
            {"model": {"backbone": str(tmp_path), "options": given}, "train": {"method": "linktokens"}}
        )
        started = training_method("linktokens").load(config)
        assert started.fingerprint == LinkTokensForCausalLM.from_backbone(model, token_ids=ids).fingerprint


def test_rows_over_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    settings = config_from_dict(
        {
            "data": {"num_documents": 2, "max_prompt_tokens": 60, "options": {"scenes": 10, "questions": 2}},
            "train": {
                "method": "linktokens", "steps": 1, "batch_size": 4, "teacher": "nano", "output_dir": str(tmp_path),
                "answer_max_new_tokens": 8,
            },
        }
    )  # fmt: skip
    result = run_training(settings, progress=False)
    assert result.counts.dropped["prompt and answer of more than 60 tokens"]
    assert result.record["tokens"]["examples"]


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 120, "factor": 8.0}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "few positions": {"max_position_embeddings": 200},
    "another beyond a length": {"max_position_embeddings": 960, "rope_parameters": LONGROPE},
    "another at every length": {
        "max_position_embeddings": 180, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_the_passage_is_cut_alike_in_training_and_wherever_documents_are_primed(name: str, tmp_path: Path) -> None:
    """By the library, which has the weights, and by a server, which has the configuration alone."""
    from comb_serving.config.serve_options import ServeOptions
    from comb_serving.vllm.linking.setup import linking_options

    model = byte_llama(**ROPES[name])
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    passage = PICEngine.from_pretrained(str(tmp_path), method="primed").method.compiled_behind
    assert 30 < len(passage) <= 100
    options = ServeOptions(str(tmp_path), method="primed")
    assert linking_options(options)["kv_transfer_config"]["kv_connector_extra_config"]["front"] == list(passage)
    assert starting_tokens(str(tmp_path), None) == list(passage)
    assert starting_tokens(str(tmp_path), 7) == list(passage[-7:])


def test_what_can_not_be_trained_is_refused() -> None:
    for more, message in (
        ({"train": {"method": "linktokens", "lora_rank": 4}}, "link tokens are no layers"),
        ({"train": {"method": "linktokens", "gradient_checkpointing": True}}, "link tokens stand in a cache"),
        ({"eval": {"methods": ["comb"], "limit": 3}}, "trains no encoder; use full, linktokens"),
    ):
        with pytest.raises(ValueError, match=message):
            training_method("linktokens").load(config_from_dict({"train": {"method": "linktokens"}, **more}))
    with pytest.raises(ValueError, match=r"does not support (gradient|activation) checkpointing"):
        link_tokens().gradient_checkpointing_enable()


def test_out_of_memory_names_nothing_that_link_tokens_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = run(tmp_path)
    monkeypatch.setattr(training.model, "forward", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(RuntimeError, match=r"out of memory at step 1 .* train.gradient_accumulation_steps\)$"):
        training.train()


def test_a_folder_of_pefts_is_a_backbone(tmp_path: Path) -> None:
    """It has no configuration of its own."""
    peft = pytest.importorskip("peft")
    backbone().save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft.LoraConfig(target_modules=["q_proj"])
    )
    tuned.save_pretrained(tmp_path / "tuned")
    TOKENIZER.save_pretrained(tmp_path / "tuned")
    settings = config_from_dict(
        {"model": {"backbone": str(tmp_path / "tuned"), "dtype": "float32"}, "train": {"method": "linktokens"}}
    )
    trained = training_method("linktokens").load(settings)
    assert meta_model(settings)[0].num_link_tokens == trained.num_link_tokens


def test_a_backbone_is_loaded_onto_the_gpu_that_it_is_tried_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(**changes: Any) -> dict[str, Any]:
        return trained_options(config_from_dict({"train": {"method": "linktokens"}, **changes}))

    assert "device_map" not in options()
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr("comb_training.models.method.device_of", lambda config: gpu)
    assert options()["device_map"] == {"": gpu}
    assert options(model={"options": {"device_map": "auto"}})["device_map"] == "auto"
    assert "device_map" not in options(train={"method": "linktokens", "deepspeed": "zero3.json"})
