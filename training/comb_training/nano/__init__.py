"""The nano backbone: a small question-answering Llama made by the project, with the world it was taught."""

from pathlib import Path

from .world import Question, Scene, World

CHECKPOINT = Path(__file__).parent / "checkpoint"

__all__ = ["CHECKPOINT", "Question", "Scene", "World"]
