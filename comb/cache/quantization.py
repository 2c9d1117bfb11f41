"""PICaches in eight or four bits.

Eight bits have one scale per head and token, for keys and values alike. For a vector x of one head and token, with q
the largest number of the format (127 for int8, 448 for fp8 e4m3):

    scale = max|x| / q        data = round(x / scale)        x' = data * scale

so int8 is off by at most scale / 2 = max|x| / 254 per channel, fp8 by 1/16 of each channel's own size.

Four bits (int4) have a lowest number and a step for each `GROUP` of numbers: of a channel's keys at neighbouring
tokens, as some channels of keys are large at all tokens, and of a token's values in neighbouring channels (KIVI,
arXiv:2402.02750):

    step = (max x - min x) / 15        data = round((x - min x) / step)        x' = data * step + min x

Scales are kept in float16 where their range fits, in float32 otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from comb.cache.picache import PICACHE_KINDS, PICache, register_kind
from comb.waits import truths

SCHEMES: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
    "int4": (torch.uint8, 15.0),  # two to a byte
}
GROUP = 64  # numbers that share a step in four bits


def quantize(tensor: Tensor, scheme: str, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Data and scales of a floating tensor [..., channels].

    In eight bits [..., channels] and [..., 1]; in four [..., channels / 2] uint8, and lowest numbers and steps in the
    tensor's shape, but for `dim`, which has groups, and a last dimension of two.

    Raises:
        ValueError: for values that are not finite, or four bits of an odd number of channels.
    """
    dtype, largest = SCHEMES[scheme]
    wide = tensor.float()
    if scheme == "int4":
        dim %= wide.ndim
        if wide.shape[-1] % 2:
            raise ValueError(f"int4 keeps two channels in a byte, and heads have {wide.shape[-1]}: use int8")
        bounds = [group.aminmax(dim=dim, keepdim=True) for group in wide.split(GROUP, dim)]
        lowest, highest = (torch.cat(each, dim) for each in zip(*bounds, strict=True))
        ranges = _storable(torch.stack([lowest, (highest - lowest) / largest], -1), wide)
        lowest, step = _spread(ranges, dim, wide.shape[dim])
        codes = ((wide - lowest) / torch.where(step > 0, step, 1.0)).round_().clamp_(0, largest).byte()
        return codes[..., ::2] | codes[..., 1::2] << 4, ranges
    scale = _storable(wide.abs().amax(dim=-1, keepdim=True) / largest, wide)
    scaled = (wide / torch.where(scale > 0, scale.float(), 1.0)).clamp_(-largest, largest)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype, dim: int = -1) -> Tensor:
    """The tensor that `quantize` took, as near as its bits come."""
    if data.dtype != torch.uint8:
        return (data.float() * scale.float()).to(dtype)
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    lowest, step = _spread(scale, dim % codes.ndim, codes.shape[dim])
    return (codes * step + lowest).to(dtype)


def _spread(ranges: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    """Lowest numbers and steps of each number, of `count` along `dim`."""
    return ranges.float().repeat_interleave(GROUP, dim).narrow(dim, 0, count).unbind(-1)


def _storable(scale: Tensor, wide: Tensor) -> Tensor:
    """`scale` in float16 where all of it fits. Raises ValueError if `wide`, which it is of, isn't finite."""
    half, size = scale.half(), scale.abs()
    # below its normal numbers float16 loses precision, above its range everything
    fits = torch.isfinite(half) & ((size >= torch.finfo(torch.float16).smallest_normal) | (size == 0))
    finite, storable = truths(torch.isfinite(wide).all(), fits.all())
    if not finite:
        raise ValueError(
            "a tensor with NaN or infinity can't be quantised: the model's weights are damaged or overflow"
        )
    return half if storable else scale


@register_kind
@dataclass(frozen=True, eq=False, repr=False)
class QuantizedPICache(PICache):
    """Another PICache with its floating tensors in eight or four bits; integer tensors are kept as they are."""

    inner: str  # kind of the other PICache
    dtype: torch.dtype  # of its floating tensors
    data: Mapping[str, Tensor]  # every tensor by name, quantised or as it was
    scales: Mapping[str, Tensor]  # of the quantised ones
    kind: ClassVar[str] = "quantized"

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
        tensors = dict(self.data)
        for name, scale in self.scales.items():
            tensors[name] = dequantize(tensors[name], scale, self.dtype, _grouped(name))
        return PICACHE_KINDS.get(self.inner).from_tensors(fingerprint, tensors)


def _grouped(name: str) -> int:
    """The dimension along which a tensor is cut into groups: a PICache's keys by their tokens, values by channels."""
    return 1 if name.startswith("keys") else -1


def quantize_picache(picache: PICache, scheme: str, fingerprint: str) -> QuantizedPICache:
    """`picache` in eight or four bits, under a fingerprint of its own.

    Raises ValueError when it holds no floating tensor, some of several dtypes, or values that aren't finite.
    """
    data, scales = picache.tensors(), {}
    dtypes = {tensor.dtype for tensor in data.values() if tensor.is_floating_point()}
    if len(dtypes) != 1:
        raise ValueError(f"a {type(picache).__name__} holds floating tensors of {len(dtypes)} dtypes, expected one")
    for name, tensor in list(data.items()):
        if tensor.is_floating_point():
            data[name], scales[name] = quantize(tensor, scheme, _grouped(name))
    return QuantizedPICache(fingerprint, picache.kind, dtypes.pop(), data, scales)
