"""Documents beside LoRA, computed with their request's own or with none, against the library over merged models."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comb.documents.catalog import KeyedSegment
from comb.documents.found import SegmentFinder, with_segments
from comb_serving.encoding.compiler import Loras
from comb_training.nano import CHECKPOINT
from tests.helpers.chunks import passage
from tests.helpers.engines import SMALL
from tests.helpers.loras import RANK, make_lora
from tests.helpers.plain import PlainLibrary, logs
from tests.helpers.processes import wait_for
from tests.helpers.served import logprobs as served_logprobs
from tests.helpers.served import serve
from tests.helpers.served import states as served_states
from tests.helpers.stores import check_manager

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from comb_serving.offline import LLM

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

QUESTION = [{"role": "user", "content": "Where is Ada?"}]
TEXTS = ["Ada went to the garden.", "Bob is in the kitchen.", "Then Ada took the red ball."]
NAMES = ["", "warm", "cold", "dry", "wet"]
CLOSE = 1e-4
METHOD = "focus:0.3"
RULES = [METHOD, "legolink:4", "naive"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PlainLibrary]:
    """Of the plain model, and of each of four LoRAs merged into it."""
    folder = tmp_path_factory.mktemp("loras")
    found = {name: PlainLibrary(make_lora(folder / name, seed)) for seed, name in enumerate(NAMES) if name}
    return {"": PlainLibrary(), **found}


def lora(libraries: dict[str, PlainLibrary], name: str) -> Any:
    return LoRARequest(name, NAMES.index(name), str(Path(libraries[name].folder).parent)) if name else None


@pytest.fixture(scope="module", params=["own", "shared"])
def llm(plugin: None, request: pytest.FixtureRequest) -> Iterator[LLM]:
    # on a CPU vLLM gives requests without a LoRA the one in the last place: until the last test, two have one. A step
    # has room for few seams, so that requests of several LoRAs wait for theirs
    options = {**SMALL, "enable_lora": True, "max_loras": 3, "max_cpu_loras": 4, "max_lora_rank": 2 * RANK,
               "max_num_batched_tokens": 96}  # fmt: skip
    with LLM(CHECKPOINT, method=METHOD, pool_bytes=2**19, pool_block=4, lora_documents=request.param,
             **options) as found:  # fmt: skip
        yield found


def ask(llm: LLM, libraries: dict[str, PlainLibrary], names: list[str], texts: Any = TEXTS, **more: Any) -> list[Any]:
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    loras = [lora(libraries, name) for name in names]
    return llm.chat([QUESTION] * len(names), parameters, documents=[texts] * len(names), use_tqdm=False,
                    lora_request=loras, **more)  # fmt: skip


def expected(libraries: dict[str, PlainLibrary], name: str, rule: str, *, shared: bool, texts: Any = TEXTS) -> Any:
    """What the library says with a LoRA merged, over documents compiled with it or without."""
    library = libraries[name]
    return library.logs(library.chat(QUESTION, texts), rule, 8, libraries[""] if shared else None)


@pytest.mark.parametrize("rule", RULES)
def test_answers_are_the_librarys_over_the_merged_model(llm: LLM, libraries: Any, rule: str) -> None:
    shared = llm.preprocessor.share_loras
    names = ["warm", "", "cold", "warm"]
    answers = ask(llm, libraries, names, method=rule)
    for name, answer in zip(names, answers, strict=True):
        assert logs(answer) == pytest.approx(expected(libraries, name, rule, shared=shared), abs=CLOSE)
        assert answer.comb.get("lora") == ("shared" if shared and name else None)
        if name:  # the controls
            assert logs(answer) != pytest.approx(expected(libraries, "", rule, shared=False), abs=100 * CLOSE)
            assert logs(answer) != pytest.approx(expected(libraries, name, rule, shared=not shared), abs=10 * CLOSE)
    check_manager(llm.preprocessor.manager)


def test_documents_of_another_lora_are_others(llm: LLM, libraries: Any) -> None:
    texts = ["The lamp stands in the hall.", "Nobody saw the blue cat."]
    states = [
        [document["state"] for document in answer.comb["documents"]]
        for name in ("warm", "cold", "warm", "")
        for answer in ask(llm, libraries, [name], texts)
    ]
    made, hit = ["compiled"] * 2, ["hit"] * 2
    assert states == ([made, hit, hit, hit] if llm.preprocessor.share_loras else [made, made, hit, made])


def test_files_that_have_changed_are_another_lora(llm: LLM, libraries: Any, tmp_path: Path) -> None:
    make_lora(tmp_path / "dry", seed=99)
    segment = KeyedSegment("a", (1, 2), "key")
    loras = Loras({"dry": lora(libraries, "dry")})

    def key() -> str:
        (found,) = asyncio.run(loras.compiled_with("dry", [segment]))
        return found.key

    first = key()
    assert first == key() != segment.key
    loras.add([LoRARequest("dry", 5, str(tmp_path / "dry"))])
    assert key() != first
    with pytest.raises(ValueError, match="holds none of adapter_config"):
        loras.add([LoRARequest("dry", 6, str(tmp_path / "nothing"))])


def test_a_lora_that_vllm_would_take_for_another_is_refused(llm: LLM, libraries: Any, tmp_path: Path) -> None:
    """By its number, its name, or its files, which vLLM may have loaded before they changed, and may load again."""
    for name, seed in (("one", 97), ("other", 98)):
        make_lora(tmp_path / name, seed)
    one, other = (LoRARequest("hot", number, str(tmp_path / name)) for number, name in ((10, "one"), (11, "other")))
    llm.generate(["Where is Ada?"], use_tqdm=False, lora_request=one)  # without documents, too
    with pytest.raises(ValueError, match="two LoRAs of one name"):
        llm.generate(["Where?"] * 2, documents=[TEXTS] * 2, use_tqdm=False, lora_request=[one, other])
    with pytest.raises(ValueError, match="lora_int_id 10 is that of"):
        llm.generate("Where?", documents=TEXTS, lora_request=LoRARequest("damp", 10, str(tmp_path / "other")))
    for file in (tmp_path / "other").glob("adapter_*"):
        (tmp_path / "one" / file.name).write_bytes(file.read_bytes())
    for again in (one, LoRARequest("hot", 12, one.lora_path), LoRARequest("hot", 10, one.lora_path, load_inplace=True)):
        with pytest.raises(ValueError, match="have changed since they were read first"):
            llm.generate("Where?", documents=TEXTS, lora_request=again)


def test_a_step_has_no_more_loras_than_vllm_has_places_for(llm: LLM, libraries: Any) -> None:
    """Seams of requests that wait for them count too; more would end the engine."""
    names = ["warm", "cold", "dry", "wet", "dry", "cold", "warm", "wet"]
    scheduler, shared = llm.llm_engine.engine_core.engine_core.scheduler, llm.preprocessor.share_loras
    steps, add_seams = [], scheduler._add_seams

    def counted(output: Any, tokens: int) -> None:
        present = (scheduler.requests[name].lora_request for name in output.num_scheduled_tokens)
        before = {each.lora_int_id for each in present if each is not None}
        add_seams(output, tokens)
        rows = {row.lora_request.lora_int_id for row in output.scheduled_new_reqs if row.lora_request is not None}
        steps.append((before, rows))

    scheduler._add_seams = counted
    for name, answer in zip(names, ask(llm, libraries, names, method=METHOD), strict=True):
        assert logs(answer) == pytest.approx(expected(libraries, name, METHOD, shared=shared), abs=CLOSE)
    assert all(len(before | rows) <= 3 for before, rows in steps)
    assert any(rows - before for before, rows in steps), "no seams waited: nothing was tried"


@pytest.mark.slow
def test_requests_name_their_lora_over_http(plugin: None, libraries: Any, tmp_path: Path) -> None:
    """Documents that are sent, registered, and found in a prompt that names none."""
    loras = [f"{name}={lora(libraries, name).lora_path}" for name in ("warm", "cold")]
    options = ["--method", "legolink:4", "--comb-segments", "auto", "--comb-segment-tokens", "12", "--enable-lora",
               "--max-loras", "3", "--max-lora-rank", "8", "--lora-modules", *loras]  # fmt: skip
    names = ("warm", "cold", "nano")
    with serve(CHECKPOINT, tmp_path / "s", *options) as server:
        assert server.request("POST", "/v1/documents", {"id": "ball", "text": TEXTS[2]})[0] == 200
        for state in ("compiled", "hit"):
            for name in names:
                answer = server.chat([*TEXTS[:2], {"id": "ball"}], model=name, max_tokens=8, ignore_eos=True)
                made = expected(libraries, name.replace("nano", ""), "legolink:4", shared=False)
                assert served_logprobs(answer) == pytest.approx(made, abs=CLOSE)
                assert served_states(answer)[:2] == [state if state == "compiled" else "pool"] * 2
        assert server.request("DELETE", "/v1/documents/ball")[0] == 200
        assert server.request("POST", "/v1/documents", {"id": "ball", "text": TEXTS[2]})[0] == 200
        for name in names[:2]:  # deleted, it is gone with every LoRA
            assert served_states(server.chat([{"id": "ball"}], model=name, max_tokens=1)) == ["compiled"]
        draw = random.Random(5)
        chunks = [passage(draw, 24) for _ in range(3)]

        def found(name: str, order: list[int]) -> Any:
            passages = "\n".join(f"Passage {n}: {chunks[at]}" for n, at in enumerate(order, 1))
            asked = [{"role": "user", "content": f"Read.\n{passages}\n\nWhere is Ada?"}]
            return server.chat(messages=asked, model=name, max_tokens=8, ignore_eos=True), asked

        for name in names:  # what one of them has seen, the others haven't
            assert ["comb" in found(name, order)[0][1] for order in ([0, 1, 2], [1, 2, 0])] == [False, False]
            server.wait_until_idle()
        for name in names:
            wait_for(lambda name=name: len(found(name, [2, 1, 0])[0][1].get("comb", {}).get("documents", ())) == 3)
            answer, asked = found(name, [2, 0, 1])
            library = libraries[name.replace("nano", "")]
            ids = library.chat(asked).flat
            spans = SegmentFinder(library.builder.tokenizer, least=12).find(ids)
            prompt = with_segments(ids, [span for span in spans if span[1] >= 24])
            assert len(prompt.segments) == 3
            assert served_logprobs(answer) == pytest.approx(library.logs(prompt, "legolink:4", 8), abs=CLOSE)
        server.wait_until_idle()
