"""Plain models on a GPU whose documents vLLM links: the library's answers, and plain vLLM's without documents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.engines import answer, apart, engine, greedy
from tests.helpers.gpu_engines import EngineDevice
from tests.helpers.linked import (
    PROMPTS,
    check_nothing_is_left,
    library_logs,
    linked_engine,
    plain_llama,
    three_documents,
)

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

RULES = ["naive", "legolink:4", "attnlink:6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return plain_llama(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(("graphs", "started"), [("NONE", "naive"), ("FULL_AND_PIECEWISE", "primed")])
def test_answers_are_those_of_the_library(model: Any, graphs: str, started: str, device: EngineDevice) -> None:
    documents, tolerance = three_documents(model.config.vocab_size), device.tolerance("float32")
    options = device.options("float32", graphs, enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": prompt.built(documents)[0]} for prompt in PROMPTS]
    with engine(model.name_or_path, **options) as llm:
        alone = [answer(llm.generate([prompt], greedy(8), use_tqdm=False)[0]) for prompt in prompts]
    with linked_engine(model, started, **options) as linked:
        device.check_runner(linked.llm)
        assert [linked.ask([(prompt, "full")])[0] for prompt in PROMPTS] == alone
        full = [library_logs(model, documents, prompt, "full") for prompt in PROMPTS]
        for method in map(linked.behind, RULES):
            found = linked.ask([(prompt, method) for prompt in PROMPTS])
            for prompt, one, report in zip(PROMPTS, found, linked.reports, strict=True):
                assert apart(one, library_logs(model, documents, prompt, method)) < tolerance
                assert report is not None
                assert report.linked_tokens > 0
            # the control: linking isn't full recompute, but where nothing stands in front of a document
            assert sum(apart(one, other) > 3 * tolerance for one, other in zip(found, full, strict=True)) >= 4
        check_nothing_is_left(linked.scheduler)
