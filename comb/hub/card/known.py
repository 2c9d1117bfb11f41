"""Licences (as the Hub writes them) and languages of what is on the Hub, as cards are mostly written offline."""

from __future__ import annotations

from typing import NamedTuple

from comb.backbones.packaged import MODELS

SHORT_NAMES = {model.name: model.hub for model in MODELS}
"""Ids of backbones with a name of comb's."""


class Rights(NamedTuple):
    """Of a model or a data set."""

    licence: str
    languages: tuple[str, ...] = ()


KNOWN = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Rights("apache-2.0", ("en",)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": Rights("apache-2.0", ("en",)),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Rights("apache-2.0", ("en",)),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": Rights("apache-2.0", ("en",)),
    "Qwen/Qwen3-0.6B": Rights("apache-2.0"),
    "Qwen/Qwen3-4B": Rights("apache-2.0"),
    "Qwen/Qwen3-8B": Rights("apache-2.0"),
    "meta-llama/Llama-3.1-8B-Instruct": Rights("llama3.1", ("en", "de", "fr", "it", "pt", "hi", "es", "th")),
    **dict.fromkeys(("nano", "nano-hybrid", "nano-ledger", "ledger"), Rights("apache-2.0", ("en",))),
    "facebook/babi_qa": Rights("cc-by-3.0", ("en",)),
    "google-research-datasets/nq_open": Rights("cc-by-sa-3.0", ("en",)),
    "hotpotqa/hotpot_qa": Rights("cc-by-sa-4.0", ("en",)),
    "knkarthick/dialogsum": Rights("cc-by-nc-sa-4.0", ("en",)),
    "knkarthick/samsum": Rights("cc-by-nc-nd-4.0", ("en",)),
    "rajpurkar/squad": Rights("cc-by-sa-4.0", ("en",)),
    "rajpurkar/squad_v2": Rights("cc-by-sa-4.0", ("en",)),
}
