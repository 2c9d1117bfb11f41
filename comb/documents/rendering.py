"""A chat as its template writes it, where in that text documents stand, and the tokens around them.

The template sees the messages as they are, so what it computes from a text stays: dropped thinking, switches, JSON,
trimming. It is rendered without documents, which gives the prompt's text, and with a marker in the place of each. Where
the two differ by more than the markers, it computes with a text that a document would be a part of: an error.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from comb.documents.messages import DOCUMENTS, Generated, Message, Reference, message_parts
from comb.locks import lock_of

Slot = Reference | Generated


@dataclass(frozen=True)
class Rendered:
    """What a template makes of a chat."""

    text: str
    slots: tuple[tuple[int, int, Slot], ...] = ()
    """What stands in the text, in order, each from character to character; a document takes no room."""
    token_ids: tuple[int, ...] | None = None  # where a tokenizer makes tokens and no text
    offsets: tuple[tuple[int, int], ...] = ()  # where each of these stands in the text


# ---- chats ----


def renders_chats(tokenizer: Any) -> bool:
    """Whether it has a chat template, or writes chats in a way of its own."""
    return bool(getattr(tokenizer, "chat_template", None)) or makes_tokens(tokenizer)


def render_chat(
    tokenizer: Any, messages: Sequence[Message], arguments: Mapping[str, Any], front: Sequence[str | Slot] = ()
) -> Rendered:
    """`messages` by the tokenizer's chat template.

    Args:
        arguments: of ``apply_chat_template``; a generation prompt is added unless they say otherwise.
        front: what stands at the start of the first user message.

    Raises:
        ValueError: with the template's own words, or because documents can't be placed in what it makes of them.
    """
    user = next((place for place, message in enumerate(messages) if message.get("role") == "user"), None)
    if user is None and front:
        raise ValueError("no message with role 'user': documents and question belong to a user message")
    forms = True, True
    if not makes_tokens(tokenizer):
        try:
            template = tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
        except ValueError as error:
            raise ValueError(f"the tokenizer has no chat template for this: {error}") from error
        forms = _forms(tokenizer, template)
    chat = [_InPieces.of(each, *forms, front if place == user else ()) for place, each in enumerate(messages)]
    slots = [slot for message in chat for slot in message.slots]

    def rendered(fills: Sequence[str], *, trimmed: bool = False) -> Rendered:
        left = iter(fills)
        return _render(tokenizer, [message.written(left, trimmed=trimmed) for message in chat], arguments)

    if not slots:
        return rendered([])
    # digits stay what they are in JSON, in capitals, and at the edge of a text that is trimmed
    mark, stand_in = str(secrets.randbits(128) | 1 << 127), str(secrets.randbits(96) | 1 << 95)

    def without_documents(stand_in: str) -> Rendered:
        # a request's documents are none of the message's words, but a message that is all documents isn't empty
        inside = [each.wordless or slot != DOCUMENTS for each in chat for slot in each.slots]
        return rendered(
            [s.text if isinstance(s, Generated) else stand_in * i for s, i in zip(slots, inside, strict=True)]
        )

    reason, former = "", None
    for _ in range(3):  # at midnight, a date that the template writes changes between two renderings
        base = without_documents(stand_in)
        if base == former:
            break
        former = base
        if base.token_ids is not None:  # from which nothing can be taken
            base = without_documents("")
        base = replace(base, text=base.text.replace(stand_in, ""))
        # an answer that the template changes is a text like any other
        for tokens_stay in (True, False)[not any(isinstance(slot, Generated) for slot in slots) :]:
            fills = [_marked(slot, f"{mark}{n:07d}", tokens_stay) for n, slot in enumerate(slots)]
            for trimmed in (False, True)[: 1 + (DOCUMENTS in slots)]:  # in front of a text that the template trims
                placed, reason = _find(rendered(fills, trimmed=trimmed).text, base.text, slots, mark)
                if not reason:
                    return replace(base, slots=tuple(placed))
    raise ValueError(f"the chat template {reason}: documents can't be placed in it")


@dataclass(frozen=True)
class _InPieces:
    """A message whose texts are in pieces: words, and what stands between them.

    `texts` are one, or one for each of `fields`, the parts of a content that is a list; None: the content as it came.
    """

    message: Message
    texts: tuple[tuple[str | Slot, ...], ...] | None = None
    fields: tuple[Mapping[str, Any], ...] | None = None

    @classmethod
    def of(cls, message: Message, takes_text: bool, takes_parts: bool, front: Sequence[str | Slot]) -> _InPieces:
        """By the forms of content that the template takes (`_forms`)."""
        content, pieces = message.get("content"), message_parts(message)
        # the template gets a list of parts where one came, or where it takes nothing else
        own = isinstance(content, str) or any(isinstance(piece, Generated) for piece in pieces)
        as_list = takes_parts and not (own and takes_text)
        if not front and (not pieces or (isinstance(content, str) and not as_list)):
            return cls(message)
        row = list(front)
        if not as_list:  # texts that stand next to each other are lines of one, as in vLLM
            for before, piece in zip([None, *pieces], pieces, strict=False):
                row += ["\n", piece] if isinstance(before, str) and isinstance(piece, str) else [piece]
            return cls(message, (tuple(row),))
        texts: list[tuple[str | Slot, ...]] = []
        fields = []
        for piece, part in zip(pieces, [{"type": "text"}] if isinstance(content, str) else content or (), strict=True):
            row.append(piece)
            if isinstance(piece, str):
                texts.append(tuple(row))
                fields.append(part)
                row = []
        if texts:  # what stands behind the last words belongs to their part
            texts[-1] += tuple(row)
            return cls(message, tuple(texts), tuple(fields))
        return cls(message, (tuple(row),), ({"type": "text"},))

    @property
    def slots(self) -> list[Slot]:
        """In order."""
        return [piece for text in self.texts or () for piece in text if not isinstance(piece, str)]

    @property
    def wordless(self) -> bool:
        """Whether documents are all that it has."""
        return not any(isinstance(piece, str) and piece.strip() for text in self.texts or () for piece in text)

    def written(self, fills: Iterator[str], *, trimmed: bool) -> Message:
        """The message for a template, with the next of `fills` in place of its slots.

        `trimmed`: without the white space around a request's documents, where nothing but these is in front of it.
        """
        if self.texts is None:
            return self.message
        texts = []
        for text in self.texts:
            pieces = list(text)
            for place, piece in enumerate(text if trimmed and DOCUMENTS in text else ()):
                if isinstance(piece, str):
                    pieces[place] = piece.lstrip()
                    if pieces[place]:
                        break
            texts.append("".join(next(fills) if isinstance(piece, Slot) else piece for piece in pieces))
        if self.fields is None:
            return {**self.message, "content": texts[0]}
        parts = [{**part, "text": text} for part, text in zip(self.fields, texts, strict=True)]
        return {**self.message, "content": parts}


def _marked(slot: Slot, mark: str, tokens_stay: bool) -> str:
    if isinstance(slot, Reference):
        return f"{mark}0"
    core = slot.text.strip()
    return slot.text.replace(core, f"{mark}0{core}{mark}1", 1) if core and tokens_stay else slot.text


def _find(shown: str, text: str, slots: Sequence[Slot], mark: str) -> tuple[list[tuple[int, int, Slot]], str]:
    """Where the slots stand in `text`, and why they can't be found: the first reason, or none."""
    places: dict[tuple[int, int], list[int]] = {}
    for count, found in enumerate(re.finditer(rf"{mark}(\d{{7}})([01])", shown)):
        number, side = int(found[1]), int(found[2])
        places.setdefault((number, side), []).append(found.start() - count * len(found[0]))
    placed: list[tuple[int, int, Slot]] = []
    for number, slot in enumerate(slots):
        starts, ends = places.get((number, 0), []), places.get((number, 1), [])
        if isinstance(slot, Reference):
            if len(starts) != 1:
                return [], "shows a message more than once" if starts else "leaves out a message"
            placed.append((starts[0], starts[0], slot))
        elif len(starts) == len(ends) == 1 and text[starts[0] : ends[0]] == (core := slot.text.strip()):
            before, after = slot.text.split(core, 1)
            span = starts[0] - len(before), ends[0] + len(after)
            if text[slice(*span)] == slot.text:  # not where it was trimmed
                placed.append((*span, slot))
    if re.sub(rf"{mark}\d{{8}}", "", shown) != text:
        return [], "computes with the text of a message (its length, its beginning, one of its parts)"
    if any(former[1] > later[0] for former, later in pairwise(placed)):
        return [], "puts messages into another order"
    return placed, ""


def _render(tokenizer: Any, messages: Sequence[Message], arguments: Mapping[str, Any]) -> Rendered:
    given = {"add_generation_prompt": not arguments.get("continue_final_message"), **arguments}
    chat = [dict(message) for message in messages]
    try:
        with lock_of(tokenizer):
            if not makes_tokens(tokenizer):
                return Rendered(tokenizer.apply_chat_template(chat, **{**given, "tokenize": False}))
            return _spelled(
                tokenizer, tokenizer.apply_chat_template(chat, **{**given, "tokenize": True, "return_dict": False})
            )
    except Exception as error:  # a template is a program, and may raise anything
        from jinja2.exceptions import TemplateError

        words = " ".join(str(error).split()) or type(error).__name__
        # without its folder: clients of a server read it too
        place = PurePath(str(getattr(tokenizer, "name_or_path", ""))).name
        files = f"{place and f'{place}/'}chat_template.jinja or tokenizer_config.json"
        template = f"the tokenizer's chat template ({files})"
        if type(error) is TemplateError:  # which templates raise themselves
            raise ValueError(f"{template} doesn't take these messages: {words}") from error
        raise ValueError(
            f"{template} fails with these messages ({type(error).__name__}: {words}): if they are right, mend it, or "
            "take the one that the model was published with"
        ) from error


@lru_cache(8)
def _forms(tokenizer: Any, template: str) -> tuple[bool, bool]:
    """Whether a template shows the words of a content that is a text, and of one that is a list of parts."""
    word = "wordsofamessage"

    def shows(content: Any) -> bool:
        try:
            text = _render(tokenizer, [{"role": "user", "content": content}], {"chat_template": template}).text
        except ValueError:
            return False
        return word in text and not re.search(rf"""text['"]: ?['"]{word}""", text)

    return shows(word), shows([{"type": "text", "text": word}])


# ---- tokens ----


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text holds half of a surrogate pair, at character {error.start}: {error}") from error


def encoded(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Token ids of a text, without those that a tokenizer adds. Raises ValueError for what is no Unicode."""
    _check_unicode(text)
    with lock_of(tokenizer):
        return list(tokenizer.encode(text, add_special_tokens=False, **options))


def plain_ids(tokenizer: Any, text: str, tags: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Token ids of a text that stays text whatever it spells. Raises ValueError where a tokenizer can't do that.

    Args:
        tags: token ids that a text may spell as little as special ones.
    """
    # mistral_common's read no special token in any text
    ids = encoded(tokenizer, text, **({} if makes_tokens(tokenizer) else {"split_special_tokens": True}))
    structure = tags | (set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)})
    if structure.isdisjoint(ids):
        return tuple(ids)
    if getattr(tokenizer, "is_fast", False):
        return tuple(encoded(_speller(tokenizer, len(tokenizer), structure), text, split_special_tokens=True))
    # one written in Python may not know that option
    raise ValueError(
        f"{type(tokenizer).__name__} takes text for the special token "
        f"{tokenizer.decode([min(structure.intersection(ids))])!r}: documents would be read as structure; load the "
        "model's tokenizer.json, or leave that word out"
    )


def document_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """`plain_ids` of a document, which spells no tag of thinking or of tool calls either.

    Those are rarely special tokens, and parsers look for them in the whole prompt: what the chat template writes of a
    tokenizer's added tokens.
    """
    if makes_tokens(tokenizer):
        return plain_ids(tokenizer, text)
    return plain_ids(tokenizer, text, _tags(tokenizer, len(tokenizer), str(getattr(tokenizer, "chat_template", None))))


# what is kept of a tokenizer has its number of tokens beside it, as it may be given new ones


@lru_cache(8)
def _tags(tokenizer: Any, size: int, template: str) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return frozenset(id for id, tag in added if not tag.special and str(tag).strip() and str(tag) in template)


@lru_cache(8)
def _speller(tokenizer: Any, size: int, structure: frozenset[int]) -> Any:
    """A copy that finds these tokens in no text: told to split special ones, tokenizers still find others that were
    added, and look into their model's vocabulary."""
    from tokenizers import Tokenizer

    with lock_of(tokenizer):
        own = copy.deepcopy(tokenizer)
    for tag in (tag for id, tag in own.added_tokens_decoder.items() if id in structure and not tag.special):
        tag.special = True
        own.backend_tokenizer.add_special_tokens([tag])
    state = json.loads(own.backend_tokenizer.to_str())
    if state["model"]["type"] == "BPE":  # which finds only what its merges make: an ordinary word
        return own
    vocab, secret = state["model"]["vocab"], secrets.token_hex()  # a piece that no text spells
    if isinstance(vocab, dict):
        vocab = {f"{secret}{id}" if id in structure else piece: id for piece, id in vocab.items()}
    else:
        vocab = [(f"{secret}{id}" if id in structure else piece, score) for id, (piece, score) in enumerate(vocab)]
    state["model"]["vocab"] = vocab
    own.backend_tokenizer.model = Tokenizer.from_str(json.dumps({**state, "added_tokens": []})).model
    return own


def added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids that a tokenizer puts in front of a text, and behind it."""
    with lock_of(tokenizer):
        whole, inside = list(tokenizer.encode("a")), encoded(tokenizer, "a")
    start = next(place for place in range(len(whole)) if whole[place : place + len(inside)] == inside)
    return whole[:start], whole[start + len(inside) :]


def token_blocks(tokenizer: Any, rendered: Rendered) -> list[int | Reference]:
    """Token ids of a rendered text, with references where documents stand in it: those of the whole text, cut at slots.

    What one token of the whole text would hold from both sides of a cut is tokenised on each side by itself.
    """
    text, ids, offsets = rendered.text, rendered.token_ids, rendered.offsets
    if not rendered.slots:
        return [*(encoded(tokenizer, text) if ids is None else ids)]
    if ids is None and getattr(tokenizer, "is_fast", False):
        _check_unicode(text)
        with lock_of(tokenizer):
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = found["input_ids"], found["offset_mapping"]
    begins, ends = [begin for begin, _ in offsets], [end for _, end in offsets]
    whole = _TokenizedText(tokenizer, text, ids or (), begins, ends, frozenset(tokenizer.all_special_ids))
    blocks: list[int | Reference] = []
    position = 0
    for start, end, slot in rendered.slots:
        blocks += whole.between(position, start)
        blocks += [slot] if isinstance(slot, Reference) else slot.token_ids
        position = end
    return [*blocks, *whole.between(position, len(text))]


@dataclass(frozen=True)
class _TokenizedText:
    """The tokens of a text, each from a character (`begins`) to another (`ends`); none where a tokenizer can't say."""

    tokenizer: Any
    text: str
    ids: Sequence[int]
    begins: Sequence[int]
    ends: Sequence[int]
    special: frozenset[int]

    def between(self, start: int, stop: int) -> list[int]:
        """Token ids of the text from `start` to `stop`."""
        left, right = self._cut(start), self._cut(stop)
        if left is not None and right is not None:
            return list(self.ids[left:right])
        first, last = bisect_left(self.begins, start), bisect_right(self.ends, stop)
        inside = [place for place in range(first, last) if self.ids[place] in self.special]
        if not inside:
            return self._apart(start, stop, left)
        # only what stands between a cut and the next special token can depend on the cut
        front = self._apart(start, self.begins[inside[0]], left) if left is None else self.ids[left : inside[0]]
        behind = inside[-1] + 1
        back = self._apart(self.ends[inside[-1]], stop, behind) if right is None else self.ids[behind:right]
        return [*front, *self.ids[inside[0] : behind], *back]

    def _cut(self, place: int) -> int | None:
        """How many tokens stand in front of a place; None where it is inside of one, or nobody knows."""
        if place == 0:
            return 0
        if not self.ids:
            return None
        if place == len(self.text):
            return len(self.ids)
        count = bisect_left(self.begins, place)
        # white space that no token has may still be a part of one
        exact = 0 < count < len(self.ids) and self.ends[count - 1] == place == self.begins[count]
        return count if exact else None

    def _apart(self, start: int, stop: int, like: int | None) -> list[int]:
        """The tokens of a part alone; but without the space that SentencePiece puts in front of a text, not of a part.

        `like`: the place of its first token in the whole text, where one begins there.
        """
        part, encode = self.text[start:stop], partial(encoded, self.tokenizer)
        alone = encode(part)
        if start == 0 or (like is not None and alone[:1] == list(self.ids[like : like + 1])):
            return alone
        for before in ("\n", "a"):
            head, both = encode(before), encode(before + part)
            if encode(f"{before}b") == [*head, *encode("b")]:
                return alone  # no such space
            if both[: len(head)] == head:
                return both[len(head) :]
        return alone


# ---- mistral_common's tokenizers, which write a chat as tokens ----


def makes_tokens(tokenizer: Any) -> bool:
    """Whether it is one of these."""
    return any(kind.__name__ == "MistralCommonBackend" for kind in type(tokenizer).__mro__)


def _spelled(tokenizer: Any, ids: Sequence[int]) -> Rendered:
    own, special = tokenizer.tokenizer.instruct_tokenizer.tokenizer, set(tokenizer.all_special_ids)
    pieces = [tokenizer.convert_ids_to_tokens(i).encode() if i in special else own.id_to_byte_piece(i) for i in ids]
    offsets, position = [], 0
    for piece in pieces:
        inside = piece[:1] != b"" and piece[0] & 0xC0 == 0x80  # its first character has begun in the token before
        length = sum(byte & 0xC0 != 0x80 for byte in piece)
        offsets.append((position - inside, position + length))
        position += length
    return Rendered(b"".join(pieces).decode(), token_ids=tuple(ids), offsets=tuple(offsets))


TEMPLATE_RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
"""Arguments of apply_chat_template itself: not for who sets a template's own by name."""


def template_arguments(text: str, option: str = "--chat-template-kwargs") -> dict[str, Any]:
    """What a command line's option says. Raises ValueError for other than a JSON object of a template's own names."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} {text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f'{option} is a JSON object such as {{"enable_thinking": false}}, not {text!r}')
    if reserved := sorted(TEMPLATE_RESERVED & found.keys()):
        raise ValueError(f"{option} can't set {reserved[0]!r}, which the messages and whoever renders them say")
    return found
