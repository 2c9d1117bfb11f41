"""Tools, their calls and reasoning beside documents, in each way to ask a plain model, against vLLM's own prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from comb.documents.document import PromptBuilder
from comb_serving.api.conversation import converted
from comb_serving.api.http import RequestError
from comb_serving.api.routes import CHAT, MESSAGES, RESPONSES
from comb_training.nano import CHECKPOINT
from tests.helpers.plain import PlainLibrary
from tests.helpers.served import TEXTS, Served, logprobs, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

METHOD = "legolink:4"
CLOSE = 1e-4  # of log-probabilities
# shows calls alone where there are some, as some templates do
TEMPLATE = """
{%- if tools %}<|user|>Tools: {{ tools | tojson }}<|end|>{% endif %}
{%- if reasoning_effort %}<|user|>Effort: {{ reasoning_effort }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{%- elif message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' %}<|user|><tool_response>
{{ message.content }}
</tool_response>
{%- else %}<|user|>{{ message.content }}{% endif %}
{%- endfor %}<|assistant|>"""

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"place": {"enum": ["hall", "garden"]}}, "required": ["place"],
    "additionalProperties": False,
}  # fmt: skip
GIVEN, FOUND = '{"place": "hall"}', 'Nobody is "there".'
FIRST, LAST = "Where is Ada?", "And now?"
DOCUMENTS = "".join(f"{text}\n" for text in TEXTS)  # as they stand in front of the first user's words


def bodies(first: str) -> dict[str, dict[str, Any]]:
    """The same conversation, in which a tool was called, for each way to ask."""
    return {
        CHAT: {
            "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}],
            "messages": [
                {"role": "user", "content": first},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": GIVEN}}]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": FOUND}]},
                {"role": "user", "content": [{"type": "text", "text": LAST}]},
            ],
            "tool_choice": "none", "max_tokens": 8, "logprobs": True, "ignore_eos": True,
        },
        RESPONSES: {
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}],
            "input": [
                {"role": "user", "content": first},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": GIVEN},
                {"type": "function_call_output", "call_id": "c1", "output": FOUND},
                {"role": "user", "content": [{"type": "input_text", "text": LAST}]},
            ],
            "tool_choice": "none", "max_output_tokens": 8, "ignore_eos": True, "top_logprobs": 1,
            "include": ["message.output_text.logprobs"],
        },
        MESSAGES: {
            "tools": [{"name": "look", "input_schema": SCHEMA, "strict": True}],
            "messages": [
                {"role": "user", "content": first},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "c1", "name": "look", "input": json.loads(GIVEN)}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": FOUND}, {"type": "text", "text": LAST}]},
            ],
            "tool_choice": {"type": "none"}, "max_tokens": 8,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(CHECKPOINT, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tools(plugin: None, model: Path) -> Iterator[Served]:
    options = ["--method", METHOD, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--anthropic-disabled-thinking-effort", "low"]
    with serve(model, model.with_name("r"), *options) as server:
        yield server
        server.wait_until_idle()


def ask(server: Served, path: str, body: dict[str, Any], **more: Any) -> Any:
    status, found = server.request("POST", path, {"model": "nano", "temperature": 0, **body, **more})
    assert status == 200, found
    return found


def said(path: str, found: Any) -> Any:
    """The words of an answer, and the tokens of its prompt."""
    usage = found["usage"]
    if path == CHAT:
        return found["choices"][0]["message"]["content"], usage["prompt_tokens"]
    if path == RESPONSES:
        return "".join(part["text"] for item in found["output"] for part in item["content"]), usage["input_tokens"]
    return found["content"][0]["text"], sum(usage[name] for name in usage if name.endswith("input_tokens"))


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_the_prompt_is_what_vllm_itself_makes_of_it(tools: Served, path: str) -> None:
    """`full` has documents in the prompt and nothing linked: as if a client had written them into its first message."""
    full = {"documents": TEXTS, "comb": {"method": "full"}}
    for more in ({}, *EFFORT[path]):
        found, own = (
            ask(tools, path, bodies(FIRST)[path], **full, **more),
            ask(tools, path, bodies(DOCUMENTS + FIRST)[path], **more),
        )
        assert said(path, found) == said(path, own)
        if path == CHAT:
            assert logprobs((200, found)) == pytest.approx(logprobs((200, own)), abs=CLOSE)
    bare = {name: value for name, value in bodies(FIRST)[path].items() if name not in ("tools", "tool_choice")}
    assert said(path, ask(tools, path, bare, **full))[1] < said(path, own)[1]  # the control: tools are in the prompt


EFFORT: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"reasoning_effort": "low"}],
    RESPONSES: [{"reasoning": {"effort": "low"}}],
    MESSAGES: [{"output_config": {"effort": "low"}}, {"thinking": {"type": "disabled"}}],
}


def test_documents_are_linked_beside_tools_as_in_the_library(tools: Served, model: Path) -> None:
    library = PlainLibrary(model)
    look = {"name": "look", "description": None, "parameters": SCHEMA, "strict": True}  # as vLLM has it
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.loads(GIVEN)}}
    messages = [
        {"role": "user", "content": FIRST}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": FOUND}, {"role": "user", "content": LAST},
    ]  # fmt: skip
    builder = replace(library.builder, chat_template_kwargs={"tools": [{"type": "function", "function": look}]})
    prompt = builder.build(messages, [library.builder.segment(text) for text in TEXTS])
    answers = {path: ask(tools, path, body, documents=TEXTS) for path, body in bodies(FIRST).items()}
    expected = library.logs(prompt, METHOD, 8)
    assert logprobs((200, answers[CHAT])) == pytest.approx(expected, abs=CLOSE)
    assert expected != pytest.approx(library.logs(prompt, "full", 8), abs=1e-3)
    words = {path: said(path, answer) for path, answer in answers.items()}
    assert words[RESPONSES] == words[CHAT]
    assert words[MESSAGES][1] == words[CHAT][1] == len(prompt.flat)  # which knows no ignore_eos
    assert words[CHAT][0].startswith(words[MESSAGES][0])
    assert all(answer["comb"]["method"] == METHOD for answer in answers.values())


def test_documents_stand_in_messages_with_calls(tools: Served, model: Path) -> None:
    made = {"id": "dan", "text": "Dan lives under the stairs."}
    assert tools.request("POST", "/v1/documents", made)[0] == 200
    library = PlainLibrary(model)
    for path, body in bodies(FIRST).items():
        turns = body.get("input") or body["messages"]
        last = turns[-1]["content"]
        last.insert(len(last) - 1, {"type": "document", "id": "dan"})
        found = ask(tools, path, body, documents=TEXTS, comb={"method": "full"})
        assert [document["id"] for document in found["comb"]["documents"]][-1] == "dan"
        plain = bodies(DOCUMENTS + FIRST)[path]
        (plain.get("input") or plain["messages"])[-1]["content"][-1]["text"] = f"{made['text']}\n{LAST}"
        assert said(path, found) == said(path, ask(tools, path, plain))
        assert ask(tools, path, body, documents=TEXTS)["comb"]["documents"][-1]["tokens"] == len(
            library.builder.segment(made["text"])
        )


def test_a_forced_call_comes_out_as_one(tools: Served, model: Path) -> None:
    tokenizer = PlainLibrary(model).builder.tokenizer
    blank = {token: -100 for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()}
    named = {  # what a grammar allows between two words, and this model would write for ever
        CHAT: {"tool_choice": {"type": "function", "function": {"name": "look"}}, "max_tokens": 100},
        RESPONSES: {"tool_choice": {"type": "function", "name": "look"}, "max_output_tokens": 100},
    }
    asked = {"documents": TEXTS, "ignore_eos": False, "logit_bias": blank}
    found = {path: ask(tools, path, {**bodies(FIRST)[path], **more, **asked}) for path, more in named.items()}
    assert all(answer["comb"]["method"] == METHOD for answer in found.values())
    (call,) = found[CHAT]["choices"][0]["message"]["tool_calls"]
    (item,) = [item for item in found[RESPONSES]["output"] if item["type"] == "function_call"]
    assert call["function"]["name"] == item["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == json.loads(item["arguments"])
    assert json.loads(item["arguments"])["place"] in SCHEMA["properties"]["place"]["enum"]


def test_a_document_beside_a_call_is_refused(tools: Served) -> None:
    inside = [{"role": "assistant", "content": [{"type": "document", "id": "dan"}, {"type": "tool_use", "id": "c"}]}]
    assert tools.request("POST", "/v1/documents", {"id": "dan", "text": "Dan lives under the stairs."})[0] == 200
    messages = [{"role": "user", "content": [{"type": "tool_result"}]}, *inside]
    status, found = tools.request("POST", MESSAGES, {"model": "nano", "messages": messages, "max_tokens": 3})
    assert (status, "put them into those of the user" in found["error"]["message"]) == (400, True), found


EMPTY = {"role": "user", "content": None}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"messages": [EMPTY]}, "messages[0].content: Input should be a valid string"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role: Field required"),
        (CHAT, {**bodies(FIRST)[CHAT], "tools": [{"type": "function"}]}, "tools[0].function: Field required"),
        (RESPONSES, {"input": [EMPTY]}, "input[0].content: Input should be a valid string"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output: Field required"),
        (MESSAGES, {**bodies(FIRST)[MESSAGES], "max_tokens": None}, "max_tokens: Input should be a valid integer"),
    ],
)
def test_what_vllm_has_against_a_body_is_a_line_that_names_the_field(path: str, body: Any, said: str) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(RequestError) as found:
        converted(path, {"model": "nano", **body}, PromptBuilder(AutoTokenizer.from_pretrained(CHECKPOINT)), "none")
    assert (found.value.status, found.value.message) == (400, said)
