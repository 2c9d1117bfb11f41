"""The link tokens of a published adapter, for who has its backbone in another form (vLLM)."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from comb.backbones.loading import load_config
from comb.linktokens.config import LinkTokensConfig
from comb.linktokens.front import Front, FrontKeyValues
from comb.model.weights import load_adapter, read_weights


def published_front(name_or_path: str | Path) -> FrontKeyValues:
    """Keys [H, n, D] and values [H, n, E] per layer at positions 0 to n - 1, of an adapter's folder or Hub id.

    Raises:
        OSError, ValueError: if it can't be loaded, as `LinkTokensForCausalLM.from_pretrained` does.
    """
    front = Front(load_config(name_or_path, LinkTokensConfig))
    load_adapter(nn.ModuleDict({"front": front}), read_weights(name_or_path), name_or_path)
    return [(keys.data, values.data) for keys, values in zip(front.keys, front.values, strict=True)]
