"""The nano backbones: a small question-answering Llama made by the project, a hybrid made from it, and their world."""

from comb_training.nano.checkpoints import CHECKPOINT, HYBRID_CHECKPOINT
from comb_training.nano.world import Question, Scene, World

__all__ = ["CHECKPOINT", "HYBRID_CHECKPOINT", "Question", "Scene", "World"]
