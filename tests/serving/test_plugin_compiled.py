"""The plug-in in a compiled engine (torch.compile, as GPUs run it): the backbone stays plain vLLM's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from comb.backbones.loading import resolve_name
from tests.helpers.engines import Served, checkpoint, engine, served

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

PROMPTS = [list(range(10, 10 + length)) for length in (7, 40)]


def test_compiled_without_documents_it_is_plain_vllm_and_with_them_the_library(tmp_path: Path) -> None:
    with engine(resolve_name("nano"), enforce_eager=False) as llm:
        plain = [Served(llm, None, ()).ask([(prompt, "")])[0] for prompt in PROMPTS]
    with served(tmp_path, checkpoint(tmp_path, "nano"), enforce_eager=False) as found:
        assert not found.llm.llm_engine.vllm_config.model_config.enforce_eager
        assert [found.ask([(prompt, "")])[0] for prompt in PROMPTS] == plain
        asked = [(prompt, names) for names in ("A", "", "CB") for prompt in PROMPTS]
        for (prompt, names), (ids, logs) in zip(asked, found.ask(asked), strict=True):
            wanted, likely = found.reference(prompt, names)
            assert ids == wanted
            assert logs == pytest.approx(likely, abs=1e-5)
            assert (logs == pytest.approx(plain[PROMPTS.index(prompt)][1], abs=1e-3)) is not bool(names)
