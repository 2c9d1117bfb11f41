"""`comb bench serve`: requests, figures and report on canned records, and a small run against the real servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comb.bench.harness import BenchmarkReport
from comb.documents.document import Document
from comb_serving.bench.client import GIVE_UP, RequestRecord, Target
from comb_serving.bench.serve import ServeRun
from comb_serving.bench.servers import ServerPlan, models_of, plans, token_bytes
from comb_serving.bench.tables import (
    CACHED,
    COLD,
    SOAK,
    TOGETHER,
    growth,
    percentile,
    ratio,
    summarize,
    sustained,
    tables,
)
from comb_serving.bench.workload import COMB, PLAIN, Ask, ServeBenchOptions, Workload
from tests.helpers.bench_command import run_bench

OPTIONS = ServeBenchOptions(pool=11, documents=4, document_tokens="20-60", query_tokens=12)


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def workload() -> Workload:
    return Workload(OPTIONS, words)


def test_requests_follow_from_the_seed_and_the_phase(workload: Workload) -> None:
    again, other = Workload(OPTIONS, words), Workload(replace(OPTIONS, seed=1), words)
    asks = list(workload.drawn(300, "a"))
    assert asks == list(again.drawn(300, "a"))
    assert not {ask.query for ask in asks} & {ask.query for ask in workload.drawn(300, "b")}
    assert [ask.documents for ask in asks] != [ask.documents for ask in other.drawn(300, "a")]
    assert all(2 <= words(document.text or "") <= 60 for document in workload.pool)
    assert len({document.text for document in workload.pool}) == len({d.id for d in workload.pool}) == OPTIONS.pool
    assert all(len(set(ask.documents)) == OPTIONS.documents for ask in asks)
    first = [workload.pool.index(ask.documents[0]) for ask in asks]
    assert set(first) == set(range(OPTIONS.pool))  # any document may stand in front
    new = [set(ask.documents) - set(workload.pool) for ask in workload.drawn(20, "soak", new=1)]
    assert [len(each) for each in new] == [1] * 20
    assert len(set().union(*new)) == 20


def test_cold_requests_name_every_document_once_and_end_with_the_pool(workload: Workload) -> None:
    for wanted, expected in ((1, 3), (5, 5)):
        asks = workload.cold(wanted)
        named = [document for ask in asks for document in ask.documents]
        assert len(asks) == expected
        assert len(named) == len(set(named)) == expected * OPTIONS.documents
        assert set(named[-OPTIONS.pool :]) == set(workload.pool)


def test_clients_at_once_share_documents_in_orders_of_their_own(workload: Workload) -> None:
    repeats = workload.together(6, 2)
    for asks in repeats:
        assert len({frozenset(ask.documents) for ask in asks}) == 1
        assert len({ask.documents for ask in asks}) > 1
        assert len({ask.query for ask in asks}) == 6
    assert set(repeats[0][0].documents) != set(repeats[1][0].documents)


def test_arrivals_are_poisson_and_exactly_as_many_as_offered(workload: Workload) -> None:
    arrivals = workload.arrivals(50, 40)
    assert len(arrivals) == 2000
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] < arrivals[-1] < 40
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    # the gaps of a Poisson process are as spread as they are long; a metronome's aren't
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1, abs=0.1)
    assert len(workload.arrivals(0.01, 1)) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"documents": 12, "pool": 11}, "1 to 11 documents"),
        ({"document_tokens": "9-8"}, "shorter length first"),
        ({"document_tokens": "a few"}, "from-to like 256-512"),
    ],
)
def test_impossible_workloads_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeBenchOptions(**given)


ASK = Ask(3, (Document("one", id="d1"), Document("two", id="d2")), "which?")
LINKED = Target(COMB, "http://x", linked=True, tokens=3)


def event(*choices: Any, usage: Any = None, **more: Any) -> SimpleNamespace:
    """A chunk as OpenAI's client makes it."""
    made = [SimpleNamespace(delta=SimpleNamespace(role=choice["delta"].get("role"))) for choice in choices]
    return SimpleNamespace(choices=made, usage=usage and SimpleNamespace(**usage), **more)


def stream(ids: list[str], tokens: int = 3) -> list[tuple[dict[str, Any], float]]:
    documents = [{"id": name, "state": "hit" if name == "d1" else "encoded", "tokens": 7} for name in ids]
    return [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}], "comb": {"documents": documents}}, 1.4),
        ({"choices": [{"delta": {"content": ""}}]}, 1.5),
        ({"choices": [{"delta": {"content": "b"}}]}, 1.9),
        ({"choices": [], "usage": {"completion_tokens": tokens}}, 2.1),
    ]


def read(lines: list[tuple[dict[str, Any], float]], target: Target = LINKED, error: str = "") -> RequestRecord:
    chunks = [(event(*line["choices"], **{k: v for k, v in line.items() if k != "choices"}), at) for line, at in lines]
    return target.record("cached 1", ASK, chunks, due=1.0, sent=1.1, now=2.5, error=error)


def test_a_stream_is_timed_from_arrival_to_its_first_token() -> None:
    record = read(stream(["d1", "d2"]))
    assert record.error == ""
    assert (record.ttft_s, record.total_s, record.late_s) == pytest.approx((0.5, 1.5, 0.1))
    assert (record.hits, record.encoded, record.document_tokens) == (1, 1, 14)
    lines = stream(["d1", "d2"])
    lines[0][0]["comb"]["documents"][1]["state"] = "compiled"  # by a plain model itself
    assert read(lines).encoded == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (stream(["d2", "d1"]), "names the documents"),
        (stream([]), "names the documents"),
        (stream(["d1", "d2"], tokens=2), "2 tokens instead of 3"),
        (stream(["d1", "d2"])[:-1], "broke off"),
    ],
)
def test_answers_that_arent_whole_or_over_other_documents_have_failed(lines: Any, message: str) -> None:
    assert message in read(lines).error
    assert read(lines, error="no room").error == "no room"
    plain = read(stream([]), Target(PLAIN, "http://x", linked=False, tokens=3))
    assert plain.error == ""  # it has no report


def test_both_servers_are_asked_the_same_about_the_same_texts() -> None:
    linked, plain = (Target("x", "http://x", linked=on, tokens=3).body(ASK) for on in (True, False))
    assert linked["extra_body"].pop("documents") == [{"id": "d1", "text": "one"}, {"id": "d2", "text": "two"}]
    assert linked.pop("messages") == [{"role": "user", "content": "which?"}]
    assert plain.pop("messages") == [{"role": "user", "content": "one\ntwo\nwhich?"}]
    assert linked == plain
    assert plain["extra_body"]["ignore_eos"] is True


async def serving(handle: Callable[[int], Any], work: Callable[[str], Any]) -> Any:
    """Runs `work` on the address of a server; `handle` gets the number of each request and gives its lines."""
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    count = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count, number = count + 1, count
        lines = await handle(number)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for line, _ in lines:
            await response.write(f"data: {json.dumps(line)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        return await asyncio.to_thread(work, f"http://127.0.0.1:{server.port}")


def test_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("openai")

    asks, arrivals = [ASK] * 8, [0.02 * number for number in range(8)]
    waiting, most, all_there = 0, 0, asyncio.Event()

    async def slow(_: int) -> Any:
        """Answers when all eight wait at the same time, and the closed loop's later ones after 0.3 s."""
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if waiting == len(asks):
            all_there.set()
        await all_there.wait()
        await asyncio.sleep(0.3)
        waiting -= 1
        return stream(["d1", "d2"])

    def work(url: str) -> Any:
        seen: list[RequestRecord] = []
        target = Target(COMB, url, linked=True, tokens=3, timeout_s=30, on_record=seen.append)
        opened = target.run_open("x", asks, arrivals)
        assert (len(seen), most) == (8, 8)
        return opened, target.run_closed("x", asks[:3], 1)

    opened, closed = asyncio.run(serving(slow, work))
    assert all(record.error == "" for record in [*opened, *closed])
    assert sorted(record.due_s for record in opened) == pytest.approx(arrivals)
    # a closed loop waits for its answer, so its third request isn't due before two have been answered
    assert sorted(record.due_s for record in closed)[2] >= 0.55


def test_failures_are_records_and_a_dead_server_ends_the_phase() -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("openai")

    async def some(number: int) -> Any:
        if number == 1:
            await asyncio.Event().wait()
        return stream(["d1", "d2"] if number != 2 else ["d1"])

    def work(url: str) -> Any:
        return Target(COMB, url, linked=True, tokens=3, timeout_s=3).run_closed("x", [ASK] * 4, 1)

    errors = [record.error for record in asyncio.run(serving(some, work))]
    assert errors[0] == errors[3] == ""
    assert "no whole answer within 3 s" in errors[1]
    assert "names the documents" in errors[2]
    sent: list[RequestRecord] = []
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # taken, and nobody listens there
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        gone = Target(COMB, address, linked=True, timeout_s=1, on_record=sent.append)
        with pytest.raises(RuntimeError, match=f"{GIVE_UP} requests in a row"):
            gone.run_closed("x", [ASK] * 50, 1)
    assert len(sent) == GIVE_UP


def record(server: str, phase: str, number: int, ttft: float, **more: Any) -> RequestRecord:
    values = {"due_s": float(number), "total_s": ttft + 1.5, "tokens": 16, **more}
    return RequestRecord(server, phase, number, **{"ttft_s": ttft, **values})


def test_figures_of_a_phase() -> None:
    records = [record(COMB, "x", number, 0.1 * (number + 1), hits=8) for number in range(10)]
    found = summarize([*records, record(COMB, "x", 10, 99, error="gone")], COMB, "x", clients=2)
    assert [found[name] for name in ("n", "errors", "hits")] == [10, 1, 80]
    assert (found["ttft_p50"], found["ttft_p90"]) == pytest.approx((0.55, 0.91))
    assert found["throughput"] == pytest.approx(10 / 11.5)  # the failed one is none, though it was the last
    assert summarize(records, COMB, "x", rate=1.0, window_s=20)["throughput"] == pytest.approx(0.5)
    nothing = summarize([], COMB, "x")
    assert (nothing["n"], nothing["ttft_p50"], nothing["throughput"]) == (0, None, None)
    assert percentile([], 50) is None


def test_ratios_have_an_interval_that_holds_the_truth_and_shrinks() -> None:
    few, many = ([1 + 0.01 * (number % 50) for number in range(count)] for count in (10, 1000))
    for sample in (few, many):
        found = ratio([8 * value for value in sample], sample)
        assert found is not None
        assert found.low <= 8 <= found.high
        assert found.median == pytest.approx(8)
    narrow, wide = ratio(many, many), ratio(few, few)
    assert narrow is not None
    assert wide is not None
    assert narrow.high - narrow.low < wide.high - wide.low
    assert ratio([], few) is None


def test_the_sustained_rate_keeps_the_slo_without_a_failure() -> None:
    def at(rate: float, p90: float, errors: int = 0, server: str = COMB) -> dict[str, Any]:
        return {"server": server, "rate": rate, "ttft_p90": p90, "errors": errors, "n": 9}

    results = [at(1, 0.2), at(2, 0.9), at(3, 1.1), at(4, 0.5, errors=1), at(9, 0.1, server=PLAIN)]
    assert sustained(results, COMB, 1.0) == 2
    assert sustained(results, COMB, 0.1) is None


def test_memory_that_grows_is_told_from_memory_that_has_grown() -> None:
    def samples(grow: Callable[[int], float]) -> list[dict[str, Any]]:
        return [{"requests": number, "parts": {"a": 10, "b": int(1e9 + grow(number))}} for number in range(0, 400, 5)]

    assert growth(samples(lambda number: 1000 * number)) == pytest.approx(1000, rel=1e-6)
    assert growth(samples(lambda number: 1000 * min(number, 100))) == pytest.approx(0, abs=1e-6)
    assert growth(samples(lambda number: 0)[:2]) is None
    growing = samples(lambda number: 1000 * number)
    assert (growth(growing, "a"), growth(growing, "b")) == pytest.approx((0, 1000), abs=1e-3)


def test_bytes_per_token_are_read_from_the_servers_own_figures() -> None:
    pytest.importorskip("prometheus_client")
    comb, plain = ServerPlan(COMB, (), 4096, pool_bytes=1), ServerPlan(PLAIN, (), 4096)
    page = "vllm:x 5\ncomb_pool_bytes 1e9\ncomb_pool_used_bytes {}\ncomb_document_evictions_total {}\n"
    before, after, evicted = (page.format(*values) for values in ((100, 0), (4100, 0), (9, 3)))
    assert token_bytes(comb, before, after, 40) == 100
    assert token_bytes(comb, before, evicted, 40) is None
    labelled = ['comb:pool_used_bytes{tier="device"} 7.0', 'comb:pool_used_bytes{tier="host"} 40.0']
    assert token_bytes(comb, labelled[0], "\n".join(labelled), 4) == 10
    size = 'vllm:cache_config_info{a="1",num_gpu_blocks="64",block_size="16"} 1.0'
    assert token_bytes(plain, "", size, 0) == 4
    assert token_bytes(plain, "", "vllm:cache_config_info{} 1.0", 0) is None


def test_both_servers_get_the_same_memory_and_options() -> None:
    options = replace(OPTIONS, cache_bytes="100", pool_bytes="30", vllm="--dtype float32")
    plain, comb = plans(options, "back", ["adapter"], positions=99)
    assert plain.kv_bytes == comb.kv_bytes + comb.pool_bytes == 100
    shared = plain.command[plain.command.index("--served-model-name") :]
    assert comb.command[-len(shared) :] == shared
    assert shared[-2:] == ("--dtype", "float32")
    assert plain.environment == {"VLLM_PLUGINS": ""}
    with pytest.raises(ValueError, match="part of --cache-bytes"):
        plans(replace(options, pool_bytes="100"), "back", ["adapter"], positions=99)


def test_a_plain_model_is_served_with_its_method(tmp_path: Path) -> None:
    models = models_of(replace(OPTIONS, checkpoint="nano", method="naive"), tmp_path)
    assert models.backbone == models.adapter
    assert models.name == "nano, naive"
    assert models_of(replace(OPTIONS, checkpoint="nano"), tmp_path).name == "nano, primed"
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="--method is for a plain model"):
        models_of(replace(OPTIONS, method="naive"), tmp_path)


def outcome() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and facts of canned records in which comb's first token comes ten times sooner."""
    rows: list[dict[str, Any]] = []
    memory = []
    for server, ttft in ((PLAIN, 1.0), (COMB, 0.1)):
        for phase, clients in ((COLD, 1), (f"{CACHED} 1", 1), (f"{CACHED} 4", 4), (TOGETHER, 16)):
            records = [record(server, phase, number, ttft * (1 + 0.01 * number)) for number in range(8)]
            rows.append(summarize(records, server, phase, clients=clients))
            if server == COMB:
                seconds = [each.ttft_s for each in records]
                rows[-1]["ratio"] = ratio([10 * each for each in seconds], seconds)
        for rate in (1.0, 4.0):
            at = {"server": server, "phase": f"{rate:g}/s", "rate": rate, "n": 0, "errors": 0}
            if server == PLAIN and rate > 1:
                rows.append({**at, "refused": "not run: too much"})
                continue
            records = [record(server, f"{rate:g}/s", number, ttft, due_s=number / rate) for number in range(8)]
            rows.append(summarize(records, server, f"{rate:g}/s", rate=rate, window_s=8 / rate))
        memory += [{"server": server, "phase": phase, "requests": 8, "parts": {"worker": 2**30}}
                   for phase in (COLD, TOGETHER)]  # fmt: skip
    memory += [{"server": COMB, "phase": SOAK, "requests": n, "parts": {"worker": 2**30, "encoder": 2**28 + n * 2**20}}
               for n in range(10)]  # fmt: skip
    facts = {"slo_s": 2.0, "ready_s": {PLAIN: 20.0, COMB: 25.0}, "first_answer_s": {},
             "token_bytes": {PLAIN: 4000.0, COMB: 1000.0}, "memory": memory}  # fmt: skip
    return rows, facts


def test_tables_say_the_outcome_what_was_not_run_and_a_pool_too_small() -> None:
    rows, facts = outcome()
    made = tables(rows, facts)
    lines = {line[0]: line for line in made[0].lines()}
    assert float(lines["TTFT ms, cached 1"][3].split()[0]) == pytest.approx(10, rel=0.01)
    assert lines["TTFT ms, cold"][1] == "1035"
    assert lines["highest rate with p90 within 2000 ms"][1:] == ("1.00", "4.00", "4.0")
    assert lines["K/V bytes per document token"][3] == "25.0%"
    text = "\n".join(table.markdown() for table in made)
    assert "4/s at server plain refused: not run: too much" in text
    assert "encoder +1000.0." in text
    assert "too small" not in text
    rows.append(summarize([record(COMB, "x", 1, 1.0, encoded=5)], COMB, f"{CACHED} 8", clients=8))
    assert any("5 documents had left the pool" in remark for table in tables(rows, facts) for remark in table.remarks)
    assert tables([], {}) == []


def test_failures_are_told() -> None:
    report = BenchmarkReport("serve", OPTIONS, list, list)
    run = ServeRun(OPTIONS, report, Workload(OPTIONS, words), None)
    assert run.wrong() == []
    run.records += [record(COMB, "x", number, 1.0, error="status 500") for number in range(5)]
    assert run.wrong(3) == [*(f"comb, x, request {number}: status 500" for number in range(3)), "2 more"]


@pytest.mark.vllm
@pytest.mark.slow
def test_the_command_against_real_servers(plugin: None, tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    arguments = [
        "bench", "serve", "--layers", "4", "--encoder-layers", "1", "--hidden", "64", "--heads", "2", "--kv-heads", "1",
        "--pool", "6", "--documents", "3", "--document-tokens", "24-48", "--query-tokens", "12", "--max-tokens", "4",
        "--requests", "6", "--cold", "3", "--clients", "1,3", "--together", "3", "--rates", "4", "--seconds", "2",
        "--soak", "20", "--dtype", "float32", "--cache-bytes", "32MiB", "--pool-bytes", "4MiB", "--out", str(out),
    ]  # fmt: skip
    found = run_bench(out, arguments)
    results = {(result["server"], result["phase"]): result for result in found["results"]}
    assert all(result["errors"] == 0 for result in results.values())
    cold, cached = results[COMB, COLD], results[COMB, f"{CACHED} 1"]
    assert (cold["hits"], cold["encoded"]) == (0, 9)
    assert (cached["hits"], cached["encoded"]) == (18, 0)
    assert results[COMB, SOAK]["n"] == 20
    assert results[COMB, SOAK]["encoded"] >= 20
    # 4 layers, 1 of them read: a quarter, and what blocks of 16 tokens leave empty
    assert 0.25 <= found["token_bytes"][COMB] / found["token_bytes"][PLAIN] < 0.4
    assert all(found[name][server] > 0 for name in ("ready_s", "first_answer_s") for server in (PLAIN, COMB))
    lines = out.with_suffix(".records.jsonl").read_text().splitlines()
    assert len(lines) == sum(result["n"] for result in results.values())
    assert "comb serve against plain vLLM" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").exists()
