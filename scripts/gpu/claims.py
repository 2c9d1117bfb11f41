"""What `scripts/bench-gpu` was run for: claims about a GPU, proven or not by the JSON files of its sections.

python -m scripts.gpu.claims FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from comb.backbones.attention_calls import SLOW_S

Section = dict[str, Any]
Figures = list[tuple[str, float]]  # of what, and how much


@dataclass(frozen=True)
class GpuClaim:
    """`figures` of a section's JSON are all at least, or at most, `bound`; no figures prove nothing."""

    text: str
    section: str
    figures: Callable[[Section], Figures]
    bound: float
    at_least: bool = True

    def judged(self, folder: Path) -> dict[str, Any]:
        """The claim with its figures: ``proven`` is True, False, or None where nothing was measured."""
        file = folder / f"{self.section}.json"
        found = self.figures(json.loads(file.read_text())) if file.exists() else []
        held = [value >= self.bound if self.at_least else value <= self.bound for _, value in found]
        return {"claim": self.text, "bound": self.bound, "figures": dict(found), "proven": all(held) if held else None}


def _share_of_bound(section: Section) -> Figures:
    rows = section["results"]
    return [(row["case"], max(row.get("error", 9e9), row.get("rival_error", 0)) / row.get("bound", 1)) for row in rows]


def _bandwidth(section: Section) -> Figures:
    copied = section.get("copy_bytes_per_s", 0)
    rows = [row for row in section["results"] if "bytes_per_s" in row and "tokens 4000" in row["case"]]
    # prompts are bound by arithmetic
    return [(row["case"], row["bytes_per_s"] / copied) for row in rows if "queries 256" not in row["case"]]


def _speedups(section: Section) -> Figures:
    rows = [row for row in section["results"] if "kernel_s" in row and "hits 0.0" not in row["case"]]
    return [(row["case"], row["speedup"]) for row in rows if "131072" in row["case"]]


def _linked(section: Section) -> Figures:
    rows = [row for row in section["results"] if row.get("speedup") and row["method"] != "full"]
    return [(f"{row['method']}, {row['tokens']} tokens", _median(row["speedup"])) for row in rows]


def _median(timing: Any) -> float:
    return float(timing["median"] if isinstance(timing, dict) else timing)


def _new_length(section: Section) -> Figures:
    return [("seconds", section["new_length_s"])] if "new_length_s" in section else []


def _handed_over(section: Section) -> Figures:
    return [(f"{row['stored']} from {row['source']}", float(not row["wrong"])) for row in section["results"]]


def _off_is_plain(section: Section) -> Figures:
    return [(section["dtype"], float(section["off_is_plain"]))] if "off_is_plain" in section else []


def _share_of_seams_bound(section: Section) -> Figures:
    rows = [row for row in section["results"] if "error" in row]
    return [(_seams(row), row["error"] / row["bound"]) for row in rows]


def _chosen_over_mask(section: Section) -> Figures:
    rows = [row for row in section["results"] if row.get("chosen", "mask") != "mask" and f"{row['chosen']}_s" in row]
    return [(_seams(row), _median(row["mask_s"]) / _median(row[f"{row['chosen']}_s"])) for row in rows]


def _seams(row: dict[str, Any]) -> str:
    return f"{row['runs']} runs, {row['rows']} rows, {row['keys']} keys"


def _promises(section: Section) -> Figures:
    return [(f"{r['model']}, {r['dtype']}, {r['method']}: {r['name']}", float(r["passed"])) for r in section["results"]]


CLAIMS = (
    GpuClaim("kernels of paged attention are right: error, of the bound", "paged", _share_of_bound, 1.0, False),
    GpuClaim("kernels of MAC are right: error, of the bound", "mac", _share_of_bound, 1.0, False),
    GpuClaim("decoding over 8 x 4,000 tokens reaches 85% of a copy's bandwidth", "paged", _bandwidth, 0.85),
    GpuClaim("MAC with hits isn't slower at 131,072 tokens", "mac", _speedups, 1.0),
    GpuClaim("a new number of keys costs no plan", "seams", _new_length, SLOW_S, False),
    GpuClaim(
        "recomputed tokens attend rightly in all ways: error, of the bound",
        "seams",
        _share_of_seams_bound,
        1.0,
        False,
    ),
    GpuClaim("what is chosen for recomputed tokens isn't slower than a mask", "seams", _chosen_over_mask, 1.0),
    GpuClaim("the encoder and all methods keep their promises", "exact", _promises, 1.0),
    GpuClaim("a pool that another process writes is read as it was written", "ipc", _handed_over, 1.0),
    GpuClaim("COMB without documents is the plain model, bit for bit", "decode", _off_is_plain, 1.0),
    GpuClaim("linking is faster than computing the prompt", "context-length", _linked, 1.0),
    GpuClaim("linking a hybrid is faster than computing the prompt", "hybrid", _linked, 1.0),
)


def main(folder: Path) -> list[dict[str, Any]]:
    """Prints all claims, and writes them to ``summary.json`` in `folder`."""
    judged = [claim.judged(folder) for claim in CLAIMS]
    (folder / "summary.json").write_text(json.dumps(judged, indent=1))
    words = {True: "proven    ", False: "not proven", None: "unmeasured"}
    for one in judged:
        figures = one["figures"].values()
        said = f" ({min(figures):.3g} to {max(figures):.3g})" if figures else ""
        typer.echo(f"{words[one['proven']]}  {one['claim']}{said}")
    return judged


if __name__ == "__main__":
    main(Path(sys.argv[1]))
