"""Pretrain the nano backbone: induction warm-up, a curriculum of longer prompts, cool-down, evaluation, checkpoint.

Stages end at a score rather than at a step, so that what the seed and the machine's rounding change is how long it
takes rather than how good it gets; the cool-down is worth about three points of exact match.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from comb_training.nano import CHECKPOINT
from comb_training.nano.world import KINDS, World
from scripts.nano.evaluate import exact_match, row_match
from scripts.nano.initialise import build_model
from scripts.nano.packing import PackedRows, encode, pack
from scripts.nano.tokenizer import train_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """A step of the curriculum: documents per prompt and what they are like.

    A stage ends when every kind of question is answered as well as `until`, or after `patience` steps: a kind that is
    slow to come often comes when the prompts get harder.
    """

    fewest: int
    most: int
    pronouns: float
    stories: float
    longest_story: int
    until: float
    patience: int


@dataclass(frozen=True)
class PretrainRecipe:
    """Everything that decides the checkpoint."""

    seed: int = 0
    warmup_steps: int = 600
    max_steps: int = 1300
    cooldown_steps: int = 400
    target: float = 0.965
    rows: int = 8
    questions: int = 8
    document_weight: float = 0.1
    adamw_lr: float = 1.5e-3
    muon_lr: float = 6e-3
    check_every: int = 100
    threads: int = 1


STAGES = (
    Stage(2, 4, 0.0, 0.35, 3, 0.8, 400),
    Stage(2, 5, 0.3, 0.3, 5, 0.85, 400),
    Stage(3, 6, 0.5, 0.3, 10, 0.9, 600),
    Stage(4, 8, 0.5, 0.3, 10, 1.0, 100_000),  # ends when held-out exact match reaches the recipe's target
)


class Optimizers:
    """Muon for the matrices of the layers, AdamW for embeddings and norms, with one schedule for both."""

    def __init__(self, model: nn.Module, muon_lr: float, adamw_lr: float) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self._parts = (
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.01),
            torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.01),
        )
        self._peaks = (muon_lr, adamw_lr)
        self._parameters = [p for _, p in named]

    def step(self, loss: Tensor, scale: float) -> None:
        """Update at `scale` times the peak learning rates."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for part, peak in zip(self._parts, self._peaks, strict=True):
            part.param_groups[0]["lr"] = peak * scale
            part.step()
            part.zero_grad(set_to_none=True)


def warm_up(model: LlamaForCausalLM, recipe: PretrainRecipe) -> float:
    """Learn to continue a random sequence that has been seen before; returns the share of tokens predicted."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizers = Optimizers(model, 1.5 * recipe.muon_lr, 1.5 * recipe.adamw_lr)
    vocab, accuracy = model.config.vocab_size, 0.0
    bar = tqdm(range(recipe.warmup_steps), desc="induction warm-up")
    for step in bar:
        half = int(torch.randint(12, 33, (), generator=generator))
        once = torch.randint(0, vocab, (24, half), generator=generator)
        ids = torch.cat([once, once], dim=1)
        logits = model(input_ids=ids).logits[:, half:-1]
        targets = ids[:, half + 1 :]
        optimizers.step(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), min(1.0, (step + 1) / 20))
        accuracy = 0.9 * accuracy + 0.1 * float((logits.argmax(-1) == targets).float().mean())
        bar.set_postfix(accuracy=f"{accuracy:.2f}")
        if accuracy > 0.97:
            break
    return accuracy


def row_stream(
    tokenizer: PreTrainedTokenizerFast, recipe: PretrainRecipe, stage: Stage, number: int
) -> Iterator[PackedRows]:
    """Endless packed batches of one stage; two of its rows have from a single document on."""
    seed = recipe.seed * 100 + number
    world = World(seed, "train", pronouns=stage.pronouns, stories=stage.stories, longest_story=stage.longest_story)
    generator = torch.Generator().manual_seed(seed)
    while True:
        scenes = []
        for row in range(recipe.rows):
            fewest = 1 if row < 2 else stage.fewest
            count = int(torch.randint(fewest, stage.most + 1, (), generator=generator))
            scenes.append(encode(tokenizer, world.scene(count, recipe.questions)))
        yield pack(scenes, int(tokenizer.pad_token_id), recipe.document_weight)


def forward(model: LlamaForCausalLM, rows: PackedRows) -> tuple[Tensor, Tensor]:
    """Logits [N, vocabulary] of the N weighted positions, and where these are [B, T] bool."""
    hidden = model.model(
        input_ids=rows.input_ids, attention_mask=rows.visible, position_ids=rows.position_ids, use_cache=False
    ).last_hidden_state
    where = rows.weights > 0
    return model.lm_head(hidden[where]), where


def loss_of(logits: Tensor, rows: PackedRows, where: Tensor) -> Tensor:
    """Weighted mean cross entropy."""
    weights = rows.weights[where]
    losses = nn.functional.cross_entropy(logits, rows.targets[where], reduction="none")
    return (losses * weights).sum() / weights.sum()


class Trainer:
    """Runs the curriculum on one model; saves the best state on the way, and the last one."""

    def __init__(self, recipe: PretrainRecipe, output: Path) -> None:
        self.recipe, self.output = recipe, output
        self.tokenizer = train_tokenizer(recipe.seed)
        self.model = build_model(self.tokenizer, recipe.seed)
        self.running = dict.fromkeys(KINDS, 0.0)
        self.started = time.monotonic()
        self.steps = 0
        self.best = 0.9  # held-out exact match from which on a state is worth keeping
        held_out = World(10_000 + recipe.seed, "heldout")
        scenes = [encode(self.tokenizer, held_out.scene(4 + i % 5, recipe.questions)) for i in range(60)]
        self.held_out = [
            pack(scenes[i : i + 10], int(self.tokenizer.pad_token_id), recipe.document_weight) for i in range(0, 60, 10)
        ]

    def run(self) -> dict[str, float]:
        """Warm up, climb the curriculum until the target or `max_steps`, cool down; returns how it ended."""
        logger.info("warm-up accuracy %.2f", warm_up(self.model, self.recipe))
        self.optimizers = Optimizers(self.model, self.recipe.muon_lr, self.recipe.adamw_lr)
        for number, stage in enumerate(STAGES):
            last = number == len(STAGES) - 1
            done = self._target_reached if last else lambda until=stage.until: min(self.running.values()) > until
            self._climb(number, stage, done)
        self._cool_down()
        return self.check()

    def _cool_down(self) -> None:
        """Learning rate to zero, with fresh optimizer states: the old ones average over larger steps."""
        self.optimizers = Optimizers(self.model, self.recipe.muon_lr, self.recipe.adamw_lr)
        rows = row_stream(self.tokenizer, self.recipe, STAGES[-1], len(STAGES))
        bar = tqdm(range(self.recipe.cooldown_steps), desc="cool-down")
        for step in bar:
            self._step(next(rows), min(1.0, (step + 1) / 20) * (1.0 - step / self.recipe.cooldown_steps), bar)

    def _climb(self, number: int, stage: Stage, done: Callable[[], bool]) -> None:
        rows = row_stream(self.tokenizer, self.recipe, stage, number)
        self.running = dict.fromkeys(KINDS, 0.0)
        bar = tqdm(desc=f"{stage.fewest}-{stage.most} documents")
        end = min(self.steps + stage.patience, self.recipe.max_steps)
        while not done() and self.steps < end:
            self._step(next(rows), 1.0, bar)
            bar.update()
        bar.close()
        logger.info("stage %d done at step %d, %s", number, self.steps, self._show(self.running))

    def _step(self, rows: PackedRows, scale: float, bar: tqdm) -> None:
        logits, where = forward(self.model, rows)
        loss = loss_of(logits, rows, where)
        self.optimizers.step(loss, scale)
        for kind, (right, asked) in row_match(logits.detach(), rows, where).items():
            if asked:
                self.running[kind] += 0.05 * (right / asked - self.running[kind])
        self.steps += 1
        bar.set_postfix(loss=f"{loss.item():.3f}", **{k: f"{v:.2f}" for k, v in self.running.items()}, refresh=False)
        if self.steps % 50 == 0:
            logger.info(
                "step %d, %.0f s, loss %.3f, %s",
                self.steps,
                time.monotonic() - self.started,
                loss.item(),
                self._show(self.running),
            )

    def _target_reached(self) -> bool:
        if self.steps == 0 or self.steps % self.recipe.check_every:
            return False
        scores = self.check()
        if scores["all"] > self.best:
            self.best = scores["all"]
            self.save(scores)
        return min(scores.values()) >= self.recipe.target

    def check(self) -> dict[str, float]:
        """Held-out exact match per kind, read off packed rows (the same as greedy decoding, without its cost)."""
        totals = {kind: [0, 0] for kind in KINDS}
        for rows in self.held_out:
            with torch.no_grad():
                logits, where = forward(self.model, rows)
            for kind, counts in row_match(logits, rows, where).items():
                totals[kind] = [a + b for a, b in zip(totals[kind], counts, strict=True)]
        scores = {kind: right / max(1, asked) for kind, (right, asked) in totals.items()}
        scores["all"] = sum(right for right, _ in totals.values()) / sum(asked for _, asked in totals.values())
        logger.info("held-out at step %d: %s", self.steps, self._show(scores))
        return scores

    def save(self, scores: dict[str, float], **more: Any) -> None:
        """`save_checkpoint`, with what else is to be said of it."""
        self.model.generation_config.max_new_tokens = 48
        save_checkpoint(
            self.output, self.model, self.tokenizer, self.started, recipe=asdict(self.recipe),
            stages=[asdict(stage) for stage in STAGES], steps=self.steps, held_out_packed=scores, **more,
        )  # fmt: skip

    @staticmethod
    def _show(scores: dict[str, float]) -> str:
        return ", ".join(f"{kind} {value:.3f}" for kind, value in scores.items())


def save_checkpoint(output: Path, model: Any, tokenizer: PreTrainedTokenizerFast, started: float, **how: Any) -> None:
    """Writes model, tokenizer and how they came about; `started` by `time.monotonic`."""
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    metadata = {
        **how,
        "seconds": round(time.monotonic() - started),
        "parameters": model.num_parameters(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }  # fmt: skip
    (output / "training.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main() -> None:
    """Train from the seed, evaluate with plain greedy generation, write the checkpoint."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    recipe, output = PretrainRecipe(), Path(sys.argv[1]) if sys.argv[1:] else CHECKPOINT
    torch.set_num_threads(recipe.threads)
    trainer = Trainer(recipe, output)
    trainer.save(scores := trainer.run())  # hours of work, in front of what may fail
    result = exact_match(trainer.model, trainer.tokenizer, num_scenes=100, seed=20_000)
    logger.info("held-out greedy generation: %s", result)
    trainer.save(scores, held_out_generate=result)


if __name__ == "__main__":
    main()
