"""The names of the nano backbones, and their folders beside this file."""

from __future__ import annotations

from pathlib import Path

from comb.backbones.loading import backbones

CHECKPOINT = backbones.register("nano")(Path(__file__).parent / "checkpoint")
HYBRID_CHECKPOINT = backbones.register("nano-hybrid")(Path(__file__).parent / "hybrid_checkpoint")
