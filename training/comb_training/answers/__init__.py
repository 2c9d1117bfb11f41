"""On-policy answers: what the backbone itself says, greedily, with the documents and the question in its prompt.

Training on them teaches the encoder to make the backbone say what it would have said, rather than new facts (COMB
sec. 5). Another model may answer in its place (`train.teacher`). `comb answers` generates them ahead of `comb train`,
which generates what is missing. A `PreparedRun` enters `answer_prepared`, its examples leave with answers: `Targets`.
"""

from comb_training.answers.generate import Targets, answer_prepared, choose_engine

__all__ = ["Targets", "answer_prepared", "choose_engine"]
