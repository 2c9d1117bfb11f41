"""What serving adds to the `comb` command. Imported at every start of it, so it must stay light."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from comb_serving.config.serve_options import ServeOptions


def serve(context: typer.Context, **given: Any) -> None:
    """Serves an adapter, or any model without training, on vLLM: its OpenAI server plus `documents`.

    All other options are vLLM's.
    """
    asked = ServeOptions.read(given)

    # takes seconds, so behind what can be wrong with the options
    from comb_serving.launch.launcher import launch
    from comb_serving.launch.preflight import check_start

    options = check_start(asked, context.args)
    engine: dict[str, Any] = {}
    if options.method is not None:
        from comb_serving.vllm.linking.setup import linking_options

        engine = linking_options(options)

    status = launch(
        options, context.args, engine=engine, on_ready=lambda address: typer.echo(f"comb: ready at {address}")
    )
    raise typer.Exit(status if status >= 0 else 128 - status)


_context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
serve.__signature__ = inspect.Signature([_context, *ServeOptions.parameters()])  # type: ignore[attr-defined]  # for typer


def add_commands(app: typer.Typer) -> None:
    """Adds `serve` and `bench serve` to the `comb` application."""
    from comb.bench import benchmarks

    benchmarks.look_in("comb_serving.bench.serve")
    app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
