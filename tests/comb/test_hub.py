"""Publishing, with the real Hub client against a hub on this machine."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file

from comb import CombForCausalLM
from comb.backbones.loading import is_hub_id
from comb.cli.main import main
from comb.hub.card import TEMPLATE, inherited_licence
from comb.hub.push import UploadFailedError, plan_push, push
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.fake_hub import Failure, Hub, fake_hub
from tests.helpers.families import tiny


@pytest.fixture
def adapter(adapter: Path) -> Path:
    """With what a training run leaves beside it."""
    (adapter / "training_args.bin").write_bytes(b"a token may be in here")
    (adapter / "checkpoint-10").mkdir()
    (adapter / "checkpoint-10" / "optimizer.pt").write_bytes(b"x")
    return adapter


def test_plan_names_what_goes_and_what_stays(adapter: Path) -> None:
    (adapter / "tokenizer_backup").mkdir()
    (adapter / "tokenizer_backup" / "secret.txt").write_text("x")
    (adapter / "README.md").unlink()
    plan = plan_push(adapter, "me/tiny")
    assert {name for name, _ in plan.files} == FILES
    assert set(plan.left_out) == {"training_args.bin", "checkpoint-10/optimizer.pt", "tokenizer_backup/secret.txt"}
    assert any("tokenizer" in warning for warning in plan.warnings)
    assert not any("not a Hub id" in warning for warning in plan.warnings)
    assert 'from_pretrained("me/tiny")' in plan.card
    assert not (adapter / "README.md").exists()  # a plan writes nothing
    config = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps({**config, "backbone_name_or_path": "./backbone"}))
    assert any("not a Hub id" in warning for warning in plan_push(adapter, "me/x").warnings)
    assert is_hub_id("Qwen/Qwen3-8B")
    assert not any(map(is_hub_id, ("nano", "./backbone", "/abs/path", "a/b/c", "../other/x", "comb/methods")))


def test_a_tokenizer_goes_whole(adapter: Path) -> None:
    tokenizer, before = byte_tokenizer(), set(adapter.rglob("*"))
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": tokenizer.chat_template}
    tokenizer.save_pretrained(adapter)
    written = {str(path.relative_to(adapter)) for path in set(adapter.rglob("*")) - before if path.is_file()}
    assert "additional_chat_templates/tool_use.jinja" in written
    (adapter / "tokenizer.json").unlink()  # as tokenizers without it have
    more = {"spiece.model", "sentencepiece.bpe.model", "tekken.json"}
    for name in (*more, "tokenization_mine.py", "additional_chat_templates/notes.txt"):
        (adapter / name).write_text("{}")
    plan = plan_push(adapter, "me/tiny")
    assert {name for name, _ in plan.files} == {*FILES, *written - {"tokenizer.json"}, *more}
    assert not any("tokenizer" in warning for warning in plan.warnings)
    assert {"tokenization_mine.py", "additional_chat_templates/notes.txt"} < set(plan.left_out)  # code


def test_a_folder_that_is_no_adapter(tmp_path: Path, adapter: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        plan_push(tmp_path, "me/x")
    weights = load_file(adapter / "model.safetensors")
    save_file({**weights, "backbone.lm_head.weight": torch.zeros(2)}, adapter / "model.safetensors")
    with pytest.raises(ValueError, match=r"belong to no adapter, among them 'backbone\.lm_head\.weight'"):
        plan_push(adapter, "me/x")
    (adapter / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="weights are missing"):
        plan_push(adapter, "me/x")
    tiny("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="model_type 'llama', not a COMB adapter"):
        plan_push(tmp_path / "plain", "me/x")


TOKEN = "hf_" + "Secret" * 6
FILES = {"config.json", "generation_config.json", "model.safetensors", "README.md"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that takes TOKEN alone."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with fake_hub() as hub:
        hub.token = TOKEN
        hub.add("owner/backbone", {"README.md": b"---\nlicense: llama3.1\n---\n# Backbone\n"})
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)


def on_the_hub(hub: Hub) -> str:
    return hub.repos["me/tiny"]["README.md"].decode()


def test_all_ways_to_publish(
    adapter: Path, hub: Hub, api: HfApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = push(adapter, "me/tiny", private=True, api=api)
    assert address == f"{hub.url}/me/tiny/commit/{hub.repositories['me/tiny'].head}"
    assert set(hub.repos["me/tiny"]) == FILES
    assert hub.repositories["me/tiny"].private
    assert len(hub.repositories["me/tiny"].commits) == 2  # the repository's first, and one with everything
    monkeypatch.setattr("comb.model.adapter.HfApi", lambda token: api)
    local = CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama"))
    local.push_to_hub("me/method", tokenizer=byte_tokenizer())
    local.save_pretrained(tmp_path / "copy", tokenizer=byte_tokenizer(), push_to_hub=True, repo_id="me/argument")
    for name in ("me/method", "me/argument"):
        assert "tokenizer.json" in hub.repos[name]
        assert b"base_model: owner/backbone" in hub.repos[name]["README.md"]


def test_words_of_the_folder_go_before_those_on_the_hub(
    adapter: Path, hub: Hub, api: HfApi, caplog: pytest.LogCaptureFixture
) -> None:
    push(adapter, "me/tiny", api=api)
    first = on_the_hub(hub)
    assert "license: llama3.1" in first
    assert "llama3.1, from the card of owner/backbone" in first
    edited = first.replace("license: llama3.1", "license: mit").replace("---\n\n<!--", "---\n\nFrom the web.\n\n<!--")
    hub.repositories["me/tiny"].commit({"README.md": edited.encode()})
    for _ in range(2):  # the folder has none
        push(adapter, "me/tiny", api=api)
        assert ModelCard(on_the_hub(hub)).data.license == "mit"
        assert "From the web." in on_the_hub(hub)
    here = adapter / "README.md"
    here.write_text(here.read_text().replace("tags:", "language: en\ntags:") + "\n## Limits\nFrom here.\n")
    replaced = hub.repositories["me/tiny"].commits[0]
    push(adapter, "me/tiny", api=api)
    card = ModelCard(on_the_hub(hub))
    assert (card.data.license, card.data.language) == ("llama3.1", "en")
    assert on_the_hub(hub).endswith("## Limits\nFrom here.\n")
    (said,) = (record.message for record in caplog.records if "words of a person's" in record.message)
    assert f"https://huggingface.co/me/tiny/blob/{replaced}/README.md" in said
    caplog.clear()
    push(adapter, "me/tiny", api=api)
    assert "words" not in caplog.text
    here.unlink()  # as after training into another folder
    push(adapter, "me/tiny", api=api)
    assert on_the_hub(hub).endswith("## Limits\nFrom here.\n")


def test_a_card_written_on_the_hub_by_hand_stays(adapter: Path, hub: Hub, api: HfApi) -> None:
    hub.add("me/tiny", {"README.md": b"---\nlicense: mit\n---\n"})  # what the Hub's own form makes
    push(adapter, "me/tiny", api=api)
    assert ModelCard(on_the_hub(hub)).data.license == "mit"
    assert "A COMB adapter" in on_the_hub(hub)
    hub.repositories["me/tiny"].commit({"README.md": b"---\nlibrary_name: comb\n---\nMine.\n"})
    plan = plan_push(adapter, "me/tiny", api=api)
    assert plan.card == "---\nlibrary_name: comb\n---\nMine.\n"
    assert any("no generated part" in warning for warning in plan.warnings)


def test_what_the_version_before_left_there_is_deleted(
    adapter: Path, hub: Hub, api: HfApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ("chat_template.jinja", "results.json", "results.png", "tokenizer_config.json")
    for name in old:
        (adapter / name).write_text("{}")
    push(adapter, "me/tiny", api=api)
    mine = {"LICENSE": b"mine", "mine.png": b"mine", "data/config.json": b"mine"}
    edited = on_the_hub(hub).replace("---\n\n<!--", "---\n\n![](mine.png)\n\n<!--").encode()
    before = hub.repositories["me/tiny"].commit({**mine, "README.md": edited})
    for name in old:
        (adapter / name).unlink()
    model = CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama"))
    with torch.no_grad():
        model.cross_blocks[0].cross_attn.o_proj.weight.fill_(0.5)
    model.save_pretrained(adapter, max_shard_size="20KB")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(SystemExit, match="0"):
        main(["push", str(adapter), "me/tiny", "--dry-run"])
    shown = capsys.readouterr().out
    assert f"{', '.join(sorted([*old, 'model.safetensors']))} on the Hub, which" in shown
    assert f"https://huggingface.co/me/tiny/tree/{before}" in shown
    push(adapter, "me/tiny", api=api)
    weights = {path.name for path in adapter.glob("model*")}
    assert set(hub.repos["me/tiny"]) == {*FILES - {"model.safetensors"}, *weights, *mine}
    loaded = CombForCausalLM.from_pretrained("me/tiny", backbone=tiny("llama"), token=TOKEN)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())
    assert "is deleted there" not in " ".join(plan_push(adapter, "me/tiny", api=api).warnings)


@pytest.mark.parametrize(
    ("revision", "link", "wanted"),
    [
        (None, "LICENSE", "https://huggingface.co/owner/backbone/blob/main/LICENSE"),
        ("v1", "./LICENSE", "https://huggingface.co/owner/backbone/blob/v1/LICENSE"),
        (None, "https://owner.com/licence", "https://owner.com/licence"),
    ],
)
def test_a_licence_beside_the_backbones_card_is_linked_there(
    adapter: Path, hub: Hub, api: HfApi, revision: str | None, link: str, wanted: str
) -> None:
    card = f"---\nlicense: other\nlicense_name: own\nlicense_link: {link}\n---\n"
    hub.repositories["owner/backbone"].commit({"README.md": card.encode()})
    found, _ = inherited_licence("owner/backbone", revision, adapter, api=api)
    assert found == {"license": "other", "license_name": "own", "license_link": wanted}


def test_an_upload_that_fails_leaves_nothing_and_goes_on(adapter: Path, hub: Hub, api: HfApi) -> None:
    card = (adapter / "README.md").read_text()
    hub.failures.append(Failure("/commit/", 500, times=99))
    with pytest.raises(UploadFailedError, match=r"nothing of it is there; the same command goes on.*500"):
        push(adapter, "me/tiny", api=api)
    assert hub.repos["me/tiny"] == {}
    assert (adapter / "README.md").read_text() == card
    hub.failures.clear()
    push(adapter, "me/tiny", api=api)
    assert set(hub.repos["me/tiny"]) == FILES
    assert len(hub.repositories["me/tiny"].commits) == 2
    assert sum(request.startswith("PUT") for request in hub.requests) == 1  # the weights went up once


def test_what_the_hub_refuses_is_explained(
    adapter: Path, hub: Hub, api: HfApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UploadFailedError, match=r"asked about me/tiny.*no valid token \(401\).*hf auth login"):
        push(adapter, "me/tiny", api=HfApi(endpoint=hub.url, token="hf_wrong"))
    hub.failures.append(Failure("POST /api/repos/create", 403))
    with pytest.raises(UploadFailedError, match=r"nothing was uploaded.*may not write there \(403\)"):
        push(adapter, "me/tiny", api=api)
    hub.failures.append(Failure("/info/lfs/", 403))
    with pytest.raises(UploadFailedError, match=r"nothing of it is there.*may not write there \(403\)"):
        push(adapter, "me/tiny", api=api)
    assert hub.repos["me/tiny"] == {}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UploadFailedError, match="HF_HUB_OFFLINE is set"):
        push(adapter, "me/tiny", api=api)


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "me/", "me/ tiny", "me/tiny.git", "me/--x"])
def test_names_the_hub_does_not_take(adapter: Path, hub: Hub, api: HfApi, name: str) -> None:
    with pytest.raises(ValueError, match=r"owner/name|no name for a repository"):
        push(adapter, name, api=api)
    assert not hub.requests


def test_somebody_else_pushes_meanwhile(adapter: Path, hub: Hub, api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    push(adapter, "me/tiny", api=api)
    repo = hub.repositories["me/tiny"]
    commit = HfApi.create_commit

    def after_another(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        repo.commit({"README.md": b"theirs"})
        return commit(self, *args, **kwargs)

    (adapter / "config.json").write_text((adapter / "config.json").read_text() + "\n")
    monkeypatch.setattr(HfApi, "create_commit", after_another)
    with pytest.raises(UploadFailedError, match="somebody else has pushed to it"):
        push(adapter, "me/tiny", api=api)
    assert repo.files["README.md"] == b"theirs"


def test_private_does_not_hold_for_a_public_repository(adapter: Path, hub: Hub, api: HfApi) -> None:
    hub.add("me/tiny")
    with pytest.raises(ValueError, match="on the Hub already, and public"):
        push(adapter, "me/tiny", private=True, api=api)
    assert hub.repos["me/tiny"] == {}
    push(adapter, "me/tiny", api=api)


def test_no_token_is_uploaded(adapter: Path, hub: Hub, api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2)
    argv = ["comb", "train", "c.yaml", f"model.options.token={TOKEN}", "--hub-token", "plain-word",
            "x=https://u:pw12@h/"]  # fmt: skip
    training = {"argv": argv, "steps": 1, "config": {
        "model": {"options": {"token": "another-word"}}, "data": {"dataset": "squad"},
        "train": {"note": "0123456789abcdef" * 2}}}  # fmt: skip
    (adapter / "training.json").write_text(json.dumps(training))
    (adapter / "results.json").write_text(json.dumps({"argv": argv, "note": "another-word", "results": []}))
    (adapter / "training_args.bin").write_bytes(TOKEN.encode())
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_text|>"}))  # no such token
    plan = plan_push(adapter, "me/tiny", api=api)
    assert sum("goes up without the token" in warning for warning in plan.warnings) == 2
    push(adapter, "me/tiny", api=api)
    secrets = (TOKEN, "plain-word", "another-word", "0123456789abcdef" * 2, "u:pw12")
    for name, content in hub.repos["me/tiny"].items():
        assert not [secret for secret in secrets if secret.encode() in content], name
    uploaded = json.loads(hub.repos["me/tiny"]["training.json"])
    assert uploaded["argv"][3] == "model.options.token=[removed]"
    assert json.loads(hub.repos["me/tiny"]["tokenizer_config.json"]) == {"eos_token": "<|end_of_text|>"}
    assert TOKEN in (adapter / "training.json").read_text()  # what is here stays as it was
    assert dict(plan.files)["training.json"] == len(hub.repos["me/tiny"]["training.json"])
    for name in ("config.json", "README.md"):
        text = (adapter / name).read_text()
        leak = f'{{"a": "{TOKEN}", ' + text.lstrip()[1:] if name == "config.json" else text + TOKEN
        (adapter / name).write_text(leak)
        commits = len(hub.repositories["me/tiny"].commits)
        with pytest.raises(ValueError, match=rf"{name} holds what is or looks like a token") as error:
            push(adapter, "me/tiny", api=api)
        assert TOKEN not in str(error.value)
        assert len(hub.repositories["me/tiny"].commits) == commits
        (adapter / name).write_text(text)


def test_a_dry_run_shows_what_goes(adapter: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push(adapter, "me/tiny", api=HfApi(endpoint=hub.url, token=TOKEN))
    before, here = hub.repositories["me/tiny"].commits[:], (adapter / "README.md").read_text()
    edited = on_the_hub(hub) + "\n## From the web\n"
    hub.repositories["me/tiny"].commit({"README.md": edited.encode()})
    main_arguments = ["push", str(adapter), "me/tiny"]
    with pytest.raises(SystemExit, match="0"):
        main([*main_arguments, "--dry-run"])
    shown = capsys.readouterr().out
    assert "\n".join(edited.splitlines()[:3]) in shown
    assert "## From the web" in shown
    assert f"{(adapter / 'model.safetensors').stat().st_size:,d} bytes  model.safetensors" in shown
    assert "stays here      checkpoint-10/ (1 file)" in shown
    assert "nothing was uploaded to me/tiny" in shown
    assert hub.repositories["me/tiny"].commits[1:] == before
    assert (adapter / "README.md").read_text() == here
    plan = plan_push(adapter, "me/tiny", api=HfApi(endpoint=hub.url, token=TOKEN))
    assert plan.card in shown
    with pytest.raises(SystemExit, match="0"):
        main(main_arguments)
    assert hub.repositories["me/tiny"].head in capsys.readouterr().out.replace("\n", "")
    for name, size in plan.files:
        assert len(hub.repos["me/tiny"][name]) == size
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match="0"):
        main([*main_arguments, "--dry-run"])
    assert "what was edited there is not shown here" in " ".join(capsys.readouterr().err.split())


def test_a_wheel_has_the_template() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    (source,) = (source for source, target in included.items() if target == "comb/hub/template.md")
    assert (root / source).resolve() == TEMPLATE.resolve()
