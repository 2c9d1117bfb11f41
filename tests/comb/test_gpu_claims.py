"""Claims about a GPU are proven by figures alone: missing ones prove nothing, and one that is too low is enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.claims import CLAIMS, main


def write(folder: Path, **sections: Any) -> None:
    for name, section in sections.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(section))


def proven(folder: Path) -> list[bool | None]:
    return [one["proven"] for one in main(folder)]


def test_no_file_proves_nothing(tmp_path: Path) -> None:
    assert proven(tmp_path) == [None] * len(CLAIMS)
    assert json.loads((tmp_path / "summary.json").read_text())[0]["figures"] == {}


@pytest.mark.parametrize("good", [True, False])
def test_figures_prove_or_disprove(tmp_path: Path, good: bool) -> None:
    timed = {"kernel_s": 1.0, "bound": 0.01, "error": 0.002 if good else 0.02}
    speedups = [
        {"case": f"context 131072, hits {hits}", "speedup": 15.0 if good else 0.9, **timed} for hits in (0.9, 1.0)
    ]
    linked = [{"method": "full", "tokens": 9, "speedup": {"median": 1.0}},
              {"method": "naive", "tokens": 9, "speedup": {"median": 3.0 if good else 0.5}}]  # fmt: skip
    decoding = {"case": "rows 8, documents 8, tokens 4000", "bytes_per_s": 90 if good else 80, **timed}
    prompts = {"case": "tokens 4000, queries 256", "bytes_per_s": 1, **timed}
    runs = {"runs": 8, "rows": 64, "keys": 99, "bound": 0.01, "error": 0.002 if good else 0.02, "chosen": "varlen",
             "mask_s": {"median": 2.0}, "varlen_s": {"median": 1.0 if good else 3.0}}  # fmt: skip
    write(
        tmp_path, paged={"copy_bytes_per_s": 100, "results": [decoding, prompts]}, mac={"results": speedups},
        seams={"new_length_s": 0.0001 if good else 0.03, "results": [runs]},
        exact={"results": [{"model": "m", "dtype": "d", "method": "naive", "name": "is finite", "passed": good}]},
        ipc={"results": [{"stored": "auto", "source": "cpu", "wrong": "" if good else "it differs"}]},
        decode={"off_is_plain": good, "dtype": "torch.bfloat16", "results": []},
        context_length={"results": linked}, hybrid={"results": linked},
    )  # fmt: skip
    assert proven(tmp_path) == [good] * len(CLAIMS)


def test_a_section_that_was_cut_off_or_refused_proves_nothing_it_did_not_measure(tmp_path: Path) -> None:
    checked = {"case": "x", "error": 0.001, "bound": 0.01}
    refused = {"method": "naive", "tokens": 9, "refused": "no room"}
    write(tmp_path, mac={"results": [checked]}, context_length={"results": [refused]})
    assert proven(tmp_path)[1:4] == [True, None, None]
    assert proven(tmp_path)[5:] == [None] * 7
    write(tmp_path, mac={"results": [checked, {"case": "no kernel ran"}]})
    assert proven(tmp_path)[1] is False
