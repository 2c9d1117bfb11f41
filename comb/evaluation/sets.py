"""The sets of a comparison, read from one file: where their questions are, and how they are put to a language model.

    templates:
      few-shot: {head: "...\\n\\n", document: "{text}\\n", query: "Question: {query}\\nAnswer:", stop: "\\n"}
    sets:
      squad: {dataset: squad, path: squad/dev.json, template: few-shot, options: {num_documents: 4}}

Where a benchmark comes with a file of its prompts (LongBench's dataset2prompt.json: a JSON object of prompts with
``{context}`` and ``{input}``), a template names that file, and a set the prompt in it:

    templates:
      official: {prompts: longbench/dataset2prompt.json}
    sets:
      hotpotqa: {dataset: longbench, path: longbench, template: official, prompt: hotpotqa, options: {bare: true}}

`configs/evaluation.yaml` is such a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import yaml

from comb.documents.datasets import Dataset, below, read_dataset
from comb.documents.document import Example, PromptBuilder

T = TypeVar("T")


@dataclass(frozen=True)
class QuestionTemplate:
    """How documents and a question become a prompt.

    Args:
        head: plain text in front of the documents (`PromptBuilder.head`); None takes the model's chat template.
        lead: text in front of the documents in the user's message (`PromptBuilder.lead`).
        document: with ``{text}`` and, optionally, ``{title}``; None is `PromptBuilder`'s own.
        query: with ``{query}``.
        stop: characters that end an answer, as the model's end token does; the text in front is scored.
        prompts: a file of prompts below the folder of all sets' data; a set's stands in it instead of lead and query.
    """

    head: str | None = None
    lead: str = ""
    document: str | None = None
    query: str = "{query}"
    stop: str = ""
    prompts: str | None = None

    def __post_init__(self) -> None:
        if self.prompts is not None and (self.lead or self.query != "{query}"):
            raise ValueError("a template has either prompts, a file, or lead and query of its own")

    def builder(self, tokenizer: Any) -> PromptBuilder:
        """What writes prompts so."""
        return PromptBuilder(tokenizer, document_template=self.document, head=self.head, lead=self.lead)


@dataclass(frozen=True)
class EvaluationSet:
    """Questions of one dataset, and how they are asked.

    Args:
        dataset: a registered name. path: its file below the folder of all sets' data, or ``hf://...`` (`below`).
        split: the side that is scored; templates were chosen on the other one.
        options: of the dataset's reader.
        prompt: the name of its prompt, where the template is a file of prompts.
    """

    name: str
    dataset: str
    template: QuestionTemplate
    path: str | None = None
    split: str = "heldout"
    max_new_tokens: int = 24
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None

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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
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
