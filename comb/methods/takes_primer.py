"""What methods share that compile segments behind a primer instead of alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, ClassVar

from comb.backbones.identity import weights_fingerprint
from comb.backbones.primer import Primer, own_tokenizer, primer_ids
from comb.methods.base import Method


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
        ids = primer_ids(primer, own_tokenizer(self.backbone) if isinstance(primer, (bool, str)) else None)
        vocabulary = self.backbone.get_input_embeddings().weight.shape[0]
        if wrong := [each for each in ids if not isinstance(each, int) or not 0 <= each < vocabulary]:
            raise ValueError(f"{self.name}:primer has token ids below {vocabulary}, got {wrong[0]!r}")
        limit = self.max_prompt_tokens
        if limit is not None and len(ids) > limit // 2:
            raise ValueError(
                f"the primer's {len(ids)} tokens take more than half of the {limit} positions that the model has: "
                "documents are compiled behind them, so give a shorter one"
            )
        return tuple(ids)

    @classmethod
    def tokenized(cls, parameters: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
        primer = parameters.get("primer", cls.default_primer)
        return {**parameters, "primer": primer_ids(primer, tokenizer)} if primer else dict(parameters)

    @property
    def fingerprint(self) -> str:
        own = weights_fingerprint(self.backbone)
        return f"{own}/{sha256(str(self.primer).encode()).hexdigest()[:12]}" if self.primer else own
