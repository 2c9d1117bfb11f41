"""Every reach into names of vLLM's own that start with an underscore, in one place.

Seen in vLLM 0.32:

- ``CompilationConfig._attention_ops``: the ops at which compiled graphs are cut unless a user names them; there is an
  option to replace the list (``splitting_ops``), none to add to it
- ``vllm._custom_ops``: the module through which its layers call their operators; documents of hybrids listen there
  (`linking.scans`)
- ``Scheduler._reserve_prefill_lookahead``: overridden in `linking.scheduler`; no other part of the scheduler asks where
  a chunk of a prompt ends
"""

from __future__ import annotations

from types import ModuleType

from vllm.config import CompilationConfig


def cut_graphs_at(op: str) -> None:
    """Has vLLM cut its compiled graphs at `op`, as it does at attention; calling it again changes nothing."""
    if op not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(op)


def operators() -> ModuleType:
    """The operators that vLLM's layers call, looked up there at each call."""
    import vllm._custom_ops

    found: ModuleType = vllm._custom_ops
    return found
