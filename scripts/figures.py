"""Reruns the cheap tables of the docs, and fails where a printed figure lies outside of what comes out now.

    scripts/figures [--only TEXT]

scripts/figures.yaml says which tables. A table's command stands above it in the page and is run as it stands there. A
printed figure has to lie within the 95% interval of the new one, or, where a figure has none, to be the same but for
its last digit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PERCENT = ("em", "same", "rouge_l_full")
"""Values that are shares, and printed as percentages."""


def command_and_table(page: str, begins: str) -> tuple[list[str], list[list[str]]]:
    """The command of a page that begins so, and the cells of the first table behind it, its head left out.

    Raises:
        ValueError: if the page has no such command, or several, or no table behind it.
    """
    joined = re.sub(r"\\\n\s*", "", page)
    found = re.findall(rf"^ *({re.escape(begins)}[^\n]*)$", joined, re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"{len(found)} commands begin with {begins!r}, expected one")
    behind = joined[joined.index(found[0]) :]
    table = re.search(r"(?:^\|.*\n)+", behind, re.MULTILINE)
    if table is None:
        raise ValueError(f"there is no table behind {begins!r}")
    lines = [re.split(r"(?<!\\)\|", line.strip("|\n")) for line in table[0].splitlines()]
    return shlex.split(found[0].partition("  #")[0]), [[cell.strip() for cell in line] for line in lines[2:]]


def rerun(command: list[str]) -> list[dict[str, Any]]:
    """The rows of a `comb` command."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        words = [word for flag, word in zip(["", *command], command, strict=False) if "--out" not in (flag, word)]
        run = [str(Path(sys.executable).with_name(words[0])), *words[1:], "--out", str(out)]
        # one thread each: two commands at a time share the cores
        threads = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(run, cwd=ROOT, env=threads, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(run)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["results"]
        return rows


def compared(
    cells: list[list[str]], group: Mapping[str, Any], rows: list[dict[str, Any]]
) -> Iterator[tuple[str, str, float, float, float]]:
    """(method, value, printed, least, most) of each figure of a group of columns: `method` and values by column."""
    by_method = {row["method"]: row for row in rows}
    for line in cells:
        name = line[group["method"]]
        method = name.removeprefix("`").partition("`")[0]
        if method not in by_method:
            raise ValueError(f"the command gives no row for {name!r}")
        row = by_method[method]
        for value, column in group.items():
            number = re.match(r"-?[\d.]+", line[column].lstrip("<"))
            if value == "method" or number is None:  # a cell may be empty
                continue
            printed, scale = float(number[0]), 100 if value in PERCENT else 1
            found = (row[value], *(row.get("intervals", {}).get(value) or ()))
            digit = 10.0 ** -len(number[0].partition(".")[2])
            yield method, value, printed, scale * min(found) - digit, scale * max(found) + digit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only tables whose command has this text in it")
    only = parser.parse_args().only
    tables = yaml.safe_load((ROOT / "scripts" / "figures.yaml").read_text(encoding="utf-8"))
    chosen = [table for table in tables if only in table["command"]]
    found = [command_and_table((ROOT / each["page"]).read_text(encoding="utf-8"), each["command"]) for each in chosen]
    wrong = count = 0
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(rerun, [command for command, _ in found])
        for table, (command, cells), rows in zip(chosen, found, results, strict=True):
            print(f"{table['page']}: {shlex.join(command)}", flush=True)
            for group in table["columns"]:
                for method, value, printed, least, most in compared(cells, group, rows):
                    count += 1
                    if not least <= printed <= most:
                        wrong += 1
                        print(f"  {method}: {value} is printed as {printed:g}, and is {least:.4g} to {most:.4g}")
    print(f"{count} figures compared, {wrong} of them wrong")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
