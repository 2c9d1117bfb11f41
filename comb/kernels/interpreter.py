"""Triton's interpreter: kernels as NumPy, to be tested on a CPU. It is chosen when triton is first imported.

The one place that reaches into triton: `triton.runtime.interpreter._patch_lang_tensor`, seen in 3.7.
"""

from __future__ import annotations

import os

import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _scalars_as_bounds() -> None:
    """Lets numbers that a kernel has loaded bound its loops: NumPy 2.4 no longer takes an array of one for a number."""
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if INTERPRETED and tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
    _scalars_as_bounds()
