"""Imported by workers only: among the tests, the fragile method would be one more for all of them."""

from comb import methods
from tests.helpers.parallel_faults import Fragile

methods.register("fragile")(Fragile)
