"""The command `comb bench drift`."""

from __future__ import annotations

from comb.bench.inputs import make_setting, read
from comb.bench.options import (
    Backbone,
    DataPath,
    DatasetName,
    Device,
    DocumentTemplate,
    Dtype,
    Limit,
    Methods,
    Model,
    NumDocuments,
    Out,
    QueryTemplate,
    Seed,
    Split,
    Splitter,
    bench,
)
from comb.bench.output import show


@bench.command("drift")
def drift_command(
    model: Model = "nano-hybrid",
    methods: Methods = "addition,hypic:mode=rotation,hypic:0,hypic:4,hypic:8,hypic:16",
    dataset: DatasetName = "nano",
    path: DataPath = None,
    split: Split = "heldout",
    num_documents: NumDocuments = None,
    limit: Limit = 50,
    query_template: QueryTemplate = None,
    document_template: DocumentTemplate = None,
    splitter: Splitter = None,
    seed: Seed = 0,
    out: Out = None,
    backbone: Backbone = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """How far a hybrid's states are from full recompute's, by layer: what composing costs in depth (HYPIC table 4)."""
    from comb.bench.comparison import drop_too_long
    from comb.bench.drift import measure_drift
    from comb.bench.drift_report import drift_table, plot_drift
    from comb.bench.report import check_out
    from comb.bench.specs import split_methods, without_control

    check_out(out)
    specs = without_control(split_methods(methods), "drift")
    examples, counts = read(dataset, path, split, num_documents, limit, seed)
    setting = make_setting(model, backbone, dtype, device, query_template, document_template, splitter)
    examples = drop_too_long(setting, examples, 0, counts)
    results = measure_drift(setting, examples, specs)
    title = f"{model}, {dataset}, {split}"
    drawn = any(not result.refused for result in results)
    show(
        out, results, [drift_table(results)],
        (lambda file: plot_drift(results, file, title=title)) if drawn else None,
        heading=title, benchmark="drift", model=model, dataset=dataset, path=path, split=split, seed=seed,
        data=counts.to_dict(), splitter=splitter, dtype=str(setting.model.dtype),
    )  # fmt: skip
