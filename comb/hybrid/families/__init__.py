"""Families of transitions, one file each: its `Transition`, its plain twin, and the scans that it is read from.

All files here are imported, and each registers what it has: a new family is a new file.
"""

from importlib import import_module
from pkgutil import iter_modules

from comb.hybrid.transition import TRANSITIONS

__all__ = ["TRANSITIONS"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
