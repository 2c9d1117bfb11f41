"""The messages that the template gets are those that vLLM's renderer hands to it, and its prompt is vLLM's."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comb import PICEngine, PromptBuilder
from comb.documents.document import Prompt
from comb_serving.api.choice import MethodChoice
from comb_serving.api.conversation import renders_alike
from comb_serving.api.http import RequestError
from comb_serving.api.preprocessor import Preprocessor
from comb_serving.api.routes import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from comb_serving.config.serve_options import ServeOptions
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.chat_templates import MADE_UP, REFUSED, shipped

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

CONFIG = SimpleNamespace(
    tokenizer_revision=None, code_revision=None, tokenizer="", model="", trust_remote_code=False, revision=None,
    hf_config=SimpleNamespace(model_type="llama"), multimodal_config=None, enable_prompt_embeds=False,
)  # fmt: skip
DOCUMENT = "The <|end|> lake is 12 m deep."
TEMPLATES = {**MADE_UP, **shipped()}
words = st.lists(st.sampled_from(["Hi", " ", "\n", "</think>", "/no_think", '"', "<|end|>", "/"]), max_size=5).map(
    "".join
)


def by_vllm(tokenizer: Any, path: str, body: dict[str, Any], usual: Any = None) -> list[int] | None:
    """Token ids of vLLM's renderer, without documents; None where the template refuses the messages."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    request: Any
    tools = None
    if path == RESPONSES:
        request = ResponsesRequest.model_validate(body)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        tools = construct_tool_dicts(request.tools, request.tool_choice)
    else:
        if path == MESSAGES:
            first = AnthropicServingMessages._detect_merge_inline_system(tokenizer.chat_template)
            given = AnthropicMessagesRequest.model_validate(body)
            request = AnthropicServingMessages.to_chat_completion_request(given, merge_inline_system=first)
        else:
            request = ChatCompletionRequest.model_validate(body)
        messages = request.messages
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    form = resolve_chat_template_content_format(tokenizer.chat_template, tools, "auto", tokenizer, model_config=CONFIG)
    found, _, _ = parse_chat_messages(messages, CONFIG, form)
    # some defaults are always there, so what the client leaves open is always dropped (`preprocess_chat`)
    defaults = {**(usual or {}), "tokenize": False}
    arguments = request.build_chat_params(None, "auto").with_defaults(defaults).chat_template_kwargs
    try:
        text = safe_apply_chat_template(
            CONFIG, tokenizer, found, chat_template=tokenizer.chat_template, tools=tools, **arguments
        )
    except VLLMValidationError:
        return None
    return list(tokenizer.encode(text, add_special_tokens=False))


async def over_http(tokenizer: Any, path: str, body: dict[str, Any], **builder: Any) -> Prompt:
    """The prompt that the front builds for a request with one document."""
    built: list[Prompt] = []

    class Kept(PromptBuilder):
        def build(self, *arguments: Any, **options: Any) -> Prompt:
            built.append(super().build(*arguments, **options))
            return built[-1]

        def complete(self, *arguments: Any, **options: Any) -> Prompt:
            built.append(super().complete(*arguments, **options))
            return built[-1]

    options = ServeOptions("nano", method="full")
    await Preprocessor(Kept(tokenizer, **builder), None, MethodChoice(options)).preprocess(
        path, {**body, "documents": [DOCUMENT]}, ""
    )
    return built[-1]


def bodies(chat: list[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same messages in each way to ask."""
    messages = [{"role": role, "content": content} for role, content in chat]
    typed = [
        {**each, "content": [{**part, "type": "input_text"} for part in content]}
        if isinstance(content := each["content"], list)
        else each
        for each in messages
    ]
    return {
        CHAT: {"model": "m", "messages": messages},
        RESPONSES: {"model": "m", "input": typed},
        MESSAGES: {"model": "m", "messages": messages, "max_tokens": 3},
    }


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(words, min_size=2, max_size=4), system=st.none() | words, parts=st.booleans())
async def test_a_chat_with_documents_is_vllms_chat_around_them(
    name: str, texts: list[str], system: str | None, parts: bool
) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name], bos_token="<|bos|>")
    contents: list[Any] = [f"Hi{text}" for text in texts]
    if parts:
        contents = [[{"type": "text", "text": part} for part in ("", text, "", "?", "")] for text in contents]
    roles = ["assistant" if place % 2 else "user" for place in range(len(texts))]
    chat = list(zip(roles, contents, strict=True))
    if system is not None:
        chat = [("system", f"S{system}"), *chat]
    for path, body in bodies(chat).items():
        if path == MESSAGES and system is not None and name == "plain":
            body = {**body, "messages": body["messages"][1:], "system": f"S{system}"}
        expected = by_vllm(tokenizer, path, body)
        try:
            prompt = await over_http(tokenizer, path, body)
        except RequestError:
            if expected is not None and name not in REFUSED:
                raise
            continue
        assert list(prompt.bare) == expected
        assert len(prompt.segments) == 1


@pytest.mark.parametrize(
    "name",
    [
        "plain", "parts or texts", "dates, tools, JSON, trimmed", "an empty text is no message",
        "thoughts, and what isn't there", "calls as they are",
    ],
)  # fmt: skip
async def test_what_vllm_does_with_messages_is_done(name: str) -> None:
    tokenizer = byte_tokenizer(MADE_UP[name])
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    told = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": 'a "b"'}]}]  # fmt: skip
    chats: list[dict[str, Any]] = [
        {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "Hi"},
                      {"role": "developer", "content": [{"type": "text", "text": text} for text in "BC"]}]},
        {"messages": [{"role": "user", "content": "Hi", "name": "ann", "custom": "x"}]},
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 3\nBe brief."}, *told[:1]]},
        {"messages": [*told[:1], {"role": "assistant", "content": "Ho", "reasoning": "I think."}, *told[:1]]},
        {"messages": [*told, {"role": "user", "content": [{"type": "text", "text": " So?"}]}], "tools": [tool]},
        {"messages": told[:1], "reasoning_effort": "low", "chat_template_kwargs": {"other": 3}},
        *({"messages": [*told[:1], {"role": "assistant", "content": "Ho", **thought}, *told[:1]], **more}
          for thought in ({"reasoning_content": "I think."}, {"reasoning_content": "I.", "reasoning": "You."})
          for more in ({}, {"tools": [tool]})),
        *({"messages": [*told[:1], {"role": "assistant", "content": [part, {"type": "text", "text": "Ho"}]}, *told[:1]]}
          for part in ({"type": "refusal", "refusal": "No."}, {"type": "thinking", "thinking": "I think."})),
        {"messages": [*told[:2], {**told[2], "content": [{"type": "text", "text": text} for text in ("", "b")]}]},
    ]  # fmt: skip
    asked = [(CHAT, {"model": "m", **body}) for body in chats]
    turns = [{"role": role, "content": "Hi"} for role in ("user", "system", "user")]
    asked.append((MESSAGES, {"model": "m", "max_tokens": 3, "system": "A", "messages": turns}))
    redacted = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Ho"}]
    for role, parts in (("user", []), ("user", [{"type": "text", "text": ""}]), ("assistant", redacted)):
        turns = [*told[:1], {"role": role, "content": parts}, *told[:1]]
        asked.append((MESSAGES, {"model": "m", "max_tokens": 3, "messages": turns}))
    for path, body in asked:
        expected = by_vllm(tokenizer, path, copy.deepcopy(body))
        assert list((await over_http(tokenizer, path, body)).bare) == expected, body


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_no_field_of_a_part_makes_vllm_forget_the_prompt(path: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages
    from vllm.renderers.chat_utils import has_non_text_content

    def forgets(body: dict[str, Any]) -> bool:
        body = copy.deepcopy({**body, "kv_transfer_params": {"prompt_token_ids": [1]}})
        if path == CHAT:
            return not ChatCompletionRequest.model_validate(body).kv_transfer_params
        request = ResponsesRequest.model_validate(body)
        return has_non_text_content(construct_input_messages(request_input=request.input))

    keys = import_module(has_non_text_content.__module__)._MEDIA_CONTENT_PART_KEYS
    options, more = ServeOptions("nano", method="full"), dict.fromkeys(keys)
    preprocessor = Preprocessor(PromptBuilder(byte_tokenizer(MADE_UP["plain"])), None, MethodChoice(options))
    for extra in (more, {}):
        part = {"type": "text" if path == CHAT else "input_text", "text": "Hi", **extra}
        call = {"type": "function", "function": {"name": "look", "arguments": "{}"}, "id": "c"}
        output = {"role": "tool", "tool_call_id": "c", "content": [part]}
        if path == RESPONSES:
            call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c"}
            output = {"type": "function_call_output", "call_id": "c", "output": [part]}
        called = {"role": "assistant", "content": None, "tool_calls": [call]} if path == CHAT else call
        asked = {"role": "user", "content": [part]}
        for turns in ([asked], [{"role": "user", "content": "Hi"}, called, output]):
            body = {"model": "m", "messages" if path == CHAT else "input": turns}
            assert forgets(body) == bool(extra)
            found = await preprocessor.preprocess(path, {**body, "documents": [DOCUMENT]}, "")
            assert not forgets(found.body)
    turns = [{"role": "user", "content": "Hi"}]
    for role in ("assistant", "user") if path == CHAT else ():
        thought = {"role": role, "content": "Hi", "reasoning": {"type": "prompt_embeds", "prompt_embeds": ""}}
        with pytest.raises(RequestError) as refused:
            await preprocessor.preprocess(
                path, {"model": "m", "messages": [*turns, thought], "documents": [DOCUMENT]}, ""
            )
        assert refused.value.status == 400


@pytest.mark.parametrize("usual", [{"enable_thinking": False}, {}])
@pytest.mark.parametrize("asked", [{}, *({"enable_thinking": value} for value in (True, None, "auto"))])
async def test_a_servers_usual_arguments_are_those_of_vllm(asked: dict[str, Any], usual: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(MADE_UP["thinking of earlier answers is dropped"])
    for path, body in bodies([("user", "Hi"), ("assistant", "Ho"), ("user", "So?")]).items():
        body = body if path == MESSAGES else {**body, "chat_template_kwargs": asked}
        built = list((await over_http(tokenizer, path, body, chat_template_kwargs=usual)).bare)
        assert built == by_vllm(tokenizer, path, body, usual)
        if usual and (not asked or path == MESSAGES):
            assert built != by_vllm(tokenizer, path, body)


@pytest.mark.parametrize(
    ("mode", "kind", "same"), [("hf", "llama", True), ("hf", "gpt_oss", False), ("deepseek_v32", "llama", False)]
)
async def test_chats_that_vllm_renders_in_a_way_of_its_own_are_refused(
    mode: str, kind: str, same: bool, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer(MADE_UP["plain"])
    tokenizer.save_pretrained(tmp_path)
    config = SimpleNamespace(
        model="", tokenizer=str(tmp_path), runner_type="generate", tokenizer_mode=mode, tokenizer_revision=None,
        trust_remote_code=False, hf_config=SimpleNamespace(model_type=kind),
    )  # fmt: skip
    assert renders_alike(config, tokenizer) == same
    preprocessor = Preprocessor(PromptBuilder(tokenizer), None, MethodChoice(ServeOptions("nano", method="full")))
    preprocessor.chats = same
    asked = [(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, same), (COMPLETIONS, {"prompt": "Hi"}, True)]
    for path, body, answered in asked:
        with nullcontext() if answered else pytest.raises(RequestError, match="a way of its own"):
            await preprocessor.preprocess(path, {**body, "documents": [DOCUMENT]}, "")


async def test_what_documents_cannot_stand_beside_is_refused() -> None:
    tokenizer = byte_tokenizer(MADE_UP["plain"])
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    ask = [{"role": "user", "content": "Hi"}]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for path, body, words in (
        (CHAT, {"messages": [*ask, {"role": "tool", "content": [image]}]}, "image_url"),
        (CHAT, {"messages": ask, "add_special_tokens": True}, "add_special_tokens"),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}, "no message with role"),
        (CHAT, {"messages": ask, "tools": 3}, "tools"),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "web_search"}]}, "tools of type web_search"),
        (RESPONSES, {"input": "Hi", "tools": 3}, "tools is a list, not int"),
    ):
        with pytest.raises(RequestError, match=words) as error:
            await over_http(tokenizer, path, body)
        assert error.value.status == 400


async def test_raw_prompts_keep_what_vllm_puts_around_them() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(bos_token="<|bos|>")
    bos = ("<|bos|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    text = "<|user|>Hi<|end|>"
    for special in (True, False):
        prompt = await over_http(tokenizer, COMPLETIONS, {"prompt": text, "add_special_tokens": special})
        assert list(prompt.bare) == tokenizer.encode(text, add_special_tokens=special)


def test_a_model_with_mistrals_own_tokenizer_answers(tmp_path: Path) -> None:
    import mistral_common
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    data = Path(str(mistral_common.__path__[0])) / "data"
    shutil.copy(next(data.glob("tekken_240911.json")), tmp_path / "tekken.json")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    config = MistralConfig(vocab_size=131072, num_key_value_heads=1, sliding_window=None, **sizes)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer).__name__ == "MistralCommonBackend"
    builder = PromptBuilder(tokenizer)
    segment = builder.segment("The [INST] lake</s> is 12 m deep.")
    assert not set(tokenizer.all_special_ids).intersection(segment)
    raw = builder.complete("How [INST]", [segment])
    assert (list(raw.bare), raw.prefix) == (tokenizer.encode("How [INST]"), (tokenizer.bos_token_id,))
    for chat in (
        [{"role": "user", "content": "How déep? \u2603"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
         {"role": "assistant", "content": "a [INST]"}, {"role": "user", "content": " So? </s>"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}],
    ):  # fmt: skip
        whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert list(builder.build(chat).flat) == whole
        assert list(builder.build(chat, [segment]).bare) == whole
    engine = PICEngine.from_pretrained(tmp_path, method="naive")
    answer = engine.ask("How deep?", ["The lake is 12 m deep."], max_new_tokens=2)
    assert answer.report.prompt_tokens == len(
        builder.build("How deep?", [builder.segment("The lake is 12 m deep.")]).flat
    )
