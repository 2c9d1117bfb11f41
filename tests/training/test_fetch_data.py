"""scripts/fetch-data against a server with made-up files, and the sets that configurations name."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from comb.documents.datasets import read_dataset
from comb.evaluation.setting import read_sets
from comb_training.config import load_config
from comb_training.data.mixture import sources
from tests.helpers.doc_blocks import ROOT, fill_data, mine, write_rows

SCRIPT = ROOT / "scripts" / "fetch-data"


@dataclass
class Mirror:
    """A server of `files` by their paths; the next answer for a path in `cut` ends after so many bytes."""

    files: dict[str, bytes]
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and the header Range
    url: str = ""


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    made = tmp_path / "made"
    fill_data(made)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        file.add(made / "babi" / "en-10k", "tasks_1-20_v1-2/en-10k")
        file.add(made / "babi" / "en-10k", "tasks_1-20_v1-2/hn")
    names = ("nq_open/nq-open-oracle.jsonl.gz", "squad/dev-v2.0.json", "hotpotqa/hotpot_dev_fullwiki_v1.json")
    files = {name: (made / name).read_bytes() for name in names}
    files["babi/tasks_1-20_v1-2.tar.gz"] = archive.getvalue()
    server = Mirror(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, wanted = self.path.removeprefix("/pub/"), self.headers["Range"]
            server.asked.append((path, wanted))
            if path not in server.files:
                self.send_error(404)
                return
            whole = server.files[path]
            start = 0 if wanted is None else int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(whole):
                self.send_error(416)
                return
            self.send_response(200 if wanted is None else 206)
            self.send_header("Content-Length", str(len(whole) - start))
            self.end_headers()
            self.wfile.write(whole[start : server.cut.pop(path, None)])

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{http.server_port}/pub/"
    yield server
    http.shutdown()


def fetch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_what_comes_is_what_the_readers_take(tmp_path: Path, mirror: Mirror) -> None:
    done = fetch(tmp_path, "nq_open", "squad", "hotpotqa", "babi", "--from", mirror.url)
    assert (done.returncode, done.stderr) == (0, "")
    data = tmp_path / "data"
    for dataset, path in (
        ("nq_open", "nq_open/nq-open-oracle.jsonl.gz"), ("squad", "squad/dev-v2.0.json"), ("babi", "babi/en-10k"),
        ("hotpotqa", "hotpotqa/hotpot_dev_fullwiki_v1.json"),
    ):  # fmt: skip
        assert len(read_dataset(dataset, data / path)) > 10
    files = {path.relative_to(data).as_posix() for path in data.rglob("*") if path.is_file()}
    assert not any(name.endswith((".part", ".tar.gz")) or "hn" in name for name in files)
    mirror.asked.clear()
    again = fetch(tmp_path, "squad", "babi", "--from", mirror.url)
    assert (again.returncode, mirror.asked) == (0, [])
    assert again.stdout.count("is there") == 2


def test_it_goes_on_where_it_was_broken_off(tmp_path: Path, mirror: Mirror) -> None:
    mirror.cut["squad/dev-v2.0.json"] = 1000
    done = fetch(tmp_path, "squad", "--from", mirror.url)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"error: squad: {mirror.url}squad/dev-v2.0.json: ")
    assert not (tmp_path / "data/squad/dev-v2.0.json").exists()
    assert fetch(tmp_path, "squad", "--from", mirror.url).returncode == 0
    assert mirror.asked[-1] == ("squad/dev-v2.0.json", "bytes=1000-")
    assert (tmp_path / "data/squad/dev-v2.0.json").read_bytes() == mirror.files["squad/dev-v2.0.json"]
    # broken off behind the last byte
    (tmp_path / "data/squad/dev-v2.0.json").rename(tmp_path / "data/squad/dev-v2.0.json.part")
    assert fetch(tmp_path, "squad", "--from", mirror.url).returncode == 0


@pytest.mark.parametrize(
    "name", ["nq_open/nq-open-oracle.jsonl.gz", "squad/dev-v2.0.json", "babi/tasks_1-20_v1-2.tar.gz"]
)
def test_something_else_is_not_kept(name: str, tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[name] = b"<html>Please log in</html>"
    done = fetch(tmp_path, "nq_open", "squad", "babi", "--from", mirror.url, "--to", "sets")
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()  # the others came
    assert f"{name} isn't what it should be" in error
    assert len([path for path in (tmp_path / "sets").iterdir() if any(path.iterdir())]) == 2


def test_what_is_missing_there_is_one_line_each(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files.clear()
    done = fetch(tmp_path, "squad", "babi", "--from", mirror.url)
    assert [line.rpartition(": ")[2] for line in done.stderr.splitlines()] == ["Not Found"] * 2
    nobody = fetch(tmp_path, "squad", "--from", "http://127.0.0.1:9/")
    assert (nobody.returncode, len(nobody.stderr.splitlines())) == (1, 1)
    assert "there is no set 'squat'" in fetch(tmp_path, "squat").stderr


def test_the_list_says_what_from_where_how_large_and_which_licence(tmp_path: Path) -> None:
    done = fetch(tmp_path, "--list")
    assert done.returncode == 0
    address = "squad/dev-v2.0.json  https://rajpurkar.github.io/"
    assert all(text in done.stdout for text in ("squad: ", "4.4 MB; CC BY-SA 4.0", address, "-> babi/en-10k"))
    assert not (tmp_path / "data").exists()


def test_a_set_on_the_hub_is_read_from_a_copy_in_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    write_rows(tmp_path / "data" / "org" / "mine" / "train.jsonl", mine(8))
    (tmp_path / "evaluation.yaml").write_text(
        "templates: {plain: {query: '{query}'}}\n"
        "sets: {mine: {dataset: jsonl, path: 'hf://org/mine?split=train', split: all, template: plain}}\n"
    )
    assert len(read_sets(tmp_path / "evaluation.yaml")["mine"].read(tmp_path / "data")) == 8
    mixture = "data.mixture=[{dataset: jsonl, path: 'hf://org/mine?split=train'}]"
    (source,) = sources(load_config(None, [mixture, f"data.path={tmp_path / 'data'}"]).data)
    assert len(source.read("all")[0]) == 8


def test_a_missing_set_is_one_line_that_says_where_it_may_lie(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scripts/fetch-data .*data.path=.*--data FOLDER$"):
        read_dataset("squad", tmp_path / "squad" / "dev-v2.0.json")
    with pytest.raises(ValueError, match=r"no file or folder '[^']*mine.jsonl'$"):  # nobody fetches one's own rows
        read_dataset(str(tmp_path / "mine.jsonl"))


def test_no_committed_file_is_read_from_outside_of_the_checkout() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    outside = "../" + "shared"
    for name in files:
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".safetensors"):
            assert outside not in path.read_text(encoding="utf-8", errors="ignore"), name
