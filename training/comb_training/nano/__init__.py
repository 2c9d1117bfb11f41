"""The nano backbones: a small question-answering Llama, a hybrid made from it, and the world that both know.

`nano-ledger` is another hybrid with a task of its own (`ledger`), in which later documents overwrite earlier ones. The
checkpoints come with the package, under the names `nano`, `nano-hybrid` and `nano-ledger`; `scripts/nano` makes them.
Others use `CHECKPOINT`, `HYBRID_CHECKPOINT`, `LEDGER_CHECKPOINT`, and `World`, whose scenes are a data set.
"""

from comb_training.nano.checkpoints import CHECKPOINT, HYBRID_CHECKPOINT, LEDGER_CHECKPOINT
from comb_training.nano.world import Question, Scene, World

__all__ = ["CHECKPOINT", "HYBRID_CHECKPOINT", "LEDGER_CHECKPOINT", "Question", "Scene", "World"]
