"""A card as its generated and its hand-written parts.

The generated text stands between two markers and ends with a record: digests of the header's generated values, of the
generated text, and of what a person had written at the last push. So a value that a person changed, added or deleted
is told from one that may be rewritten, and a card that was edited on the Hub from one that is as it was pushed.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

BEGIN, END = "<!-- comb: generated, rewritten on every save -->", "<!-- comb: end of the generated part -->"
_RECORD = re.compile(r"<!-- comb: record (\{.*\}) -->\n")


@dataclass(frozen=True)
class Card:
    """A card in parts.

    Args:
        header: the YAML header's values; `header_text` is how a person wrote them, comments too.
        before, after: the text around the generated part; without such a part, all text is in `before`.
        body: the generated part without its record, None if there is none.
        record: ``generated`` (header key -> digest), ``body`` and ``pushed`` (digests).
    """

    header: dict[str, Any]
    header_text: str = ""
    before: str = "\n"
    after: str = "\n"
    body: str | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether all of the text is a person's: there is some, and no generated part."""
        return self.body is None and bool(self.before.strip())

    @property
    def body_was_edited(self) -> bool:
        """Whether somebody wrote into the generated part, which the next save rewrites."""
        return self.body is not None and "body" in self.record and digest(self.body) != self.record["body"]

    @property
    def own(self) -> dict[str, Any]:
        """What a person wrote: header values that weren't generated, generated keys taken out, text around."""
        generated = self.record.get("generated", {})
        return {
            "header": {name: value for name, value in self.header.items() if generated.get(name) != digest(value)},
            "removed": sorted(generated.keys() - self.header.keys()),
            "before": self.before.strip(),
            "after": self.after.strip(),
        }

    def __str__(self) -> str:
        text = self.header_text if _mapping(self.header_text) == self.header else _dump(self.header)
        header = f"---\n{text.rstrip()}\n---\n" if self.header else ""
        if self.body is None:
            return header + self.before
        record = json.dumps(self.record, sort_keys=True).replace(">", "\\u003e")  # no value may end the comment
        return f"{header}{self.before}{BEGIN}{self.body}<!-- comb: record {record} -->\n{END}{self.after}"


def digest(value: Any) -> str:
    """Twelve hex digits that stand for a value in the record."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def parse_card(text: str, where: str) -> Card:
    """Takes a card apart. Raises ValueError, naming `where`, for a header that is no YAML mapping."""
    text = text.replace("\r\n", "\n")
    found = REGEX_YAML_BLOCK.search(text)
    header_text, rest = (found[2], text[found.end() :]) if found else ("", text)
    try:
        header = yaml.safe_load(header_text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: the header between the --- lines is not valid YAML: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{where}: the header between the --- lines should be `key: value` lines, got {header!r:.80}")
    before, begin, generated = rest.partition(BEGIN)
    body, end, after = generated.partition(END)
    if not begin or not end:
        return Card(header, header_text, before=rest, after="")
    record: dict[str, Any] = {}
    if (noted := _RECORD.search(body)) is not None:
        try:
            record = json.loads(noted[1])
        except json.JSONDecodeError:  # somebody edited it: without it, all of the header counts as a person's
            record = {}
        body = body[: noted.start()] + body[noted.end() :]
    return Card(header, header_text, before, after, body, record)


def edited_last(here: Card | None, there: Card | None, repo: str) -> Card | None:
    """Which card has what a person wrote last, the one in the folder or the one on the Hub.

    Raises:
        ValueError: both were edited since the last push, in different ways.
    """
    if here is None or there is None:
        return here or there
    pushed = (here.record.get("pushed"), there.record.get("pushed"))
    ours, theirs = here.own, there.own
    if ours == theirs or digest(theirs) in pushed:
        return here
    if digest(ours) in pushed:
        return there
    if not any(ours.values()) or not any(theirs.values()):
        return here if any(ours.values()) else there
    raise ValueError(
        "README.md was edited both in the folder and on the Hub since the last push. Copy what should stay of the "
        f"header and of the text around the generated part from https://huggingface.co/{repo} into the folder's card, "
        "and the same the other way, until the two are alike; or delete the folder's to take the Hub's"
    )


def with_own(generated: Card, person: Card | None, *, pushing: bool = False) -> Card:
    """The generated card with what a person wrote in an earlier one, its header in that one's order."""
    if person is None:
        person = Card({})
    if person.is_own:
        return person
    own = person.own
    kept = {name: value for name, value in generated.header.items() if name not in own["removed"]}
    header = {**kept, **own["header"]}
    header = {name: header[name] for name in dict.fromkeys([*person.header, *header]) if name in header}
    body = generated.body or ""
    record = {"generated": {name: digest(value) for name, value in generated.header.items()}, "body": digest(body)}
    before, after = (text if text.strip() else "\n" for text in (person.before, person.after))
    card = Card(header, person.header_text, before, after, body, record)
    pushed = digest(card.own) if pushing else person.record.get("pushed")
    return replace(card, record={**record, "pushed": pushed})


def _dump(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000)


def _mapping(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None
