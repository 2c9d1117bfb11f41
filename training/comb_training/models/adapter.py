"""Methods of training that put an adapter beside a frozen backbone, and publish that alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comb.backbones.loading import resolve_name
from comb_training.config import Config
from comb_training.models.loading import dtype_of, shaping_options
from comb_training.models.method import TrainingMethod


class AdapterTraining(TrainingMethod):
    """What the methods share whose `adapter` is a class of adapters."""

    measures_closed = True

    def continued(self, config: Config) -> Any:
        """The adapter of `model.init_from` on its backbone, ready to be trained on. Raises ValueError for options that
        would shape another one."""
        assert config.model.init_from is not None
        if shaping := sorted(shaping_options(self.adapter, config.model.options).keys() - {"adapter_dtype"}):
            raise ValueError(f"model.options {', '.join(shaping)} can't change the adapter of model.init_from")
        model = self.adapter.from_pretrained(
            resolve_name(config.model.init_from), dtype=dtype_of(config.model.dtype), **trained_options(config)
        )
        model.requires_grad_(True).backbone.requires_grad_(False)
        return model

    def plain_backbone(self, model: Any) -> AbstractContextManager[Any]:
        return nullcontext(model.backbone)

    def save_trained(self, model: Any, folder: Path, tokenizer: Any, weights: Mapping[str, Tensor]) -> None:
        """An adapter folder, which can be asked like the one of a finished run."""
        model.save_pretrained(folder, tokenizer=tokenizer, state_dict=weights)


def trained_options(config: Config) -> dict[str, Any]:
    """Of `model.options`, those of an adapter that trains."""
    # trained weights stay in float32 whatever the backbone's: small updates, of gates above all, are not lost
    return {"adapter_dtype": torch.float32, **config.model.options}
