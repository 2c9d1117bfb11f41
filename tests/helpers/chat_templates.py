"""Chat templates by what they do with messages: made-up ones of each kind, and those that installed packages ship."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_GO_ON = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"


def _loop(body: str, before: str = "", behind: str = _GO_ON) -> str:
    return f"{before}{{% for m in messages %}}{body}{{% endfor %}}{behind}"


MADE_UP = {
    "plain": _loop("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", behind=_GO_ON + "\n"),
    "thinking of earlier answers is dropped": _loop(
        "<|{{ m.role }}|>{% set text = m.content or '' %}{% if m.role == 'assistant' and '</think>' in text %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ text }}<|end|>",
        behind=_GO_ON + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    ),
    "a switch in a text": _loop(
        "<|{{ m.role }}|>{{ m.content | replace('/no_think', '') }}<|end|>",
        "{% set quiet = '/no_think' in (messages[0].content or '') %}",
        _GO_ON + "{% if quiet %}<think>\n</think>{% endif %}",
    ),
    "dates, tools, JSON, trimmed": _loop(
        "<|{{ m.role }}|>\n\n{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% elif m.role == 'tool' %}"
        "{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|end|>",
        "<|system|>Today: {{ strftime_now('%d %b %Y') if strftime_now is defined else 'never' }}<|end|>" + _TOOLS,
    ),
    "no system": _loop(
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "<|{{ 'model' if m.role == 'assistant' else m.role }}|>\n{{ m.content | trim }}<|end|>\n"
    ),
    "the system text in the first question": _loop(
        "{% if m.role == 'user' %}[INST] {% if loop.first %}{{ system }}{% endif %}{{ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }}<|end|>{% endif %}",
        "{% set system = '' %}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
        "{% set messages = messages[1:] %}{% endif %}",
        "",
    ),
    "strict turns": _loop(
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must\nalternate') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>"
    ),
    "an empty text is no message": _loop("{% if m.content %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}"),
    "channels": _loop(
        "<|{{ m.role }}|>{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}analysis: "
        "{{ m.reasoning_content }}<|end|>{% endif %}final: {% endif %}{{ m.content }}<|end|>"
    ),
    "thoughts, and what isn't there": _loop(
        "<|{{ m.role }}|>{{ m.reasoning }}{{ m.reasoning_content }}{{ m.tools }}\n{{ m.content }}<|end|>"
    ),
    "calls as they are": _loop(
        "<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
        "<|end|>"
    ),
    "parts or texts": _loop(
        "<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{{ part.text | trim }}{% if not loop.last %} {% endif %}{% endfor %}{% endif %}<|end|>"
    ),
    "parts alone": _loop(
        "<|{{ m.role }}|>{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}<|end|>"
    ),
    "documents of its own": _loop(
        "<|{{ m.role }}|>{{ m.content }}<|end|>",
        "{% if documents %}<|system|>{% for d in documents %}{{ d.text }}\n{% endfor %}<|end|>{% endif %}",
    ),
    "generation blocks": _loop(
        "<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}"
    ),
    "capitals, and words in a row": _loop("{{ m.role | upper }}: {{ m.content.split() | join(' ') }}\n", behind="BOT:"),
    "the beginning of a text": _loop(
        "<|{{ m.role }}|>{% if m.content.startswith('/') %}command{% else %}{{ m.content }}{% endif %}<|end|>"
    ),
    "as much as there is room for": _loop("<|{{ m.role }}|>{{ m.content[:12] }}<|end|>"),
    "how long a text is": _loop("<|{{ m.role }}|>{{ m.content | length }}:{{ m.content }}<|end|>"),
    "the last message alone": "<|user|>{{ messages[-1].content }}<|end|>" + _GO_ON,
    "a title": "{{ messages[0].content[:5] }}\n" + _loop("<|{{ m.role }}|>{{ m.content }}<|end|>"),
}

# what these read of a question isn't there where documents stand in front of it
REFUSED = {
    "a title", "as much as there is room for", "how long a text is", "the beginning of a text",
    "the last message alone",
}  # fmt: skip


def shipped() -> dict[str, str]:
    """By file, of vLLM and transformers as they are installed."""
    found = {}
    if spec := importlib.util.find_spec("vllm"):
        folder = Path(str(spec.origin)).parent / "transformers_utils" / "chat_templates"
        found = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
        del found["template_kimi_audio"]  # which reads variables of another name
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    own = Qwen2AudioProcessor.__dict__.get("default_chat_template")
    found["smolvlm"] = DEFAULT_CHAT_TEMPLATE
    if own is not None:
        found["qwen2_audio"] = own.fget(None)
    return found
