"""The names of the nano backbones, and their folders beside this file."""

from __future__ import annotations

from pathlib import Path

from comb.backbones import backbones

CHECKPOINT = Path(__file__).parent / "checkpoint"
HYBRID_CHECKPOINT = Path(__file__).parent / "hybrid_checkpoint"
LEDGER_CHECKPOINT = Path(__file__).parent / "ledger_checkpoint"
backbones.register("nano")(CHECKPOINT)
backbones.register("nano-hybrid")(HYBRID_CHECKPOINT)
backbones.register("nano-ledger")(LEDGER_CHECKPOINT)
