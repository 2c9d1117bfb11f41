"""A card as its generated and its hand-written parts, and the three-way merge of the latter.

The generated part stands between two markers and ends with a record: digests of the header's generated values, of the
generated text, and of what a person had written at the last push. So a value that a person changed, added or deleted
is told from one that may be rewritten, and an edit made here since the last push from one made on the Hub.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import yaml

BEGIN, END = "<!-- comb: generated, rewritten on every save -->", "<!-- comb: end of the generated part -->"
BEFORE, AFTER, WHOLE = "text above the generated part", "text below the generated part", "text"

_RECORD = re.compile(r"<!-- comb: record (\{.*\}) -->\n")
_HEADER = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"^[A-Za-z_\"'][^:\n]*:", re.MULTILINE)


class CardConflictError(ValueError):
    """The same part of a card was edited in the folder and on the Hub, in different ways."""


@dataclass(frozen=True)
class Deleted:
    """Stands for a generated header key that a person took out."""


@dataclass(frozen=True)
class Card:
    """A card in parts.

    Args:
        header: the YAML header's values; `header_text` is how they are written.
        before, after: the text around the generated part; without such a part, all text is in `before`.
        body: the generated part without its record, None if there is none.
        record: ``generated`` and ``pushed`` (name -> digest), and ``body`` (digest).
    """

    header: dict[str, Any]
    header_text: str
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

    def edits(self) -> dict[str, Any]:
        """What a person wrote: header values that weren't generated, `Deleted` for those taken out, and text."""
        generated = self.record.get("generated", {})
        found = {name: value for name, value in self.header.items() if generated.get(name) != digest(value)}
        found.update({name: Deleted() for name in generated if name not in self.header})
        if self.is_own:
            found[WHOLE] = self.before
        else:
            texts = {BEFORE: self.before, AFTER: self.after}
            found.update({name: text for name, text in texts.items() if text.strip()})
        return found

    def __str__(self) -> str:
        header = f"---\n{self.header_text}---\n" if self.header else ""
        if self.body is None:
            return header + self.before
        record = json.dumps(self.record, sort_keys=True).replace(">", "\\u003e")  # no value may end the comment
        return f"{header}{self.before}{BEGIN}{self.body}<!-- comb: record {record} -->\n{END}{self.after}"


def digest(value: Any) -> str:
    """Twelve hex digits that stand for a value in the record."""
    text = repr(value) if isinstance(value, Deleted) else json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse_card(text: str, where: str) -> Card:
    """Takes a card apart. Raises ValueError, naming `where`, for a header that is no YAML mapping."""
    text = text.replace("\r\n", "\n")
    header_text, rest = "", text
    if (found := _HEADER.match(text)) is not None:
        header_text, rest = found[1], text[found.end() :]
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


def merge_edits(
    here: Mapping[str, Any], there: Mapping[str, Any], pushed: Mapping[str, str], *, prefer: str | None = None
) -> dict[str, Any]:
    """A person's edits in the folder and on the Hub in one, where `pushed` are digests of those at the last push.

    Args:
        prefer: ``folder`` or ``hub`` wins where both were edited.

    Raises:
        CardConflictError: if both were edited and nothing is preferred.
    """
    merged, conflicts = {}, []
    for name in dict.fromkeys([*here, *there]):
        ours, theirs = (digest(side[name]) if name in side else None for side in (here, there))
        if ours == theirs or theirs == pushed.get(name) or (prefer == "folder" and ours != pushed.get(name)):
            chosen = here
        elif ours == pushed.get(name) or prefer == "hub":
            chosen = there
        else:
            conflicts.append(f"{name} (folder: {_shown(here, name)}; Hub: {_shown(there, name)})")
            continue
        if name in chosen:
            merged[name] = chosen[name]
    if WHOLE in merged and (BEFORE in merged or AFTER in merged):  # one side has no generated part to be above or below
        if prefer is None:
            conflicts.append("text (without its generated part on one side, beside it on the other)")
        elif WHOLE in (here if prefer == "folder" else there):
            merged = {name: value for name, value in merged.items() if name not in (BEFORE, AFTER)}
        else:
            del merged[WHOLE]
    if conflicts:
        raise CardConflictError(
            f"README.md was edited both in the folder and on the Hub since the last push: {'; '.join(conflicts)}. "
            "Make the two alike, or say which one holds with --card folder or --card hub"
        )
    return merged


def compose(generated: Card, edits: Mapping[str, Any], like: Card | None, pushed: Mapping[str, str]) -> Card:
    """The generated card with a person's `edits`; header keys in the order, and with the comments, of `like`."""
    values = {name: value for name, value in edits.items() if name not in (BEFORE, AFTER, WHOLE)}
    base = {} if WHOLE in edits else generated.header
    header = {name: value for name, value in {**base, **values}.items() if not isinstance(value, Deleted)}
    order = [name for name in (like.header if like else {}) if name in header]
    header = {name: header[name] for name in dict.fromkeys([*order, *header])}
    text = header_text(header, like.header_text if like else "")
    if WHOLE in edits:
        return Card(header, text, before=edits[WHOLE], after="")
    record: dict[str, Any] = {
        "generated": {name: digest(value) for name, value in generated.header.items()},
        "pushed": dict(pushed),
    }
    body = generated.body or ""
    record["body"] = digest(body)
    return Card(header, text, edits.get(BEFORE, "\n"), edits.get(AFTER, "\n"), body, record)


def header_text(header: Mapping[str, Any], old: str = "") -> str:
    """The header as YAML; what hasn't changed since `old` stays as it is written there, comments too."""
    starts = [0, *(match.start() for match in _KEY.finditer(old)), len(old)]
    kept: dict[str, str] = {}
    comment = ""
    for start, stop in pairwise(starts):
        block = comment + old[start:stop]
        lines = block.splitlines(keepends=True)
        # a comment belongs to the key below it
        last = next((i for i in range(len(lines), 0, -1) if not lines[i - 1].startswith("#")), 0)
        comment = "".join(lines[last:])
        for name, value in _mapping("".join(lines[:last])).items():
            if name in header and header[name] == value:
                kept[name] = "".join(lines[:last])
    text = "".join(kept.get(name) or _dump({name: value}) for name, value in header.items()) + comment
    return text if _mapping(text) == dict(header) else _dump(dict(header))


def _dump(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000)


def _mapping(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _shown(edits: Mapping[str, Any], name: str) -> str:
    if name not in edits:
        return "as generated"
    return "taken out" if isinstance(edits[name], Deleted) else repr(str(edits[name]).strip()[:60])
