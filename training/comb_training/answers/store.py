"""Answers on disk: parquet parts in one folder, written whole or not at all, found again by their content.

Any number of processes may write to a folder at once; each adds parts of its own and never touches another's. A
killed process loses the batch under way, nothing else. Parts of other weights or settings may lie in the same folder:
they are left alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from comb.files import TEMPORARY_PREFIX, is_abandoned, write_whole

logger = logging.getLogger(__name__)

METADATA = b"comb.answers"
COLUMNS = {"key": pa.string(), "token_ids": pa.list_(pa.int32()), "text": pa.string(), "finished": pa.bool_()}


@dataclass(frozen=True)
class StoredAnswer:
    """Token ids as generated, the stop token included if there was one (`finished`), and their text without it."""

    token_ids: tuple[int, ...]
    finished: bool
    text: str = ""


@dataclass(frozen=True)
class AnswerSettings:
    """What a greedy answer depends on, beside its prompt."""

    model: str  # its name, for people; `weights` tells models apart
    weights: str  # `weights_fingerprint` without `settings`
    dtype: str
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def identity(self) -> str:
        """The same text for whatever gives the same answers."""
        stops = ",".join(map(str, sorted(self.stop_token_ids)))
        return f"{self.weights}/{self.max_new_tokens}/{stops}"


class AnswerStore:
    """The answers of one model under one `AnswerSettings`, in a folder: `answers` by their keys.

    A part that can't be read is put aside (``*.damaged``) and said; its answers count as missing.

    Args:
        rank: part of the names of this process's parts.
    """

    def __init__(self, folder: str | Path, settings: AnswerSettings, *, rank: int = 0) -> None:
        self.folder = Path(folder)
        self.settings = settings
        self.answers: dict[str, StoredAnswer] = {}
        self._seen: set[str] = set()
        self._prefix = f"part-{rank:05d}-{secrets.token_hex(4)}"  # two processes never choose the same name
        self._parts = 0
        self.refresh()

    def refresh(self) -> int:
        """Reads parts that others have added since; how many new answers there were."""
        before = len(self.answers)
        for path in sorted(self.folder.glob("part-*.parquet")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                self._read(path)
        return len(self.answers) - before

    def add(self, answers: Mapping[str, StoredAnswer], engine: str) -> None:
        """Keeps answers as one part, written whole. Raises OSError when they can't be written (a full disk, say),
        naming the folder; parts before are whole."""
        self.answers.update(answers)
        made = {**asdict(self.settings), "identity": self.settings.identity, "engine": engine}
        rows = [{"key": key, **asdict(answer)} for key, answer in answers.items()]
        schema = pa.schema(list(COLUMNS.items()), metadata={METADATA: json.dumps(made, sort_keys=True).encode()})
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, write_page_checksum=True)
        path = self.folder / f"{self._prefix}-{self._parts:06d}.parquet"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._parts == 0:
                for abandoned in filter(is_abandoned, self.folder.glob(f"{TEMPORARY_PREFIX}*")):
                    abandoned.unlink(missing_ok=True)
            write_whole(path, sink.getvalue().to_pybytes())
        except OSError as error:
            raise OSError(
                error.errno,
                f"can't keep answers in {self.folder} ({error.strerror or error}). Answers written before are whole: "
                "put it right and start again, what is there is not generated again",
            ) from error
        self._seen.add(path.name)
        self._parts += 1

    def _read(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # another process has put it aside
            return
        try:
            file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
            written = json.loads((file.schema_arrow.metadata or {}).get(METADATA, b"{}"))
            if written.get("identity") != self.settings.identity:  # other weights or settings, or no part of ours
                return
            answers = {
                row["key"]: StoredAnswer(tuple(row["token_ids"]), bool(row["finished"]), row["text"])
                for row in file.read(list(COLUMNS)).to_pylist()
            }
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            aside = path.with_name(f"{path.name}.damaged")
            logger.warning(
                "%s is damaged (%s): put aside as %s, its answers are generated again", path, error, aside.name
            )
            with contextlib.suppress(OSError):
                path.rename(aside)
            return
        self.answers.update(answers)
