"""What is asked in a comparison, and how: a model, how examples become requests, how long an answer may be; and sets of
questions, read from one file that says where they are and how they are put to a language model, as
`configs/evaluation.yaml` does.

Where a benchmark comes with a file of its prompts (LongBench's dataset2prompt.json: a JSON object of prompts with
``{context}`` and ``{input}``), a template names that file, and a set the prompt in it, as in `configs/longbench.yaml`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from comb.documents.datasets import Counts, Dataset, below, read_dataset
from comb.documents.document import Document, Example, PromptBuilder, stopping_tokens, until_stop
from comb.files import OnceEach
from comb.kernels.mac.mac_config import MacConfig

if TYPE_CHECKING:
    from comb.cache.store import PICacheStore
    from comb.engine.engine import PICEngine

T = TypeVar("T")
NO_DOCUMENTS = "none"
"""A control in place of a method: the backbone is asked without any document."""


@dataclass(frozen=True)
class Setting:
    """What all methods of one comparison share: model, tokenizer, and how examples become requests."""

    model: Any
    tokenizer: Any
    builder: PromptBuilder
    query_template: str = "{query}"
    splitter: str | None = None
    mac: MacConfig | None = None

    def engine(self, method: str, store: PICacheStore | None = None) -> PICEngine:
        """A fresh engine; ``naive@fixed:128`` is a method with a splitter of its own.

        Raises:
            ValueError: where the method is unknown or doesn't fit the model.
        """
        from comb.engine.engine import PICEngine

        name, _, splitter = ("full" if method == NO_DOCUMENTS else method).partition("@")
        extra: dict[str, Any] = {"splitter": splitter or self.splitter} if splitter or self.splitter else {}
        extra |= {"prompt_builder": self.builder, "mac": self.mac}
        return PICEngine(self.model, self.tokenizer, method=name, store=store, **extra)

    def request(self, method: str, example: Example) -> tuple[str, Sequence[Document]]:
        documents = () if method == NO_DOCUMENTS else example.documents
        return self.query_template.replace("{query}", example.query), documents

    def prompt_tokens(self, example: Example, *, documents: bool = True) -> int:
        """Of the prompt, with or without its documents in it."""
        segments = [self.builder.segment(document) for document in example.documents]
        prompt = self.builder.build(self.request("full", example)[0], segments)
        return len(prompt.flat if documents else prompt.bare)


@dataclass(frozen=True)
class AnswerRules:
    """How long an answer may be, and the characters each of which ends it before the model's own end token."""

    max_new_tokens: int = 48
    stop: str = ""

    def settings(self, engine: PICEngine) -> dict[str, Any]:
        """For ``generate``, greedy: every token whose text holds a character of `stop` is an end token."""
        settings = engine.settings({"max_new_tokens": self.max_new_tokens})
        if self.stop:
            ends = settings["eos_token_id"] or ()
            settings["eos_token_id"] = [*ends, *stopping_tokens(engine.tokenizer, self.stop)]
        return settings

    def text(self, engine: PICEngine, token_ids: Sequence[int]) -> str:
        """An answer's tokens as the text that is scored."""
        return until_stop(str(engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)), self.stop)


def drop_too_long(
    setting: Setting, examples: Sequence[Example], specs: Sequence[str], max_new_tokens: int, counts: Counts
) -> list[Example]:
    """Examples whose prompts and answers fit the backbone with every method; the others are counted as dropped.

    Raises:
        ValueError: if none is left, or a method is unknown or doesn't fit the model.
    """
    limits: dict[bool, int] = {}  # with documents in the prompt, and without
    for spec in specs:
        method = setting.engine(spec).method
        if (limit := method.max_prompt_tokens) is not None:
            reads_documents = spec != NO_DOCUMENTS and not method.uses_encoder
            limits[reads_documents] = min(limits.get(reads_documents, limit), limit)
    kept = list(examples)
    for documents, limit in limits.items():
        room = limit - max_new_tokens
        fitting = [each for each in kept if setting.prompt_tokens(each, documents=documents) <= room]
        prompt = "prompt" if documents else "prompt without documents"
        reason = f"{prompt} and {max_new_tokens} new tokens exceed the model's {limit} positions"
        counts.drop(reason, len(kept) - len(fitting))
        kept = fitting
    if not kept:
        raise ValueError(
            f"no question is left to ask ({counts}): use fewer or shorter documents, allow for shorter answers, or "
            "take only methods that don't put documents into the prompt"
        )
    return kept


@dataclass(frozen=True)
class QuestionTemplate:
    """How documents and a question become a prompt."""

    prefix: str | None = None  # plain text in front of the documents; None takes the model's chat template
    lead: str = ""  # text in front of the documents in the user's message
    document: str | None = None  # with ``{text}`` and, optionally, ``{title}``; None is `PromptBuilder`'s own
    query: str = "{query}"
    stop: str = ""  # characters that end an answer, as the model's end token does; the text in front is scored
    prompts: str | None = None  # a file below the folder of all sets' data; a set's prompt in it has lead and query

    def __post_init__(self) -> None:
        if self.prompts is not None and (self.lead or self.query != "{query}"):
            raise ValueError("a template has either prompts, a file, or lead and query of its own")

    def builder(self, tokenizer: Any) -> PromptBuilder:
        return PromptBuilder(tokenizer, document_template=self.document, prefix=self.prefix, lead=self.lead)


@dataclass(frozen=True)
class EvaluationSet:
    """Questions of one dataset, and how they are asked."""

    name: str
    dataset: str  # a registered name
    template: QuestionTemplate
    path: str | None = None  # below the folder of all sets' data, or ``hf://...`` (`below`)
    split: str = "heldout"  # the side that is scored; templates were chosen on the other one
    max_new_tokens: int = 24
    options: Mapping[str, Any] = field(default_factory=dict)  # of the dataset's reader
    prompt: str | None = None  # the name of its prompt, where the template is a file of prompts

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.template.prompts is None):
            raise ValueError("a set names its prompt if its template is a file of prompts, and only then")

    def asked(self, data: Path) -> QuestionTemplate:
        """How its questions are put, a prompt of a file below `data` written as the template of its own that it is.

        Raises:
            ValueError: for a file that can't be read, or a prompt that isn't in it or has no place for documents.
        """
        if self.template.prompts is None:
            return self.template
        path = data / self.template.prompts
        try:
            prompts = json.loads(path.read_text(encoding="utf-8"))
            lead, question = prompts[self.prompt].split("{context}")
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"set {self.name}: the prompts in {path} can't be read as JSON: {error}") from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"set {self.name}: {path} has no prompt {self.prompt!r}") from error
        except (AttributeError, ValueError) as error:
            raise ValueError(f"set {self.name}: prompt {self.prompt!r} of {path} needs {{context}} once") from error
        made = replace(self.template, prompts=None, lead=lead)
        # "write a summary" is asked of all documents alike: it has no place for a question
        return replace(made, query=question.replace("{input}", "{query}") if "{input}" in question else question)

    def read(self, data: Path, seed: int = 0) -> Dataset:
        """All its questions, `spread`."""
        path = None if self.path is None else below(data, self.path)
        found = read_dataset(self.dataset, path, split=self.split, seed=seed, **self.options)
        return replace(found, examples=tuple(spread(found.examples, seed)))


def spread(examples: tuple[Example, ...], seed: int) -> list[Example]:
    """The examples in an order of which any beginning is a sample: shuffled, no documents again before all were asked.

    Questions about the same paragraph are alike, so that few paragraphs asked often would tell less.
    """
    rounds: dict[tuple[int, float], Example] = {}
    asked: dict[Any, int] = {}
    rng = Random(seed)
    for example in rng.sample(examples, len(examples)):
        asked[example.documents] = asked.get(example.documents, -1) + 1
        rounds[asked[example.documents], rng.random()] = example
    return [rounds[key] for key in sorted(rounds)]


def read_sets(path: Path) -> dict[str, EvaluationSet]:
    """The sets of a file by their names.

    Raises:
        ValueError: for a file that can't be read, an unknown key, or a template that isn't there.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), OnceEach)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} can't be read as YAML: {error}") from error
    if not isinstance(content, Mapping) or set(content) != {"templates", "sets"}:
        got = list(content) if isinstance(content, Mapping) else content
        raise ValueError(f"{path}: expected the keys templates and sets, got {got!r}")
    for name, section in content.items():
        if not isinstance(section, Mapping) or not section:
            raise ValueError(f"{path}: {name} is a section with an entry for each of them, got {section!r}")
    templates = {
        name: _made(QuestionTemplate, row, f"{path}: templates.{name}") for name, row in content["templates"].items()
    }
    for name, template in templates.items():
        if "{query}" not in template.query:
            raise ValueError(
                f"{path}: templates.{name}: a template's query needs {{query}}, or all questions would be the same: "
                f"{template.query!r}"
            )
    sets = {}
    for name, row in content["sets"].items():
        where = f"{path}: sets.{name}"
        wanted = row.get("template") if isinstance(row, Mapping) else None
        if wanted not in templates:
            raise ValueError(f"{where}.template is one of {', '.join(templates)}, not {wanted!r}")
        sets[name] = _made(EvaluationSet, {**row, "name": name, "template": templates[wanted]}, where)
    return sets


def _made(kind: type[T], row: Any, where: str) -> T:
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # both kinds are dataclasses
    if not isinstance(row, Mapping) or set(row) - set(known):
        wrong = row if not isinstance(row, Mapping) else sorted(set(row) - set(known))
        raise ValueError(f"{where}: expected keys among {', '.join(known)}, got {wrong}")
    for each in fields(kind):  # type: ignore[arg-type]  # as above
        wanted = {"str": str, "int": int, "Mapping": Mapping}.get(str(each.type).partition("[")[0].partition(" ")[0])
        value = row.get(each.name)
        absent = value is None and "None" in str(each.type)
        if each.name in row and wanted is not None and not absent and not isinstance(value, wanted):
            raise ValueError(f"{where}: {each.name} is {value!r}, and has to be of type {each.type}")
    try:
        return kind(**row)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
