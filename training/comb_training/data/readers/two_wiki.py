"""2WikiMultihopQA (Ho et al. 2020): two- to four-hop questions over ten Wikipedia paragraphs.

HotpotQA's rows, in the official JSON (``context: [[title, [sentence, ...]], ...]``) and the Hub's form (``context:
{title: [...], sentences: [[...], ...]}``); the official test file has no answers.

document: a paragraph's sentences joined, its title as title; query: ``question``; answer: ``answer``.
"""

from __future__ import annotations

from pathlib import Path

from comb.documents.datasets import Dataset, datasets
from comb_training.data.grouping import Split
from comb_training.data.readers.hotpotqa import read_paragraphs


@datasets.register("2wikimultihopqa", hub_id="framolfese/2WikiMultihopQA")
def read_2wikimultihopqa(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads 2WikiMultihopQA from JSON, JSONL or the Hub.

    Args:
        num_documents: keep only the first so many documents of a row (counted); None keeps all of them.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    return read_paragraphs(
        "2wikimultihopqa",
        path,
        split=split,
        seed=seed,
        limit=limit,
        num_documents=num_documents,
        heldout_share=heldout_share,
    )
