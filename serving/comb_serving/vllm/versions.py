"""Which vLLM this plug-in was tested with, and every reach into names of vLLM's own.

Those that start with an underscore, seen in vLLM 0.32 and 0.33:

- ``CompilationConfig._attention_ops``: the ops at which compiled graphs are cut unless a user names them; there is an
  option to replace the list (``splitting_ops``), none to add to it
- ``vllm._custom_ops``: the module through which its layers call their operators; documents of hybrids listen there
  (`linking.states`)
- ``Scheduler._reserve_prefill_lookahead``: overridden in `linking.scheduler`; no other part of the scheduler asks where
  a chunk of a prompt ends
- ``AnthropicServingMessages._detect_merge_inline_system`` and, in 0.32, ``_get_disabled_thinking_effort``: how it
  renders messages, which `comb_serving.api` has to do alike
"""

from __future__ import annotations

import logging
from types import ModuleType

logger = logging.getLogger(__name__)

TESTED = ("0.32", "0.33")


def untested(version: str) -> str:
    """What is to be said of a vLLM that comb was not tested with; empty for one that it was."""
    if any(version == one or version.startswith(f"{one}.") for one in TESTED):
        return ""
    return f"was tested with vLLM {', '.join(f'{one}.x' for one in TESTED)}, this is {version}"


def check_version(version: str) -> None:
    """Warns about a vLLM that comb was not tested with."""
    if said := untested(version):
        logger.warning("comb %s: check answers before you rely on it", said)


def cut_graphs_at(op: str) -> None:
    """Has vLLM cut its compiled graphs at `op`, as it does at attention; calling it again changes nothing."""
    from vllm.config import CompilationConfig

    if op not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(op)


def operators() -> ModuleType:
    """The operators that vLLM's layers call, looked up there at each call."""
    import vllm._custom_ops

    found: ModuleType = vllm._custom_ops
    return found
