"""The messages that the template gets are those that vLLM's renderer hands to it, and its prompt is vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from comb import PromptBuilder
from comb.documents.document import Prompt
from comb_serving.api.choice import MethodChoice
from comb_serving.api.preprocessor import Preprocessor
from comb_serving.api.routes import CHAT, MESSAGES, RESPONSES
from comb_serving.config.options import ServeOptions
from tests.helpers.chat_templates import MADE_UP, shipped

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


def by_vllm(tokenizer: Any, path: str, body: dict[str, Any]) -> list[int] | None:
    """Token ids of vLLM's renderer, without documents; None where the template refuses the messages."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
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
        messages = request.messages if path == MESSAGES else body["messages"]
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    form = resolve_chat_template_content_format(tokenizer.chat_template, tools, "auto", tokenizer, model_config=CONFIG)
    found, _, _ = parse_chat_messages(messages, CONFIG, form)
    arguments = request.build_chat_params(None, "auto").chat_template_kwargs
    try:
        text = safe_apply_chat_template(
            CONFIG, tokenizer, found, chat_template=tokenizer.chat_template, tools=tools, tokenize=False, **arguments
        )
    except ValueError:
        return None
    return list(tokenizer.encode(text, add_special_tokens=False))


async def over_http(tokenizer: Any, path: str, body: dict[str, Any]) -> Prompt:
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
    await Preprocessor(Kept(tokenizer), None, MethodChoice(options)).preprocess(
        path, {**body, "documents": [DOCUMENT]}, ""
    )
    return built[-1]


def bodies(chat: list[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same messages in each way to ask."""
    messages = [{"role": role, "content": content} for role, content in chat]
    typed = [
        {
            **each,
            "content": [
                {**part, "type": "output_text" if each["role"] == "assistant" else "input_text"} for part in content
            ],
        }
        if isinstance(content := each["content"], list)
        else each
        for each in messages
    ]
    return {
        CHAT: {"model": "m", "messages": messages},
        RESPONSES: {"model": "m", "input": typed},
        MESSAGES: {"model": "m", "messages": messages, "max_tokens": 3},
    }
