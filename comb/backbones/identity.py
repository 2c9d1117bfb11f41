"""Identity of all of a model's weights, for caches of what its own layers compute."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

_CHUNK = 2**24
_VOLATILE = ("transformers_version", "_name_or_path", "_commit_hash", "architectures", "dtype", "use_cache")


def weights_fingerprint(model: Any) -> str:
    """A short name for configuration, dtype, all weights' bits and adapters in use, so that fine-tunes differ.

    `backbone_fingerprint` looks at the embedding only, which is all that COMB's encoder shares with
    a backbone; keys and values of decoder layers depend on every layer. Kept on the model until a parameter is
    written (other than through ``.data``) or replaced.
    """
    stamp = weights_stamp(model)
    kept = model.__dict__.get("_comb_weights_fingerprint")
    if kept is None or kept[0] != stamp:
        kept = model.__dict__["_comb_weights_fingerprint"] = (stamp, _digest(model))
    name: str = kept[1]
    return name


def weights_stamp(model: Any) -> int:
    """Changes when a weight is written (other than through ``.data``) or replaced, or an adapter is switched."""
    # asked for at every link: a second walk over the modules, or their names, would be felt
    seen: list[Any] = []
    for module in model.modules():
        for _, tensor in _tensors(module):
            # inference tensors count no writes: they can't be written to outside of inference mode
            version = -1 if tensor.is_inference() else tensor._version
            seen.append((tensor.data_ptr(), version, tensor.dtype))
        seen.append(_adapter(module))
    return hash(tuple(seen))


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters, and its buffers that belong to a checkpoint (packed weights of quantised models)."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _adapter(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """Which of peft's adapters are in use in this layer, and how strongly; None for other layers."""
    if not hasattr(type(module), "active_adapters"):
        return None
    active, disabled = getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None)
    if not isinstance(active, list | tuple) or not isinstance(disabled, bool):
        return None  # a transformers model has methods of these names
    scaling = getattr(module, "scaling", None)
    scales = tuple(sorted(scaling.items())) if isinstance(scaling, dict) else ()
    return tuple(active), disabled, tuple(getattr(module, "merged_adapters", ())), scales


def _digest(model: Any) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    counted: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in _tensors(module):
            if id(tensor) not in counted:  # tied weights count once
                counted.add(id(tensor))
                digest.update(f"{path}.{name}:{tuple(tensor.shape)}:{tensor.dtype}:{_sums(tensor)};".encode())
        adapter = _adapter(module)
        if adapter is not None:
            digest.update(f"{path}:{adapter};".encode())
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
