"""Rules of selection: which document tokens are computed again in a linked prompt.

A new one is a function under `comb.methods.linked.selects` (CONTRIBUTING.md), and then a method by that name behind
every front, in the library and the server, whose scheduler knows the choice before anything is computed. A rule that
has to know what the question looks at gets a `QueryLook` instead of the spans (``@selects("mine", by_query=True)``), in
the server as well; one that has to look into the linked cache the `PromptLayout` (``looks=True``), in the library only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_type_hints

from torch import Tensor

from comb.linking.cache import Span


@dataclass(frozen=True)
class TokenCount:
    """A parameter that is a number of tokens; with `everything` a rule chooses all."""

    step: int = 1
    everything = 2**16

    def check(self, parameter: str, value: object) -> None:
        """Raises ValueError if `value` isn't one."""
        if type(value) is not int or value < 0 or value % self.step:
            kind = "an integer" if self.step == 1 else "an even integer"
            raise ValueError(f"{parameter} is a number of tokens, {kind} of at least 0, got {value!r}")


@dataclass(frozen=True)
class TokenShare:
    """A parameter that is a share of the document tokens."""

    everything = 1.0

    def check(self, parameter: str, value: object) -> None:
        """Raises ValueError if `value` isn't one."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            name = parameter.split(":")[1]
            raise ValueError(f"{parameter} is a share of the document tokens, 0 < {name} <= 1, got {value!r}")


Tokens = Annotated[int, TokenCount()]
EvenTokens = Annotated[int, TokenCount(step=2)]
Share = Annotated[float, TokenShare()]


@dataclass(frozen=True)
class QueryLook:
    """What the query saw when it passed over the linked prompt with nothing recomputed."""

    # [N] float32, on the CPU: the attention that its tokens pay to each of the prompt's, over them, layers and heads
    paid: Tensor
    spans: Sequence[Span]  # of the documents, in order
    behind_front: bool  # whether they were compiled behind something


@dataclass(frozen=True)
class Rule:
    """A function that chooses, and what it takes."""

    choose: Callable[..., list[int]]  # (spans, look or prompt, parameters by name) -> sorted positions
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of its parameters; the first one needs no name
    kinds: Mapping[str, TokenCount | TokenShare] = field(default_factory=dict)  # of those that are checked by kind
    looks: bool = False  # into the linked prompt, instead of knowing its choice from where documents are
    by_query: bool = False  # what the query looks at says it; then the prompt's last token is computed with the rest
    # raises ValueError for a method (its model, its parameters) that the rule can't be used with
    check: Callable[[Any], None] | None = None

    @classmethod
    def of(cls, function: Callable[..., list[int]], **defaults: Any) -> Rule:
        """What a function takes says its signature, but for other `defaults`."""
        _, *names = inspect.signature(function).parameters
        own = {name: inspect.signature(function).parameters[name].default for name in names}
        kinds: dict[str, Any] = {}
        for name, hint in get_type_hints(function, include_extras=True).items():
            for each in (hint, *get_args(hint)):  # of `Tokens | None`, too
                for kind in getattr(each, "__metadata__", ()):
                    kinds[name] = kind
        return cls(function, {**own, **defaults}, kinds)

    def read(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values of all its parameters. Raises ValueError for one that is none."""
        for name, value in given.items():
            if name in self.kinds and not (value is None and self.defaults[name] is None):
                self.kinds[name].check(f"{method}:{name}", value)
        return {**self.defaults, **given}

    def select(self, prompt: Any, spans: Sequence[Span], behind_front: bool, **parameters: Any) -> list[int]:
        """Sorted positions of the document tokens that are computed again in a prompt with documents at `spans`.

        The first token of a prompt that begins with a document which knows itself behind something that isn't there is
        always among them: it has to become the prompt's attention sink.

        Args:
            prompt: for a rule that looks, the `PromptLayout`; for one by query, the `QueryLook`; else nothing.
        """
        chosen = self.choose(spans if self.from_places else prompt, **parameters)
        return sorted({0, *chosen}) if behind_front and spans and not spans[0].start else chosen

    @property
    def from_places(self) -> bool:
        """Whether it needs to see nothing but where documents are."""
        return not (self.looks or self.by_query)

    @property
    def everything(self) -> dict[str, Any]:
        """Parameters that choose all document tokens; nothing where none do."""
        return {name: kind.everything for name, kind in list(self.kinds.items())[:1]}


def _nothing(spans: Sequence[Span]) -> list[int]:
    return []


NOTHING = Rule(_nothing)
