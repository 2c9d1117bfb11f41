"""The nano backbones: a small question-answering Llama, a hybrid made from it, and the world that both know.

`nano-ledger` is another hybrid with a task of its own (`world.ledger`), in which later documents overwrite earlier
ones. The checkpoints come with the package, under the names `nano`, `nano-hybrid` and `nano-ledger`; `scripts/nano`
makes them.
"""

from __future__ import annotations

from pathlib import Path

from comb.backbones import backbones
from comb_training.nano.world import Question, Scene, World

CHECKPOINT = Path(__file__).parent / "checkpoint"
HYBRID_CHECKPOINT = Path(__file__).parent / "hybrid_checkpoint"
LEDGER_CHECKPOINT = Path(__file__).parent / "ledger_checkpoint"
backbones.register("nano")(CHECKPOINT)
backbones.register("nano-hybrid")(HYBRID_CHECKPOINT)
backbones.register("nano-ledger")(LEDGER_CHECKPOINT)

__all__ = ["CHECKPOINT", "HYBRID_CHECKPOINT", "LEDGER_CHECKPOINT", "Question", "Scene", "World"]
