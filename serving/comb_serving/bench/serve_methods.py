"""`comb bench serve-methods`: a plain model behind `comb serve`, method by method, against plain vLLM.

All servers run at once with the same options; every request goes to all of them in turn, in an order that rotates, so
that a slow moment of the machine meets all. One request at a time: what is compared is the work, not the queue. An
adapter is one more server, its encoder's time and memory counted.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from comb.backbones.loading import resolve_name
from comb.backbones.tokenizer import load_tokenizer
from comb.bench.harness import BenchmarkReport, Row, benchmark
from comb.documents.document import Document
from comb.evaluation.plot import Bars, Panel
from comb.evaluation.table import Column, TextTable, fixed, ms, spread
from comb_serving.bench.figures import percentile, ratio
from comb_serving.bench.options import WorkloadOptions
from comb_serving.bench.servers import MODEL, PLAIN, MeasuredServer, plans
from comb_serving.bench.workload import Workload
from comb_serving.linking.methods import FULL, LinkMethod

ADAPTER = "comb"  # the method that an adapter is
WORKLOADS = ("cold", "shuffled", "same order", "system prompt", "multi-turn", "half without")
TURNS, TOP = 3, 20
_FLOOR = 1e-6  # of a probability that the server hasn't named


@dataclass(frozen=True)
class ServeMethodsOptions(WorkloadOptions):
    """Which model and methods, and in which situations."""

    model: Annotated[str, typer.Option(help="any plain model that vLLM serves")] = "smollm2-135m"
    methods: Annotated[str, typer.Option(help="that link documents, compiled alike")] = "legolink:16,naive"
    adapter: Annotated[str | None, typer.Option(help="trained on the model: one more server to compare with")] = None
    workloads: Annotated[str, typer.Option(help=f"of {', '.join(WORKLOADS)}")] = ",".join(WORKLOADS)
    requests: Annotated[int, typer.Option(min=1, help="per workload and method")] = 8
    system_tokens: Annotated[int, typer.Option(min=1, help="of the shared system prompt, about so many")] = 320
    pool: Annotated[int, typer.Option(min=1, help="documents that come back")] = 16
    documents: Annotated[int, typer.Option(min=1, help="per request")] = 6
    document_tokens: Annotated[str, typer.Option(help="length of a document, from-to")] = "128-256"

    @property
    def positions(self) -> int:
        """Tokens of the longest conversation."""
        turns = TURNS * (2 * self.query_tokens + self.max_tokens + 32)
        longest: int = super().positions
        return longest + 2 * self.system_tokens + turns


@dataclass(frozen=True)
class MethodQuestion:
    """One request; `documents` None asks without any."""

    documents: tuple[Document, ...] | None
    messages: tuple[dict[str, str], ...]


@dataclass
class MethodAnswer:
    """What came of one request.

    Times in seconds; `likely`: of the first token, log-probabilities by its text; `cpu_s`: of the server meanwhile.
    """

    workload: str
    method: str
    number: int
    ttft_s: float = 0.0
    total_s: float = 0.0
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    likely: dict[str, float] = field(default_factory=dict)
    computed: int = 0
    cpu_s: float = 0.0


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One row per workload and method."""
    columns = (
        Column("workload", "workload", names=True), Column("method", "method", names=True), Column("n", "n"),
        Column("TTFT ms", "ttft", ms), Column("times sooner", "sooner", spread), Column("TPOT ms", "tpot", ms),
        Column("answers/s", "throughput", fixed(2)), Column("computed", "computed", fixed(0)),
        Column("agreed", "agreed", fixed(2)), Column("KL", "kl", fixed(3)), Column("CPU s", "cpu", fixed(2)),
        Column("MiB", "memory", fixed(0)),
    )  # fmt: skip
    remarks = [
        "One request at a time, to plain vLLM (with its prefix cache) and comb serve in turn. times sooner: ratio of "
        "the medians of TTFT, 95% bootstrap interval. computed: tokens of the prompt that passed through the model, "
        "documents compiled for it included. agreed: share of the greedy answer until it parts from plain vLLM's; KL: "
        f"of the first token from plain vLLM's, over its {TOP} likeliest, in nats. CPU s: of all processes of the "
        "server per request, an encoder's too. MiB: what they have in memory behind the workload."
    ]
    return [TextTable("A plain model in the server", columns, rows, remarks)]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Time to first token."""
    return [Bars(rows, lambda row: f"{row['workload']}, {row['method']}", lambda row: {"median": row["ttft"]},
                 "time to first token, ms")]  # fmt: skip


@benchmark("serve-methods", tables, panels)
def serve_methods(options: ServeMethodsOptions, report: BenchmarkReport) -> None:
    """Methods without training (or an adapter) behind `comb serve` against plain vLLM: TTFT, TPOT, agreement, CPU."""
    methods = [LinkMethod.parse(each).name for each in options.methods.split(",")]
    workloads = [each.strip() for each in options.workloads.split(",")]
    if unknown := sorted(set(workloads) - set(WORKLOADS)):
        raise ValueError(f"--workloads: {unknown[0]!r} is none of {', '.join(WORKLOADS)}")
    place = resolve_name(options.model)
    tokenizer = load_tokenizer(place)
    workload = Workload(options, lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    served, more = [place, "--method", methods[0]], ["--enable-prompt-tokens-details", "--dtype", options.dtype]
    report.heading = f"{options.model}, {options.dtype}: {options.documents} documents of {options.document_tokens}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comb-bench-")))
        planned = plans(options, place, served, more)
        if options.adapter is not None:
            trained = [resolve_name(options.adapter), "--backbone", place]
            planned.append(plans(options, place, trained, more)[1])
        servers = [
            stack.enter_context(MeasuredServer(plan, folder / f"{number}.log")) for number, plan in enumerate(planned)
        ]
        plain, comb, *others = servers
        report.facts |= {"servers": [server.plan.command for server in servers], "records": []}
        arms = {
            PLAIN: plain,
            **dict.fromkeys([FULL, *methods], comb),
            **dict.fromkeys([ADAPTER] * len(others), *others),
        }
        run = MethodsRun(options, workload, arms)
        list(run.answers("warm-up", run.questions("shuffled", 1, "warm-up")))
        for name in workloads:
            found: list[MethodAnswer] = []
            for answered in run.workload_answers(name):
                found.append(answered)
                report.facts["records"].append(
                    {key: value for key, value in asdict(answered).items() if key != "likely"}
                )
            for row in summarized(name, found, run.arms):
                memory = run.servers[row["method"]].resident()
                report.add({**row, "memory": sum(memory.values()) / 2**20, "resident": memory})
            report.say(f"{name}: {len(found)} answers")


class MethodsRun:
    """Asks `arms`, names of methods (or plain vLLM) with the server that has each."""

    def __init__(self, options: ServeMethodsOptions, workload: Workload, servers: dict[str, MeasuredServer]) -> None:
        from openai import OpenAI

        self.options, self.workload, self.servers, self.arms = options, workload, servers, list(servers)
        self._clients = {
            arm: OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600.0)
            for arm, server in servers.items()
        }
        self._rotation = itertools.count()

    def workload_answers(self, name: str) -> Iterator[MethodAnswer]:
        """Every request of a workload to every arm."""
        count = self.options.requests
        if name == "cold":  # documents of its own for each arm: what one compiles, another would find
            for number in range(count):
                for place, arm in self._in_turn():
                    (question,) = self.questions("cold", 1, f"cold {number}.{place}", new=self.options.documents)
                    yield self._ask(name, arm, number, question)
        elif name == "multi-turn":
            yield from self._conversations(name, -(-count // TURNS))
        else:
            # as they are after a while: every document has been seen, and in this order where there is one
            list(self.answers(name, self.questions(name, 1, f"{name} before")))
            yield from self.answers(name, self.questions(name, count, name))

    def answers(self, name: str, questions: Sequence[MethodQuestion]) -> Iterator[MethodAnswer]:
        """Each question to each arm."""
        for number, question in enumerate(questions):
            for _, arm in self._in_turn():
                yield self._ask(name, arm, number, question)

    def questions(self, name: str, count: int, draw: str, *, new: int = 0) -> list[MethodQuestion]:
        """Requests of a workload; `new` documents of each have never been seen."""
        asks, made = list(self.workload.drawn(count, draw, new=new)), []
        fixed_order = next(self.workload.drawn(1, "same order")).documents
        for number, ask in enumerate(asks):
            documents: tuple[Document, ...] | None = fixed_order if name == "same order" else ask.documents
            messages = [{"role": "user", "content": ask.query}]
            if name == "system prompt":
                messages.insert(
                    0, {"role": "system", "content": self.workload.text("system", self.options.system_tokens)}
                )
            if name == "half without" and number % 2:
                documents = None
            made.append(MethodQuestion(documents, tuple(messages)))
        return made

    def _conversations(self, name: str, count: int) -> Iterator[MethodAnswer]:
        """Questions one after the other about the same documents; each arm goes on from its own answers."""
        for number in range(count):
            turns = self.questions(name, TURNS, f"{name} {number}")
            history: dict[str, tuple[dict[str, str], ...]] = dict.fromkeys(self.arms, ())
            for turn, question in enumerate(turns):
                for _, arm in self._in_turn():
                    messages = (*history[arm], *question.messages)
                    asked = replace(question, documents=turns[0].documents, messages=messages)
                    answered = self._ask(name, arm, number * TURNS + turn, asked)
                    history[arm] = (*messages, {"role": "assistant", "content": answered.text})
                    yield answered

    def _in_turn(self) -> list[tuple[int, str]]:
        places = list(enumerate(self.arms))
        by = next(self._rotation) % len(places)
        return [*places[by:], *places[:by]]

    def _ask(self, workload: str, arm: str, number: int, question: MethodQuestion) -> MethodAnswer:
        server = self.servers[arm]
        found, busy, start = MethodAnswer(workload, arm, number), server.cpu_seconds(), time.perf_counter()
        usage, report = None, None
        for chunk in self._clients[arm].chat.completions.create(**self._body(arm, question)):
            report = report or getattr(chunk, "comb", None)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                for token in (choice.logprobs.content or ()) if choice.logprobs else ():
                    if not found.tokens:
                        found.ttft_s = time.perf_counter() - start
                        found.likely = {each.token: each.logprob for each in token.top_logprobs}
                    found.tokens.append(token.token)
                found.text += choice.delta.content or ""
        found.total_s = time.perf_counter() - start
        found.cpu_s = server.cpu_seconds() - busy
        if len(found.tokens) != self.options.max_tokens or usage is None:
            raise RuntimeError(f"{arm}, {workload}: {len(found.tokens)} tokens instead of {self.options.max_tokens}")
        details = usage.prompt_tokens_details
        found.computed = usage.prompt_tokens - ((details.cached_tokens or 0) if details else 0)
        if report is not None and "computed_tokens" in report:
            fresh = sum(each["tokens"] for each in report["documents"] if each["state"] == "compiled")
            found.computed = report["computed_tokens"] + fresh
        return found

    def _body(self, arm: str, question: MethodQuestion) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [dict(each) for each in question.messages]
        extra: dict[str, Any] = {"ignore_eos": True}
        documents = question.documents or ()
        if arm == PLAIN:  # where the front puts them: at the start of the first message of the user's
            first = next(each for each in messages if each["role"] == "user")
            first["content"] = "\n".join([*(str(each.text) for each in documents), first["content"]])
        elif documents:
            extra |= {"documents": [{"id": each.id, "text": each.text} for each in documents]}
            extra |= {} if arm == ADAPTER else {"comb": {"method": arm}}
        return {
            "model": MODEL, "max_tokens": self.options.max_tokens, "temperature": 0, "stream": True, "logprobs": True,
            "top_logprobs": TOP, "stream_options": {"include_usage": True}, "messages": messages, "extra_body": extra,
        }  # fmt: skip


def summarized(workload: str, found: Sequence[MethodAnswer], arms: Sequence[str]) -> list[Row]:
    """A row for each arm. Of conversations only the first turns are compared, where all were asked the same."""
    plain = {each.number: each for each in found if each.method == PLAIN}
    rows: list[Row] = []
    for arm in arms:
        own = [each for each in found if each.method == arm]
        same = [each for each in own if workload != "multi-turn" or each.number % TURNS == 0]
        compared = [(plain[each.number], each) for each in same if workload != "cold"]
        rows.append({
            "workload": workload, "method": arm, "n": len(own),
            "ttft": percentile([each.ttft_s for each in own], 50),
            "sooner": ratio([each.ttft_s for each in plain.values()], [each.ttft_s for each in own]),
            "tpot": mean((each.total_s - each.ttft_s) / (len(each.tokens) - 1) for each in own),
            "throughput": len(own) / sum(each.total_s for each in own),
            "computed": mean(each.computed for each in own),
            "agreed": mean(agreement(*pair) for pair in compared) if compared else None,
            "kl": mean(divergence(*pair) for pair in compared) if compared else None,
            "cpu": mean(each.cpu_s for each in own),
        })  # fmt: skip
    return rows


def agreement(plain: MethodAnswer, other: MethodAnswer) -> float:
    """Share of the answer's tokens until it parts from plain vLLM's."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(plain.tokens, other.tokens, strict=True))
    return sum(1 for _ in equal) / len(plain.tokens)


def divergence(plain: MethodAnswer, other: MethodAnswer) -> float:
    """KL(plain || other) of the first token over the tokens that plain vLLM has named, the rest as one."""
    terms = [
        (math.exp(log), math.exp(other.likely.get(token, math.log(_FLOOR)))) for token, log in plain.likely.items()
    ]
    terms.append(tuple(max(_FLOOR, 1 - sum(side)) for side in zip(*terms, strict=True)))
    return sum(p * math.log(p / q) for p, q in terms)
