"""`comb serve` and `ServerProcess` with small programs in vLLM's place: folders, signals, flags, options."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from comb_serving.config.instance import LOCK, PREFIX, instance_folder, remove_abandoned
from comb_serving.config.serve_options import ServeOptions, flag_of, key_hash, parse_bytes, parse_share
from comb_serving.launch.launcher import launch, read_flags, tokenizer_flags
from comb_serving.launch.server_process import ServerProcess
from tests.helpers.processes import gone, wait_for, wait_until_gone

PROGRAM = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["COMB_INSTANCE_DIR"])
(folder / "pool-0").write_text("x")
seen = pathlib.Path({seen!r})
keep = {{name: os.environ[name] for name in os.environ if name.startswith(("COMB_", "VLLM_", "PROM"))}}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
seen.with_suffix(".tmp").write_text(json.dumps({{"argv": sys.argv[1:], "environment": keep, "pid": os.getpid()}}))
seen.with_suffix(".tmp").rename(seen)
{then}
"""
LAUNCH = """
import sys, pathlib
from comb_serving.launch.launcher import launch
from comb_serving.config.serve_options import ServeOptions
sys.exit(launch(ServeOptions("owner/adapter"), ["--port", "1"], root=pathlib.Path(sys.argv[1]),
    server=sys.argv[2:]))
"""


def program(tmp_path: Path, then: str) -> tuple[list[str], Path, Path]:
    """Its command, where it writes about itself, and a folder for instances."""
    seen, root = tmp_path / "seen.json", tmp_path / "root"
    root.mkdir()
    return [sys.executable, "-c", PROGRAM.format(seen=str(seen), then=then)], seen, root


def told(path: Path) -> Any:
    """What the program has written about itself, once it has."""
    wait_for(path.exists)
    return json.loads(path.read_text())


def test_the_server_gets_its_environment_and_the_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv("COMB_ADMIN_KEY", "secret")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    server, seen, root = program(tmp_path, "sys.exit(3)")
    arguments = ["--max-model-len", "64", "-tp", "2", "--api-key", "k"]
    options = ServeOptions("owner/adapter", pool_bytes=4096, pool_dtype="fp8")
    assert launch(options, arguments, root=root, server=server) == 3
    found = told(seen)
    assert found["argv"][:2] == ["--model", "owner/adapter"]
    assert found["argv"][-2:] == ["--middleware", "comb_serving.api.middleware.CombMiddleware"]
    environment = found["environment"]
    assert environment["VLLM_PLUGINS"] == "other,comb"
    assert not {"PROMETHEUS_MULTIPROC_DIR", "VLLM_SERVER_DEV_MODE"} & set(environment)
    assert "COMB_ADMIN_KEY" not in environment
    options = ServeOptions.from_environment(environment)
    assert (options.pool_bytes, options.pool_dtype, options.ranks, len(options.key_hashes)) == (4096, "fp8", 2, 1)
    assert "k" not in options.key_hashes
    assert list(root.iterdir()) == []
    assert 1 <= int(environment["VLLM_CPU_KVCACHE_SPACE"]) <= 4
    for given in ("--kv-cache-memory-bytes=1", "--gpu_memory_utilization=0.5"):
        seen.unlink()
        launch(options, [given], root=root, server=server)
        assert "VLLM_CPU_KVCACHE_SPACE" not in told(seen)["environment"]


def test_an_adapter_without_a_tokenizer_has_its_backbones(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "comb", "backbone_name_or_path": "./below"}')
    assert tokenizer_flags(tmp_path, ["--port", "1"]) == ["--tokenizer", str(tmp_path / "below")]
    assert tokenizer_flags(tmp_path, ["--tokenizer=x"]) == tokenizer_flags(tmp_path, ["--tokenizer", "x"]) == []
    assert tokenizer_flags(tmp_path, ["--tokenizer-mode", "slow"])
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_flags(tmp_path, []) == []
    assert tokenizer_flags(tmp_path / "ORG" / "NAME", []) == []


def test_a_plain_model_brings_its_arguments_and_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, seen, root = program(tmp_path, "sys.exit(0)")
    engine = {"kv_transfer_config": {"kv_role": "kv_both"}, "scheduler_cls": "a.B", "no_such": True, "other": False}
    options = ServeOptions("nano", method="naive", pool_bytes=9)
    launch(options, [], engine=engine, root=root, server=server)
    argv = told(seen)["argv"]
    assert argv[2:4] == ["--served-model-name", "nano"]
    assert argv[4:10] == [
        "--kv-transfer-config", '{"kv_role": "kv_both"}', "--scheduler-cls", "a.B", "--no-such", "--no-other",
    ]  # fmt: skip
    assert told(seen)["environment"]["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
    seen.unlink()
    full = ServeOptions("nano", method="full")
    named = ["--served-model-name", "mine"]
    launch(full, named, root=root, server=server)
    assert told(seen)["argv"][2:4] == named
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU" not in told(seen)["environment"]
    for name in ("kv-transfer-config", "scheduler_cls", "worker-cls", "tokenizer", "tokenizer-revision", "revision"):
        with pytest.raises(ValueError, match="comb serve doesn't take --"):
            read_flags([f"--{name}", "x"], {}, plain=True)
        assert read_flags([f"--{name}", "x"], {})
    with pytest.raises(ValueError, match="comb serve doesn't take --kv-offloading-size: vLLM's connector"):
        read_flags(["--kv_offloading_size=4"], {}, plain=True, engine=engine)
    assert read_flags(["--kv-offloading-size", "4"], {}, plain=True)  # nothing is linked
    with pytest.raises(ValueError, match="comb serve doesn't take --enable-prefix-caching: linking documents"):
        read_flags(["--enable-prefix-caching"], {}, plain=True, engine={"enable_prefix_caching": False})


def test_a_disk_folder_is_one_servers_until_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, seen, root = program(tmp_path, "time.sleep(60)")
    quick, disk = [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "disk"
    options = ServeOptions("owner/adapter", disk_path=str(disk), drain_seconds=0)
    text = LAUNCH.replace('"owner/adapter"', f'"owner/adapter", disk_path={str(disk)!r}')
    launcher = subprocess.Popen([sys.executable, "-c", text, str(root), *server])
    pid = told(seen)["pid"]
    os.kill(pid, signal.SIGSTOP)  # it hears of no signal: one that takes its time to end
    launcher.kill()
    launcher.wait()
    monkeypatch.setattr("comb_serving.launch.launcher.END_SECONDS", -2.5)
    with pytest.raises(ValueError, match=r"--comb-disk .*disk is in use by another server: give each its own"):
        launch(options, root=root, server=quick)
    assert launch(replace(options, disk_path=str(tmp_path / "other")), root=root, server=quick) == 3
    monkeypatch.undo()
    threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()  # and is waited for
    assert launch(options, root=root, server=quick) == 3
    assert launch(options, root=root, server=quick) == 3
    assert (list(disk.iterdir()), disk.stat().st_mode & 0o077) == ([], 0)
    with pytest.raises(ValueError, match=r"can't be kept in .*: give a folder that can be made and read"):
        launch(replace(options, disk_path="/proc/none/disk"), root=root, server=quick)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_and_crashes(tmp_path: Path, number: signal.Signals) -> None:
    server, seen, root = program(tmp_path, "time.sleep(60)")
    bystander = root / "comb-instance-like"
    bystander.mkdir()
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, str(root), *server])
    pid = told(seen)["pid"]
    folders = [folder for folder in root.iterdir() if (folder / LOCK).exists()]
    assert len(folders) == 1
    assert folders[0].stat().st_mode & 0o077 == 0
    remove_abandoned(root)
    assert folders[0].exists()  # its owner lives
    launcher.send_signal(number)
    assert launcher.wait(30) == (7 if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until_gone(pid)
    if number == signal.SIGKILL:
        assert folders[0].exists()
        with instance_folder(root) as mine:
            assert mine.name.startswith(PREFIX)
            assert {path.name for path in root.iterdir()} == {mine.name, bystander.name}
    assert list(root.iterdir()) == [bystander]


def test_a_server_that_is_ended_at_its_start_leaves_no_shared_memory(tmp_path: Path) -> None:
    left, others = (Path(f"/dev/shm/psm_comb_{name}_{os.getpid()}") for name in ("start", "others"))
    others.touch()
    then = f"import mmap; file = open({str(left)!r}, 'w+b'); file.write(bytes(9)); file.flush()\n"
    server, seen, root = program(tmp_path, f"{then}held = mmap.mmap(file.fileno(), 9); time.sleep(60)")
    try:
        with subprocess.Popen([sys.executable, "-c", LAUNCH, str(root), *server]) as launcher:
            maps = Path(f"/proc/{told(seen)['pid']}/maps")
            wait_for(lambda: str(left) in maps.read_text())
            launcher.terminate()
        assert (left.exists(), others.exists()) == (False, True)
    finally:
        for path in (left, others):
            path.unlink(missing_ok=True)


def test_a_server_that_is_starting_is_not_waited_for(tmp_path: Path) -> None:
    server, seen, root = program(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: 0); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", LAUNCH, str(root), *server]) as launcher:
        pid = told(seen)["pid"]
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(15) == 128 + signal.SIGINT
        wait_until_gone(pid)


def test_a_second_signal_ends_a_server_at_once(tmp_path: Path) -> None:
    left = Path(f"/dev/shm/sem.mp-comb_second_{os.getpid()}")  # made after the first signal
    deaf = (
        f"import mmap\ndef heard(*_):\n  global held\n  file = open({str(left)!r}, 'w+b'); file.write(bytes(9))\n"
        "  file.flush(); held = mmap.mmap(file.fileno(), 9); print(flush=True)\n"
        "signal.signal(signal.SIGTERM, heard); time.sleep(60)"
    )
    server, seen, root = program(tmp_path, deaf)
    with subprocess.Popen([sys.executable, "-c", LAUNCH, str(root), *server], stdout=subprocess.PIPE) as launcher:
        pid = told(seen)["pid"]
        assert launcher.stdout is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            launcher.send_signal(number)
            launcher.stdout.read(1)  # the server has heard of the first; it says nothing of the second
        assert launcher.wait(10) != 0
        wait_until_gone(pid)
    assert list(root.iterdir()) == []
    assert not left.exists()


HEALTHY = """
import http.server, socket, ssl
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))
class Server(http.server.HTTPServer):
    address_family = socket.AF_INET6 if ":" in flags["--host"] else socket.AF_INET
server = Server((flags["--host"], int(flags["--port"])), Handler)
if "--ssl-certfile" in flags:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(flags["--ssl-certfile"], flags["--ssl-keyfile"])
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.timeout = 0.1
(folder / "ready").touch()
while not seen.with_name("ready").exists():
    server.handle_request()
"""


@pytest.mark.parametrize(
    ("host", "shown", "tls"), [("::1", "http://[::1]", False), ("127.0.0.1", "https://127.0.0.1", True)]
)
def test_a_healthy_server_is_reported(tmp_path: Path, host: str, shown: str, tls: bool) -> None:
    options: list[str] = []
    if tls:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl to make a certificate")
        options = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
        made = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=elsewhere -out cert.pem -keyout key.pem"
        subprocess.run(made.split(), cwd=tmp_path, check=True, capture_output=True)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
    except OSError:
        pytest.skip(f"{host} is no address here")
    server, seen, root = program(tmp_path, HEALTHY)
    found: list[str] = []

    def ready(address: str) -> None:
        found.append(address)
        seen.with_name("ready").touch()

    status = launch(
        ServeOptions("owner/adapter"),
        ["--host", host, "--port", str(port), *options],
        root=root,
        server=["timeout", "30", *server],
        on_ready=ready,
    )
    assert (status, found) == (0, [f"{shown}:{port}"])


FAILING = """
def say(stream, text):
    for line in text.strip().splitlines():
        print(line, file=stream, flush=True)
say(sys.stdout, '''
(EngineCore pid=5) INFO 11-25 10:00:00 [core.py:1] loading
(EngineCore pid=5) ERROR 11-25 10:00:01 [core.py:9] EngineCore failed to start.
(EngineCore pid=5) ERROR 11-25 10:00:01 [core.py:9] Traceback (most recent call last):
(APIServer pid=4) INFO 11-25 10:00:01 [api.py:2] still here
(EngineCore pid=5) ERROR 11-25 10:00:01 [core.py:9]   File "core.py", line 9, in run
(EngineCore pid=5) ERROR 11-25 10:00:01 [core.py:9]     raise Nothing
(EngineCore pid=5) ERROR 11-25 10:00:01 [core.py:9] pydantic_core.ValidationError: 1 mistake in cache
(EngineCore pid=5) ERROR 11-25 10:00:01 [core.py:9]   No memory for the cache
''')
say(sys.stderr, '''
(APIServer pid=4) Traceback (most recent call last):
(APIServer pid=4)   File "api.py", line 2, in run
(APIServer pid=4) RuntimeError: Engine core initialization failed. See root cause above.
(APIServer pid=4) Traceback (most recent call last):
(APIServer pid=4) pydantic_core.ValidationError: 1 mistake in model
(APIServer pid=4)   Value error, Model architectures ['A'] failed to be inspected. Please check the logs
''')
sys.exit(1)
"""


@pytest.mark.parametrize("debug", [False, True])
def test_a_server_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], debug: bool
) -> None:
    monkeypatch.setenv("COMB_DEBUG", str(int(debug)))
    server, _, root = program(tmp_path, FAILING)
    cause = "ended at its start (status 1): pydantic_core.ValidationError: 1 mistake in cache No memory for the cache"
    with pytest.raises(RuntimeError, match=re.escape(cause)):
        launch(ServeOptions("me/adapter"), root=root, server=server)
    said = "".join(capfd.readouterr())
    assert "loading" in said
    assert "still here" in said
    assert ("Traceback" in said) == debug
    assert ('File "core.py"' in said) == debug


MISUSED = """
import argparse
parser = argparse.ArgumentParser(prog="api_server.py", epilog="much of it")
for number in range(50):
    parser.add_argument(f"--option-{number}")
print("WARNING 11-25 10:00:00 [api.py:1] in front", file=sys.stderr, flush=True)
parser.parse_args()
"""


def test_an_option_that_vllm_does_not_know_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server, _, root = program(tmp_path, MISUSED)
    said = r"ended at its start \(status 2\): unrecognized arguments: .* --nonsense 3 "
    with pytest.raises(RuntimeError, match=said):
        launch(ServeOptions("me/adapter"), ["--nonsense", "3"], root=root, server=server)
    said = "".join(capfd.readouterr())
    assert "in front" in said
    assert "--option" not in said


SLOW_TO_START = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
born = time.monotonic()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > born + 0.3 else 503)
        self.end_headers()
    def log_message(self, *_): pass
HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""
STARTING = [sys.executable, "-c", SLOW_TO_START, "adapter"]
OWNER = """
import sys, time
from comb_serving.launch.server_process import ServerProcess
server = ServerProcess(sys.argv[1:])
print(server.pid, flush=True)
time.sleep(60)
"""


def test_it_is_healthy_then_ends_and_says_so() -> None:
    server = ServerProcess(STARTING)
    server.wait_until_healthy(30)
    server.check()
    server.get("/health")
    os.kill(server.pid, signal.SIGKILL)
    wait_until_gone(server.pid)
    with pytest.raises(RuntimeError, match=r"ended with status -9"):
        server.check()
    server.stop()
    other = ServerProcess(STARTING)
    other.wait_until_healthy(30)
    assert [each.pid for each in other.tree()] == [other.pid]
    other.stop()
    assert gone(other.pid)
    assert other.tree() == []


def test_one_that_cannot_start_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 3"):
        ServerProcess([sys.executable, "-c", "raise SystemExit(3)"]).wait_until_healthy(30)
    with pytest.raises(OSError, match="/no/such/program"):
        ServerProcess(["/no/such/program"])
    silent = [sys.executable, "-c", "print('why', flush=True); import time; time.sleep(60)"]
    server = ServerProcess(silent, log=tmp_path / "log")
    while "why" not in (tmp_path / "log").read_text():  # a busy machine takes its time
        server.check()
    with pytest.raises(RuntimeError, match=r"(?s)not healthy within 1 s; its log .* ends with:\nwhy"):
        server.wait_until_healthy(1)
    assert gone(server.pid)


def test_one_that_does_not_end_by_itself_is_ended_with_all_below_it() -> None:
    below = "import time; time.sleep(60)"
    stubborn = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.run([sys.executable, "-c", {below!r}])
"""
    server = ServerProcess([sys.executable, "-c", stubborn])
    while len(tree := server.tree()) < 2:
        server.check()
    server.stop(0.5)
    assert all(gone(each.pid) for each in tree)


def test_it_ends_with_its_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, *STARTING], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not gone(pid)
        owner.kill()
    wait_until_gone(pid)


def test_flags_that_cannot_be_served_are_refused() -> None:
    read = read_flags(["--tensor_parallel_size=4", "--host", "0.0.0.0", "--seed", "3"], {"VLLM_API_KEY": "x"})
    assert (read.ranks, read.host, len(read.key_hashes)) == (4, "0.0.0.0", 1)
    assert read_flags(["--tensor-par", "2"], {}).ranks == 2  # vLLM takes beginnings of names
    assert len(read_flags(["--api-key", "a", "b"], {"VLLM_API_KEY": "x"}).key_hashes) == 2
    usual = ["--default_chat_template_kwargs", '{"enable_thinking": false}']
    assert read_flags(usual, {}).chat_template_kwargs == {"enable_thinking": False}
    for flags in (
        "--default-chat-template-kwargs.enable_thinking false", "--default-chat-template-kwargs=[]",
        "--default-chat.enable_thinking false", "--api-server-count 2", "-dp=2", "--data_parallel_size 3",
        "--data-par 3", "--chat-template x", "--model m", "--reasoning-effort-map.low none", "--reasoning-e {}",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"comb serve|a JSON object"):
            read_flags(flags.split(), {})
    with pytest.raises(ValueError, match="invalid int"):
        read_flags(["--port", "many"], {})
    for keys, set_to in ((["--api-key", ""], ""), (["--api-key", "a", "b "], ""), ([], "a\n"), ([], "clé")):
        with pytest.raises(ValueError, match="an API key is empty"):
            read_flags(keys, {"VLLM_API_KEY": set_to})
    assert read_flags([], {"VLLM_API_KEY": ""}).key_hashes == ()


@pytest.mark.vllm
def test_no_option_of_vllms_is_taken_for_the_beginning_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    read, parse = list[str](), argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(
        argparse.ArgumentParser,
        "parse_known_args",
        lambda parser, *given: (read.extend(parser._option_string_actions), parse(parser, *given))[1],
    )
    read_flags([], {}, plain=True, engine=["kv_transfer_config", "enable_prefix_caching"])
    monkeypatch.undo()
    known = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions
    taken = {name for name in known if name not in read for ours in read if ours.startswith(name)}
    assert "--tensor-parallel-size" in known
    assert not taken


@pytest.mark.parametrize(
    ("parse", "good", "wrong", "message"),
    [
        (parse_bytes, {"512MiB": 512 * 2**20, "8GB": 8 * 10**9, "17": 17, "1.5 KiB": 1536, "2g": 2 * 10**9,
                       "1TB": 10**12, "1TiB": 2**40}, ["", "big", "-1", "1 XB"], "512MiB"),
        (parse_share, {"100%": 1.0, " 12.5 %": 0.125}, ["0%", "101%", "-3%", "1", "big"], "above 0% and at most 100%"),
    ],
)  # fmt: skip
def test_sizes_and_shares(parse: Any, good: dict[str, Any], wrong: list[str], message: str) -> None:
    assert {text: parse(text) for text in good} == good
    for text in wrong:
        with pytest.raises(ValueError, match=message):
            parse(text)


def test_pins_are_divided_among_keys() -> None:
    assert [ServeOptions("a", key_hashes=keys).pinned_share for keys in ((), ("x",), ("x", "y"))] == [1, 1, 0.5]
    assert ServeOptions("a", key_hashes=("x", "y"), tenant_pinned_share=0.9).pinned_share == 0.9


def test_options_survive_the_environment() -> None:
    options = ServeOptions("a", key_hashes=("x",), host_bytes=3)
    assert ServeOptions.from_environment(options.environment(Path("/place"))) == options
    with pytest.raises(ValueError, match="comb serve"):
        ServeOptions.from_environment({})
    for wrong, message in (
        ({"pool_block": 0}, "pool_block"), ({"pool_memory": "cuda"}, "auto or host, not 'cuda'"),
        ({"pool_bytes": 0}, "no room for a document"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ServeOptions("a", **wrong)
    assert os.environ.get("COMB_SERVE_OPTIONS") is None


def test_the_command_line_is_read_into_values() -> None:
    given = {"checkpoint": "a", "host_bytes": "1KiB", "disk_bytes": None, "tenant_share": "25%", "encoder": "off",
             "admin_hash": "key", "pool_bytes": "2GiB"}  # fmt: skip
    options = ServeOptions.read(given)
    assert (options.host_bytes, options.disk_bytes, options.tenant_share, options.encoder) == (1024, None, 0.25, False)
    assert options.admin_hash == key_hash("key")
    assert options.given("encoder", "pool_block", "pool_bytes") == ["--encoder", "--comb-pool-bytes"]
    for wrong, message in (
        ({"host_bytes": "big"}, "512MiB"),
        ({"encoder": "x"}, "--encoder is on or off, not 'x'"),
        ({"admin_hash": "key\n"}, "the admin key is empty, isn't ASCII, or has spaces or a line's end"),
    ):
        with pytest.raises(ValueError, match=message):
            ServeOptions.read({**given, **wrong})


def test_the_docs_have_a_row_for_each_option() -> None:
    nothing = {None: "none", (): "none"}
    rows = [
        f"| `{flag_of(each)}` | {nothing.get(said['default'], said['default'])} | {said['option'].help} |"
        for each in fields(ServeOptions)
        if "default" in (said := each.metadata)
    ]
    page = (Path(__file__).parents[2] / "docs" / "serving-http.md").read_text()
    assert "\n".join(rows) in page
