"""`comb bench methods`: every method on the same questions, against full recompute and against the right answers.

The questions are those of a file of rows, a dataset, or several of them (``--data a.jsonl,squad``), put as an adapter
was trained to be asked; or those of the sets in a file (``--config configs/evaluation.yaml``), which also says how they
are put to a plain language model. With ``--out`` a run that was broken off goes on where it was: a question's rows are
in ``OUT/SET.jsonl`` when it has been asked. The same command with as few ``--questions`` as are there makes their
tables meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.options import Methods, QuestionOptions, split_methods
from comb.documents.datasets import DATA
from comb.documents.document import Example
from comb.evaluation.plot import Frontier, Panel, Quality
from comb.evaluation.record import Journal
from comb.evaluation.setting import NO_DOCUMENTS, AnswerRules, Setting, drop_too_long, read_sets
from comb.evaluation.table import Row, TextTable


@dataclass(frozen=True)
class MethodsOptions(QuestionOptions):
    methods: Methods = ""
    config: Annotated[Path | None, typer.Option(help="sets of questions and their templates; instead of --dataset")] = (
        None
    )
    sets: Annotated[str, typer.Option(help="sets of --config, separated by commas; all by default")] = ""
    data: Annotated[
        str | None,
        typer.Option(help="the same as --dataset; with --config the folder of its sets' files, data by default"),
    ] = None
    limit: Annotated[int, typer.Option("--questions", min=1, help="questions per set that are answered")] = 50
    kl_questions: Annotated[int | None, typer.Option(min=1, help="per set, of which KL is taken, if more")] = None
    timing_questions: Annotated[int, typer.Option(min=0, help="of which times are taken")] = 8
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="longest answer; else the set's, or 48")] = None


_OF_CONFIG = ("sets",)
_OF_DATASET = ("dataset", "path", "split", "num_documents", "query_template", "document_template")


@dataclass(frozen=True)
class QuestionSet:
    """One set that is ready to be asked."""

    name: str
    setting: Setting
    examples: Sequence[Example]
    rules: AnswerRules
    source: dict[str, Any]  # what its questions depend on
    facts: dict[str, Any]  # what the JSON says of it


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """Two for each set."""
    from comb.evaluation.summary import comparison_tables

    return [table for name, own in _by_set(rows) for table in comparison_tables(own, name)]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """For each set KL over computed tokens, and over bytes where methods keep other numbers of them.

    Where times were taken KL over how much sooner the first token comes, and F1 over its time, too.
    """
    found: list[Panel] = []
    for name, own in _by_set(rows):
        full = next((row for row in own if row["method"] == "full" and not row["refused"]), None)
        slow = full["ttft_cached_s"] if full else None
        shown = []
        for row in [row for row in own if not row["refused"]]:
            cached, kept = row["ttft_cached_s"], row["cache_bytes_per_document_token"] or None
            share = 100 * row["computed_tokens"] / (full["computed_tokens"] if full else 1.0)
            sooner = None if not slow or not cached else slow.median / cached.median
            shown.append({**row, "share": share, "kept": kept, "sooner": sooner})
        found.append(Frontier(shown, "share", "of the prompt computed for a question, %", name))
        if len({row["kept"] for row in shown} - {None}) > 1:
            found.append(Frontier(shown, "kept", "bytes kept of a document's token", name))
        if any(row["ttft_cold_s"] for row in own):
            if slow:
                times = "first token, documents cached: times sooner than full recompute"
                found.append(Frontier(shown, "sooner", times, name))
            found.append(Quality(shown, "f1", name))
    return found


def _by_set(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(name, [row for row in rows if row["set"] == name]) for name in dict.fromkeys(row["set"] for row in rows)]


@benchmark("methods", tables, panels)
def compare_methods(options: MethodsOptions, report: BenchmarkReport) -> None:
    """Answers, KL to full recompute, times and bytes of every method; with --out a broken-off run goes on."""
    from comb.backbones.adapter import backbone_fingerprint, trained_method
    from comb.backbones.identity import backbone_of
    from comb.evaluation.compare import compare, measure_times
    from comb.evaluation.summary import summarize

    given = split_methods(options.methods) if options.methods else every_method()
    report.heading = options.model
    report.facts["sets"] = {}
    for asked in question_sets(options, report):
        report.facts["sets"][asked.name] = asked.facts
        setting, own = asked.setting, trained_method(asked.setting.model)
        trained = [own] if own is not None and not options.methods else []
        # both ends of the scale stand in every table; what can't be had with the model says why
        between = [spec for spec in [*trained, *given] if spec not in ("full", NO_DOCUMENTS)]
        specs, backbone = ["full", *between, NO_DOCUMENTS], backbone_of(setting.model)
        made_with = {
            "backbone": backbone_fingerprint(backbone), "dtype": str(backbone.dtype),
            "seed": options.seed, "rules": asdict(asked.rules), "prefix": setting.builder.prefix,
            **({"lead": setting.builder.lead} if setting.builder.lead else {}),
            "query": setting.query_template, "document": setting.builder.document_template,
            "splitter": options.splitter, **asked.source,
        }  # fmt: skip
        path = None if options.out is None else options.out.with_suffix("") / f"{asked.name}.jsonl"
        journal, refused = Journal(path, made_with), dict[str, str]()
        try:
            refused |= compare(
                setting, asked.examples, specs, journal, rules=asked.rules, answers=options.limit, title=asked.name
            )
            running = [spec for spec in specs if spec not in refused]
            measure_times(setting, asked.examples, running, journal, options.timing_questions)
        finally:  # also of a run that is broken off in between: what all have answered
            for row in summarize(journal.rows, asked.examples, specs, refused):
                report.add({"set": asked.name, **row})


def every_method() -> list[str]:
    """All methods that need no adapter, with their own parameters, and rules of selection behind prose, too."""
    from comb import methods
    from comb.methods.linked import Linked
    from comb.methods.selection import NOTHING

    found = []
    for name in methods.names():
        cls = methods.get(name)
        if cls.uses_encoder or (issubclass(cls, Linked) and cls.default_front == "adapter"):
            continue
        found.append(name)
        if issubclass(cls, Linked) and cls.rule is not NOTHING and cls.default_front == "none":
            found.append(f"{name}:front=prose")
    return found


def question_sets(options: MethodsOptions, report: BenchmarkReport) -> Iterator[QuestionSet]:
    """The sets of ``--config``, or the one of ``--dataset``; questions without room are dropped and counted."""
    wanted = max(options.limit, options.kl_questions or 0)
    how, unused = ("without", _OF_CONFIG) if options.config is None else ("with", _OF_DATASET)
    if given := [name for name in unused if getattr(options, name) != getattr(MethodsOptions, name)]:
        raise ValueError(f"--{given[0].replace('_', '-')} has no effect {how} --config: leave it out")
    if options.config is None:
        if options.data is not None and options.dataset != MethodsOptions.dataset:
            raise ValueError("--data and --dataset both say what is asked about: give one of them")
        chosen = replace(options, limit=wanted)
        longest = options.max_new_tokens or 48
        datasets = (options.dataset if options.data is None else options.data).split(",")
        stems = [Path(dataset).stem for dataset in datasets]  # journals' names are made of these
        for place, (dataset, stem) in enumerate(zip(datasets, stems, strict=True), 1):
            setting, examples = replace(chosen, dataset=dataset).load_questions(report, longest)
            rules = AnswerRules(longest, setting.builder.stop)
            source = {name: getattr(options, name) for name in ("path", "split", "num_documents")}
            name = stem if stems.count(stem) == 1 else f"{place}-{dataset.strip('./').replace('/', '-')}"
            facts = {"data": report.facts.pop("data")}
            yield QuestionSet(name, setting, examples, rules, {"dataset": dataset, **source}, facts)
        return
    sets = read_sets(options.config)
    names = list(dict.fromkeys(name.strip() for name in options.sets.split(",") if name.strip())) or list(sets)
    if unknown := [name for name in names if name not in sets]:
        raise ValueError(f"--sets: {options.config} has no set {unknown[0]!r}; it has {', '.join(sets)}")
    plain, folder = options.setting(), Path(options.data or DATA)
    for each in (sets[name] for name in names):
        template = each.asked(folder)
        rules = AnswerRules(options.max_new_tokens or each.max_new_tokens, template.stop)
        setting = replace(plain, builder=template.builder(plain.tokenizer), query_template=template.query)
        found = each.read(folder, options.seed)
        counts = found.counts
        counts.drop("over the limit", max(0, len(found) - wanted))
        examples = drop_too_long(setting, found.examples[:wanted], ["full"], rules.max_new_tokens, counts)
        source = {"dataset": each.dataset, "split": each.split, "options": each.options}
        yield QuestionSet(each.name, setting, examples, rules, source, {**asdict(each), "data": counts.to_dict()})
