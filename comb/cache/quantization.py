"""PICaches in eight bits: one scale per head and token, for keys and values alike.

For a vector x of one head and token, with q the largest number of the format (127 for int8, 448 for fp8 e4m3):

    scale = max|x| / q        data = round(x / scale)        x' = data * scale

so int8 is off by at most scale / 2 = max|x| / 254 per channel, fp8 by 1/16 of each channel's own size. Scales are kept
in float16 where their range fits, in float32 otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from comb.cache.picache import PICACHE_KINDS, PICache, register_kind

SCHEMES: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}


def check_scheme(scheme: object) -> str:
    """`scheme` if it is known. Raises ValueError otherwise."""
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise ValueError(f"quantize is one of {', '.join(SCHEMES)}, not {scheme!r}")
    return scheme


def quantize(tensor: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Eight-bit data [..., channels] and scales [..., 1] of a floating tensor [..., channels].

    Raises:
        ValueError: for an unknown scheme, or values that are not finite.
    """
    dtype, largest = SCHEMES[check_scheme(scheme)]
    wide = tensor.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / largest
    half = scale.half()
    # below its normal numbers float16 loses precision, above its range everything
    fits = torch.isfinite(half) & ((half >= torch.finfo(torch.float16).smallest_normal) | (scale == 0))
    # one wait for a GPU, not two
    finite, storable = torch.stack([torch.isfinite(wide).all(), fits.all()]).tolist()
    if not finite:
        raise ValueError(
            "a tensor with NaN or infinity can't be quantised: the model's weights are damaged or overflow"
        )
    scale = half if storable else scale
    scaled = wide / torch.where(scale > 0, scale.float(), 1.0)
    scaled = scaled.clamp_(-largest, largest)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor that `quantize` took, as near as eight bits come."""
    return (data.float() * scale.float()).to(dtype)


@register_kind
@dataclass(frozen=True, eq=False, repr=False)
class QuantizedPICache(PICache):
    """Another PICache with its floating tensors in eight bits; integer tensors are kept as they are.

    Args:
        inner: kind of the other PICache.
        dtype: of its floating tensors.
        data: every tensor by name, in eight bits or as it was.
        scales: per name of a quantised tensor [..., channels], its scales [..., 1].
    """

    inner: str
    dtype: torch.dtype
    data: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]
    kind: ClassVar[str] = "quantized"

    @property
    def scheme(self) -> str:
        """``"int8"`` or ``"fp8"``."""
        found = {tensor.dtype for name, tensor in self.data.items() if name in self.scales}
        return next(scheme for scheme, (dtype, _) in SCHEMES.items() if dtype in found)

    @property
    def num_tokens(self) -> int:
        return PICACHE_KINDS.get(self.inner).from_tensors(self.fingerprint, self.data).num_tokens

    def tensors(self) -> dict[str, Tensor]:
        # kind and dtype travel in the names, which a file's checksum covers
        prefix = f"{self.inner}|{str(self.dtype).removeprefix('torch.')}|"
        named = {f"{prefix}{name}": tensor for name, tensor in self.data.items()}
        return named | {f"{prefix}{name}|scale": tensor for name, tensor in self.scales.items()}

    @classmethod
    def from_tensors(cls, fingerprint: str, tensors: Mapping[str, Tensor]) -> Self:
        data: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}
        made_of = set()
        for full_name, tensor in tensors.items():
            inner, dtype, name, *scale = full_name.split("|")
            made_of.add((inner, dtype))
            (scales if scale == ["scale"] else data)[name] = tensor
        if len(made_of) != 1 or not scales:
            raise ValueError(f"QuantizedPICache expects tensors of one kind with scales, got {sorted(tensors)}")
        ((inner, dtype),) = made_of
        return cls(fingerprint, inner, getattr(torch, dtype), data, scales)

    def dequantize(self, fingerprint: str) -> PICache:
        """The other PICache, for a consumer that knows it under `fingerprint`."""
        tensors = {
            name: dequantize(tensor, self.scales[name], self.dtype) if name in self.scales else tensor
            for name, tensor in self.data.items()
        }
        return PICACHE_KINDS.get(self.inner).from_tensors(fingerprint, tensors)


def quantize_picache(picache: PICache, scheme: str, fingerprint: str) -> QuantizedPICache:
    """`picache` in eight bits, under a fingerprint of its own.

    Raises:
        ValueError: when it holds no floating tensor, floating tensors of several dtypes, or values that aren't finite.
    """
    floating = {name: tensor for name, tensor in picache.tensors().items() if tensor.is_floating_point()}
    dtypes = {tensor.dtype for tensor in floating.values()}
    if len(dtypes) != 1:
        raise ValueError(f"a {type(picache).__name__} holds floating tensors of {len(dtypes)} dtypes, expected one")
    data, scales = dict(picache.tensors()), {}
    for name, tensor in floating.items():
        data[name], scales[name] = quantize(tensor, scheme)
    return QuantizedPICache(fingerprint, picache.kind, dtypes.pop(), data, scales)
