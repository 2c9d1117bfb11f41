"""The nano backbones: a small question-answering Llama made by the project, a hybrid made from it, and their world."""

from pathlib import Path

from .world import Question, Scene, World

CHECKPOINT = Path(__file__).parent / "checkpoint"
HYBRID_CHECKPOINT = Path(__file__).parent / "hybrid_checkpoint"

__all__ = ["CHECKPOINT", "HYBRID_CHECKPOINT", "Question", "Scene", "World"]
