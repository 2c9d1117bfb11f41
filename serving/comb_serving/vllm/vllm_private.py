"""Every reach into names of vLLM's own that start with an underscore, in one place.

Seen in vLLM 0.32:

- ``CompilationConfig._attention_ops``: the ops at which compiled graphs are cut unless a user names them; there is an
  option to replace the list (``splitting_ops``), none to add to it
"""

from __future__ import annotations

from vllm.config import CompilationConfig


def cut_graphs_at(op: str) -> None:
    """Has vLLM cut its compiled graphs at `op`, as it does at attention; calling it again changes nothing."""
    if op not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(op)
