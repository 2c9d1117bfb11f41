"""What the README and the docs print to serve and to ask with, as it is printed (`tests/test_docs.py` has the rest).

Ports are free ones, and servers get the options that docs/install.md has for a CPU. Pages that start the same server
share it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from comb_serving.launch.server_process import COMMAND, free_port
from tests.helpers.doc_blocks import PAGES, ROOT, Block, Command, blocks, environment, fill_cache, mine, write_rows

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

READY_S = 400
SERVE = "comb serve"


def printed() -> dict[tuple[str, ...], list[Command]]:
    """What is asked of each server, by its command's words without the port."""
    asked: dict[tuple[str, ...], list[Command]] = {}
    for page in PAGES:
        server = None
        for command in (each for block in blocks(page) if block.language == "bash" for each in block.commands()):
            if command.not_run or not command.served:
                continue
            if command.text.startswith(SERVE):
                words = " ".join(command.words).replace(" --port 8000", "").split()
                server = asked.setdefault(tuple(words), [])
            else:
                assert server is not None, f"{page}: asked before a server is started: {command.text}"
                server.append(command)
    return asked


def cpu_options() -> list[str]:
    """Those of the command of docs/install.md."""
    found = [command for block in blocks(ROOT / "docs/install.md") for command in block.commands()]
    (words,) = (command.words for command in found if command.text.startswith(SERVE))
    return words[3:]


@pytest.fixture(scope="module")
def home(plugin: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the cache of a reader, and the adapter that they have trained on their own rows."""
    folder = tmp_path_factory.mktemp("served")
    fill_cache(folder / "hf")
    write_rows(folder / "mine.jsonl", mine(24))
    words = ["data=mine.jsonl", "model.options={}", "model.num_encoder_layers=2", "train.answers=gold", "train.steps=2"]
    words += ["train.max_seconds=null", "train.output_dir=out/adapter", "--no-eval"]
    done = subprocess.run(
        [sys.executable, "-m", "comb_training.train", ROOT / "configs/nano.yaml", *words],
        cwd=folder, env={**os.environ, **environment(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@contextmanager
def serving(words: tuple[str, ...], home: Path) -> Iterator[int]:
    port, log = free_port(), home / "log"
    ours = {**os.environ, **environment(home), "COMB_ADMIN_KEY": "ADMIN_KEY", "VLLM_LOGGING_LEVEL": "WARNING"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, *words[2:], *cpu_options(), "--port", str(port)],
            cwd=home, env=ours, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline = time.monotonic() + READY_S
    health = ["curl", "-sf", f"localhost:{port}/health"]
    try:
        while subprocess.run(health, check=False, capture_output=True).returncode:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


@pytest.mark.parametrize("words", printed(), ids=lambda words: " ".join(words[2:]))
def test_servers(words: tuple[str, ...], home: Path) -> None:
    with serving(words, home) as port:
        for command in printed()[words]:
            text = command.text.replace("localhost:8000", f"localhost:{port}")
            done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{text}\n{done.stderr}"
            answer = json.loads(done.stdout)
            assert "error" not in answer, f"{text}\n{done.stdout}"
            if "documents" in text:
                assert all(document["state"] != "inlined" for document in answer["comb"]["documents"])


def programs() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.served and not block.not_run]


@pytest.mark.parametrize("block", programs(), ids=lambda block: block.place)
def test_programs(block: Block, home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text], cwd=home, env={**os.environ, **environment(home)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.text}\n{done.stderr[-3000:]}"
