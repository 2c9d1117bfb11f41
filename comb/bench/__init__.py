"""`comb bench`: methods compared on the same work. What each command measures is in docs/benchmarks.md.

A benchmark is one file here: options in, rows out. `harness` makes a command of it and tables, JSON, Markdown and a
plot of its rows; `options` has the options that benchmarks share. Files are imported when a benchmark is asked for, as
they import more than `comb --help` needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from comb.registry import Registry

benchmarks: Registry[Callable[..., None]] = Registry("benchmark", "comb.bench")
"""The commands below `comb bench`; an extension has its own folder walked too (`look_in`)."""


class _Benchmarks(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return benchmarks.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        try:
            info = CommandInfo(cmd_name, callback=benchmarks.get(cmd_name))
        except ValueError as error:
            ctx.fail(str(error))
        return get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")


bench = typer.Typer(cls=_Benchmarks, help="Compare methods: quality, time, memory.", no_args_is_help=True)
