"""LegoLink-0: segments are compiled behind dummy tokens that take the attention sink away; nothing is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comb.backbones.discovery import start_token_id, text_config
from comb.methods import register
from comb.methods.checks import check_token_count
from comb.methods.decoder import Decoder


@register("legolink-0")
class LegoLinkZero(Decoder):
    """Compiles every segment behind `dummies` BOS tokens and drops their keys and values; links like `naive`.

    Not exact for a single document either: it was compiled behind tokens that are no longer there. Where nothing
    stands in front of the first document (no BOS, no chat template), the linked prompt has no sink at all.

    Args:
        dummies: how many dummy tokens; the paper takes four.
        token: the dummy's id; by default the model's BOS token, or its EOS token if it has no other.

    Source: EPIC (ICML 2025) sec. 5.4.

    Raises:
        ValueError: when the model has neither token and none is given.
    """

    compile_name = "legolink-0"
    exact_for_one = False
    positional = ("dummies",)

    def __init__(self, model: Any, *, dummies: int = 4, token: int | None = None, **parameters: Any) -> None:
        check_token_count("legolink-0:dummies", dummies, least=1)
        self.dummies = dummies
        super().__init__(model, **parameters)
        if self.primer:
            raise ValueError("legolink-0 compiles behind its dummies and takes no primer: use method='primed'")
        token = start_token_id(text_config(self.backbone)) if token is None else token
        if token is None:
            raise ValueError(
                "method 'legolink-0' compiles behind dummy tokens, and this model's configuration has neither "
                "bos_token_id nor eos_token_id: name one with legolink-0:token=ID"
            )
        vocabulary = self.backbone.get_input_embeddings().weight.shape[0]
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"legolink-0:token is a token id below {vocabulary}, got {token!r}")
        self.token = token

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}/{self.dummies}x{self.token}"

    @property
    def compiled_behind(self) -> Sequence[int]:
        return [self.token] * self.dummies
