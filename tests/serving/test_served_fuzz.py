"""Bodies that no client should send, to a real server: never a 500, never silence, and nothing stays held."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.served import CHAT, COMPLETIONS, TEXTS, Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DOCUMENTS = "/v1/documents"
EXAMPLES = int(os.environ.get("COMB_FUZZ_EXAMPLES", "300"))
LINKED = [TEXTS[0], {"title": "T", "text": TEXTS[1], "id": "d"}, {"token_ids": [5, 6, 7]}, {"id": "known"}]
COMMON: dict[str, Any] = {
    "model": "nano", "documents": LINKED, "comb": {"encoder": True}, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9,
    "n": 1, "stream": False, "stop": ["."], "seed": 3, "cache_salt": "mine", "vllm_xargs": {"other": [1]},
    "kv_transfer_params": {}, "logit_bias": {"7": 1}, "stream_options": None, "user": "u", "min_tokens": 1,
}  # fmt: skip
PARTS = [{"type": "text", "text": "Where"}, {"type": "document", "id": "known"}, {"type": "text", "text": " is Ada?"}]
VALID: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            **COMMON,
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": PARTS}],
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"a": 1},
        },
    ),
    (COMPLETIONS, {**COMMON, "prompt": ["Where?", [7, 8, 9]], "comb": {"encoder": False}, "logprobs": 1}),
    (DOCUMENTS, {"text": "Ada is here.", "title": "T", "id": "fuzz", "pin": False, "ttl_s": 0.5}),
]


def deep(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


WEIRD: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**63), 10**25, 1e308, math.nan, math.inf, -math.inf, "", " ",
    "\ud800", "\x00", "auto", "a" * 5000, "😀", [], {}, [[]], [None], [{}], {"": ""}, {"id": None}, {"text": []},
    [2**40], [-1], [[5], "x"], {"type": "document"}, {"type": "document", "id": 3}, {"id": "unknown"}, {"text": ""},
    {"text": "x", "token_ids": [5]}, {"comb_docs": [1, 1, 0]}, deep("x", 120), ["x"] * 300, [{"text": "x"}] * 300,
]  # fmt: skip
NAMES = ["id", "text", "title", "token_ids", "role", "content", "type", "encoder", "documents", "comb_docs", "pin", ""]
NAMES += ["prompt_embeds", "tools", "tool_choice", "response_format", "chat_template", "echo", "messages", "prompt"]
NAMES += ["prompt_logprobs", "best_of", "structured_outputs", "add_generation_prompt", "stop_token_ids"]
NAMES += ["use_beam_search"]
VALUES = st.sampled_from(WEIRD) | st.integers() | st.floats() | st.text(max_size=12)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside of `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*path, key), *places(item, (*path, key)))]


@st.composite
def mutated(draw: Any) -> tuple[str, dict[str, Any]]:
    """A valid body in which one to three things are replaced, left out or added."""
    path, body = draw(st.sampled_from(VALID))
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        everything = places(body)
        if not everything:
            break
        *above, last = draw(st.sampled_from(everything))
        parent = body
        for step in above:
            parent = parent[step]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add"]))
        if kind == "replace":
            parent[last] = copy.deepcopy(draw(VALUES))
        elif kind == "drop":
            del parent[last]
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(NAMES))] = copy.deepcopy(draw(VALUES))
        else:
            parent.append(copy.deepcopy(draw(VALUES)))
    return path, body


def vllms_own(path: str, body: dict[str, Any]) -> bool:
    """Whether vLLM's reading of a request breaks over this body, which without documents is its business alone.

    0.32 asks `structured_outputs`, `tools` and others for their members before it looks whether they are objects.
    """
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = {name: value for name, value in json.loads(json.dumps(body)).items() if name not in ("documents", "comb")}
    try:
        {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}[path].model_validate(body)
    except (ValidationError, ValueError):
        return False
    except Exception:
        return True
    return False


@pytest.fixture(autouse=True)
def _unharmed(served: Served) -> Iterator[None]:
    """Bodies find a known document; behind them the server answers, and holds nothing."""
    assert served.request("POST", DOCUMENTS, {"text": "Ada is known.", "id": "known"})[0] == 200
    yield
    served.wait_until_idle()
    assert served.chat(TEXTS)[0] == served.request("GET", "/health")[0] == 200


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_mutated_bodies(served: Served, found: tuple[str, dict[str, Any]]) -> None:
    """Every answer is one, and every refusal says why. What vLLM itself breaks over is left out."""
    path, body = found
    status, answer = served.request("POST", path, body)
    if status == 500 and path != DOCUMENTS and vllms_own(path, body):
        return
    assert status < 500, (path, str(body)[:2000], answer)
    if status >= 400:
        assert answer["error"]["message"], answer
        assert answer["error"]["code"] == status, answer
