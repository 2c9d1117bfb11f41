"""What trains: a model per training method, LoRA beside its layers.

A `Config` enters; a model that takes `Collator`'s batches leaves. A method is one file with a decorator.
"""

from comb_training.models.method import training_method

__all__ = ["training_method"]
