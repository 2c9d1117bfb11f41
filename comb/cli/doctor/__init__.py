"""The equivalence gate: what must hold on a model that nobody tried before, checked on the model in hand.

`run_checks` is about COMB's encoder, `check_methods` about every registered method; `random_model` makes a small
stand-in of the same architecture where the weights are too large, or not there.
"""

from comb.cli.doctor.encoder import run_checks
from comb.cli.doctor.exactness import Check, Verdict, check_methods
from comb.cli.doctor.random_model import random_model

__all__ = ["Check", "Verdict", "check_methods", "random_model", "run_checks"]
