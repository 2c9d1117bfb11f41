"""Methods: named compile/link pairs. A method that links keys and values is a front and a rule of selection.

A new rule is one function in a file of this folder (`comb.methods.selection`), and needs no other line anywhere:
command line, doctor, comparison table and server read the registry. Any other method is a subclass of `Method`:

    from comb import methods

    @methods.register("mine")
    class Mine(methods.Method):
        def compile(self, segments): ...     # each segment alone -> PICache
        def link_row(self, row): ...             # PICaches, head, query -> DecodeState

What stands in front of the first document is an ordinary prefix, cached once for all methods on a backbone; methods
that can link behind a cache take it off their rows with `prefixes.behind_prefix`.
"""

from comb.methods.base import DecodeState, LinkRequest, Method, MethodSpec, SegmentUse
from comb.methods.registry import create, get, names, parse, register, registry, split_specs

__all__ = [
    "DecodeState",
    "LinkRequest",
    "Method",
    "MethodSpec",
    "SegmentUse",
    "create",
    "get",
    "names",
    "parse",
    "register",
    "registry",
    "split_specs",
]
