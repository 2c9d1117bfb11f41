"""`comb serve`: makes the instance's folder, starts vLLM's server with the middleware in it, and ends with it.

The server starts the encoder processes (`supervisor`), so everything below this process is one tree.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any

from comb.backbones.loading import backbone_beside, resolve_name
from comb.documents.rendering import template_arguments
from comb_serving.config.instance import READY, instance_folder, note_segments, own_disk
from comb_serving.config.serve_options import ADMIN_KEY, ServeOptions, hash_of_own
from comb_serving.launch.server_process import StartLog, end_with_parent

logger = logging.getLogger(__name__)

MIDDLEWARE = "comb_serving.api.middleware.CombMiddleware"
SERVER = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry")
PLUGIN = "comb"  # its name among vLLM's plug-ins, for who lists the allowed ones
END_SECONDS, LEFTOVER_SECONDS = 4.0, 3.0  # the first from when no request is open any more

# what would make two managers of one pool, or prompts that the front doesn't build
REFUSED = {
    "model": "the checkpoint comes first: comb serve CHECKPOINT",
    "config": "give its options on the command line",
    "chat-template": "the front renders with the checkpoint's template: save it with the tokenizer",
    "chat-template-content-format": "the front finds it in the template",
    "cohere-format": "give it as --default-chat-template-kwargs '{\"cohere_format\": ...}'",
    "exclude-tools-when-tool-choice-none": "leave tools out of such requests",
    "reasoning-effort-map": "let requests name the efforts that the template knows",
    "headless": "all processes must run on this machine",
}
# what linking in a plain model needs itself
REFUSED_PLAIN = {
    "kv-transfer-config": "documents come to vLLM through a KV connector of comb's",
    "scheduler-cls": "documents are linked by a scheduler of comb's",
    "worker-cls": "documents are kept by a worker of comb's",
    "tokenizer": "the front makes prompts with the tokenizer in the model's own folder",
    "tokenizer-revision": "the front makes prompts with the tokenizer in the model's own folder",
    "skip-tokenizer-init": "documents and answers are text",
    "revision": "serve a folder that holds it (hf download --revision ... --local-dir ...)",
}
# Of the environment. Answers that vLLM keeps could be read by whoever knows or guesses their names, and its development
# mode shows settings to whoever asks; there is one API server, and with Prometheus' folder vLLM would show what is in
# its files, and not our counters.
_DROPPED = {ADMIN_KEY, "VLLM_ENABLE_RESPONSES_API_STORE", "VLLM_SERVER_DEV_MODE", "PROMETHEUS_MULTIPROC_DIR"}
_CACHE_SIZES = {"--kv-cache-memory-bytes", "--gpu-memory-utilization"}
_ONLY_ONE = {"api-server-count": "-asc", "data-parallel-size": "-dp", "pipeline-parallel-size": "-pp"}


@dataclass(frozen=True)
class ServerFlags:
    """What of vLLM's own options matters here."""

    host: str
    port: int
    uds: str | None
    tls: bool
    ranks: int
    key_hashes: tuple[str, ...]
    named: bool
    chat_template_kwargs: dict[str, Any]

    @property
    def address(self) -> str:
        """Where a client on this machine finds the server; it has none on a Unix socket."""
        host = {"0.0.0.0": "localhost", "::": "localhost"}.get(self.host, self.host)
        return f"http{'s' * self.tls}://{f'[{host}]' if ':' in host else host}:{self.port}"


def read_flags(
    arguments: Sequence[str], environment: Mapping[str, str], *, plain: bool = False, engine: Iterable[str] = ()
) -> ServerFlags:
    """Looks through vLLM's options, which are all passed on. Raises ValueError for what documents can't stand beside.

    `plain`: of a model in which vLLM links documents; `engine`: names of the arguments that this needs.
    """
    normal = []  # vLLM takes names with _ too, beginnings of names, and --name.key for a part of an object
    for item in arguments:
        head, equals, value = item.partition("=")
        name, dot, _ = head.replace("_", "-").partition(".")
        if dot and name.startswith("--") and "--default-chat-template-kwargs".startswith(name):
            raise ValueError("comb serve takes --default-chat-template-kwargs as one JSON object")
        normal.append(name + equals + value if item.startswith("--") else item)
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for name in ("host", "uds", "ssl-certfile", "ssl-keyfile"):
        parser.add_argument(f"--{name}", default=None)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+", default=None)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--api-key", nargs="*", default=None)
    parser.add_argument("--default-chat-template-kwargs", default="{}")
    for name, short in _ONLY_ONE.items():
        parser.add_argument(f"--{name}", short, type=int, default=1)
    ours = {name.replace("_", "-"): "linking documents needs its own" for name in engine}
    if "kv-transfer-config" in ours:
        ours["kv-offloading-size"] = "vLLM's connector for it would stand in place of comb's"
    refused = {**REFUSED, **ours, **(REFUSED_PLAIN if plain else {})}
    for name in refused:
        parser.add_argument(f"--{name}", nargs="?", const=True, default=None)
    try:
        found, _ = parser.parse_known_args(normal)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    values = {name.replace("_", "-"): value for name, value in vars(found).items()}
    for name, why in refused.items():
        if values[name] is not None:
            raise ValueError(f"comb serve doesn't take --{name}: {why}")
    for name in _ONLY_ONE:
        if values[name] != 1:
            raise ValueError(f"comb serve has one manager of one pool: --{name} must be 1, not {values[name]}")
    keys = found.api_key or list(filter(None, [environment.get("VLLM_API_KEY")]))
    return ServerFlags(
        host=found.host or "localhost",
        port=found.port,
        uds=found.uds,
        tls=bool(found.ssl_certfile or found.ssl_keyfile),
        ranks=found.tensor_parallel_size,
        # of an empty one, as of a variable that isn't set, vLLM would make a server that asks for no key
        key_hashes=tuple(map(hash_of_own, keys)),
        named=bool(found.served_model_name),
        chat_template_kwargs=template_arguments(found.default_chat_template_kwargs, "--default-chat-template-kwargs"),
    )


def launch(
    options: ServeOptions,
    arguments: Sequence[str] = (),
    *,
    engine: Mapping[str, Any] = MappingProxyType({}),
    root: Path | None = None,
    server: Sequence[str] = SERVER,
    on_ready: Callable[[str], Any] = logger.info,
) -> int:
    """Runs a server until it ends; returns its exit status. Told to end by a signal, this process ends with it.

    Args:
        arguments: of vLLM's server. engine: of vLLM's engine, that linking in a plain model needs.
        root: where the instance's folder is made; shared memory by default.
        server: the command, for tests.
        on_ready: called with the server's address once it is healthy.

    Raises:
        RuntimeError: with the cause, if the server can't start.
        ValueError: for options that don't go together, or a disk folder that another server has.
    """
    flags = read_flags(arguments, os.environ, plain=options.method is not None, engine=engine)
    if options.admin_hash in flags.key_hashes:
        raise ValueError("the admin key is one of the API keys: choose another, or every client may switch it")
    options = replace(
        options, ranks=flags.ranks, key_hashes=flags.key_hashes, chat_template_kwargs=flags.chat_template_kwargs
    )
    # a server that has just been told to end gives its requests their time
    ends = options.drain_seconds + END_SECONDS + LEFTOVER_SECONDS
    with own_disk(options.disk_path, ends) as lock, instance_folder(root) as folder:
        model, ours = resolve_name(options.model), list[str]()
        if not flags.named and model != options.checkpoint:
            # clients know a registered model by its name, not by the folder where it lies
            ours += ["--served-model-name", options.checkpoint]
        if options.method is None:
            ours += tokenizer_flags(Path(model), arguments)
        for name, value in engine.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                ours.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                ours += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
        # how much of a prompt wasn't computed is what clients want to know of this server
        ours += ["--enable-prompt-tokens-details", "--middleware", MIDDLEWARE]
        command, environment = [*server, "--model", model, *arguments, *ours], _environment(options, folder, arguments)
        # a session of its own: a terminal's Ctrl-C reaches it once, through us
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=end_with_parent, pass_fds=lock,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            with _forwarding(process, folder, options.drain_seconds) as told:
                log = StartLog(process, (folder / READY).exists)
                threading.Thread(target=_report_ready, args=(process, flags, folder, on_ready), daemon=True).start()
                status = process.wait()
        finally:
            _end(process, folder)
        log.close()
        if status > 0 and log.cause and not (folder / READY).exists():
            raise RuntimeError(f"the server ended at its start (status {status}): {log.cause}")
    if told:  # with all that was imported for the checks, Python's own way to end takes seconds
        sys.stdout.flush()
        os._exit(status if status >= 0 else 128 + told[0])
    return status


def tokenizer_flags(folder: Path, arguments: Sequence[str]) -> list[str]:
    """The backbone's tokenizer for an adapter's folder without one, where alone vLLM looks; unless one is given."""
    given = any(item.partition("=")[0] == "--tokenizer" for item in arguments)
    if given or not (folder / "config.json").is_file() or any(folder.glob("tokenizer*")):
        return []
    backbone = json.loads((folder / "config.json").read_text()).get("backbone_name_or_path")
    return [] if backbone is None else ["--tokenizer", resolve_name(backbone_beside(backbone, folder))]


def _environment(options: ServeOptions, folder: Path, arguments: Sequence[str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    environment |= options.environment(folder)
    if options.has_pool and options.method is not None:
        # on a CPU vLLM leaves another core per rank to a connector's threads, and comb's has none
        environment.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", str(options.ranks))
    if not {item.partition("=")[0].replace("_", "-") for item in arguments} & _CACHE_SIZES:
        # read on CPUs alone, where vLLM takes 92% of the memory, and doesn't start where less than that is free
        import psutil

        quarter = psutil.virtual_memory().available // 4
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, min(4, quarter // 2**30))))
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        environment["VLLM_PLUGINS"] = ",".join([*filter(None, allowed.split(",")), PLUGIN])
    return environment


@contextmanager
def _forwarding(process: subprocess.Popen[bytes], folder: Path, drain_seconds: float) -> Any:
    """Tells the server of a signal; if it isn't gone some seconds later, or at a second signal, it is ended."""
    told: list[int] = []

    def forward(number: int, _: object) -> None:
        told.append(number)
        again = len(told) > 1
        seconds = END_SECONDS + (drain_seconds if (folder / READY).exists() else 0)  # at its start nothing is open
        if not again:
            note_segments(folder)  # workers leave some even then, and it may be starting
            process.terminate()
        # in a thread: the one that handles signals is in the middle of waiting for the process
        timer = threading.Timer(0 if again else seconds, _end, [process, folder])
        timer.daemon = True
        timer.start()

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends what is left of the server's session, after a moment: workers and encoders of a server that crashed."""
    deadline = time.monotonic() + (LEFTOVER_SECONDS if process.poll() is not None else 0)
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    with suppress(FileNotFoundError):  # the folder: a signal's timer may come when all is over
        note_segments(folder)  # they may have made more since the signal
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report_ready(
    process: subprocess.Popen[bytes], flags: ServerFlags, folder: Path, on_ready: Callable[[str], Any]
) -> None:
    """Says that the server is ready once the middleware has: until then asking would only fill the server's log."""
    trusting = ssl._create_unverified_context()  # our own process; its certificate may not name this host
    while process.poll() is None:
        if (folder / READY).exists():
            note_segments(folder)
            if flags.uds is not None:
                return
            with suppress(OSError, HTTPException):
                urllib.request.urlopen(f"{flags.address}/health", timeout=5, context=trusting).close()
                on_ready(flags.address)
                return
        time.sleep(0.5)
