"""2WikiMultihopQA (Ho et al. 2020): two- to four-hop questions over ten Wikipedia paragraphs.

HotpotQA's rows, in the official JSON (``context: [[title, [sentence, ...]], ...]``) and the Hub's form (``context:
{title: [...], sentences: [[...], ...]}``); the official test file has no answers.

document: a paragraph's sentences joined, its title as title; query: ``question``; answer: ``answer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from comb.documents.document import Example
from comb_training.data.readers.hotpotqa import paragraphs_example
from comb_training.data.side import DatasetSide, reader


@reader("2wikimultihopqa", hub_id="framolfese/2WikiMultihopQA")
def read_2wikimultihopqa(side: DatasetSide, *, num_documents: int | None = None) -> Iterable[Example]:
    """Reads 2WikiMultihopQA from JSON, JSONL or the Hub; argument and errors as of `read_hotpotqa`."""
    return side.examples(partial(paragraphs_example, num_documents=num_documents))
