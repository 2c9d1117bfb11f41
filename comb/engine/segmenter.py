"""Documents to the segments that a method compiles, each under its content key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from comb.documents.catalog import KeyedSegment
from comb.documents.document import Document, DocumentLike, PromptBuilder, as_document
from comb.documents.splitting import Splitter, split_document
from comb.methods.base import Method

REMEMBERED = 256
"""Documents whose tokens an engine remembers: tokenising them again would take a cached question more than linking."""

CutDocument = Callable[[Any, int, PromptBuilder, Splitter, Document], tuple[tuple[int, ...], ...]]


def cut_document(
    tokenizer: Any, vocabulary: int, builder: PromptBuilder, splitter: Splitter, document: Document
) -> tuple[tuple[int, ...], ...]:
    """Token ids of a document's segments, which depend on the arguments alone.

    Args:
        vocabulary: size of `tokenizer`, which may have been given new tokens.
    """
    return tuple(split_document(tokenizer, builder.segment(document), splitter))


@dataclass(frozen=True)
class Segmenter:
    """How one engine cuts, names and keys documents.

    Args:
        method: what compiles the segments; keys follow its model, adapter and dtype of the moment.
        tokenizer: the model's, by which `splitter` finds its places.
        builder: writes a document as tokens.
        splitter: KVSplit.
        cut: `cut_document`, or what remembers its results.
        salt: separates tenants.
    """

    method: Method
    tokenizer: Any
    builder: PromptBuilder
    splitter: Splitter
    cut: CutDocument
    salt: str = ""

    def segments(self, documents: Sequence[DocumentLike]) -> list[KeyedSegment]:
        """All documents' segments, in order. Raises ValueError for empty ones, and for one that isn't in a list."""
        if isinstance(documents, str | Document | bytes | Mapping) or not isinstance(documents, Iterable):
            raise ValueError(
                f"documents is a list, not {type(documents).__name__}: write documents=[...] around a single one"
            )
        checked = [as_document(document) for document in documents]
        how = self.tokenizer, len(self.tokenizer), self.builder, self.splitter
        split = [self.cut(*how, document) for document in checked]
        keys = iter(self.method.keys_of([part for parts in split for part in parts], self.salt))
        segments = []
        for document, parts in zip(checked, split, strict=True):
            own = [next(keys) for _ in parts]
            # a document in one part is called after its key; more parts are called after all of them
            digest = own[0] if len(own) == 1 else sha256("".join(own).encode()).hexdigest()
            name = document.name(digest)
            segments += [
                KeyedSegment(name, ids, key, part) for part, (ids, key) in enumerate(zip(parts, own, strict=True))
            ]
        return segments

    def keyed_anew(self, segments: Sequence[KeyedSegment]) -> list[KeyedSegment]:
        """The same segments under today's keys: an adapter may have been trained since they were made."""
        keys = self.method.keys_of([segment.token_ids for segment in segments], self.salt)
        return [replace(segment, key=key) for segment, key in zip(segments, keys, strict=True)]

    def check_lengths(self, segments: Sequence[KeyedSegment]) -> None:
        """Raises ValueError for a segment that is longer than the method compiles."""
        limit, compiler = self.method.max_segment_tokens, "encoder" if self.method.uses_encoder else "backbone"
        for segment in segments:
            if limit is not None and len(segment.token_ids) > limit:
                raise ValueError(
                    f"document {segment.id!r} has {len(segment.token_ids)} tokens, but this model's {compiler} takes "
                    f"at most {limit} at once: split it into parts of at most {limit} tokens, for example with "
                    f"splitter='paragraphs:{min(limit, 512)}'"
                )
