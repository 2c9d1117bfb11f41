"""Methods: named compile/link pairs. A method that links keys and values is a front and a rule of selection.

A new rule is one function in a file of this folder (`comb.methods.selection`), any other method a subclass of `Method`
under ``@register("mine")`` with `compile`, `fingerprint` and `link_row`; command line, doctor, comparison table and
server read the registry. What stands in front of the first document is an ordinary prefix, cached once for all methods
on a backbone; methods that can link behind a cache take it off their rows with `prefix.behind_prefix`.
"""

from comb.methods.base import LinkRequest, Method, MethodSpec
from comb.methods.decode_state import DecodeState, SegmentUse
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
