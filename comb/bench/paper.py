"""`comb bench paper NAME`: a paper's tables and figures, asked again here, its own figures beside ours.

A protocol is a file in `papers/`: which benchmarks run with which settings, and which of their rows answer which figure
of the paper. What stands there under ``paper`` was printed in the paper and is never computed with; ours is measured,
or the row says why it can't be.

    runs:
      quality: {benchmark: methods, sets: true, options: {methods: "full,legolink:2", limit: $questions}}
    rows:
      - at: Fig. 6
        what: "{method}: % of full's score kept, {set}"
        each: {method: ["legolink:2"], set: [hotpotqa, samsum]}    # a row for each pair
        run: quality
        value: $score            # F1, or ROUGE-L for summaries; a path into the benchmark's row
        over: {method: full}     # the row to compare with, where it differs; `by` is its value, if another
        form: kept
        paper: 93 to 100
      - {at: Fig. 11, what: a production trace, refused: it isn't public}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, get_type_hints

import typer
import yaml

from comb.bench.context_length import context_length
from comb.bench.drift import drift
from comb.bench.harness import BenchmarkReport, OutOptions, benchmark
from comb.bench.mac import measure_mac
from comb.bench.methods import compare_methods
from comb.bench.options import DeviceOptions, Seed
from comb.bench.parallel import parallel
from comb.documents.datasets import DATA
from comb.evaluation.setting import read_sets
from comb.evaluation.table import Column, Row, TextTable, Timing, or_refused

PAPERS = {file.stem: file for file in sorted((Path(__file__).parent / "papers").glob("*.yaml"))}
BENCHMARKS: dict[str, Callable[[Any, BenchmarkReport], None]] = {
    "methods": compare_methods, "context-length": context_length,
    "drift": drift, "mac": measure_mac, "parallel": parallel,
}  # fmt: skip
SCORES = {"samsum": "rouge_l", "multi_news": "rouge_l", "gov_report": "rouge_l"}
"""What ``$score`` is for a set: F1 for all others, as in the papers."""
FORMS: dict[str, tuple[str, Callable[[float, float], float]]] = {
    "value": ("{:.3f}", lambda ours, other: ours),
    "percent": ("{:.1f}", lambda ours, other: 100 * ours),
    "rest": ("{:.1f}", lambda ours, other: 100 * (1 - ours)),
    "degrees": ("{:.2f}", lambda ours, other: ours),
    "kept": ("{:.1f}", lambda ours, other: 100 * ours / other),
    "saved": ("{:.1f}", lambda ours, other: 100 * (1 - ours / other)),
    "points": ("{:+.1f}", lambda ours, other: 100 * (ours - other)),
    "times": ("{:.2f}", lambda ours, other: other / ours),
    "fold": ("{:.2f}", lambda ours, other: ours / other),
}
"""How a value, and the one it is compared with, become the figure: ``times`` is the other's over ours, ``fold`` the
other way round."""


@dataclass(frozen=True)
class PaperOptions(DeviceOptions):
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"one of {', '.join(PAPERS)}")] = ""
    model: Annotated[str, typer.Option(help="instead of the small ones that the protocol names")] = ""
    questions: Annotated[int, typer.Option(min=1, help="per set")] = 12
    config: Annotated[
        Path | None, typer.Option(help="the paper's sets: configs/longbench.yaml, or public: configs/evaluation.yaml")
    ] = None
    data: Annotated[Path, typer.Option(help="folder in which the files of --config's sets are")] = Path(DATA)
    only: Annotated[str, typer.Option(help="only rows whose figure or table begins like this")] = ""
    seed: Seed = 0


@dataclass(frozen=True)
class PaperRow:
    """One row of a protocol, as the module's text says."""

    at: str
    what: str
    paper: str | Mapping[str, str] = "plotted"
    run: str = ""
    each: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    pick: Mapping[str, Any] = field(default_factory=dict)
    over: Mapping[str, Any] = field(default_factory=dict)
    value: str = "$score"
    by: str = ""
    form: str = "value"
    note: str = ""
    refused: str = ""

    def expanded(self, sets: bool) -> Iterator[PaperRow]:
        """A claim for each combination of `each`. Without `sets`, the paper's sets are one row, behind the model's own.

        Of a paper's figures that of the whole combination counts, or the one for all sets.
        """
        every = dict(self.each)
        if not sets and "set" in every:
            every["set"] = ["nano", ", ".join(every["set"])]
        for values in product(*every.values()):
            one = dict(zip(every, values, strict=True))
            theirs = self.paper
            if isinstance(theirs, Mapping):
                keys = (" ".join(map(str, values)), " ".join(str(one[name]) for name in one if name != "set"))
                theirs = next((theirs[key] for key in keys if key in theirs), "plotted")
            picked = {key: value.format(**one) if isinstance(value, str) else value for key, value in self.pick.items()}
            templates = f"{self.value} {self.pick}"  # what is filled in there is no key of a row
            picked |= {name: value for name, value in one.items() if f"{{{name}}}" not in templates}
            what, value = self.what.format(**one), self.value.format(**one)
            yield replace(self, what=what, paper=theirs, each={}, value=value, pick=picked)


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per figure: theirs, ours, and what has to be known of ours."""
    columns = (
        Column("in the paper", "at", names=True),
        Column("what", "what", names=True),
        Column("theirs", "paper", names=True),
        Column("ours", lambda row: "refused" if row["why"] else row["text"]),
        Column("rows", "n"),
    )
    shown = [{**row, "why": row["refused"], "refused": ""} for row in rows]
    by_note: dict[str, list[Row]] = {}
    for row in shown:
        if note := row["why"] or row["note"]:
            by_note.setdefault(note, []).append(row)
    remarks = ["Theirs: as the paper prints it, on its own models, data and machines; plotted: only in a picture. "
               "Ours: measured here. Rows: those of the benchmark that ours is the mean of."]  # fmt: skip
    for note, own in by_note.items():
        where = f"{own[0]['at']}, {own[0]['what']}" if len(own) == 1 else "; ".join(dict.fromkeys(r["at"] for r in own))
        remarks.append(f"{where}{' (refused)' if own[0]['why'] else ''}: {note}.")
    return [TextTable("The paper's figures and ours", columns, shown, remarks)]


@benchmark("paper", tables)
def paper(options: PaperOptions, report: BenchmarkReport) -> None:
    """A paper's tables and figures on the models and samples at hand, its own figures beside ours."""
    if options.name not in PAPERS:
        raise ValueError(f"NAME is one of {', '.join(PAPERS)}, not {options.name!r}")
    protocol = yaml.safe_load(PAPERS[options.name].read_text(encoding="utf-8"))
    report.heading = f"{protocol['title']}. Theirs: {protocol['theirs']}. Ours: {options.model or protocol['ours']}."
    claims = [PaperRow(**row) for row in protocol["rows"] if row["at"].startswith(options.only)]
    if not claims:
        raise ValueError(f"--only {options.only!r}: no row of {options.name} begins so")
    found: dict[str, list[Row]] = {}
    for claim in claims:
        for one in claim.expanded(options.config is not None):
            row: Row = {"at": one.at, "what": one.what, "paper": one.paper, "ours": None, "text": "-", "n": None,
                        "note": one.note, "refused": one.refused}  # fmt: skip
            if not one.refused:
                with or_refused(row):
                    if one.run not in found:
                        found[one.run] = _run(one.run, protocol["runs"][one.run], options, report)
                    row |= measured(one, found[one.run])
            report.add(row)


def _run(name: str, run: Mapping[str, Any], options: PaperOptions, report: BenchmarkReport) -> list[Row]:
    """The rows of one benchmark; of one that is refused, a row that says why."""
    report.say(f"{name}: comb bench {run['benchmark']}")
    kind, wanted = get_type_hints(BENCHMARKS[run["benchmark"]])["options"], dict(run["options"])
    known = {each.name for each in fields(kind)}
    wanted = {key: options.questions if value == "$questions" else value for key, value in wanted.items()}
    model = "" if run.get("own") else options.model  # a model and its task that belong together
    given = {"model": model, "dtype": options.dtype, "device": options.device, "seed": options.seed}
    wanted |= {key: value for key, value in given.items() if key in known and value != ""}
    row: Row = {"refused": ""}
    rows: list[Row] = []
    with or_refused(row):
        if not run.get("sets") or options.config is None:
            return _rows(run["benchmark"], kind(**wanted))
        there = read_sets(options.config)
        for each in (name for name in run["sets"] if name in there):
            own: Row = {"set": each, "refused": ""}
            with or_refused(own):  # a set whose file isn't there is no reason to refuse the others
                asked = kind(**wanted, config=options.config, data=str(options.data), sets=each)
                rows += _rows(run["benchmark"], asked)
            rows += [own] if own["refused"] else []
    return [row] if row["refused"] else rows


def _rows(name: str, options: OutOptions) -> list[Row]:
    inner = BenchmarkReport(name, options, lambda rows: (), lambda rows: ())
    BENCHMARKS[name](options, inner)
    return inner.rows


def measured(claim: PaperRow, rows: Sequence[Row]) -> Row:
    """``ours``, its ``text`` and the ``n`` rows behind it.

    Raises:
        ValueError: why there is nothing to show: no such row, a refused one, or one without the value.
    """
    value = claim.value if claim.value != "$score" else SCORES.get(str(claim.pick.get("set")), "f1")
    ours = _values(rows, claim.pick, value)
    others = _values(rows, {**claim.pick, **claim.over}, claim.by or value) if claim.over or claim.by else ours
    form, figure = FORMS[claim.form]
    if fmean(ours if claim.form == "times" else others) == 0 and claim.form in ("kept", "saved", "times", "fold"):
        raise ValueError(f"{value} is 0 in what is compared with, so there is no ratio")
    result = figure(fmean(ours), fmean(others))
    return {"ours": result, "text": form.format(result), "n": len(ours)}


def _values(rows: Sequence[Row], pick: Mapping[str, Any], path: str) -> list[float]:
    """The value at a path such as ``stages_s.select`` of all rows that are picked; of times the median."""
    if len(rows) == 1 and set(rows[0]) == {"refused"}:
        raise ValueError(rows[0]["refused"])
    chosen = [row for row in rows if all(row.get(key) == value for key, value in pick.items())]
    if not chosen:
        whole = [row for row in rows if set(row) == {"set", "refused"} and row["set"] == pick.get("set")]
        if whole:
            raise ValueError(whole[0]["refused"])
        if "set" in pick and all(row.get("set") != pick["set"] for row in rows):
            raise ValueError(f"no set {pick['set']}: --config names a file of sets, --data the folder of their files")
        raise ValueError(f"no row for {dict(pick)}")
    values = []
    for row in chosen:
        if row.get("refused"):
            raise ValueError(row["refused"])
        found: Any = row
        for part in path.split("."):
            found = found[int(part)] if isinstance(found, (list, tuple)) else found.get(part)
            if found is None:
                raise ValueError(f"there is no {path} in the row {dict(pick)}")
        values.append(found.median if isinstance(found, Timing) else float(found))
    return values
