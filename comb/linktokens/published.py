"""The link tokens of a published adapter, for who has its backbone already: here in another model, or in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from comb.backbones.fingerprint import check_fingerprint
from comb.backbones.loading import load_config
from comb.linktokens.config import LinkTokensConfig
from comb.linktokens.front import LearnedFront
from comb.model.weights import load_adapter, read_weights


def published_front(name_or_path: str | Path, backbone: Any = None) -> tuple[LearnedFront, LinkTokensConfig]:
    """What an adapter's folder or Hub id has learned, and its configuration.

    Args:
        backbone: checked to be the adapter's, and where the front's tensors go.

    Raises:
        OSError, ValueError: if it can't be loaded, as `LinkTokensForCausalLM.from_pretrained` does.
    """
    config: Any = load_config(name_or_path)
    if not isinstance(config, LinkTokensConfig):
        raise ValueError(f"{name_or_path} is no adapter of link tokens, its model_type is {config.model_type!r}")
    if backbone is not None and config.backbone_fingerprint is not None:
        check_fingerprint(backbone, config.backbone_fingerprint, config.backbone_name_or_path)
    front = LearnedFront(config)
    load_adapter(nn.ModuleDict({"front": front}), read_weights(name_or_path), name_or_path)
    if backbone is not None:
        front.to(device=backbone.get_input_embeddings().weight.device)
    return front.requires_grad_(False), config
