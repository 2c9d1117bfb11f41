"""Block-attention fine-tuning: the mask is what method `block` computes, and runs are saved, resumed and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import DynamicCache

from comb import Prompt, methods
from comb.linking.blocks import block_mask
from comb.methods.base import LinkRequest
from comb_training.config import TrainConfig, config_from_dict
from comb_training.data.batches import TrainingExample
from comb_training.models.block import BlockAttentionModel
from comb_training.models.lora import add_lora
from comb_training.models.rows import RowCollator, segment_numbers
from comb_training.train import run_training
from comb_training.trainer.losses import target_loss
from comb_training.trainer.trainer import CombTrainer
from tests.helpers.training import TOKENIZER, backbone, examples, trainer

PROMPT = Prompt((3, 4), ((5, 6, 7, 8), (9, 10, 11), (12, 13, 14, 15, 16)), (17, 18, 19), ((), (20,)))


def sliding() -> Gemma3ForCausalLM:
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, sliding_window=6, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def test_the_mask_sees_own_document_and_fresh_tokens_see_all() -> None:
    assert segment_numbers(PROMPT) == [0, 0, 1, 1, 1, 1, 2, 2, 2, 0, 3, 3, 3, 3, 3, 0, 0, 0]
    [mask] = block_mask(torch.tensor([[0, 1, 1, 2, 0, -1]]))[0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    [near] = block_mask(torch.tensor([[0, 1, 1, 2, 0]]), window=2)[0]
    assert near.int().tolist()[-1] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("make", [backbone, sliding])
def test_training_computes_what_method_block_links(make: Any) -> None:
    """And not what a causal mask computes."""
    model = make()
    trained = BlockAttentionModel(model)
    batch = RowCollator(0)([TrainingExample(PROMPT, (30, 31))])
    batch.pop("labels")
    method = methods.get("block")(model)
    picaches = method.compile(PROMPT.segments)
    with torch.no_grad():
        found = trained(**batch).logits[0, len(PROMPT.flat) - 1]
        [linked] = method.link_row(LinkRequest(picaches, PROMPT.tail, PROMPT.head, PROMPT.gaps)).logits
        causal = model(input_ids=torch.tensor([PROMPT.flat]), past_key_values=DynamicCache()).logits[0, -1]
    torch.testing.assert_close(found, linked, rtol=1e-4, atol=1e-5)
    assert (found - causal).abs().max() > 1e-3


def test_the_loss_does_not_depend_on_the_batch() -> None:
    model = BlockAttentionModel(backbone())
    rows = examples()[:5]

    def losses(groups: list[list[TrainingExample]]) -> list[float]:
        found = []
        for group in groups:
            batch = RowCollator(0)(group)
            labels = batch.pop("labels")
            found += [float(target_loss(model(**batch), labels, 1))]
        return found

    with torch.no_grad():
        assert sum(losses([[row] for row in rows])) == pytest.approx(losses([rows])[0], rel=1e-5)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_run_is_resumed_exactly_and_published_as_an_ordinary_checkpoint(rank: int | None, tmp_path: Path) -> None:
    if rank is not None:
        pytest.importorskip("peft")

    def run() -> CombTrainer:
        model = BlockAttentionModel(backbone())
        if rank is not None:
            model.requires_grad_(False)
            add_lora(model.backbone.model.layers, rank=rank, alpha=4.0, dropout=0.0)
        return trainer(
            model, tmp_path, method="block", steps=10, learning_rate=1e-2, save_steps=5, lora_rank=rank,
            kl_weight=0.5 if rank else 0.0, batch_query_tokens=200,
        )  # fmt: skip

    straight = run()
    straight.train()
    assert straight.losses[-1][1] < straight.losses[0][1]
    straight.save_model(str(tmp_path / "published"))
    saved = load_file(tmp_path / "checkpoint-5" / "model.safetensors")
    assert all(".lora_" in name for name in saved) if rank else not any(".lora_" in name for name in saved)
    resumed = run()
    resumed.train(tmp_path / "checkpoint-5")
    assert resumed.losses == straight.losses
    weights = resumed.trained_weights()
    assert all(torch.equal(weights[name], weight) for name, weight in straight.trained_weights().items())

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "published").eval()
    assert loaded.config.block_attention
    ids = torch.tensor([PROMPT.flat])
    with torch.no_grad():
        expected = straight.model.backbone.eval()(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
        assert (backbone()(input_ids=ids).logits - expected).abs().max() > 1e-3


def test_the_whole_run_from_a_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config_from_dict(
        {
            "model": {"backbone": "nano"},
            "data": {"dataset": "nano", "num_documents": 2, "limit": 24},
            "train": {
                "method": "block", "steps": 2, "batch_size": 8, "answers": "gold", "learning_rate": 1e-4,
                "output_dir": str(tmp_path), "eval_steps": 2,
            },
            "eval": {"methods": ["full", "block"], "limit": 4},
        }
    )  # fmt: skip
    result = run_training(settings, progress=False)
    assert [step for step, _ in result.record["heldout_losses"]] == [0, 2]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger="comb.methods.block"):
        methods.get("block")(loaded)
    assert not caplog.records
    assert not (tmp_path / "README.md").exists()


def test_what_can_not_be_trained_is_refused(tmp_path: Path) -> None:
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    with pytest.raises(ValueError, match=r"train.method=block can't be used with this backbone"):
        BlockAttentionModel(learned)
    with pytest.raises(ValueError, match="kl_weight needs the backbone as it was"):
        TrainConfig(method="block", kl_weight=1.0)
    with pytest.raises(ValueError, match=r"go on from model\.backbone"):
        config_from_dict({"model": {"init_from": "x"}, "train": {"method": "block"}})
    with pytest.raises(ValueError, match="trains no encoder"):
        config_from_dict({"train": {"method": "block"}, "eval": {"methods": ["comb"], "limit": 3}})
    assert config_from_dict({"train": {"method": "block"}}).eval.methods == ("full", "block")


def test_a_teacher_answers_what_is_left_of_the_rows(tmp_path: Path) -> None:
    settings = config_from_dict(
        {
            "data": {"num_documents": 2, "max_prompt_tokens": 60, "options": {"scenes": 10, "questions": 2}},
            "train": {
                "method": "block", "steps": 1, "batch_size": 4, "teacher": "nano", "output_dir": str(tmp_path),
                "answer_max_new_tokens": 8,
            },
        }
    )  # fmt: skip
    result = run_training(settings, progress=False)
    assert result.counts.dropped["prompt and answer of more than 60 tokens"]
    assert result.statistics.examples
