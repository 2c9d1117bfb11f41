"""Configuration of an adapter of link tokens: JSON beside the weights, in the form Hugging Face models use."""

from __future__ import annotations

from typing import Any

from comb.backbones.adapter import AdapterConfig, check_types
from comb.backbones.discovery import start_token_id


class LinkTokensConfig(AdapterConfig):
    """How many link tokens stand in front of a document while it is compiled, and the backbone they belong to.

    Args:
        num_link_tokens: n, in front of every document.
        layer_shapes: per layer [kv_heads, channels of a key, channels of a value].

    Raises:
        ValueError: for a number below one.
    """

    model_type = "comb_linktokens"
    method = "linktokens"
    parts = ("front",)
    otherwise = "not an adapter of link tokens; to put some on it, use LinkTokensForCausalLM.from_backbone"

    num_link_tokens: int = 8
    layer_shapes: list[list[int]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_types(self)
        if self.num_link_tokens < 1:
            raise ValueError(f"num_link_tokens must be at least 1, got {self.num_link_tokens}")
        if any(len(shape) != 3 for shape in self.layer_shapes or ()):
            raise ValueError(
                f"layer_shapes is a list of [kv_heads, channels of a key, of a value], got {self.layer_shapes}"
            )
        super().__post_init__(**kwargs)

    @property
    def placeholder_id(self) -> int:
        """The token id that stands for a link token where a prompt is written as ids; it is never looked up."""
        return start_token_id(self.get_text_config()) or 0
