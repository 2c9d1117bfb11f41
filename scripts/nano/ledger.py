"""Make the ledger backbone: gated DeltaNet layers that carry across documents what a later document may overwrite.

Its task is `comb_training.nano.world`. The only full layer stands first, where no token knows yet what stands around
it, so that what was written, and overwritten, is in the states of the three linear layers: adding states up and
composing them differ. Decays start slow (a token forgets 0.1 to 0.8%), as transformers' own start loses a state within
ten tokens.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from comb_training.nano import CHECKPOINT, LEDGER_CHECKPOINT, Scene
from comb_training.nano.world import LARGEST_LEDGER, ledger
from scripts.nano.packing import encode
from scripts.nano.pretrain import Optimizers, save_checkpoint

logger = logging.getLogger(__name__)

FULL = (0,)
STAGES = ((2, 2, 4), (4, 3, 6), (6, 4, 8), (8, 5, 12), LARGEST_LEDGER)
"""As `LARGEST_LEDGER`; the next comes when nine of ten answers are right."""


@dataclass(frozen=True)
class LedgerRecipe:
    """Everything that decides the checkpoint."""

    seed: int = 0
    max_steps: int = 6000
    cooldown_steps: int = 150
    rows: int = 24
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    adamw_lr: float = 1e-3
    muon_lr: float = 3e-3
    threads: int = 1


def build_ledger(tokenizer: PreTrainedTokenizerFast, recipe: LedgerRecipe) -> Qwen3_5ForCausalLM:
    """A Qwen3.5 with random weights, whose states forget slowly."""
    torch.manual_seed(recipe.seed)
    width = recipe.hidden // recipe.heads
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden, intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.heads,
        head_dim=width, linear_num_key_heads=recipe.heads, linear_num_value_heads=recipe.heads,
        linear_key_head_dim=width, linear_value_head_dim=width, max_position_embeddings=2048,
        layer_types=["full_attention" if index in FULL else "linear_attention" for index in range(recipe.layers)],
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config)
    for index, layer in enumerate(model.model.layers):
        if index not in FULL:
            nn.init.uniform_(layer.linear_attn.A_log, -6.5, -4.5)
            nn.init.zeros_(layer.linear_attn.dt_bias)
    return model


def row_batch(tokenizer: PreTrainedTokenizerFast, scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """Token ids and targets [rows, tokens]; -100 but at answers. All questions of a scene stand behind each other."""
    rows = []
    for scene in scenes:
        encoded = encode(tokenizer, scene)
        ids, targets = list(encoded.context), [-100] * len(encoded.context)
        for ask, answer in zip(encoded.asks, encoded.answers, strict=True):
            ids += ask + answer
            targets += [-100] * (len(ask) - 1) + answer + [-100]
        rows.append((ids, targets))
    longest, pad = max(len(ids) for ids, _ in rows), int(tokenizer.pad_token_id)
    return (
        torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        torch.tensor([targets + [-100] * (longest - len(targets)) for _, targets in rows]),
    )


def train(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: LedgerRecipe) -> dict[str, float]:
    """Cross entropy of answers from stage to stage, then down to a learning rate of zero; returns how it ended."""
    optimizers = Optimizers(model, recipe.muon_lr, recipe.adamw_lr)
    rng = random.Random(recipe.seed)
    stage, accuracy, left, steps = 0, 0.0, recipe.cooldown_steps, 0
    for steps in (bar := tqdm(range(recipe.max_steps))):
        late = steps > recipe.max_steps - recipe.cooldown_steps
        done = stage == len(STAGES) - 1 and accuracy > 0.97
        cooling = left < recipe.cooldown_steps or late or done
        names, documents, entries = STAGES[stage]
        # shorter prompts, as of earlier stages, stay among them
        scenes = [
            ledger(rng, rng.randint(2, names), rng.randint(2, documents), rng.randint(2, entries), names)
            for _ in range(recipe.rows)
        ]
        ids, targets = row_batch(tokenizer, scenes)
        logits = model(input_ids=ids).logits
        where = targets != -100
        loss = nn.functional.cross_entropy(logits[where], targets[where])
        left -= cooling
        optimizers.step(loss, min(1.0, (steps + 1) / 50) * max(left, 0) / recipe.cooldown_steps)
        places = where & (targets != tokenizer.eos_token_id)
        right = float((logits[places].argmax(-1) == targets[places]).float().mean())
        accuracy = 0.95 * accuracy + 0.05 * right
        bar.set_postfix(stage=stage, accuracy=f"{accuracy:.2f}", loss=f"{loss.item():.2f}", left=left)
        if accuracy > 0.9 and stage < len(STAGES) - 1 and not cooling:
            stage, accuracy = stage + 1, 0.5
        if left <= 0:
            break
    return {"steps": steps + 1, "stage": stage, "accuracy": round(accuracy, 4)}


def main() -> None:
    """Train from the seed, write the checkpoint."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    recipe, output = LedgerRecipe(), Path(sys.argv[1]) if sys.argv[1:] else LEDGER_CHECKPOINT
    torch.set_num_threads(recipe.threads)
    begun = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = build_ledger(tokenizer, recipe)
    result = train(model, tokenizer, recipe)
    logger.info("%s", result)
    model.generation_config = GenerationConfig.from_pretrained(CHECKPOINT)
    how = {"recipe": asdict(recipe), "full_layers": list(FULL), "training": result}
    save_checkpoint(output, model, tokenizer, begun, **how)


if __name__ == "__main__":
    main()
