"""A comb checkpoint, the engine that serves it, the library's model to compare with, and documents in the pool."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from comb import CombForCausalLM
from comb.model.lora import add_lora
from comb_serving.config.instance import default_root, make_secret, read_secret
from comb_serving.config.serve_options import ServeOptions
from comb_serving.pool.capability import KEY, MARK, Capability, PoolHandle, digest, pack
from comb_serving.pool.shared_pool import SharedPool
from tests.helpers.families import open_gates

BLOCK = 4
SMALL = {
    "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 8 * 2**20, "block_size": 32,
    "max_model_len": 256, "max_num_seqs": 16, "disable_log_stats": True, "seed": 0,
}  # fmt: skip


def checkpoint(folder: Path, backbone: Any, *, lora: int | None = None, **options: Any) -> CombForCausalLM:
    """An adapter with open gates on `backbone` (a name, a folder or a model saved before), saved to `folder`.

    lora: rank of the LoRA that it has beside copies of the backbone's layers.
    """
    torch.manual_seed(3)
    made = CombForCausalLM.from_backbone(backbone, dtype=torch.float32, num_encoder_layers=2, **options)
    model = open_gates(made, 1.5, 1.0)
    for block in model.cross_blocks:
        for parameter in block.parameters():
            if parameter.ndim == 1 and len(parameter) > 1:  # norms and biases, which start at one and zero
                parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    if lora is not None:
        add_lora(model, rank=lora)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, state_dict=trained)
    return CombForCausalLM.from_pretrained(folder, dtype=torch.float32)


@contextmanager
def engine(folder: str | Path, **options: Any) -> Iterator[Any]:
    """An engine in this process, gone afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    try:
        model = LLM(str(folder), skip_tokenizer_init=True, **{**SMALL, **options})
    except BaseException:
        ensure_kv_transfer_shutdown()  # an engine that was refused leaves things that are the process's
        cleanup_dist_env_and_memory()
        raise
    try:
        yield model
    finally:
        model.llm_engine.engine_core.shutdown()
        del model
        cleanup_dist_env_and_memory()


@dataclass
class Served:
    """An engine, the same model in the library, and documents that are in its pool."""

    llm: Any
    model: CombForCausalLM | Any
    pools: Sequence[SharedPool]
    documents: dict[str, list[int]] = field(default_factory=dict)
    handles: dict[str, PoolHandle] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)  # tokens that each answer took from the prefix cache

    def add(self, name: str, tokens: list[int]) -> None:
        """Encodes a document and writes it into blocks that lie scattered over the pool."""
        layout = self.pools[0].layout
        count = layout.blocks_for(len(tokens))
        taken = {block for handle in self.handles.values() for block in handle.blocks}
        free = [block for block in reversed(range(layout.num_blocks)) if block not in taken]
        handle = PoolHandle(len(tokens), tuple(free[: 2 * count : 2]))
        (picache,) = self.model.encode([tokens])
        for rank, pool in enumerate(self.pools):
            first = rank * layout.kv_heads
            pool.write(handle, picache.keys, picache.values, slice(first, first + layout.kv_heads))
            pool.finish()
        self.documents[name], self.handles[name] = tokens, handle

    def request(self, prompt: list[int], names: str, tokens: int = 8, **stated: Any) -> tuple[Any, Any]:
        """vLLM's prompt and sampling parameters for a question about the documents named by letters.

        `stated`: what the capability says otherwise.
        """
        if not names:
            return {"prompt_token_ids": prompt}, greedy(tokens)
        salt = stated.get("salt", MARK + names)
        places = tuple(pack([self.handles[name] for name in names]))
        means = {"request_id": "", "salt": salt, "documents": places, "prompts": (digest(prompt),)}
        means |= stated
        token = Capability(**means).sign(read_secret(Path(os.environ["COMB_INSTANCE_DIR"])))
        return {"prompt_token_ids": prompt, "cache_salt": salt}, greedy(tokens, {KEY: token})

    def ask(self, requests: Sequence[tuple[list[int], str]], tokens: int = 8, **stated: Any) -> list[Any]:
        """(token ids, log-probabilities of them) per (prompt, names of documents)."""
        prompts, parameters = zip(*(self.request(*each, tokens, **stated) for each in requests), strict=True)
        outputs = self.llm.generate(list(prompts), list(parameters), use_tqdm=False)
        self.cached += [output.num_cached_tokens for output in outputs]
        return [answer(output) for output in outputs]

    def reference(self, prompt: list[int], names: str, tokens: int = 8, prefix: int = 0) -> Any:
        """The library's own answer; the prompt's first `prefix` tokens read no documents."""
        return reference(self.model, prompt, [self.documents[name] for name in names], tokens, prefix)[:2]

    def apart(self, answer: Any, prompt: list[int], names: str) -> float:
        """How far an answer is from the library's (`apart`)."""
        return apart(answer, reference(self.model, prompt, [self.documents[name] for name in names], len(answer[0]))[2])


def reference(
    model: CombForCausalLM, prompt: list[int], documents: list[list[int]], tokens: int, prefix: int = 0
) -> Any:
    """The library's greedy answer: token ids, their log-probabilities, and those of all tokens at each step."""
    given = torch.tensor([prompt])
    found = model.generate(
        given, attention_mask=torch.ones_like(given), documents=[documents] if documents else None, pad_token_id=0,
        prefix_tokens=[prefix], max_new_tokens=tokens, do_sample=False, eos_token_id=[], output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids = found.sequences[0, len(prompt) :].tolist()
    logs = [logits[0].float().log_softmax(-1) for logits in found.logits]
    return ids, [log[token].item() for log, token in zip(logs, ids, strict=True)], logs


def three_documents(vocab_size: int) -> dict[str, list[int]]:
    """Token ids of documents A, B and C: blocks filled in part, filled, and many."""
    draw = torch.Generator().manual_seed(11)
    sizes = {"A": 13, "B": 8, "C": 30}
    return {name: torch.randint(5, vocab_size, (size,), generator=draw).tolist() for name, size in sizes.items()}


def greedy(tokens: int, extra: dict[str, Any] | None = None, **more: Any) -> Any:
    """Greedy decoding of exactly so many tokens, with their log-probabilities."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, extra_args=extra, detokenize=False, **more
    )


def check_seeds(llm: Any) -> None:
    """A seeded answer to a long prompt is the same whether the prompt is computed in parts or at once."""
    from vllm import SamplingParams

    def ask(seed: int) -> tuple[int, list[int]]:
        asked = SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [5 + number % 50 for number in range(100)]}
        (found,) = llm.generate([prompt], asked, use_tqdm=False)
        return found.num_cached_tokens, list(found.outputs[0].token_ids)

    assert llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens < 100
    (before, in_parts), (cached, at_once), (_, other) = map(ask, (3, 3, 4))
    assert before == 0 < cached  # but for the last few
    assert in_parts == at_once != other


def answer(output: Any) -> Any:
    """(token ids, log-probabilities) of vLLM's request output."""
    (found,) = output.outputs
    ids = list(found.token_ids)
    return ids, [step[token].logprob for step, token in zip(found.logprobs, ids, strict=True)]


def apart(answer: Any, logs: Sequence[torch.Tensor]) -> float:
    """How far an engine's log-probabilities are from the library's `logs` of all tokens, step by step [vocabulary].

    It ends where the engine says another token than the library, which of a near tie it may: behind it prompts differ.
    """
    largest = 0.0
    for token, value, log in zip(*answer, logs, strict=True):
        largest = max(largest, abs(value - log[token].item()))
        if token != log.argmax():
            break
    return largest


@contextmanager
def served(folder: Path, model: CombForCausalLM, *, pool_dtype: str = "auto", **options: Any) -> Iterator[Served]:
    """A checkpoint served, and three documents put into its pool."""
    ranks = options.get("tensor_parallel_size", 1)
    with instance(pool_dtype=pool_dtype) as place, engine(folder, **options) as llm:
        # CUDA opens no handle in the process that made it
        own = llm.apply_model(lambda made: made.comb.pool) if ranks == 1 else None
        pools = own or [SharedPool.attach(place / f"pool-{rank}") for rank in range(ranks)]
        found = Served(llm, model, pools)
        for name, tokens in three_documents(model.info.vocab_size).items():
            found.add(name, tokens)
        yield found


@contextmanager
def instance(**options: Any) -> Iterator[Path]:
    """The environment of an instance with room for some hundred tokens of documents; `options` of `ServeOptions`."""
    folder = Path(tempfile.mkdtemp(dir=default_root(), prefix="comb-test-"))
    values = ServeOptions("any", **{"pool_bytes": 2**20, "pool_block": BLOCK, **options}).environment(folder)
    os.environ.update(values)
    make_secret(folder)
    try:
        yield folder
    finally:
        for name in values:
            del os.environ[name]
        shutil.rmtree(folder)
