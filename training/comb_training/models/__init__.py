"""What trains: a model per training method, LoRA beside its layers.

A `Config` enters; a model that takes `Collator`'s batches leaves. A method is one file.
"""

from comb_training.models.comb import CombTraining
from comb_training.models.linktokens import LinkTokensTraining
from comb_training.models.method import TrainingMethod


def training_method(name: str) -> TrainingMethod:
    """The method called `name` (`train.method`)."""
    return {"comb": CombTraining, "linktokens": LinkTokensTraining}[name]()
