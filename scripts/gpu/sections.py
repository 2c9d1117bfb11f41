"""Sections of `scripts/bench-gpu` that no benchmark of comb's measures.

    python -m scripts.gpu.sections exact|ipc|tiers|decode --out FILE.json [--tiny] [--device cpu]

exact: what `comb doctor` checks of the encoder and of all methods, on the models that come with comb. ipc: a pool that
another process writes and is killed over. tiers: a document between host memory and a GPU, in one
copy of pinned memory, as the store moves it, and tensor by tensor. decode: time per token of an answer over linked
documents, of a Llama with an 8B model's shape and random weights; that COMB without documents is the plain model, bit
for bit.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor

from comb.bench.harness import in_turns, ratios
from comb.evaluation.table import Timing
from comb.waits import moved

# the writers of `ipc` start by importing this file: transformers, which takes seconds, is imported where it is needed
if TYPE_CHECKING:
    from comb import CombForCausalLM
    from comb.methods.decode_state import DecodeState

Section = dict[str, Any]
SHORT = 2  # tokens of the answer whose time is taken off


def exact(device: torch.device, *, tiny: bool) -> Section:
    """A row for each check of each method that takes the model."""
    from comb import CombForCausalLM
    from comb.cli.doctor import Verdict, check_methods, run_checks
    from comb.model.source import load_named

    results = []
    for name, dtype in product(("nano", "nano-hybrid", "nano-ledger"), ("float32", "bfloat16")):
        if tiny and (name, dtype) != ("nano", "float32"):
            continue
        model = load_named(name, dtype=dtype, device=str(device))
        encoder = CombForCausalLM.from_backbone(model, num_encoder_layers=2)
        for verdict in (Verdict("encoder", run_checks(encoder)), *check_methods(model)):
            results += [{"model": name, "dtype": dtype, "method": verdict.method, **asdict(c)} for c in verdict.checks]
    return {"results": results}


def ipc(device: torch.device, *, tiny: bool) -> Section:
    """A row for each way; raises RuntimeError if anything is read that wasn't written."""
    from comb_serving.pool.shared_pool import PoolLayout
    from scripts.gpu.ipc import hand_over

    results = []
    for source, stored in product(dict.fromkeys((str(device), "cpu")), ("auto", "fp8")):
        layout = PoolLayout(2, 2, 16, 1, 4, dtype="bfloat16", stored=stored)
        with tempfile.TemporaryDirectory() as folder:
            try:
                wrong = hand_over(Path(folder), layout, device, source=source, tokens=8 if tiny else 300)
            except RuntimeError as error:
                wrong = str(error)
        results.append({"device": str(device), "stored": stored, "source": source, "wrong": wrong})
    return {"results": results}


def tiers(device: torch.device, *, tiny: bool) -> Section:
    """Both ways in turns, to the device and back; raises RuntimeError if a document comes back as another one."""
    dtype, host = torch.bfloat16, torch.device("cpu")
    layers, shape = (2, (2, 8, 16)) if tiny else (36, (8, 512, 128))
    kept = {f"{what}.{layer}": torch.randn(shape).to(dtype) for layer in range(layers) for what in "kv"}
    there = moved(kept, device)
    pinned = moved(there, host)  # as the store keeps it
    if not all(torch.equal(pinned[name], tensor) for name, tensor in kept.items()):
        raise RuntimeError("a document came back from the device as another one: nothing is timed")
    nbytes, results = sum(tensor.nbytes for tensor in kept.values()), []

    def by_tensor(tensors: Mapping[str, Tensor], target: torch.device) -> dict[str, Tensor]:
        return {name: tensor.to(target) for name, tensor in tensors.items()}

    for way, sources, target in (("up", (pinned, kept), device), ("down", (there, there), host)):
        calls = {
            "own": partial(seconds_of, partial(moved, sources[0], target), device),
            "plain": partial(seconds_of, partial(by_tensor, sources[1], target), device),
        }
        for call in calls.values():
            call()
        found = in_turns(calls, 10)
        own = Timing.of(found["own"])
        results.append({
            "way": way, "nbytes": nbytes, "own_s": own, "plain_s": Timing.of(found["plain"]),
            "speedup": ratios(found["plain"], found["own"]), "bytes_per_s": nbytes / own.median,
        })  # fmt: skip
    return {"results": results}


def decode(device: torch.device, *, tiny: bool) -> Section:
    """A row for each method; a token's time is what a longer answer takes beyond a short one."""
    from comb import CombForCausalLM, methods
    from comb.evaluation.random_prompts import RandomPrompt, random_model

    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 512}
    tokens, segment, count, repeats, dtype = 64, 16, 2, 1, torch.float32
    if not tiny:
        sizes = {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 151_936}
        tokens, segment, count, repeats, dtype = 8192, 512, 16, 3, torch.bfloat16
    model = random_model(**sizes, positions=tokens + 128, dtype=dtype, device=device)
    trained = CombForCausalLM.from_backbone(model)
    prompt = RandomPrompt.random(model, tokens, segment, 32)
    states: dict[str, DecodeState] = {}
    for spec in ("full", "naive", "comb"):
        method = methods.create(spec, trained if spec == "comb" else model)
        states[spec] = method.link(method.compile(prompt.segments), prompt.query)
        token_seconds(states[spec], count)  # whatever is lazy happens
    times = in_turns({spec: partial(token_seconds, state, count) for spec, state in states.items()}, repeats)
    results = [
        {"method": spec, "tokens": tokens, "token_s": Timing.of(own), "speedup": ratios(times["full"], own)}
        for spec, own in times.items()
    ]
    return {"results": results, "dtype": str(dtype), "off_is_plain": off_is_plain(trained)}


@torch.no_grad()
def off_is_plain(model: CombForCausalLM) -> bool:
    """Whether logits and an answer without documents are the backbone's to the bit, after documents were read."""
    from comb import methods
    from comb.backbones.identity import backbone_of
    from comb.evaluation.random_prompts import RandomPrompt

    backbone = backbone_of(model)
    prompt = RandomPrompt.random(model, 64, 32, 32)
    ids = torch.tensor([prompt.query], device=backbone.device)
    wanted = backbone(input_ids=ids).logits
    method = methods.create("comb", model)
    state = method.link(method.compile(prompt.segments), prompt.query)
    read = state.logits
    found = model(input_ids=ids).logits
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    same = torch.equal(found, wanted) and torch.equal(model.generate(ids, **greedy), backbone.generate(ids, **greedy))
    return same and not torch.equal(read[0].to(wanted), wanted[0, -1])  # documents were read, or it shows nothing


def token_seconds(state: DecodeState, tokens: int) -> float:
    """Seconds of a token in a greedy answer."""

    def seconds(count: int) -> float:
        greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}
        answer = partial(state.generate, max_new_tokens=count, min_new_tokens=count, **greedy)
        return seconds_of(answer, state.input_ids.device)

    return (seconds(SHORT + tokens) - seconds(SHORT)) / tokens


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, what it has launched included."""
    from comb.evaluation.random_prompts import synchronize

    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


SECTIONS: dict[str, Callable[..., Section]] = {"exact": exact, "ipc": ipc, "tiers": tiers, "decode": decode}


def main(
    name: str,
    out: Annotated[Path, typer.Option()],
    device: Annotated[str, typer.Option()] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny")] = False,
) -> None:
    """Writes a section's JSON, and prints it."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    text = json.dumps(SECTIONS[name](place, tiny=tiny), default=asdict, indent=1)
    out.write_text(text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
