"""What a replica's actor does with its `comb serve`, with a small program in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from comb_serving.replicas.process import ServeProcess
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
from comb_serving.replicas.process import ServeProcess
server = ServeProcess(sys.argv[1:])
print(server.pid, flush=True)
time.sleep(60)
"""


def test_it_is_healthy_then_ends_and_says_so() -> None:
    server = ServeProcess(COMMAND, start_seconds=30)
    server.check()
    with urllib.request.urlopen(f"{server.address}/health", timeout=5) as answer:
        assert answer.status == 200
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until_gone(server.pid)
    assert server._ended.wait(20)
    with pytest.raises(RuntimeError, match=r"ended with status -9"):
        server.check()
    server.stop()
    other = ServeProcess(COMMAND, start_seconds=30)
    assert other.pid is not None
    other.stop()
    assert gone(other.pid)


def test_one_that_cannot_start_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(RuntimeError, match="ended with status 3"):
        ServeProcess([sys.executable, "-c", "raise SystemExit(3)"], start_seconds=30)
    with pytest.raises(RuntimeError, match="ended with status None"):
        ServeProcess(["/no/such/program"], start_seconds=30)
    with pytest.raises(RuntimeError, match="not healthy within 0 s"):
        ServeProcess([sys.executable, "-c", "import time; time.sleep(60)"], start_seconds=0.4)


def test_it_ends_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *COMMAND], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not gone(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until_gone(pid)
