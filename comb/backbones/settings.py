"""What is wrong with the values of a checkpoint's settings: transformers checks the types of a model's own fields
alone, and other values fail later and elsewhere, or give NaN.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from comb.backbones.transformers_private import why_no_template

PEFT = "adapter_config.json"
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
          "max_position_embeddings", "n_positions", "n_embd", "n_layer", "n_head")  # fmt: skip
_NUMBERS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences",
            "top_k", "no_repeat_ngram_size", "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff",
            "eta_cutoff", "repetition_penalty", "length_penalty", "max_time", "guidance_scale")  # fmt: skip
_ROLES = {f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}


def values_in(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All values with their names, however deep."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from values_in(value, key)
    elif isinstance(content, list):
        for value in content:
            yield from values_in(value, name)
    else:
        yield name, content


def _wrong_in_config(content: Mapping[str, Any]) -> str | None:
    """Numbers with which a model can be made, and computes nothing, or NaN."""
    # what a vision tower or a head for further tokens says, the text model doesn't read
    read = {key: value for key, value in content.items() if not key.endswith("_config") or key == "text_config"}
    for name, value in values_in(read):
        if isinstance(value, float) and math.isnan(value):
            return f"{name} is NaN"
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name in _SIZES and value < 1 and (name, value) != ("max_position_embeddings", -1):  # no limit
            return f"{name} is {value}, and has to be at least 1"
        if name == "rope_theta" and not 0 < value < math.inf:
            return f"{name} is {value}, and has to be above 0"
        if name.endswith(("_eps", "epsilon")) and not 0 <= value < math.inf:
            return f"{name} is {value}, and has to be at least 0"
    classes = content.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        return f"architectures is {classes!r}, not a list of names"
    for name in ("quantization_config", "auto_map"):
        if not isinstance(content.get(name), dict | None):
            return f"{name} is {content[name]!r}, not an object"
    return None


def _wrong_in_generation(content: Mapping[str, Any]) -> str | None:
    from transformers import GenerationConfig

    for name in _NUMBERS:
        value = content.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
            return f"{name} is {value!r}, not a number"
        if isinstance(value, float) and not value.is_integer() and name in _NUMBERS[:8]:
            return f"{name} is {value!r}, not a whole number"
    for name in ("num_beams", "num_return_sequences", "repetition_penalty"):
        if content.get(name) is not None and content[name] <= 0:
            return f"{name} is {content[name]}, and has to be above 0"
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = content.get(name)
        ids = value if isinstance(value, list) else [value]
        if not all(id is None or _whole(id) or (isinstance(id, float) and id.is_integer()) for id in ids):
            return f"{name} is {value!r}, not a token's number"
    for name in ("do_sample", "use_cache"):
        if not isinstance(content.get(name), bool | None):
            return f"{name} is {content[name]!r}, not true or false"
    stops = content.get("stop_strings")
    if not (isinstance(stops, str | None) or (isinstance(stops, list) and all(isinstance(s, str) for s in stops))):
        return f"stop_strings is {stops!r}, not a list of texts"
    try:
        GenerationConfig.from_dict(dict(content))
    except Exception as error:  # whatever a value makes its checks do
        return words_of(error)
    return None


def _wrong_in_tokenizer(content: Mapping[str, Any]) -> str | None:
    for name, value in content.items():
        if name in _ROLES and not isinstance(value, str | dict | bool | None):
            return f"{name} is {value!r}, not a token"
    length, template = content.get("model_max_length"), content.get("chat_template")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int | float)):
        return f"model_max_length is {length!r}, not a number"
    if not isinstance(content.get("tokenizer_class"), str | None):
        return f"tokenizer_class is {content['tokenizer_class']!r}, not a name"
    several: Any = template.values() if isinstance(template, dict) else template
    for each in several if isinstance(template, dict | list) else [template]:
        text = each.get("template") if isinstance(each, dict) else each
        why = why_no_template(text) if isinstance(text, str) else "it is no text" if text is not None else None
        if why is not None:
            return f"its chat_template is none ({why})"
    return None


def _wrong_in_added_tokens(content: Mapping[str, Any]) -> str | None:
    return next((f"{name!r} is {id!r}, not a number" for name, id in content.items() if not _whole(id)), None)


def _wrong_in_peft(content: Mapping[str, Any]) -> str | None:
    try:
        import peft
    except ImportError:
        return None  # said by who loads it
    kind, base = content.get("peft_type"), content.get("base_model_name_or_path")
    known = {str(each.value): made for each, made in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if kind not in known:
        return f"peft_type is {kind!r}, which peft {peft.__version__} doesn't know (pip install -U peft?)"
    if not isinstance(base, str | None):
        return f"base_model_name_or_path is {base!r}, not a folder or a Hub id"
    for field in dataclasses.fields(known[kind]):
        hint, value = str(getattr(field.type, "__name__", field.type)), content.get(field.name)
        kinds: dict[str, Any] = {"int": int | float, "float": int | float, "bool": bool, "str": str}
        if field.name in content and hint in kinds:
            if hint in ("bool", "str") and (value is None or (hint == "bool" and value in (0, 1))):
                continue  # as peft takes it
            if not (isinstance(value, kinds[hint]) and isinstance(value, bool) == (hint == "bool")):
                return f"{field.name} is {value!r}, and has to be a value of type {hint}"
    if not isinstance(targets := content.get("target_modules"), str | list | None):
        return f"target_modules is {targets!r}, not a list of names"
    return None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_validation(error: Exception) -> bool:
    return type(error).__name__.startswith("StrictDataclass")


def words_of(error: Exception) -> str:
    """What an error says, in one line; of a value of another type than it should have, without the frame around it."""
    said = " ".join(str(error).split())
    frame = r"^(Class )?[Vv]alidation error for .*?: \w+Error: |\. Errors: .*$"
    return re.sub(frame, "", said) if is_validation(error) else said


WRONG: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "config.json": _wrong_in_config,
    "generation_config.json": _wrong_in_generation,
    "tokenizer_config.json": _wrong_in_tokenizer,
    "special_tokens_map.json": _wrong_in_tokenizer,
    "added_tokens.json": _wrong_in_added_tokens,
    PEFT: _wrong_in_peft,
}
"""By a file's name, what says of its object which value is wrong, and why; None for none."""
