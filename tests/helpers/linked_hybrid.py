"""A hybrid on vLLM with linking, in a process of its own, which says what it answered.

vLLM for CPUs starts no second engine in a process in which a hybrid's kernels were imported. The process gets one JSON
object, and writes one (`ask_hybrid`); distributions are log-probabilities of the first token [vocabulary].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers as tf
from torch import Tensor

from comb.hybrid.transition import DenseTransition, ScalarTransition
from tests.helpers.hybrids import BASE, PATTERN, slow_decays
from tests.helpers.linked import LinkedPrompt, check_nothing_is_left, library_logs, linked_engine
from tests.helpers.processes import wait_for

# what vLLM's kernels for CPUs take: heads of attention from 32 on, of gated DeltaNet 64 or 128
WIDE = {**BASE, "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "max_position_embeddings": 512}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {
        **WIDE, "layer_types": PATTERN, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }),
    "falcon_h1": ("FalconH1Config", {
        **WIDE, "num_hidden_layers": 3, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_expand": 2, "mamba_d_ssm": 96,
    }),
}  # fmt: skip
# with seams of 8: D leaves an interior shorter than the convolutions, E none
SIZES = {"A": 41, "B": 30, "C": 26, "D": 18, "E": 12}
PROMPTS = [
    LinkedPrompt("ABC"),
    LinkedPrompt("CAB", gaps=((30, 31), ())),
    LinkedPrompt("BB", prefix=()),  # the same document twice, and nothing in front
    LinkedPrompt("A", prefix=(), query=(5,)),  # exact
    LinkedPrompt("CDEA", gaps=((40,), (41, 42, 43))),
    LinkedPrompt("AC", query=()),  # a document ends the prompt
]


def tiny_model(family: str, folder: Path, **changes: Any) -> Any:
    """A random model that remembers, saved to `folder`."""
    kind, values = CONFIGS[family]
    torch.manual_seed(0)
    model = slow_decays(tf.AutoModelForCausalLM.from_config(getattr(tf, kind)(**{**values, **changes})).eval())
    model.save_pretrained(folder)
    return model


def documents() -> dict[str, list[int]]:
    """Token ids by name."""
    draw = torch.Generator().manual_seed(5)
    return {name: torch.randint(50, 128, (size,), generator=draw).tolist() for name, size in SIZES.items()}


def library(model: Any, method: str, prompt: LinkedPrompt) -> Tensor:
    """The first token's log-probabilities by the library's method of the same name."""
    return library_logs(model, documents(), prompt, method, 1)[0]


def error(one: Any, other: Tensor) -> float:
    """Relative, of logits: a constant on all of them means nothing."""
    found = torch.as_tensor(one)
    found, other = found - found.mean(), other - other.mean()
    return float((found - other).norm() / other.norm())


def ask_hybrid(folder: Path, method: str, *, pressure: bool = False, **options: Any) -> dict[str, Any]:
    """What an engine says (`_answers`, or `_under_pressure`), started with these options of vLLM's."""
    out = folder / f"{method.replace(':', '-')}.json"
    given = {"folder": str(folder), "method": method, "options": options, "out": str(out), "pressure": pressure}
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if "tensor_parallel_size" in options:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    subprocess.run([sys.executable, "-m", __name__, json.dumps(given)], check=True, env=environment, timeout=600)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _answers(linked: Any, method: str) -> dict[str, Any]:
    """All that is asked of one engine."""

    def asked(pairs: list[tuple[LinkedPrompt, str]], tokens: int = 1) -> list[list[float]]:
        given = []
        for prompt, name in pairs:
            ids, parameters = linked.request(prompt, name, tokens)
            parameters.logprobs = 128
            given.append((ids, parameters))
        outputs = linked.llm.generate(*map(list, zip(*given, strict=True)), use_tqdm=False)
        first = [output.outputs[0].logprobs[0] for output in outputs]
        return [[row[token].logprob for token in range(128)] for row in first]

    said: dict[str, Any] = {}
    said["plain"] = [asked([(prompt, "full")])[0] for prompt in PROMPTS]
    said["linked"] = [asked([(prompt, method)])[0] for prompt in PROMPTS]
    linked.ask([(prompt, method) for prompt in PROMPTS], 1)
    said["reports"] = [(report.linked_tokens, report.computed_tokens) for report in linked.reports]
    mixed = [(prompt, name) for prompt in PROMPTS for name in (method, "full")]
    said["together"] = asked(mixed, 12)
    for steps in range(9):  # waiting, in the middle of its seams, at its query, while it answers
        linked.leave(linked.request(PROMPTS[0], method, 20), steps)
    linked.forget()  # documents are compiled anew, and one of them is left alone in the middle of it
    linked.leave(linked.compiling("A"), 1)
    linked.forget()
    said["afterwards"] = asked(mixed)
    said["preemptions"] = linked.preemptions
    linked.llm.llm_engine.step()
    check_nothing_is_left(linked.scheduler)
    if linked.llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size > 1:
        return said  # what follows is not in this process
    added = mock.Mock(side_effect=lambda state: state)  # states added up, as if nothing were forgotten
    with mock.patch.object(ScalarTransition, "apply", added), mock.patch.object(DenseTransition, "apply", added):
        said["without transitions"] = [asked([(prompt, method)])[0] for prompt in PROMPTS]
    return said


def _under_pressure(linked: Any, method: str, tokens: int = 100) -> dict[str, Any]:
    """Answers of single requests; of all at once, for which there are too few blocks; and with documents that have come
    back from lower tiers into another place."""
    mixed = [(prompt, name) for prompt in PROMPTS for name in (method, "full")]
    said: dict[str, Any] = {"alone": [linked.ask([each], tokens)[0] for each in mixed]}
    assert linked.preemptions == 0
    said["together"] = linked.ask(mixed, tokens)
    said["preemptions"] = linked.preemptions
    tiers = set()
    for name in SIZES:  # the host has no room for all of them
        ids, parameters = linked.compiling(name, method, name)
        linked.llm.generate([ids], [parameters], use_tqdm=False)
        tiers.add(wait_for(lambda name=name: linked.fetch(name, method)))
    said["tiers"] = sorted(tiers | {linked.fetch(name, method) for name in SIZES})
    said["fetched"] = linked.ask(mixed, tokens)
    linked.llm.llm_engine.step()
    check_nothing_is_left(linked.scheduler)
    return said


def main() -> None:
    """The process of an engine."""
    given = json.loads(sys.argv[1])
    model: Any = SimpleNamespace(name_or_path=given["folder"], config=tf.AutoConfig.from_pretrained(given["folder"]))
    options = {"kv_cache_memory_bytes": 2**26, "max_logprobs": 128, **given["options"]}
    if (links := options.get("link_tokens")) is not None:
        model, options["link_tokens"] = SimpleNamespace(backbone=model, config=model.config), Path(links)
    with linked_engine(model, given["method"], **options) as linked:
        linked.documents = documents()
        answers = _under_pressure if given["pressure"] else _answers
        Path(given["out"]).write_text(json.dumps(answers(linked, given["method"])))


if __name__ == "__main__":
    main()
