"""A card as its generated and its hand-written parts.

The generated text stands between two markers, and is rewritten on every save; so are the header's values that comb
knows. All else is a person's. The last marker holds a digest of what a person had written at the last push, so a card
that was edited on the Hub is told from one that is as it was pushed.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from huggingface_hub import CardData, RepoCard

BEGIN, END = "<!-- comb: generated, rewritten on every save -->", "<!-- comb: end of the generated part"
_END = re.compile(re.escape(END) + r"(?:, pushed (\w+))? -->")
GENERATED = ("library_name", "pipeline_tag", "base_model", "base_model_relation", "datasets", "metrics", "model-index")
"""Values of the header that comb writes. `TAGS` are joined with a person's, and of `SETTLED` `render` takes either."""
TAGS = ["comb", "position-independent-caching", "kv-cache", "rag"]
LICENCE = ("license", "license_name", "license_link")
SETTLED = (*LICENCE, "language")


@dataclass(frozen=True)
class Card:
    """A card in parts.

    Args:
        header: the YAML header's values.
        before, after: the text around the generated part; without such a part, all text is in `before`.
        body: the generated part, None if there is none. pushed: the digest of `own` at the last push.
    """

    header: dict[str, Any] = field(default_factory=dict)
    before: str = "\n"
    after: str = "\n"
    body: str | None = None
    pushed: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether all of the text is a person's: there is some, and no generated part."""
        return self.body is None and bool(self.before.strip())

    @property
    def own(self) -> dict[str, Any]:
        """What a person may have written: other header values, and the text around."""
        header = {name: value for name, value in self.header.items() if name not in (*GENERATED, "tags")}
        tags = [tag for tag in self.header.get("tags") or () if tag not in TAGS]
        return {"header": header, "tags": tags, "before": self.before.strip(), "after": self.after.strip()}

    @property
    def is_written(self) -> bool:
        """Whether a person has written anything; before the first push `SETTLED` are taken for what was looked up."""
        own = self.own
        keys = own["header"].keys() - (() if self.pushed else SETTLED)
        return any([keys, own["tags"], own["before"], own["after"]])

    def __str__(self) -> str:
        text = self.before
        if self.body is not None:
            pushed = f", pushed {self.pushed}" if self.pushed else ""
            text += f"{BEGIN}{self.body}{END}{pushed} -->{self.after}"
        return f"---\n{CardData(**self.header).to_yaml()}\n---\n{text}" if self.header else text


def digest(own: dict[str, Any]) -> str:
    """Twelve hex digits that stand for what a person wrote."""
    return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:12]


def parse_card(text: str, where: str) -> Card:
    """Takes a card apart. Raises ValueError, naming `where`, for a header that is no YAML mapping."""
    text = text.replace("\r\n", "\n")
    try:
        card = RepoCard(text) if text.startswith("---") else None
    except (yaml.YAMLError, ValueError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"{where}: the header between the --- lines is not valid YAML: {told}") from error
    header, rest = ({}, text) if card is None else (card.data.to_dict(), card.text)  # type: ignore[no-untyped-call]
    before, begin, generated = rest.partition(BEGIN)
    end = _END.search(generated)
    if not begin or end is None:
        return Card(header, before=rest, after="")
    return Card(header, before, generated[end.end() :], generated[: end.start()], end[1])


def edited_last(here: Card | None, there: Card | None, repo: str) -> Card | None:
    """Which card has what a person wrote last, the one in the folder or the one on the Hub.

    Raises:
        ValueError: both were edited since the last push, in different ways.
    """
    if here is None or there is None:
        return here or there
    pushed, ours, theirs = (here.pushed, there.pushed), digest(here.own), digest(there.own)
    if ours == theirs or theirs in pushed:
        return here
    if ours in pushed:
        return there
    if not here.is_written or not there.is_written:
        return here if here.is_written else there
    raise ValueError(
        "README.md was edited both in the folder and on the Hub since the last push. Copy what should stay of the "
        f"header and of the text around the generated part from https://huggingface.co/{repo} into the folder's card, "
        "and the same the other way, until the two are alike; or delete the folder's to take the Hub's"
    )


def with_own(generated: Card, person: Card | None, *, pushing: bool = False) -> Card:
    """The generated card with what a person wrote in an earlier one, its header in that one's order."""
    if person is None:
        person = Card()
    if person.is_own:
        return person
    own = person.own
    # licence and languages are settled where the card is generated
    header = {**{name: value for name, value in own["header"].items() if name not in SETTLED}, **generated.header}
    if tags := [*generated.header.get("tags", ()), *own["tags"]]:
        header["tags"] = tags
    header = {name: header[name] for name in dict.fromkeys([*person.header, *header]) if name in header}
    before, after = (text if text.strip() else "\n" for text in (person.before, person.after))
    card = Card(header, before, after, generated.body, person.pushed)
    return replace(card, pushed=digest(card.own)) if pushing else card
