"""Fronts: what documents are compiled behind, and what no linked prompt holds.

What stands at the start of a prompt becomes its attention sink. Compiled alone, each document has one of its own;
behind a front its tokens are what they are in the middle of a text. The front is dropped; where a linked prompt begins
with a document, its first token is computed again, to be the one sink that it needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from comb.backbones.adapter import trained_method
from comb.backbones.discovery import start_token_id, text_config
from comb.backbones.identity import backbone_of, identity_of, weights_fingerprint
from comb.backbones.rotary import compile_limit, front_limit, why_length_dependent
from comb.backbones.tokenizer import check_front, front_ids, own_tokenizer
from comb.cache.picache import DecoderPICache, PICache
from comb.hybrid.caches import is_hybrid, new_cache, run
from comb.hybrid.support import HybridSupport
from comb.linking.cache import fork_cache
from comb.linking.passes import compile_tokens
from comb.linking.positions import UnmovableError
from comb.methods.base import LinkRequest, Method
from comb.methods.decode_state import DecodeState, PastState

P = TypeVar("P", bound=PICache)

FrontChoice = str | Sequence[int]
"""``none``; ``dummies:n``, BOS tokens; ``prose``, a passage that comb has; a text file; token ids; ``adapter``, what
the model's own adapter has learned; or another adapter's folder or Hub id."""

DUMMIES = "dummies"


class Front:
    """Tokens whose keys and values the backbone computes; none by default."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.token_ids = tuple(token_ids)

    @property
    def mark(self) -> str:
        """What a fingerprint has of it: documents behind another front are others."""
        return f"/{sha256(str(self.token_ids).encode()).hexdigest()[:12]}" if self.token_ids else ""

    def compiled(self, backbone: Any) -> list[DecoderPICache]:
        """Its keys and values, computed once for each state of the weights. The caller holds the backbone's lock."""
        if not self.token_ids:
            return []
        kept: dict[str, DecoderPICache] = identity_of(backbone).fact(("front", self.token_ids), dict)
        if not kept:  # a pass of this compile's, which is counted
            kept["front"] = compile_tokens(backbone, "", self.token_ids)
        return list(kept.values())

    def begun(self, backbone: Any, support: HybridSupport) -> Callable[[], Any] | None:
        """What makes the cache that a hybrid's document begins with; None where the front runs in one pass with it.

        Computed and called as `compiled` is.
        """
        if not self.token_ids or support.step is not None:
            return None
        kept: dict[str, Any] = identity_of(backbone).fact(("front's cache", self.token_ids), dict)
        if not kept:
            kept["front"] = new_cache(backbone)
            run(backbone, list(self.token_ids), kept["front"], 0)
        return partial(fork_cache, kept["front"])


class TrainedFront(Front):
    """An adapter's learned keys and values (`comb.linktokens.front.LearnedFront`); `token_ids` are placeholders."""

    def __init__(self, learned: Any, placeholder: int) -> None:
        super().__init__([placeholder] * learned.length)
        self.learned = learned

    @property
    def mark(self) -> str:
        return f"+{self.learned.fingerprint}"

    def compiled(self, backbone: Any) -> list[DecoderPICache]:
        with torch.no_grad():
            keys, values = zip(*self.learned(backbone.dtype), strict=True)
        return [DecoderPICache("", keys, values, torch.tensor(self.token_ids))]

    def begun(self, backbone: Any, support: HybridSupport) -> Callable[[], Any]:
        return partial(self.learned.cache, backbone, support)


class TakesFront(Method):
    """A method whose segments may be compiled behind something that linked prompts don't have (a `FrontChoice`)."""

    default_front: ClassVar[str] = "none"

    def __init__(self, model: Any, *, front: FrontChoice | None = None, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        try:  # first: a model that can't be linked at all may have no tokenizer either
            self.check_model()
        except UnmovableError as reason:
            others = "'hypic' or 'full'" if is_hybrid(self.backbone) and self.compile_name != "hybrid" else "'full'"
            raise ValueError(
                f"method {self.name!r} can't be used with this model: {reason}; use method={others}, or 'comb' with a "
                "trained encoder where the model can take one"
            ) from reason
        self.front = front_of(self.default_front if front is None else front, model, self.name)

    @abstractmethod
    def check_model(self) -> None:
        """Raises UnmovableError or ValueError for a model that this method can't link; the message says why."""

    @property
    def compiled_behind(self) -> Sequence[int]:
        return self.front.token_ids

    @property
    def max_segment_tokens(self) -> int | None:
        limit = compile_limit(self.backbone)
        return None if limit is None else limit - 1 - len(self.front.token_ids)

    def why_not_continue(self) -> str:
        return why_length_dependent(self.backbone)

    @abstractmethod
    def link_row(self, row: LinkRequest, past: PastState | None = None) -> DecodeState:
        """`Method.link_row`, behind `past` where it is given."""

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        """`link_row` behind `past`, whose keys, values and states are copied; nothing in there is computed again."""
        return self.link_row(row, past)

    def owned(self, row: LinkRequest, past: PastState | None, kind: type[P], *, links: str, made_by: str) -> list[P]:
        """A row's PICaches; `links` and `made_by` say in messages what they hold, and what may have made another's.

        Raises:
            ValueError: for a PICache of another method, model or dtype, and when a row behind `past` leaves no position
                to answer in.
        """
        fingerprint, found = self.fingerprint, list[P]()  # to ask for a fingerprint is a walk over the weights
        for picache in row.picaches:
            if not isinstance(picache, kind):
                raise ValueError(
                    f"method {self.name!r} links {links}, got a {type(picache).__name__}: PICaches can't be linked by "
                    "another method than the one that compiled them"
                )
            if picache.fingerprint != fingerprint:
                raise ValueError(
                    f"this PICache was compiled by {made_by} (fingerprint {picache.fingerprint}, method {self.name!r} "
                    f"on this model has {fingerprint}): compile the document again"
                )
            found.append(picache)
        others = (0 if past is None else len(past.token_ids)) + sum(map(len, row.fresh))
        self.check_prompt(sum(picache.num_tokens for picache in found), others)
        return found

    @classmethod
    def tokenized(cls, parameters: Mapping[str, Any], tokenizer: Any, model: Any) -> dict[str, Any]:
        choice = parameters.get("front", cls.default_front)
        ids = _text_ids(choice, backbone_of(model), tokenizer)
        return dict(parameters) if ids is None else {**parameters, "front": ids}

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.backbone) + self.front.mark


def front_of(choice: FrontChoice, model: Any, method: str) -> Front:
    """The front that `choice` names on a model (plain, or an adapter on one).

    Raises:
        ValueError: for what is no front, or none for this model, saying what to do.
    """
    backbone = backbone_of(model)
    if choice == "none":
        return Front()
    if choice == "adapter":
        if trained_method(model) != "linktokens":
            raise ValueError(
                f"method {method!r} compiles documents behind what an adapter has learned (front=adapter), and "
                f"{type(model).__name__} has none: train some with `comb train configs/linktokens-smollm2-135m.yaml`, "
                "load an adapter that has it or name it (front=FOLDER), or use front=prose"
            )
        return TrainedFront(model.front, model.placeholder_id)
    if isinstance(choice, str) and choice.partition(":")[0] == DUMMIES:
        return Front(dummy_ids(choice, text_config(backbone)))
    ids = _text_ids(choice, backbone, None)
    if ids is None:  # a published adapter's
        assert isinstance(choice, str)
        if not Path(choice).is_dir() and choice.count("/") != 1:
            raise ValueError(
                f"front={choice}: there is no such file or folder; a front is none, {DUMMIES}:n, prose, a text file, "
                "adapter, or an adapter's folder or Hub id"
            )
        from comb.linktokens.front import published_front

        try:
            learned, config = published_front(choice, backbone)
        except OSError as error:
            raise ValueError(f"front={choice}: {' '.join(str(error).split())}") from error
        return TrainedFront(learned, config.placeholder_id)
    check_front(ids, backbone)
    return Front(ids)


def dummies_of(choice: str) -> int:
    """n of ``dummies:n``; the paper takes four (EPIC sec. 5.4). Raises ValueError for what is no number of tokens."""
    count = choice.partition(":")[2]
    if count and not (count.isdecimal() and int(count) > 0):
        raise ValueError(f"front={DUMMIES}:n is a number of tokens, at least 1, got {count!r}")
    return int(count) if count else 4


def dummy_ids(choice: str, config: Any) -> list[int]:
    """The tokens of ``dummies:n``. Raises ValueError where a text configuration has neither BOS nor EOS."""
    token = start_token_id(config)
    if token is None:
        raise ValueError(
            f"front={DUMMIES}:n is so many BOS tokens, and this model's configuration has neither bos_token_id nor "
            "eos_token_id: use front=prose, or give token ids"
        )
    return [token] * dummies_of(choice)


def _text_ids(choice: FrontChoice, backbone: Any, tokenizer: Any) -> list[int] | None:
    """Token ids of a front that is text, or ids already; None for one of another kind."""
    if not isinstance(choice, str):
        if not isinstance(choice, Sequence) or not choice:
            raise ValueError(
                f"front is none, {DUMMIES}:n, prose, a text file, token ids, adapter, or an adapter's folder or Hub "
                f"id, got {choice!r}"
            )
        return [*choice]
    if choice != "prose" and not Path(choice).is_file():
        return None
    found = own_tokenizer(backbone) if tokenizer is None else tokenizer
    return front_ids(choice, found, front_limit(backbone.config))
