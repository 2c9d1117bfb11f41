"""Configuration of an adapter of link tokens: JSON beside the weights, in the form Hugging Face models use."""

from __future__ import annotations

from typing import Any

from comb.backbones.adapter import AdapterConfig
from comb.backbones.discovery import start_token_id

FORMS = ("embeddings", "keys_values")


class LinkTokensConfig(AdapterConfig):
    """How many link tokens stand in front of a document and what of them is learned, and the backbone they belong to.

    Args:
        num_link_tokens: n, in front of every document.
        kept: whether their keys and values stay in front of the document where it is linked, as n more tokens of it;
            else only the document is what it is behind them, as in LegoLink-0, and linked prompts are no longer.
        form: ``embeddings`` learns what the first layer is given, n x width values, and the backbone computes keys and
            values from that; ``keys_values`` learns the keys and values of every layer themselves (prefix tuning).
        layer_shapes: per layer [kv_heads, channels of a key, channels of a value], for ``keys_values``.

    Raises:
        ValueError: for another form, or a number below one.
    """

    model_type = "comb_linktokens"
    method = "linktokens"
    parts = ("front",)
    otherwise = "not an adapter of link tokens; to put some on it, use LinkTokensForCausalLM.from_backbone"

    num_link_tokens: int = 8
    kept: bool = False
    form: str = "keys_values"
    layer_shapes: list[list[int]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form is {' or '.join(FORMS)}, not {self.form!r}")
        if self.num_link_tokens < 1:
            raise ValueError(f"num_link_tokens must be at least 1, got {self.num_link_tokens}")
        super().__post_init__(**kwargs)

    @property
    def placeholder_id(self) -> int:
        """The token id that stands for a link token where a prompt is written as ids; it is never looked up."""
        return start_token_id(self.get_text_config()) or 0
