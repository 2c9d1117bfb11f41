"""Which examples a run trains on: one dataset, or a mixture of several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictInt
from pydantic.dataclasses import dataclass

from comb.documents.datasets import HUB
from comb_training.config.types import KNOWN_KEYS, AtLeastOne, Items, Number, Options, Positive

HeldoutShare = Annotated[Number, Field(gt=0, lt=1)]

MIXTURE = "mixture"
"""`DataConfig.dataset` where there is a mixture: what tables and plots call the data."""
ROWS = (
    "dataset", "path", "mixture", "epoch_examples", "max_repeats", "num_documents", "heldout_share", "limit", "options",
)  # fmt: skip
"""Keys of `DataConfig` that say which rows are read; the others, how text is written, hold for other rows as well."""


def other_rows(section: Mapping[str, Any], named: str | Sequence[Any], path: str | None = None) -> dict[str, Any]:
    """The keys of a `data` section with these rows in the place of its own (``data=mine.jsonl``).

    Args:
        named: what `comb.documents.datasets.locate` finds, or a list of them: a mixture of all their rows.
        path: of a registered dataset's name.
    """
    kept = {name: value for name, value in section.items() if name not in ROWS}
    if isinstance(named, str):
        return kept | {"dataset": named, "path": path}
    return kept | {"mixture": _told_apart(named)}


def _told_apart(sets: Sequence[Any]) -> list[Any]:
    """The sets of a mixture; files of the same name in several folders are called by their whole paths."""
    names = [_stem(each) if isinstance(each, str) else None for each in sets]
    return [
        each if name is None or names.count(name) == 1
        else {"dataset": each, "name": re.sub(r"[^\w.-]+", "-", each).strip("-.")}
        for each, name in zip(sets, names, strict=True)
    ]  # fmt: skip


def _stem(dataset: str) -> str:
    return Path(dataset.partition("?")[0]).stem


def _check_template(template: str | None, where: str) -> None:
    if template is not None and "{query}" not in template:
        raise ValueError(f"{where}: query_template {template!r} has no {{query}}: every question would be the same")


@dataclass(frozen=True, config=KNOWN_KEYS)
class MixtureEntry:
    """One set of a mixture (`DataConfig.mixture`). What is null is as in `DataConfig`.

    Raises:
        ValueError: for a value out of range, or an option that the mixture decides.
    """

    dataset: str
    """As in `DataConfig`: a registered dataset, or a file, folder or set on the Hub."""
    path: str | None = None
    """The dataset's file or folder; null for generated data."""
    name: str | None = None
    """What the set is called in counts and ids; null is `dataset`. Two sets can't have the same name."""
    weight: Positive | None = None
    """Share of the epoch's examples, relative to the other weights; null is 1, or, where no set of the mixture has a
    weight, all that it has."""
    num_documents: AtLeastOne | None = None
    """Documents per example."""
    heldout_share: HeldoutShare | None = None
    """Share of the groups (articles, stories) kept for evaluation."""
    limit: AtLeastOne | None = None
    """Different examples of this set at most, for training."""
    query_template: str | None = None
    """How a question is written; {query} is replaced."""
    options: Options = Field(default_factory=dict)
    """More options of the dataset's reader."""

    def __post_init__(self) -> None:
        if self.name is None:
            object.__setattr__(self, "name", _stem(self.dataset))
        where = f"data.mixture, set {self.name!r}"
        if not self.name or "/" in self.name or "@" in self.name:
            raise ValueError(f"{where}: a name is a text without / and @, which ids have behind it")
        _check_template(self.query_template, where)
        decided = sorted({"split", "limit"} & self.options.keys())
        if decided:
            raise ValueError(f"{where}: options can't hold {decided[0]!r}, which the mixture decides")


def _entry(value: Any) -> Any:
    return {"dataset": value} if isinstance(value, str) else value


@dataclass(frozen=True, config=KNOWN_KEYS)
class DataConfig:
    """Which examples, and how they become tokens."""

    dataset: str = ""
    """A registered dataset (squad, babi, nano, ...), or what is read: a file or folder of rows with documents, query
    and answer, or a set on the Hub, hf://org/name?split=train. Left out it is nano, or with a mixture "mixture"."""
    path: str | None = None
    """The dataset's file or folder, null for generated data; with a mixture, the folder that its paths are in."""
    mixture: Items[Annotated[MixtureEntry, BeforeValidator(_entry)]] = ()
    """Several sets instead of one `dataset`, each with a weight, or by its name alone."""
    epoch_examples: AtLeastOne | None = None
    """Examples of an epoch of the mixture; null: as many as `max_repeats` allows."""
    max_repeats: Annotated[Number, Field(ge=1)] = 1.0
    """How often an epoch of the mixture holds each example of a set at most, in the mean over the set. The set that
    runs out first decides how long the epoch is."""
    num_documents: AtLeastOne | None = None
    """Documents per example; null is the dataset's own default."""
    heldout_share: HeldoutShare | None = None
    """Share of the groups (articles, stories) kept for evaluation; null is the dataset's own default."""
    limit: AtLeastOne | None = None
    """Examples at most, for training."""
    seed: StrictInt = 0
    """Decides splits, distractors and shuffles."""
    max_document_tokens: AtLeastOne | None = None
    """Longer documents are cut (counted and said); null is what the encoder can take."""
    splitter: str | None = None
    """A splitter with its budget, fixed:512 say: documents of more tokens become several documents, and nothing of
    them is cut off (counted and said); null cuts at `max_document_tokens`."""
    max_prompt_tokens: AtLeastOne | None = None
    """Examples with a longer full prompt get no answer from the backbone and are dropped (counted and said)."""
    max_query_tokens: AtLeastOne = 1024
    """Examples whose query and answer are longer are dropped (counted and said)."""
    document_template: str | None = None
    """How a document is written, with {text} and {title}; null is the title, if there is one, and the text."""
    query_template: str = "{query}"
    """How a question is written; {query} is replaced."""
    questions_per_row: AtLeastOne = 1
    """Questions over the same documents that a row of training asks one after the other, at most; the answers of all of
    them are learned. Above 1 it needs `head`."""
    head: str | None = None
    """Plain text in front of the documents, examples say, for a model that answers best so; there is no chat template
    then. As in a file of evaluation sets (configs/evaluation.yaml)."""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """What the chat template is given, {enable_thinking: false} for Qwen3 say. The adapter's template has it from then
    on, wherever it is asked and served, unless a request says otherwise."""
    stop: str = ""
    """Characters that end an answer, each of them, where no chat template does; the data's answers get the first."""
    options: Options = Field(default_factory=dict)
    """More options of the dataset's reader."""

    @property
    def label(self) -> str:
        """The datasets' names, for titles; a person's own rows are called by their file."""
        sets = [(entry.dataset, entry.path) for entry in self.mixture] or [(self.dataset, self.path)]
        names = [path if name == "jsonl" and path else name for name, path in sets]
        return ", ".join(dict.fromkeys(name if name.startswith(HUB) else Path(name).name for name in names))

    def __post_init__(self) -> None:
        if self.questions_per_row > 1 and self.head is None:
            raise ValueError(
                "data.questions_per_row joins questions as plain text: give data.head ('' for none, on a command line "
                "data.head=\"''\"), as without one the tokenizer's chat template writes them"
            )
        if self.chat_template_kwargs and self.head is not None:
            raise ValueError("data.chat_template_kwargs are for a chat template, and with data.head there is none")
        _check_template(self.query_template, "data")
        if "split" in self.options:
            raise ValueError("data.options can't hold 'split': what is trained on would count as held out")
        if not self.mixture:
            if self.dataset == MIXTURE:
                raise ValueError(f"data.dataset={MIXTURE} needs data.mixture: a list of sets, each with a dataset")
            if self.epoch_examples is not None or self.max_repeats != 1:
                raise ValueError("data.epoch_examples and data.max_repeats are for data.mixture, and there is none")
            object.__setattr__(self, "dataset", self.dataset or "nano")
            return
        for name, given in (
            ("dataset", self.dataset not in ("", MIXTURE)), ("options", self.options)
        ):  # fmt: skip
            if given:
                raise ValueError(
                    f"data.{name} and data.mixture are both given: it belongs to the sets of the mixture; data=FILE "
                    "takes other rows in the place of all of them"
                )
        object.__setattr__(self, "dataset", MIXTURE)
        names = [entry.name for entry in self.mixture]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"data.mixture has two sets called {twice[0]!r}: give them a name each")
