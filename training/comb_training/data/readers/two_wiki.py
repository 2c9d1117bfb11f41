"""2WikiMultihopQA (Ho et al. 2020): two- to four-hop questions over ten Wikipedia paragraphs.

HotpotQA's rows, in the official JSON (``context: [[title, [sentence, ...]], ...]``) and the Hub's form (``context:
{title: [...], sentences: [[...], ...]}``); the official test file has no answers.

document: a paragraph's sentences joined, its title as title; query: ``question``; answer: ``answer``.
"""

from __future__ import annotations

from comb_training.data.readers.hotpotqa import read_hotpotqa
from comb_training.data.side import reader

reader("2wikimultihopqa", hub_id="framolfese/2WikiMultihopQA")(read_hotpotqa)
