"""What front and engine say to each other of a request: where its documents lie, signed, and what was done with them.

Whatever names blocks of the pool reads documents, and numbers are easily guessed; vLLM passes on what clients send, and
some of its ways lose what it was given. So documents, the prompt over them, the salt of the prefix cache and the
request are stated together, under the instance's secret. A salt that begins with `MARK` demands the statement that
names it, and no statement is good under another salt: they come to the engine together, or the request fails.

Reports go the other way, beside vLLM's own outputs, a line each in a file that whoever reads it empties, as no socket
holds those of a burst: vLLM has no field for them that all of its routes and streams would show. The engine writes when
it has admitted a request, before any token of the answer can be seen, so who writes the answer finds it there. They are
information only: when the front is gone, nothing else happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

KEY = "comb_docs"  # in `SamplingParams.extra_args`; over HTTP in ``vllm_xargs``
MARK = "comb-documents-"
COMPILE = "compile"
_DIGITS = 64
REPORTS = "reports"  # in the instance's folder
_KEPT = 100_000  # reports that nobody has asked for: more than one batch has requests


@dataclass(frozen=True)
class Capability:
    """One request's documents.

    Args:
        method: of a plain model, whose documents stand in the prompt and are linked there (`comb_serving.linking`);
            `COMPILE` for a prompt that is one document, to be kept; empty for a trained encoder's.
        spans: with a method, for each of `prompts` its documents' places, ``(start, tokens)``.
        found: whether these are segments that nobody has marked: what the prefix cache has of the prompt goes first.
        snapshot: tokens of the prompt's beginning, exact, that the first of `documents` holds in front of all `spans`;
            where that is compiled, all of them.
        prefixes: of a trained encoder's documents, for each of `prompts` how many of its first tokens read none; empty
            where all do.
    """

    request_id: str  # part of the engine's name for the request; empty where the engine alone chooses it
    salt: str  # of the prefix cache, made from tenant and documents
    documents: tuple[int, ...]  # their places, as `pack` writes them; empty where documents stand in the prompt
    prompts: tuple[str, ...]  # `digest` of each prompt; empty where vLLM renders the messages itself
    method: str = ""
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()
    found: bool = False
    lora: str = ""  # name of the LoRA that vLLM is to compute the request with; empty for none
    snapshot: int = 0
    prefixes: tuple[int, ...] = ()
    prefix_salt: str = ""  # of these tokens, which are the same whatever the documents
    nonce: str = ""  # tells it from another that states the same under the same name, which clients may choose

    def sign(self, secret: bytes) -> str:
        """As a request carries it."""
        text = json.dumps(astuple(self), separators=(",", ":"))
        return _code(text, secret) + text

    @classmethod
    def verify(cls, token: object, secret: bytes) -> Capability:
        """Reads what `sign` has written. Raises ValueError for anything else."""
        if not isinstance(token, str) or not hmac.compare_digest(
            token[:_DIGITS].encode(), _code(token[_DIGITS:], secret).encode()
        ):
            raise ValueError(f"{KEY} is not signed by this instance: send documents in the field 'documents'")
        read = cls(*json.loads(token[_DIGITS:]))
        spans = tuple(tuple((start, tokens) for start, tokens in row) for row in read.spans)
        documents, prompts, prefixes = tuple(read.documents), tuple(read.prompts), tuple(read.prefixes)
        return replace(read, documents=documents, prompts=prompts, spans=spans, prefixes=prefixes)

    def check(self, request_id: str, salt: str | None, prompt: Sequence[int] | None) -> None:
        """Raises ValueError unless it was made for this request."""
        # where documents stand in the prompt, losing their places costs time alone: the salt is the tenant's own
        if self.salt != (salt or "") or not (self.method or not self.documents or self.salt.startswith(MARK)):
            raise ValueError("its salt is not the one of its documents")
        if self.request_id not in request_id:
            raise ValueError(f"its documents are those of request {self.request_id}")
        if self.prompts and (prompt is None or digest(prompt) not in self.prompts):
            raise ValueError("its prompt is not the one over its documents")
        if self.method and len(self.spans) != len(self.prompts):
            raise ValueError("its documents have no places in its prompt")

    def prefix_of(self, prompt: Sequence[int] | None) -> int:
        """How many of the first tokens of one of its prompts, which `check` has let pass, read no documents."""
        return self.prefixes[self.prompts.index(digest(prompt))] if self.prefixes and prompt is not None else 0

    def spans_in(self, prompt: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Where the documents are in one of its prompts, which `check` has let pass."""
        return self.spans[self.prompts.index(digest(prompt))]


def digest(prompt: Sequence[int]) -> str:
    """A name for token ids."""
    return hashlib.sha256(array("I", prompt).tobytes()).hexdigest()[:32]


def _code(text: str, secret: bytes) -> str:
    return hmac.new(secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class PoolHandle:
    """One document in the pool: its length, and the blocks that hold it, the last one perhaps in part."""

    tokens: int
    blocks: tuple[int, ...]


def pack(handles: Sequence[PoolHandle]) -> list[int]:
    """``[tokens, blocks, block, block, ..., tokens, ...]``."""
    return [number for handle in handles for number in (handle.tokens, len(handle.blocks), *handle.blocks)]


def unpack(numbers: Sequence[int], layout: Any) -> list[PoolHandle]:
    """The handles of `pack`.

    Raises ValueError for anything that isn't such a list, or names blocks or lengths that don't fit the pool.
    """
    handles, at = [], 0
    while at < len(numbers):
        tokens, count = [*numbers[at : at + 2], -1][:2]
        blocks = tuple(numbers[at + 2 : at + 2 + count]) if count > 0 else ()
        if tokens < 1 or count != layout.blocks_for(tokens) or len(blocks) != count:
            raise ValueError(
                f"documents: {tokens} tokens in {count} blocks of {layout.block_size} at place {at} of {len(numbers)}"
            )
        if not all(0 <= block < layout.num_blocks for block in blocks):
            raise ValueError(f"documents: blocks {blocks[:4]} at place {at}, but the pool has {layout.num_blocks}")
        handles.append(PoolHandle(tokens, blocks))
        at += 2 + count
    return handles


# ---- what the engine did, said back ----


@dataclass(frozen=True)
class LinkReport:
    """What was done for a prompt."""

    prefix_tokens: int  # taken from the exact prefix cache
    linked_tokens: int  # taken from the pool
    computed_tokens: int  # that passed through the model: seams and query
    linked_of: tuple[int, ...] = ()  # of `linked_tokens`, those of each document

    @property
    def said(self) -> dict[str, int]:
        """As answers and the log have it."""
        return {name: value for name, value in asdict(self).items() if name != "linked_of"}


def name_of(token: str) -> str:
    """How a request's report is found: by its signed `Capability`, which both sides have."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[BinaryIO]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


class ReportSender:
    """The engine's end."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / REPORTS).open("ab", buffering=0)

    def send(self, name: str, report: LinkReport) -> None:
        """Never fails, and waits at most until the front has read what was sent before."""
        line = json.dumps([name, *astuple(report)]).encode() + b"\n"
        try:
            with _locked(self._file) as file:
                size = file.seek(0, os.SEEK_END)
                if file.write(line) < len(line):  # half a line would spoil the next
                    file.truncate(size)
                    raise OSError(f"there is no room in {file.name}")
        except OSError as error:
            logger.warning("what was linked for a request can't be said: %s", error)


class ReportReceiver:
    """The front's end; made before the engine has requests."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / REPORTS).open("a+b", buffering=0)
        self._file.truncate(0)
        self._found: OrderedDict[str, LinkReport] = OrderedDict()

    def take(self, name: str) -> LinkReport | None:
        """The first report of a request; None if there is none. Of several answers, the later ones find what the first
        has left in the prefix cache."""
        with _locked(self._file) as file:
            file.seek(0)
            if lines := file.read().splitlines():
                file.truncate(0)
        for found, prefix, linked, computed, each in map(json.loads, lines):
            self._found.setdefault(found, LinkReport(prefix, linked, computed, tuple(each)))
        while len(self._found) > _KEPT:
            self._found.popitem(last=False)
        return self._found.pop(name, None)

    def close(self) -> None:
        """Closes the file, which goes with the instance's folder."""
        self._file.close()
