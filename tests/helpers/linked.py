"""A plain model on vLLM with linking, the library's methods over the same model, and prompts with documents in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from comb import LinkTokensForCausalLM, methods
from comb_serving.config.instance import read_secret
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.pool.capability import (
    COMPILE,
    KEY,
    Capability,
    LinkReport,
    PoolHandle,
    ReportReceiver,
    digest,
    name_of,
    pack,
)
from comb_serving.vllm.linking.setup import engine_options, front_for
from tests.helpers.engines import answer, engine, greedy, instance
from tests.helpers.engines import three_documents as three_documents
from tests.helpers.families import BASE, MLA

PREFIX = [7, 8, 9, 10, 11, 12, 13]
FRONT = [25, 31, 47, 6, 19]  # what stands here for prose


@dataclass(frozen=True)
class LinkedPrompt:
    """``prefix + document + gap + document + ... + query``, its documents by name."""

    names: str
    prefix: tuple[int, ...] = tuple(PREFIX)
    gaps: tuple[tuple[int, ...], ...] = ()
    query: tuple[int, ...] = (20, 21, 22, 23)

    def built(self, documents: dict[str, list[int]]) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        """Token ids, and where documents are in them."""
        ids, spans = list(self.prefix), []
        for gap, name in zip(((), *self.gaps, *[()] * len(self.names)), self.names, strict=False):
            ids += gap
            spans.append((len(ids), len(documents[name])))
            ids += documents[name]
        return [*ids, *self.query], tuple(spans)


@dataclass
class LinkedEngine:
    """An engine, its pool's blocks, and what the library says."""

    llm: Any
    model: Any
    folder: Path
    documents: dict[str, list[int]]
    front: str = "none"
    handles: dict[str, PoolHandle] = field(default_factory=dict)
    reports: list[LinkReport | None] = field(default_factory=list)
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.layout = LinkingLayout.read(self.folder)
        self.secret = read_secret(self.folder)
        self.receiver = ReportReceiver(self.folder)
        self.forget()
        preempt = getattr(self.scheduler, "_preempt_request", None)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.preemptions += 1
            return preempt(*arguments, **options)

        self.scheduler._preempt_request = counted

    def forget(self) -> None:
        """Documents are compiled anew."""
        self.handles.clear()
        self._free = list(range(self.layout.num_blocks))[::-2]  # they lie scattered

    def behind(self, rule: str) -> str:
        """A rule of selection behind the front that this engine's documents have."""
        return rule if self.front == "none" else f"{rule},front={self.front}"

    @property
    def scheduler(self) -> Any:
        """The engine's, which runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def pool(self) -> Any:
        """Its worker's, which runs in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().pool

    def signed(self, method: str, prompt: Any, spans: Any, handles: Sequence[PoolHandle], /, **stated: Any) -> str:
        """A capability; `stated`: what it says otherwise."""
        means = {
            "request_id": "", "salt": "", "documents": tuple(pack(handles)), "prompts": (digest(prompt),),
            "method": method, "spans": (spans,), **stated,
        }  # fmt: skip
        return Capability(**means).sign(self.secret)

    def place(self, name: str, method: str) -> PoolHandle:
        """Blocks for a document, in which requests look for it from now on."""
        tokens = len(self.documents[name])
        handle = PoolHandle(tokens, tuple(self._free.pop() for _ in range(self.layout.blocks_for(tokens))))
        self.handles[name + LinkMethod.parse(method).compiled] = handle
        return handle

    def fetch(self, name: str, method: str) -> str | None:
        """The tier from which a document has come into other blocks."""
        handle = self.place(name, method)
        found: list[str | None] = self.llm.collective_rpc("comb_fetch", args=(name, handle.tokens, list(handle.blocks)))
        return found[0]

    def compiling(self, name: str, method: str = "naive", salt: str = "") -> tuple[Any, Any]:
        """vLLM's prompt and parameters that compile a document for a method.

        `salt`: under which it is kept beyond the pool.
        """
        ids = self.documents[name]
        handle, front = self.place(name, method), self.layout.front
        prompt = [*front, *ids]
        token = self.signed(COMPILE, prompt, ((len(front), len(ids)),), [handle], salt=salt)
        own = {"cache_salt": salt} if salt else {}
        return {"prompt_token_ids": prompt, **own}, greedy(1, {KEY: token})

    def request(self, prompt: LinkedPrompt, method: str, tokens: int = 8, /, **stated: Any) -> tuple[Any, Any]:
        """vLLM's prompt and parameters; compiles what isn't there yet."""
        ids, spans = prompt.built(self.documents)
        parsed = LinkMethod.parse(method)
        if parsed.full:
            return {"prompt_token_ids": ids}, greedy(tokens)
        missing = [name for name in dict.fromkeys(prompt.names) if name + parsed.compiled not in self.handles]
        if missing:
            requests = [self.compiling(name, method) for name in missing]
            self.llm.generate(*map(list, zip(*requests, strict=True)), use_tqdm=False)
        handles = [self.handles[name + parsed.compiled] for name in prompt.names]
        token = self.signed(parsed.name, ids, spans, handles, **stated)
        return {"prompt_token_ids": ids}, greedy(tokens, {KEY: token})

    def ask(self, requests: Sequence[tuple[LinkedPrompt, str]], tokens: int = 8) -> list[Any]:
        """(token ids, log-probabilities of them) per (prompt, method)."""
        given = [self.request(*each, tokens) for each in requests]
        outputs = self.llm.generate(*map(list, zip(*given, strict=True)), use_tqdm=False)
        names = [(parameters.extra_args or {}).get(KEY) for _, parameters in given]
        self.reports = [None if name is None else self.receiver.take(name_of(name)) for name in names]
        return [answer(output) for output in outputs]

    def leave(self, request: tuple[Any, Any], steps: int) -> None:
        """Somebody asks, and leaves after so many steps of the engine."""
        driver = self.llm.llm_engine
        driver.add_request("leaving", *request)
        for _ in range(steps):
            driver.step()
        driver.abort_request(["leaving"])
        while driver.has_unfinished_requests():
            driver.step()

    def reference(self, prompt: LinkedPrompt, method: str, tokens: int = 8) -> tuple[list[int], list[float]]:
        """What the library says."""
        return library_answer(self.model, self.documents, prompt, method, tokens)


def library_answer(
    model: Any, documents: dict[str, list[int]], prompt: LinkedPrompt, method: str, tokens: int = 8,
    front: Sequence[int] = FRONT,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """The library's greedy answer by the method of the same name: token ids and their log-probabilities."""
    logs = library_logs(model, documents, prompt, method, tokens, front)
    ids = [int(log.argmax()) for log in logs]
    return ids, [log[token].item() for log, token in zip(logs, ids, strict=True)]


def library_logs(
    model: Any, documents: dict[str, list[int]], prompt: LinkedPrompt, method: str, tokens: int = 8,
    front: Sequence[int] = FRONT,
) -> list[torch.Tensor]:  # fmt: skip
    """Log-probabilities of all tokens at each step of that answer."""
    prose = LinkMethod.parse(method).front == "prose"
    made = methods.create(method, model, **({"front": list(front)} if prose else {}))
    segments = [documents[name] for name in prompt.names]
    gaps = [list(gap) for gap in prompt.gaps]
    gaps += [[]] * (len(segments) - 1 - len(gaps))
    state = made.link(made.compile(segments), list(prompt.query), prefix_ids=list(prompt.prefix), gaps=gaps)
    _, logits = state.generate_with_logits(max_new_tokens=tokens, do_sample=False, eos_token_id=[], pad_token_id=0)
    return list(logits.float().log_softmax(-1))


def adapter(backbone: Any, folder: Path, **options: Any) -> LinkTokensForCausalLM:
    """Link tokens that no tokens are, on a saved backbone; saved to `folder`."""
    made = LinkTokensForCausalLM.from_backbone(backbone, **{"num_link_tokens": 5, **options})
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.front.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std())
    made.save_pretrained(folder)
    return made


PROMPTS = [
    LinkedPrompt("ABC"),
    LinkedPrompt("CAB", gaps=((30, 31), ())),
    LinkedPrompt("BB", prefix=()),  # the same document twice, and nothing in front
    LinkedPrompt("C", prefix=(), query=(5,)),  # exact
    LinkedPrompt("CBA", gaps=((40,), (41, 42, 43))),
    LinkedPrompt("AC", query=tuple(range(50, 90))),
]
# vLLM's CPU attention knows prefix sizes from 32 on
WIDE = {**BASE, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

LATENT = {**BASE, **MLA, "hidden_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
          "v_head_dim": 128, "q_lora_rank": None}  # fmt: skip
# what vLLM prefers on a CPU with AMX refuses float32. Its rotary kernel for CPUs takes the keys of one prefix to lie
# close together, which these don't, and turns few of them: such an engine is refused, in torch they are turned
LATENT_OPTIONS = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def plain_model(folder: Path, config: Any, std: float = 0.2) -> Any:
    """A random model, saved in `folder`, whose attention looks at things."""
    torch.manual_seed(0)
    made = tf.AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1 or name.endswith("proj.bias"):
            torch.nn.init.normal_(parameter, std=std)
    made.save_pretrained(folder)
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def plain_llama(folder: Path) -> Any:
    """A Llama with grouped heads."""
    return plain_model(folder, tf.LlamaConfig(**WIDE))


def check_nothing_is_left(scheduler: Any) -> None:
    """No block, request, link or job."""
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    assert not scheduler.requests
    connector = scheduler.connector
    left = connector.links, connector.jobs, connector._matched, connector._loads, connector.behind_seams
    assert not any(left)


@contextmanager
def linked_engine(
    model: Any, method: str = "naive", *, link_tokens: Path | None = None, kept: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[LinkedEngine]:  # fmt: skip
    """A model served with linking from where it was saved; or the backbone of an adapter saved at `link_tokens`.

    `kept`: options of the tiers below the pool.
    """
    parsed, backbone = LinkMethod.parse(method), model if link_tokens is None else model.backbone
    adapter = None if link_tokens is None else str(link_tokens)
    prose = FRONT if parsed.front == "prose" else []
    ours = engine_options(parsed, prose if adapter is None else front_for(parsed, "", adapter), adapter)
    with instance(pool_bytes=2**23, **(kept or {})) as place, engine(backbone.name_or_path, **ours, **options) as llm:
        known = three_documents(model.config.get_text_config().vocab_size)
        found = LinkedEngine(llm, model, place, known, parsed.front)
        try:
            yield found
        finally:
            found.receiver.close()


def largest_difference(one: Any, other: Any) -> float:
    """Of log-probabilities; infinite where the tokens differ."""
    (ids, logs), (other_ids, other_logs) = one, other
    if ids != other_ids:
        return float("inf")
    return max(abs(a - b) for a, b in zip(logs, other_logs, strict=True))
