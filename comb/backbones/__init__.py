"""The frozen language model under everything: loaded, looked into, identified, run by one caller at a time.

A name or a model enters; `discovery` leaves its layers and geometry, `identity` who it is until its weights change, and
the right to compute on it, `adapter` what an adapter knows it by, `forward` a way to run it.
What torch and transformers don't document is reached in `torch_private` and `transformers_private` only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from comb.registry import Registry

backbones: Registry[Path | Callable[[], Path]] = Registry("backbone", "comb.backbones.gguf")
"""Short names for backbones: a folder that comes with the package (training registers `nano`), or what fetches one."""
