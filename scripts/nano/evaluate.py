"""Whole-answer exact match: read off packed rows while training, by greedy generation at the end."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from comb_training.nano.world import KINDS, World
from scripts.nano.packing import EncodedScene, PackedRows, encode


def row_match(logits: Tensor, rows: PackedRows, where: Tensor) -> dict[str, tuple[int, int]]:
    """Per kind, how many answers are right in every token and how many were asked.

    An answer that is right in every token given the right tokens before it is what greedy decoding gives.
    """
    hit = torch.ones_like(where)
    hit[where] = logits.argmax(-1) == rows.targets[where]
    answers = rows.weights > 0.5
    counts = {}
    for index, kind in enumerate(KINDS):
        this = answers & (rows.kind == index)
        row = torch.arange(len(where))[:, None].expand_as(where)
        # One number per question of the batch: its row and its segment.
        asked = set(zip(row[this].tolist(), rows.segment[this].tolist(), strict=True))
        wrong = set(zip(row[this & ~hit].tolist(), rows.segment[this & ~hit].tolist(), strict=True))
        counts[kind] = (len(asked) - len(wrong), len(asked))
    return counts


def exact_match(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, num_scenes: int, seed: int, documents: bool = True
) -> dict[str, dict[str, float]]:
    """Exact match and the number of questions behind it, per kind and overall, by plain greedy `generate`."""
    world = World(seed, "heldout")
    right, asked = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for index in range(num_scenes):
        scene = world.scene(4 + index % 5, 8)
        encoded = encode(tokenizer, scene, documents=documents)
        for question, given in zip(scene.questions, _generate(model, tokenizer, encoded), strict=True):
            asked[question.kind] += 1
            right[question.kind] += given == question.answer
    right["all"], asked["all"] = sum(right.values()), sum(asked.values())
    return {kind: {"exact_match": right[kind] / max(1, count), "n": count} for kind, count in asked.items()}


def _generate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, encoded: EncodedScene) -> list[str]:
    """Greedy answers to every question of a scene, its prompts left-padded to one batch."""
    prompts = [encoded.prompt(question) for question in range(len(encoded.asks))]
    longest = max(map(len, prompts))
    pad = int(tokenizer.pad_token_id)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        # transformers types `generate` for a protocol that its own models don't satisfy.
        output = cast(Any, model).generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=48)
    return [str(text) for text in tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)]
