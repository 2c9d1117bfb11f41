"""Commands and programs that run each in a process of its own, a fork of one that has imported what they need.

An import of seconds is then paid once, and what a command leaves behind in memory is gone with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).parents[2]


class Forks:
    """The process that is forked, in a folder and with an environment of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forks"], cwd=folder, env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def comb(self, arguments: Sequence[str]) -> tuple[int, str]:
        """The exit status of `comb` and what it wrote, standard error included."""
        return self._run({"comb": list(arguments)})

    def python(self, code: str) -> tuple[int, str]:
        """The same of a program's text."""
        return self._run({"python": code})

    def _run(self, task: dict[str, Any]) -> tuple[int, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        status, output = json.loads(self.process.stdout.readline())
        return status, output

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _do(task: dict[str, Any]) -> None:
    if "python" in task:
        # under a name, so that inspect and dataclasses find the module
        sys.modules["__main__"].__dict__.update(__name__="__main__")
        exec(compile(task["python"], "block", "exec"), {"__name__": "__main__"})
    else:
        from comb.cli.main import main

        main(task["comb"])


def _fork(task: dict[str, Any], out: Path) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        with out.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115  the process ends with it
        try:
            _do(task)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _serve() -> None:
    import tempfile

    import matplotlib.pyplot  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import comb_training.cli.train
    import comb_training.trainer.trainer  # noqa: F401

    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        for line in sys.stdin:
            status = _fork(json.loads(line), out)
            print(json.dumps([status, out.read_text(encoding="utf-8", errors="replace")]), flush=True)


if __name__ == "__main__":
    _serve()
