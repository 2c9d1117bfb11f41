"""An adapter whose encoder is the backbone's own layers, in the encoder process and the decoder of a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comb import CombForCausalLM, PICEngine
from comb.backbones.tokenizer import load_tokenizer
from comb_serving import LLM
from tests.helpers.engines import SMALL, reference
from tests.helpers.families import open_gates

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

QUESTION = [{"role": "user", "content": "Where is Ada?"}]
TEXTS = ["Ada went to the garden.", "Bob is in the kitchen."]


FORMS: dict[str, dict[str, Any]] = {
    "blocks": {"key_distance": 8, "sink": "null", "gate": 0.9, "cross_mlp": False},
    "joint": {"joint_attention": True, "primer": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_it_answers_as_the_library_does_and_off_is_the_backbone(form: str, tmp_path: Path) -> None:
    from vllm import SamplingParams

    options = {"cross_attention_layers": [2, 4], "shared_layers": True, **FORMS[form]}
    made = CombForCausalLM.from_backbone("nano", **options)
    open_gates(made).save_pretrained(tmp_path, tokenizer=load_tokenizer("nano", made))
    library = PICEngine.from_pretrained(tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(tmp_path, pool_bytes=2**16, pool_block=4, **SMALL) as llm:
        builder = llm.preprocessor.builder
        prompt = builder.build(QUESTION, [builder.segment(text) for text in TEXTS])
        documents = [list(builder.segment(text)) for text in TEXTS]
        for encoder in (True, False):
            asked = list(prompt.query if encoder else prompt.flat), documents if encoder else [], 8
            wanted = reference(library.model, *asked, front=len(prompt.head))[1]
            [answer] = llm.chat([QUESTION], greedy, documents=[TEXTS], encoder=encoder, use_tqdm=False)
            [found] = answer.outputs
            logprobs = [step[token].logprob for step, token in zip(found.logprobs, found.token_ids, strict=True)]
            assert logprobs == pytest.approx(wanted, abs=1e-4)
