"""On-policy answers: what the backbone itself says, greedily, with the documents and the question in its prompt.

Training on them teaches the encoder to make the backbone say what it would have said, rather than new facts (COMB
sec. 5). Another model may answer in its place (`train.teacher`). `comb answers` generates them ahead of `comb train`,
which generates what is missing.
"""

from comb_training.answers.generate import Answered, Share, generate_answers, stop_token_ids
from comb_training.answers.prepared import Targets, answer_prepared, choose_engine
from comb_training.answers.store import AnswerSettings, AnswerStore, StoredAnswer, read_settings

__all__ = [
    "AnswerSettings",
    "AnswerStore",
    "Answered",
    "Share",
    "StoredAnswer",
    "Targets",
    "answer_prepared",
    "choose_engine",
    "generate_answers",
    "read_settings",
    "stop_token_ids",
]
