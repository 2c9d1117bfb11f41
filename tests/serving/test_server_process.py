"""A server as a child process, with a small program in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from comb_serving.launch.server_process import ServerProcess
from tests.helpers.processes import gone, wait_until_gone

PROGRAM = """
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
COMMAND = [sys.executable, "-c", PROGRAM, "adapter"]
OWNER = """
import sys, time
from comb_serving.launch.server_process import ServerProcess
server = ServerProcess(sys.argv[1:])
print(server.pid, flush=True)
time.sleep(60)
"""


def test_it_is_healthy_then_ends_and_says_so() -> None:
    server = ServerProcess(COMMAND)
    server.wait_until_healthy(30)
    server.check()
    server.get("/health")
    os.kill(server.pid, signal.SIGKILL)
    wait_until_gone(server.pid)
    with pytest.raises(RuntimeError, match=r"ended with status -9"):
        server.check()
    server.stop()
    other = ServerProcess(COMMAND)
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
    server = ServerProcess([sys.executable, "-c", "print('why', flush=True); import time; time.sleep(60)"],
                           log=tmp_path / "log")  # fmt: skip
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
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *COMMAND], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not gone(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until_gone(pid)
