"""The `comb` command. Commands of training and serving are added by their packages, if installed."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from comb.bench import bench
from comb.documents.splitting import DEFAULT_SPLITTER
from comb.engine import DEFAULT_MAX_NEW_TOKENS
from comb.registry import when_imported

app = typer.Typer(
    help="Position-independent caching for LLMs: compile a document once, link it anywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
console = Console(emoji=False)
errors = Console(stderr=True, emoji=False)

COMMANDS_GROUP = "comb.commands"

ModelArgument = Annotated[str, typer.Argument(help="adapter folder, backbone folder, Hub id, or `nano`")]
BackboneOption = Annotated[str | None, typer.Option(help="load the adapter's backbone from here instead")]
DtypeOption = Annotated[str, typer.Option(help="dtype to load weights in: auto, float32, bfloat16, float16")]
DeviceOption = Annotated[str, typer.Option(help="device to run on: auto, cpu, cuda, cuda:1")]


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"comb {metadata.version('comb-pic')}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show log messages")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="show where an error comes from; stands anywhere (or COMB_DEBUG=1)")
    ] = False,
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="show it")] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    handler = RichHandler(console=errors, show_time=False, show_path=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler], force=True)
    if verbose:
        return

    def quiet(transformers_logging: Any) -> None:
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()

    when_imported("transformers.utils.logging", quiet)
    # printed wherever accelerate asks whether a model is DeepSpeed's, in the middle of the bar
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to" not in record.getMessage())


@app.command()
def info(
    model: ModelArgument,
    backbone: BackboneOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    check: Annotated[bool, typer.Option(help="run the equivalence gate")] = True,
    placement: Annotated[
        str | None, typer.Option(help="measure on this dataset through which layers documents are read")
    ] = None,
    path: Annotated[Path | None, typer.Option(help="file or folder of that dataset")] = None,
    blocks: Annotated[int, typer.Option(help="cross blocks to place")] = 4,
) -> None:
    """What discovery found, parameter counts, cache bytes per token, and the equivalence gate."""
    from comb.backbones.tokenizer import load_tokenizer
    from comb.cli.info import describe
    from comb.model.source import load_named

    comb_model = _as_comb(load_named(model, backbone=backbone, dtype=dtype, device=device))
    console.print(describe(comb_model))
    if placement is not None:
        from comb.evaluation.placement import describe_placement

        tokenizer = load_tokenizer(model, comb_model)
        console.print(describe_placement(comb_model.backbone, tokenizer, placement, path, blocks))
    if check:
        _gate(comb_model)


@app.command()
def doctor(
    model: ModelArgument,
    backbone: BackboneOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    methods: Annotated[str, typer.Option(help="methods to try: all, none, or names as in `comb bench`")] = "all",
    random: Annotated[
        bool, typer.Option("--random", help="try a small random model of this architecture; needs config.json only")
    ] = False,
    segments: Annotated[
        bool, typer.Option("--segments", help="instead, what linking segments that a server finds costs, by their kind")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="with --segments: JSON lines of messages, in place of made ones; 8 of each kind")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="with --segments: KL to full recompute that a kind may have, nats per token")
    ] = 0.1,
) -> None:
    """The equivalence gate: encoder and methods tried on this model; exit code 1 if a check fails."""
    from comb.backbones.discovery import UnsupportedBackboneError
    from comb.cli.doctor import check_methods
    from comb.methods import split_specs
    from comb.model.source import load_named

    if prompts is not None and not segments:
        raise ValueError("--prompts are for --segments: add it")
    if random:
        from comb.backbones.damage import explained
        from comb.backbones.loading import load_config
        from comb.cli.doctor import random_model
        from comb.model.source import named_device, named_dtype

        if backbone is not None:
            raise ValueError("--random makes a model of MODEL's architecture: name the backbone as MODEL")
        config = load_config(model)
        with explained(model):
            loaded = random_model(config)
        loaded = loaded.to(named_device(device), named_dtype(dtype))
    else:
        loaded = load_named(model, backbone=backbone, dtype=dtype, device=device)
    if segments:
        from comb.backbones.tokenizer import load_tokenizer
        from comb.cli.doctor_segments import check_segments, kinds_below, made_prompts, read_prompts
        from comb.evaluation.table import Column, TextTable, fixed

        specs = split_specs("primed,legolink:16" if methods == "all" else methods)
        asked = made_prompts(8) if prompts is None else {prompts.name: read_prompts(prompts)}
        found = check_segments(loaded, load_tokenizer(model, loaded), specs, asked)
        columns = [Column("method", "method", names=True), Column("segments", "kind", names=True),
                   Column("prompts", "prompts"), Column("found, %", lambda row: f"{100 * row['linked']:.0f}"),
                   Column("KL", "kl", fixed(3)), Column("at most (95%)", "high", fixed(3))]  # fmt: skip
        title = "Segments that a server finds, linked; KL to full recompute"
        console.print(TextTable(title, columns, list(map(vars, found))))
        for spec in specs:
            kinds = kinds_below(found, spec, threshold)
            said = (
                f"--comb-segment-kinds {','.join(kinds)}" if kinds else "no kind of segment; leave --comb-segments off"
            )
            console.print(f"{escape(spec)}, KL below {threshold:g}: {said}", soft_wrap=True)
        return
    console.print("[bold]encoder[/]")
    passed = True
    try:
        passed = _gate(_as_comb(loaded))
    except UnsupportedBackboneError as error:
        console.print(f"[yellow]none[/] {escape(str(error))}", soft_wrap=True)
    except Exception as error:  # what this model does with an encoder is a finding, whatever it is
        console.print(f"[bold red]FAIL[/] {escape(f'{type(error).__name__}: {error}')}", soft_wrap=True)
        passed = False
    if methods != "none":
        console.print("[bold]methods[/]")
        for verdict in check_methods(loaded, () if methods == "all" else split_specs(methods)):
            name = f"{escape(verdict.method):<14}"
            if verdict.refused is not None:
                console.print(f"[yellow]refused[/]  {name} {escape(verdict.refused)}", soft_wrap=True)
                continue
            mark = "[green]safe[/]   " if verdict.passed else "[bold red]FAILED[/] "
            held = ", ".join(check.name for check in verdict.checks if check.passed)
            console.print(f"{mark}  {name} [dim]{escape(held)}[/]", soft_wrap=True)
            for check in verdict.checks:
                if not check.passed:
                    console.print(f"         [bold red]{escape(check.name)}[/]: {escape(check.detail)}", soft_wrap=True)
            passed = passed and verdict.passed
    if not passed:
        raise typer.Exit(1)


def _as_comb(model: Any) -> Any:
    from comb.backbones.identity import backbone_of
    from comb.model.modeling import CombForCausalLM

    return model if isinstance(model, CombForCausalLM) else CombForCausalLM.from_backbone(backbone_of(model))


def _gate(model: Any) -> bool:
    from comb.cli.doctor import run_checks

    checks = run_checks(model)
    for item in checks:
        mark = "[green]ok  [/]" if item.passed else "[bold red]FAIL[/]"
        console.print(f"{mark} {escape(item.name)}  [dim]{escape(item.detail)}[/]", soft_wrap=True)
    return all(item.passed for item in checks)


@app.command()
def ask(
    model: ModelArgument,
    question: Annotated[str, typer.Argument(help="the question")],
    doc: Annotated[list[Path] | None, typer.Option("--doc", help="a text file to answer from; repeatable")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="comb, full, legolink:16, ...; by default the adapter's own, of a plain model primed"),
    ] = None,
    splitter: Annotated[
        str, typer.Option(help="how long documents are cut: whole, paragraphs:512, ...")
    ] = DEFAULT_SPLITTER,
    encoder: Annotated[str, typer.Option(help="on or off; off puts the documents into the prompt")] = "on",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help=f"longest answer, in tokens; by default the model's own, or {DEFAULT_MAX_NEW_TOKENS}"),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="folder that keeps compiled documents between runs")] = None,
    mac: Annotated[
        str | None, typer.Option(help="reuse attention while decoding: context, generation, generation:band=128, ...")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Ray actors that compile new documents side by side")] = 0,
    chat_template_kwargs: Annotated[
        str, typer.Option(help='JSON: what the chat template is given, such as {"enable_thinking": false}')
    ] = "{}",
    backbone: BackboneOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Asks a question about documents, and says what was cached, compiled and recomputed."""
    from comb.documents.document import Document
    from comb.documents.rendering import template_arguments
    from comb.files import read_text

    if not question.strip():
        raise ValueError('the question is empty: comb ask MODEL --doc FILE "question"')
    if encoder not in ("on", "off"):
        raise ValueError(f"--encoder is on or off, not {encoder!r}")
    arguments = template_arguments(chat_template_kwargs)
    # a name of other bytes than UTF-8 has lone surrogates, which nothing prints
    documents = [Document(read_text(path), id=os.fsencode(path.name).decode(errors="replace")) for path in doc or []]

    # takes seconds, so behind what can be wrong with the options
    from comb.backbones.tokenizer import load_tokenizer
    from comb.cache.store import PICacheStore
    from comb.engine.engine import PICEngine
    from comb.model.source import ModelSource, load_named

    loaded = load_named(model, backbone=backbone, dtype=dtype, device=device)
    store = None if cache is None else PICacheStore(device=str(loaded.device), disk_path=cache)
    tokenizer = load_tokenizer(model, loaded, chat_template_kwargs=arguments)
    source = ModelSource(model, {"backbone": backbone, "dtype": dtype}, str(loaded.device))
    engine = PICEngine(
        loaded, tokenizer, method=method, store=store, splitter=splitter, mac=mac, workers=workers, source=source
    )
    with engine, ExitStack() as behind:
        if store is not None:
            behind.callback(store.flush)  # what was compiled is kept, whatever comes of the answer
        answer = engine.ask(question, documents=documents, encoder=encoder == "on", max_new_tokens=max_new_tokens)
        typer.secho(answer.text, bold=True)  # rich makes spaces of tabs
        console.print(f"[dim]{escape(str(answer.report))}[/]", soft_wrap=True)
        if engine.executor is not None:
            console.print(f"[dim]{escape(f'workers {workers}: {engine.executor.stats}')}[/]", soft_wrap=True)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="folder of a published COMB checkpoint (model_type combllama)")],
    target: Annotated[Path, typer.Argument(help="where the adapter goes; its backbone goes to TARGET/backbone")],
    backbone: Annotated[str | None, typer.Option(help="Hub id to record as the adapter's backbone")] = None,
) -> None:
    """Turns a checkpoint of the published COMB release into an adapter and a plain backbone."""
    from comb.model.conversion import convert_release

    model = convert_release(source, target, backbone_name=backbone)
    trainable, total = model.num_trainable_parameters()
    console.print(f"adapter ({trainable:,d} parameters) -> {target}")
    console.print(f"backbone ({total - trainable:,d} parameters) -> {target / 'backbone'}")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="adapter folder")],
    repo: Annotated[str, typer.Argument(help="owner/name on the Hub")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the files and the card, upload nothing")] = False,
    private: Annotated[bool, typer.Option("--private", help="create the repository as private")] = False,
) -> None:
    """Publishes an adapter to the Hugging Face Hub."""
    from huggingface_hub import HfApi

    from comb.backbones.adapter import AdapterConfig
    from comb.backbones.loading import load_config
    from comb.hub.push import UploadFailedError, plan_push, upload
    from comb.model.weights import check_headers

    config = load_config(folder) if (folder / "config.json").is_file() else None
    if isinstance(config, AdapterConfig):
        check_headers(folder, config)
    api = HfApi()
    try:
        plan = plan_push(folder, repo, api=api, private=private)
    except UploadFailedError as error:
        if not dry_run:
            raise
        plan = plan_push(folder, repo, private=private)
        errors.print(f"[yellow]warning:[/] {escape(str(error))}; what was edited there is not shown here")
    for name, size in plan.files:
        console.print(f"  {size:15,d} bytes  {escape(name)}")
    for name, files in Counter(name.partition("/")[0] for name in plan.left_out).items():
        many = "" if name in plan.left_out else f"/ ({files} {'file' if files == 1 else 'files'})"
        console.print(f"         [dim]stays here[/]      {escape(name)}{many}")
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    if dry_run:
        console.print(f"\n{plan.card}", markup=False, highlight=False, soft_wrap=True)
        size = sum(size for _, size in plan.files)
        console.print(f"dry run: nothing was uploaded to {repo} ({len(plan.files)} files, {size:,d} bytes)")
        return
    console.print(upload(plan, api), soft_wrap=True)


@cache
def _add_commands() -> None:
    """Adds what other packages bring, once in a process."""
    for entry_point in metadata.entry_points(group=COMMANDS_GROUP):
        entry_point.load()(app)


_PERMISSION = "see who may read and write it (ls -l), or take another place"
_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EEXIST: "something of that name is in the way: move it, or take another place",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "part of that path is a file",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "take a place that can be written to",
    errno.ENOSPC: "free some space on that disk, or take another one (HF_HOME moves the caches)",
    errno.EDQUOT: "free some space of your quota, or take another disk (HF_HOME moves the caches)",
    errno.ENAMETOOLONG: "check the path",
}


def one_line(error: BaseException) -> str:
    """Any exception as one line: comb's own words as they are, anyone else's with the name of the exception.

    What nobody foresaw is said to be a fault of comb's, with where it happened.
    """
    from comb.backbones.tracebacks import frames, in_comb, raised_by_us

    message = " ".join(str(error).split())
    if format_message := getattr(error, "format_message", None):  # click's, or of typer's copy of it
        message, context = format_message().rstrip("."), getattr(error, "ctx", None)
        many = [each.opts[0] for each in context.command.params if getattr(each, "multiple", False)] if context else []
        if many and "extra argument" in message:
            message += f": {' and '.join(many)} comes again before each of several"
        return f"{message} ({context.command_path if context else 'comb'} --help says what there is)"
    if raised_by_us(error) and message:
        return message
    if isinstance(error, OSError) and error.strerror and error.errno in _REMEDIES:
        names = ", ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names + ': ' if names else ''}{error.strerror}: {_REMEDIES[error.errno]}"
    kind = type(error).__name__
    named = f"{kind}: {message}" if message else kind
    if any(frame.tb_frame.f_code.co_filename == "<template>" for frame in frames(error)):
        return (
            f"the tokenizer's chat template (chat_template.jinja, or in tokenizer_config.json) raises {named}: mend it "
            "there, or take the one that the model was published with"
        )
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError":
        return f"out of memory ({named}): take a smaller model, dtype or batch, or fewer documents at once"
    if isinstance(error, ValueError | OSError | RuntimeError | ImportError):
        return f"{named} (--debug shows the traceback)"
    last = [frame for frame in frames(error) if in_comb(frame)][-1:]
    place = "".join(f" at {frame.tb_frame.f_globals['__name__']}:{frame.tb_lineno}" for frame in last)
    return f"unexpected {named}{place}: that is a fault of comb's, please report it; --debug shows the traceback"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `comb`, with the process's own arguments by default.

    Every error is one line on standard error; ``--debug`` or ``COMB_DEBUG=1`` shows the traceback instead.
    """
    gc.set_threshold(50_000)  # looking for garbage while torch and transformers are imported is half a second
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in given:
        os.environ["COMB_DEBUG"] = "1"  # for the processes of a server, too
    debug = os.environ.get("COMB_DEBUG") == "1"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # rather than no answer where a terminal lacks a character
    try:
        _add_commands()
        # not standalone, where usage errors would be a page
        status = app([each for each in given if each != "--debug"], prog_name="comb", standalone_mode=False)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]  # click's, or of typer's copy of it
        elif debug:
            raise
        else:
            errors.print(f"[bold red]error:[/] {escape(one_line(error))}", soft_wrap=True)
        status = getattr(error, "exit_code", 1)
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
