"""What serving adds to the `comb` command. Imported at every start of it, so it must stay light."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from comb_serving.config.sizes import parse_bytes, parse_share


def serve(
    context: typer.Context,
    checkpoint: Annotated[str, typer.Argument(help="adapter, or any plain model with --method: folder, name, Hub id")],
    method: Annotated[
        str | None,
        typer.Option(
            help="for a plain model: primed, legolink:k, naive,front=ADAPTER, full; for hybrids hypic:w,front=prose"
        ),
    ] = None,
    audit: Annotated[
        float, typer.Option(help="share of a plain model's requests that are also answered in full, to compare: 0.01")
    ] = 0.0,
    encoder: Annotated[str, typer.Option(help="on, or off for the plain backbone with documents in the prompt")] = "on",
    backbone: Annotated[str | None, typer.Option(help="load the encoder's embedding table from here")] = None,
    comb_pool_bytes: Annotated[str, typer.Option(help="pool of documents, of all ranks together; or 25%")] = "1GiB",
    comb_pool_block: Annotated[int, typer.Option(help="tokens per block of the pool")] = 16,
    comb_pool_dtype: Annotated[str, typer.Option(help="documents are kept as computed (auto), or in fp8")] = "auto",
    comb_encoders: Annotated[int, typer.Option(help="encoder processes")] = 1,
    comb_encoder_device: Annotated[str, typer.Option(help="where they compute: auto, cpu, cuda:1, ...")] = "auto",
    comb_host_bytes: Annotated[str, typer.Option(help="in memory, for what left the pool; per encoder")] = "0",
    comb_disk: Annotated[Path | None, typer.Option(help="folder where documents are kept beyond restarts")] = None,
    comb_disk_bytes: Annotated[str | None, typer.Option(help="of that folder; unbounded by default")] = None,
    comb_wait_seconds: Annotated[float, typer.Option(help="longest wait for room in the pool, then status 429")] = 10.0,
    comb_drain_seconds: Annotated[
        float, typer.Option(help="that open requests have when the server is told to end")
    ] = 20.0,
    comb_max_body: Annotated[str, typer.Option(help="longest body of a request")] = "16MiB",
    comb_tenant_documents: Annotated[int, typer.Option(help="documents that one key may register")] = 10_000,
    comb_tenant_share: Annotated[str, typer.Option(help="of the pool, for what one key uses or pins")] = "100%",
    comb_tenant_pinned: Annotated[
        str | None, typer.Option(help="of the pool, for what one key pins; by default one part for each key")
    ] = None,
    comb_log_format: Annotated[str, typer.Option(help="of what comb itself logs: text or json")] = "text",
    comb_admin_key: Annotated[
        str | None,
        typer.Option(envvar="COMB_ADMIN_KEY", help="may switch encoder or method at /v1/comb"),
    ] = None,
) -> None:
    """Serves an adapter, or any model without training, on vLLM: its OpenAI server plus `documents`.

    All other options are vLLM's.
    """
    if encoder not in ("on", "off"):
        raise ValueError(f"--encoder is on or off, not {encoder!r}")

    # takes seconds, so behind what can be wrong with the options
    from comb.model.weights import check_checkpoint
    from comb_serving.config.options import ServeOptions
    from comb_serving.config.tenants import key_hash
    from comb_serving.launch.launcher import launch
    from comb_serving.launch.preflight import check_plain_options, check_start, check_tokenizer_there
    from comb_serving.linking.methods import FULL, LinkMethod

    engine: dict[str, Any] = {}
    if method is not None:
        method = LinkMethod.parse(method).name
    start = check_start(checkpoint, method, backbone)
    check_checkpoint(checkpoint, start.backbone)
    check_tokenizer_there(checkpoint, context.args)
    if audit and start.method in (None, FULL):
        raise ValueError(
            "--audit compares documents that a plain model's --method links (primed, legolink:16, ...) with full "
            "recompute, and nothing is linked here"
        )
    if start.method is not None:
        from comb_serving.vllm.linking.setup import linking_options

        check_plain_options(
            {
                "--encoder": encoder != "on",
                "--comb-encoders": comb_encoders != 1,
                "--comb-encoder-device": comb_encoder_device != "auto",
                "--comb-pool-dtype": comb_pool_dtype != "auto",
            }
        )
        engine = linking_options(start.method, checkpoint, start.link_tokens)
    options = ServeOptions(
        checkpoint=checkpoint,
        method=start.method,
        audit=audit,
        backbone=start.backbone,
        encoder=encoder == "on",
        encoders=comb_encoders,
        encoder_device=comb_encoder_device,
        pool_bytes=comb_pool_bytes,
        pool_block=comb_pool_block,
        pool_dtype=comb_pool_dtype,
        host_bytes=parse_bytes(comb_host_bytes),
        disk_path=None if comb_disk is None else str(comb_disk.resolve()),
        disk_bytes=None if comb_disk_bytes is None else parse_bytes(comb_disk_bytes),
        wait_seconds=comb_wait_seconds,
        drain_seconds=comb_drain_seconds,
        max_body_bytes=parse_bytes(comb_max_body),
        max_documents=comb_tenant_documents,
        tenant_share=parse_share(comb_tenant_share),
        tenant_pinned_share=None if comb_tenant_pinned is None else parse_share(comb_tenant_pinned),
        log_format=comb_log_format,
        admin_hash=key_hash(comb_admin_key) if comb_admin_key else None,
    )

    def ready(address: str) -> None:
        typer.echo(f"comb: ready at {address}")

    status = launch(options, context.args, engine=engine, on_ready=ready)
    raise typer.Exit(status if status >= 0 else 128 - status)


def add_commands(app: typer.Typer) -> None:
    """Adds `serve` and `bench serve` to the `comb` application."""
    from comb.bench.commands import benchmarks

    benchmarks.look_in("comb_serving.bench")
    app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
