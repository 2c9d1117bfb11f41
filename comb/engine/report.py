"""What an answer says about itself: per document hit or compiled, times, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comb.cache.store import PICacheRef
from comb.documents.catalog import KeyedSegment, by_document
from comb.mac.accounting import MacReport
from comb.methods.decode_state import DocumentState, SegmentUse


@dataclass(frozen=True)
class DocumentReport:
    """How one document reached the model.

    Args:
        id: the caller's id, or ``doc-`` and the start of its content key.
        state: ``hit`` (reused), ``compiled`` (computed in this request and stored), ``inlined`` (prefilled as part of
            the prompt, nothing reused) or ``continued`` (part of the cache that a conversation's turn went on from).
        tokens: of the document.
        tier: of the store in which a hit was found; None otherwise.
        nbytes: of its PICache; 0 for an inlined document.
        segments: how many parts it was split into, each with a PICache of its own.
    """

    id: str
    state: DocumentState
    tokens: int
    tier: str | None = None
    nbytes: int = 0
    segments: int = 1

    def __str__(self) -> str:
        where = f" ({self.tier})" if self.tier is not None and self.state == "hit" else ""
        size = f", {format_bytes(self.nbytes)}" if self.nbytes else ""
        parts = f" in {self.segments} segments" if self.segments > 1 else ""
        return f"{self.id}: {self.state}{where}, {self.tokens} tokens{parts}{size}"


def document_reports(
    segments: Sequence[KeyedSegment], uses: Sequence[SegmentUse] | None, handles: Mapping[str, PICacheRef]
) -> tuple[DocumentReport, ...]:
    """One report per document of a row, from the method's word on its segments, or, where it has none, the store's."""
    assert uses is None or len(uses) == len(segments)
    words: Iterator[SegmentUse | None] = iter([None] * len(segments) if uses is None else uses)
    found = []
    for parts in by_document(segments):
        said = []
        for part in parts:
            use, handle = next(words), handles.get(part.key)
            if use is None and handle is not None:
                use = SegmentUse("hit" if handle.hit else "compiled", handle.tier, handle.picache.nbytes)
            said.append(use or SegmentUse("inlined"))
        states, tiers = {use.state for use in said}, {use.tier for use in said}
        # a hit only if every part was one
        state: DocumentState = states.pop() if len(states) == 1 else "compiled"
        found.append(
            DocumentReport(
                parts[0].id, state, sum(len(part.token_ids) for part in parts),
                tier=tiers.pop() if state == "hit" and len(tiers) == 1 else None,
                nbytes=sum(use.nbytes for use in said), segments=len(parts),
            )
        )  # fmt: skip
    return tuple(found)


def cache_bytes(
    segments: Sequence[KeyedSegment], uses: Sequence[SegmentUse] | None, handles: Mapping[str, PICacheRef]
) -> int:
    """Bytes of the PICaches that a row is read from; arguments as for `document_reports`."""
    if uses is not None:
        return sum(use.nbytes for use in uses)
    # a document given twice is one PICache
    return sum(handles[key].picache.nbytes for key in {segment.key for segment in segments} if key in handles)


@dataclass(frozen=True)
class Report:
    """The report that comes with every answer.

    Args:
        method: name of the method.
        encoder: whether COMB's encoder took part; False for other methods and with the encoder switched off.
        documents: one entry per document, in order.
        prompt_tokens: that the decoder held as its prompt, without padding; with ``comb`` that is the query alone.
        computed_tokens: all tokens that passed through the backbone for this answer's prompt: of documents compiled in
            this request, of a prefix that wasn't cached, in linking, and what was left. A token that passed some of the
            layers only counts as that share of one, also in an encoder made of the backbone's layers; what an encoder
            of its own computed is said by `documents`.
        compiled_tokens: of these, to compile documents; in a batch at the first question that has them.
        prefix_tokens: of the prompt's prefix, that were cached.
        recomputed_tokens: document tokens that the backbone prefilled while linking; a part of `computed_tokens`.
        answer_tokens: tokens generated, the end-of-turn token included.
        cache_bytes: bytes of the PICaches this answer was read from.
        ttft_s: seconds from the call to the first token, compilation included; in a batch, of the whole batch.
        total_s: seconds from the call to the last token.
        mac: what MAC attention reused, of the whole batch; None without it.
        continued_tokens: of the prompt, taken over from the turn before in a conversation.
        relinked: why a conversation's turn was linked from its start although there was one before; else empty.
    """

    method: str
    encoder: bool
    documents: tuple[DocumentReport, ...]
    prompt_tokens: int
    computed_tokens: int
    compiled_tokens: int
    prefix_tokens: int
    recomputed_tokens: int
    answer_tokens: int
    cache_bytes: int
    ttft_s: float
    total_s: float
    mac: MacReport | None = None
    continued_tokens: int = 0
    relinked: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """One line in all, and one line per document."""
        off = ", encoder off" if self.method == "comb" and not self.encoder else ""
        reused = self.continued_tokens or self.prefix_tokens
        continued = f" ({reused} {'continued' if self.continued_tokens else 'of a cached prefix'})" if reused else ""
        compiled = f" ({self.compiled_tokens} to compile)" if self.compiled_tokens else ""
        head = (
            f"method {self.method}{off}: first token {1000 * self.ttft_s:.1f} ms, all {self.answer_tokens} tokens "
            f"{1000 * self.total_s:.1f} ms, prompt {self.prompt_tokens} tokens{continued}, "
            f"{self.computed_tokens} computed{compiled}, cache {format_bytes(self.cache_bytes)}"
        )
        mac = [] if self.mac is None else [f"  {self.mac}"]
        relinked = [f"  linked from the start: {self.relinked}"] if self.relinked else []
        return "\n".join([head, *relinked, *(f"  {document}" for document in self.documents), *mac])


@dataclass(frozen=True)
class Answer:
    """Generated text, its token ids (the end-of-turn token included, no padding), and the report."""

    text: str
    token_ids: tuple[int, ...]
    report: Report

    def __str__(self) -> str:
        return self.text


def format_bytes(count: int) -> str:
    """``1536`` -> ``1.5 KiB``."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
