"""How the kernels are launched; and Triton's interpreter, which runs them as NumPy on a CPU, to be tested."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether triton chooses its interpreter, which it does once, when it is first imported."""


@dataclass(frozen=True)
class Launch:
    """Sizes of the attention's launches; they change rounding and speed, nothing else."""

    key_tile: int = 64  # keys that one turn of the loop reads: a power of two, at least 16
    programs: int | None = None  # None: `per_processor` for each multiprocessor of the device
    per_processor: int = 2
    warps: int = 4

    def depth(self, channels: int, bytes_per_number: int) -> int:
        """Tiles in flight, of keys and values of together `channels`: up to 3, as far as 96 KiB hold them."""
        return max(1, min(3, 1 + 96 * 1024 // (self.key_tile * channels * bytes_per_number)))

    def count(self, device: torch.device) -> int:
        return self.programs or self.per_processor * _processors(device)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and `least`."""
    return max(1 << max(number - 1, 0).bit_length(), least)


if INTERPRETED and find_spec("triton") is not None:
    import triton
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor  # comb's one reach into triton, seen in 3.7

    def _patch_with_bounds(tensor, scope):
        """Lets numbers that a kernel has loaded bound its loops: NumPy 2.4 no longer takes an array of one for one."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        interpreter._patch_lang_tensor = _patch_with_bounds
