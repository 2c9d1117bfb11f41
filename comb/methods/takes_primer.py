"""What methods share that link what the backbone caches of segments, compiled alone or behind a primer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, ClassVar

from comb.backbones.exclusive import backbone_of
from comb.backbones.identity import weights_fingerprint
from comb.backbones.primer import Primer, own_tokenizer, primer_ids
from comb.backbones.rotary import primer_limit
from comb.methods.base import DecodeState, LinkRequest, Method
from comb.methods.past_state import PastState


class TakesPrimer(Method):
    """A method whose segments may be compiled behind a text that linked prompts don't have.

    Args:
        primer: what segments are compiled behind, instead of alone: true for a passage of prose that comb has, a text
            file, or token ids. Nothing of its own is kept. See `primed`.
    """

    default_primer: ClassVar[Primer] = False

    def __init__(self, model: Any, *, primer: Primer | None = None, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        self.check_model()  # first: a model that can't be linked at all may have no tokenizer either
        self.primer = self._primer(self.default_primer if primer is None else primer)

    @abstractmethod
    def check_model(self) -> None:
        """Raises ValueError for a model that this method can't link; the message says why."""

    def _primer(self, primer: Primer) -> tuple[int, ...]:
        if primer is False:
            return ()
        tokenizer = own_tokenizer(self.backbone) if isinstance(primer, (bool, str)) else None
        ids = primer_ids(primer, tokenizer, primer_limit(self.backbone))
        vocabulary = self.backbone.get_input_embeddings().weight.shape[0]
        if wrong := [each for each in ids if not isinstance(each, int) or not 0 <= each < vocabulary]:
            raise ValueError(f"{self.name}:primer has token ids below {vocabulary}, got {wrong[0]!r}")
        most = primer_limit(self.backbone)
        if most is not None and len(ids) > most:
            raise ValueError(
                f"the primer's {len(ids)} tokens take more than half of the {2 * most} positions that the model has to "
                "compile in: documents stand behind them, so give a shorter one"
            )
        return tuple(ids)

    @property
    def compiled_behind(self) -> Sequence[int]:
        return self.primer

    @abstractmethod
    def link_row(self, row: LinkRequest, past: PastState | None = None) -> DecodeState:
        """`Method.link_row`, behind `past` where it is given."""

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        """`link_row` behind `past`, whose keys, values and states are copied; nothing in there is computed again."""
        return self.link_row(row, past)

    def check_row(self, row: LinkRequest, past: PastState | None) -> None:
        """Raises ValueError when a row behind `past` leaves no position to answer in."""
        others = (0 if past is None else len(past.token_ids)) + sum(map(len, row.fresh))
        self.check_prompt(sum(picache.num_tokens for picache in row.picaches), others)

    @classmethod
    def tokenized(cls, parameters: Mapping[str, Any], tokenizer: Any, model: Any) -> dict[str, Any]:
        primer = parameters.get("primer", cls.default_primer)
        if not primer:
            return dict(parameters)
        return {**parameters, "primer": primer_ids(primer, tokenizer, primer_limit(backbone_of(model)))}

    @property
    def fingerprint(self) -> str:
        own = weights_fingerprint(self.backbone)
        return f"{own}/{sha256(str(self.primer).encode()).hexdigest()[:12]}" if self.primer else own
