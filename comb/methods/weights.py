"""Identity of all of a model's weights, for caches of what its own layers compute."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_CHUNK = 2**24
_VOLATILE = ("transformers_version", "_name_or_path", "_commit_hash", "architectures", "dtype", "use_cache")


def weights_fingerprint(model: Any) -> str:
    """A short name for configuration, dtype and every parameter's bits, so that fine-tunes of one model differ.

    `comb.fingerprint.backbone_fingerprint` looks at the embedding only, which is all that COMB's encoder shares with
    a backbone; keys and values of decoder layers depend on every layer. Kept on the model until a parameter is
    written (other than through ``.data``) or replaced.
    """
    parameters = list(model.named_parameters())
    stamp = hash(tuple((name, p.data_ptr(), p._version, p.dtype) for name, p in parameters))
    kept = model.__dict__.get("_comb_weights_fingerprint")
    if kept is None or kept[0] != stamp:
        kept = model.__dict__["_comb_weights_fingerprint"] = (stamp, _digest(model, parameters))
    name: str = kept[1]
    return name


def _digest(model: Any, parameters: list[tuple[str, torch.Tensor]]) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in parameters:
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}:{_sums(parameter)};".encode())
    return digest.hexdigest()[:16]


def _sums(tensor: torch.Tensor) -> list[int]:
    """Sums of the raw bits, exact on every device, and position-weighted so that swapped values are noticed too."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = tensor.detach().reshape(-1).view(words)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        wide = bits[start : start + _CHUNK].long()
        sums += torch.stack((wide.sum(), (wide * torch.arange(1, len(wide) + 1, device=wide.device)).sum()))
    return [int(value) for value in sums.tolist()]
