"""`comb serve` that can't work ends at once, in one line, before anything is started."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from safetensors.torch import save_file

from comb import LinkTokensConfig
from comb.cli import main as cli
from comb.documents.found import KINDS
from comb_serving.config.serve_options import ServeOptions
from comb_serving.launch.preflight import check_start
from comb_serving.vllm.linking.setup import linking_options
from comb_training.nano import CHECKPOINT
from tests.helpers.byte_text import byte_llama, byte_tokenizer

FOUND = ["--method", "naive", "--comb-segments", "auto"]
ADAPTER = json.dumps({"model_type": "comb", "backbone_name_or_path": str(CHECKPOINT)})


@dataclass
class Shell:
    """`comb serve` in a place where vLLM is installed, and the Hub can't be reached."""

    folder: Path
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    started: list[str] = field(default_factory=list)  # the checkpoints that servers were started with

    def serve(self, checkpoint: Any, *options: str) -> int:
        self.patch.setattr("sys.argv", ["comb", "serve", str(checkpoint), *options])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert isinstance(stop.value.code, int)
        return stop.value.code

    def refusal(self, checkpoint: Any, *options: str) -> str:
        assert self.serve(checkpoint, *options) == 1
        (line,) = self.capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line

    def adapter(self) -> Path:
        """One that can be served, by its files."""
        (self.folder / "adapter").mkdir()
        (self.folder / "adapter" / "config.json").write_text(ADAPTER)
        save_file({}, self.folder / "adapter" / "model.safetensors")
        return self.folder / "adapter"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    found = Shell(tmp_path, monkeypatch, capsys)
    monkeypatch.setattr(
        "comb_serving.launch.launcher.launch", lambda options, *_, **__: found.started.append(options.checkpoint) or 0
    )
    monkeypatch.setattr("comb_serving.launch.preflight.find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return found


def test_without_vllm(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comb_serving.launch.preflight.find_spec", lambda name: None if name == "vllm" else name)
    assert "pip install 'comb-pic[serve]'" in shell.refusal(shell.adapter())
    assert shell.started == []


def test_adapters_are_started(shell: Shell, tmp_path: Path) -> None:
    adapter = shell.adapter()
    cached = tmp_path / "hub" / "models--me--adapter"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("0" * 40) / "config.json").write_text(ADAPTER)
    checkpoints = [str(adapter), "adapter", "me/adapter"]  # the last one a Hub id
    assert [shell.serve(checkpoint) for checkpoint in checkpoints] == [0, 0, 0]
    assert shell.started == checkpoints


def test_link_tokens_are_started_on_their_backbone(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()

    def write(**more: Any) -> None:
        config = {"model_type": "comb_linktokens", "backbone_name_or_path": "nano", "num_link_tokens": 3, **more}
        (folder / "config.json").write_text(json.dumps(config))

    save_file({}, folder / "model.safetensors")
    write()
    for options, message in (
        (["--method", "naive"], "is an adapter of link tokens, which are its method: leave --method away"),
        (["--encoder", "off"], "--encoder is for adapters"),
    ):
        assert message in shell.refusal("links", *options)
    assert "'nano' is no adapter of link tokens" in shell.refusal("nano", "--method", "linktokens")
    links = ServeOptions("links")
    found = check_start(links)
    assert (found.method, found.backbone, found.link_tokens) == ("linktokens", "nano", "links")
    full = check_start(replace(links, method="full"))
    assert (full.method, full.backbone) == ("full", "nano")
    named = "legolink:4,front=adapter"
    assert check_start(replace(links, method=named)).method == named
    # from the plain model's side; clients aren't told where the adapter is
    there = check_start(ServeOptions("nano", method=f"legolink:4,front={folder}"))
    assert (there.method, there.backbone, there.link_tokens) == (named, None, str(folder))
    assert "nano is no adapter of link tokens" in shell.refusal("nano", "--method", "naive,front=nano")
    engine = linking_options(found)
    transfer = engine["kv_transfer_config"]["kv_connector_extra_config"]
    placeholder = LinkTokensConfig.from_pretrained(folder).placeholder_id
    assert transfer == {"method": "linktokens", "front": [placeholder] * 3, "link_tokens": "links"}
    write(state_shapes={"state_1": [2, 4, 4]}, state_units={"state_1": 1.0})
    found = check_start(replace(links, backbone="nano-hybrid"))  # the states are learned, too
    assert (found.method, found.link_tokens) == ("hypic:8,front=adapter", "links")
    write()
    assert shell.serve("links") == 0
    write(backbone_name_or_path="./backbone")
    shutil.copytree(CHECKPOINT, folder / "backbone")
    assert check_start(links).backbone == str(folder / "backbone")
    write(backbone_revision="abc")
    assert "revision abc of 'nano': name a folder" in shell.refusal("links")
    assert shell.serve("links", "--backbone", "nano") == 0
    assert shell.started == ["links"] * 2


@pytest.mark.parametrize(
    ("method", "there"),
    [(None, "hypic:8,front=prose"), ("naive", "hypic:8"), ("legolink-0", "hypic:8,front=dummies:4"),
     ("naive,front=prose", "hypic:8,front=prose"), ("hypic:4", "hypic:4"), ("full", "full"),
     ("primed:4", "primed:4"), ("legolink:16", "legolink:16")],
)  # fmt: skip
def test_on_hybrids_methods_are_those_of_the_library(shell: Shell, method: str | None, there: str) -> None:
    """`hypic` behind the same front; what has no counterpart, the engine refuses by its first linear layer."""
    assert check_start(ServeOptions("nano-hybrid", method=method)).method == there
    assert check_start(ServeOptions("nano", method=method)).method == (method or "primed")


def test_plain_models_say_how_they_link(shell: Shell) -> None:
    shell.adapter()
    for checkpoint, options, message in (
        ("adapter", ["--method", "naive"], "is a COMB adapter, whose encoder is its method: leave --method away"),
        ("nano", ["--method", "cacheblend"], "it chooses, and vLLM links documents with attnlink:k, focus:r"),
        ("nano", ["--method", "legolink:-1"], "at least 0"),
        ("nano", ["--method", "naive", "--encoder", "off"], "--encoder is for adapters"),
        ("nano", ["--method", "naive", "--backbone", "nano"], "--backbone is for adapters"),
        ("nano", ["--method", "naive", "--comb-pool-memory", "host"], "--comb-pool-memory is for adapters"),
        ("nano", ["--method", "naive", "--comb-pool-dtype", "fp8"], "--comb-pool-dtype is for adapters"),
        ("nano", ["--method", "full", "--audit", "0.1"], "nothing is linked here"),
        ("adapter", ["--audit", "0.1"], "nothing is linked here"),
        ("nano", ["--method", "full", "--comb-segments", "auto"], "and not for full"),
        ("adapter", ["--comb-segments", "auto"], "and not for the encoder of an adapter"),
        ("nano", [*FOUND, "--comb-segment-kinds", "code,poems"], "there is no 'poems'"),
        ("nano", [*FOUND[:2], "--comb-segment-kinds", "code"], "--comb-segment-kinds is for --comb-segments auto"),
        ("nano", [*FOUND[:2], "--comb-disk-bytes", "1GiB"], "name it with --comb-disk"),
        ("nano", [*FOUND[:2], "--comb-disk", __file__], "is a file: name a folder"),
        ("nano", [*FOUND[:2], "--comb-pool-block", "0"], "pool_block must be at least 1"),
        ("nano", [*FOUND, "--comb-segment-pattern", "x*"], "matches nothing at all"),
    ):
        assert message in shell.refusal(checkpoint, *options), options
    assert check_start(ServeOptions("nano", method="naive", segments="auto")).segment_kinds == KINDS
    assert shell.started == []
    for method in ("naive", "legolink", "full"):
        assert shell.serve("nano", "--method", method) == 0
    assert shell.serve("nano") == 0
    assert check_start(ServeOptions("nano")) == check_start(ServeOptions("nano", method="primed"))
    assert shell.started == ["nano"] * 4


@pytest.mark.parametrize(("positions", "tokens"), [(512, 256), (1024, 512), (4096, 519)])
def test_the_passage_leaves_documents_half_of_a_small_model(positions: int, tokens: int, tmp_path: Path) -> None:
    byte_llama(max_position_embeddings=positions).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    options = linking_options(ServeOptions(str(tmp_path), method="primed"))["kv_transfer_config"]
    assert len(options["kv_connector_extra_config"]["front"]) == tokens
