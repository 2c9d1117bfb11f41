"""The nano backbones: a small question-answering Llama, a hybrid made from it, and the world that both know.

The checkpoints come with the package, under the names `nano` and `nano-hybrid`; `scripts/nano` makes
them. Others use `CHECKPOINT`, `HYBRID_CHECKPOINT`, and `World`, whose scenes are a data set.
"""

from comb_training.nano.checkpoints import CHECKPOINT, HYBRID_CHECKPOINT
from comb_training.nano.world import Question, Scene, World

__all__ = ["CHECKPOINT", "HYBRID_CHECKPOINT", "Question", "Scene", "World"]
