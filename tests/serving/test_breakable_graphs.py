"""vLLM's breakable CUDA graphs see documents: the cross block is run again at every replay, not what it did at capture.

Graphs are captured with a step that has no documents, so a block that is no break point would never be replayed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = """
from types import SimpleNamespace
import torch
from vllm.compilation import breakable_cudagraph as breakable

# no GPU: segments of graphs are nothing, tensors are held as they are
breakable._weak_ref_capture_arg = lambda argument: argument
class Capture(breakable.BreakableCUDAGraphCapture):
    def _begin_segment(self): self._capturing = True
    def _end_segment(self): self._capturing = False

from comb_serving.vllm import OP, block
documents = []
mix = SimpleNamespace(mix_=lambda hidden, residual: [hidden.add_(one) for one in documents])
block.get_forward_context = lambda: SimpleNamespace(no_compile_layers={"comb.0": mix})
hidden = torch.zeros(2)
with Capture() as capture:
    getattr(torch.ops.vllm, OP)(hidden, torch.empty(0), "comb.0")
assert capture._num_eager_breaks == 1, "the cross block is no break point"
assert hidden.tolist() == [0, 0]
documents.append(3)
for segment in capture.segments:
    segment()
assert hidden.tolist() == [3, 3], "a replay lacks its documents"
"""


def test_a_replay_sees_the_documents_of_its_step() -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "serving"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
