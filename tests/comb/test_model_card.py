"""Model cards: what they say, and what of them is a person's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import LlamaConfig

from comb import CombForCausalLM
from comb.backbones import backbones
from comb.documents.datasets import hub_id
from comb.hub.card import TAGS, inherited_licence
from comb.hub.facts import read_evaluations
from comb.hub.push import plan_push, refresh_card
from comb.hub.redaction import holds_secret, redact_json
from tests.helpers.families import tiny

ROW = {"method": "comb", "n": 400, "em": 0.96, "f1": 0.99, "rouge_l": 0.985, "intervals": {"em": [0.94, 0.98]},
       "ttft_cached_s": {"median": 0.012, "low": 0.01, "high": 0.02, "n": 5}}  # fmt: skip
REFUSED = {"method": "epic", "n": 0, "em": None, "f1": None, "rouge_l": None, "refused": "no | in here"}


def write_results(folder: Path, dataset: str, *rows: dict[str, Any], path: str | None = None) -> None:
    config = {"data": {"dataset": dataset, "path": path}}
    record = {"argv": ["/usr/bin/comb", "eval", "out/a b"], "split": "heldout", "config": config, "results": rows}
    (folder / f"results-{dataset}.json").write_text(json.dumps(record))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_card_is_valid_and_says_what_it_is(adapter: Path) -> None:
    card = ModelCard.load(adapter / "README.md")
    assert card.data.library_name == "comb"
    assert card.data.base_model == "owner/backbone"
    assert card.data.base_model_relation == "adapter"
    assert "position-independent-caching" in card.data.tags
    assert "2 layers, bidirectional" in card.text
    assert "before backbone layers [1, 3]" in card.text
    assert "256 bytes in float32" in card.text  # 2 tensors x 2 layers x 2 heads x 8 x 4 bytes
    model = CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama"))
    assert f"{model.num_trainable_parameters()[0]:,} (encoder" in card.text
    assert "Not evaluated yet" in card.text
    assert "no record of the training" in card.text


def test_a_backbone_without_a_name_on_the_hub_is_given_to_the_server_too(adapter: Path) -> None:
    served = "comb serve my-adapter --backbone FOLDER"
    assert served not in (adapter / "README.md").read_text()
    edit(adapter / "config.json", "owner/backbone", "/data/backbone")
    refresh_card(adapter)
    assert served in (adapter / "README.md").read_text()


def test_training_and_scores_stand_in_the_card(adapter: Path) -> None:
    write_results(adapter, "squad", ROW, REFUSED, path="/data/dev-v2.0.json")
    write_results(adapter, "nano", {**ROW, "n": 7})
    training = {"argv": ["/x/comb_training/train.py", "c.yaml", "data.prefix=Q|A\n\n"],
                "steps": 1200, "seconds": 61.4, "answer_seconds": 20,
                "ranks": 2, "seed": 3, "parameters": {"trainable": 10, "all": 1010},
                "tokens": {"examples": 7000, "different_documents": 900, "document_tokens": {"median": 120.5},
                           "target_tokens": {"median": 4}},
                "config": {"data": {"mixture": [{"dataset": "squad"}, {"dataset": "nano"}]},
                           "train": {"answers": "gold", "learning_rate": 0.001}}}  # fmt: skip
    (adapter / "training.json").write_text(json.dumps(training))
    card = ModelCard(plan_push(adapter, "me/x").card)
    assert card.data.datasets == ["rajpurkar/squad_v2"]
    assert card.data.model_name == "x"
    found = {(r.dataset_type, r.metric_type): (r.metric_value, r.metric_args) for r in card.data.eval_results}
    assert found["rajpurkar/squad_v2", "exact_match"] == (96.0, {"method": "comb", "questions": 400})
    assert found["nano", "rouge"] == (98.5, {"method": "comb", "questions": 7})
    assert len(found) == 6
    assert {r.dataset_split for r in card.data.eval_results} == {"heldout"}
    assert "| `comb` | 400 | 96.0 | 94.0 to 98.0 | 99.0 | 98.5 | 12.0 ms |" in card.text
    assert "| `epic` | refused: no / in here |" in card.text
    assert "`comb eval 'out/a b'`" in card.text
    assert r"| `python -m comb_training.train c.yaml 'data.prefix=Q\|A\n\n'` |" in card.text  # one cell
    assert "1,000 (the backbone)" in card.text
    assert "1,200 steps, 61 s of optimisation, 20 s for the answers before it, on 2 processes" in card.text
    assert "7,000 questions over 900 different documents" in card.text
    assert "120 per document, 4 per answer" in card.text
    assert "| settings | peak learning rate 0.001, seed 3 |" in card.text
    assert "/squad_v2), `nano` (not on the Hub)" in card.text
    (adapter / "training.json").write_text("{")
    with pytest.raises(ValueError, match=r"training\.json is damaged"):
        plan_push(adapter, "me/x")


def test_only_the_adapters_own_scores_are_its(adapter: Path) -> None:
    intervals = {"em": [0.9, 1.0], "closed": [0.94, 0.97]}
    measured = {"kl": 0.05, "closed": 0.956, "kl_questions": 64, "intervals": intervals}
    own, plain, none = ({**ROW, **measured, "method": name} for name in ("comb:quantize=int8", "full", "none"))
    write_results(adapter, "squad", plain, own, none)
    write_results(adapter, "nano", {**plain, "method": "prefix", "kl": -3e-9})
    refresh_card(adapter)
    card = ModelCard.load(adapter / "README.md")
    assert {r.metric_args["method"] for r in card.data.eval_results} == {"comb:quantize=int8"}
    found = {r.metric_type: (r.metric_value, r.metric_args["questions"]) for r in card.data.eval_results}
    assert found["kl_divergence"] == (0.05, 64)
    assert found["kl_closed"] == (95.6, 64)
    assert found["exact_match"] == (96.0, 400)
    cells = "| 400 | 96.0 | 90.0 to 100.0 | 99.0 | 98.5 | 0.0500 | 95.6 | 94.0 to 97.0 | 12.0 ms |"
    assert all(f"| `{name}` {cells}" in card.text for name in ("comb:quantize=int8", "full", "none"))
    assert "| 98.5 | 0.0000 |" in card.text  # what is rounded below zero


def test_own_rows_are_called_by_their_file_and_plots_are_shown(adapter: Path) -> None:
    data = {"dataset": "jsonl", "path": "/home/me/letters/mine.jsonl"}
    heldout = {"examples": 40, "start": {"closed": 0.9, "closed_low": 0.88, "closed_high": 0.92},
               "end": {"closed": 0.96, "closed_low": 0.95, "closed_high": 0.97}}  # fmt: skip
    (adapter / "training.json").write_text(json.dumps({"config": {"data": data}, "heldout": heldout}))
    (adapter / "results.json").write_text(json.dumps({"config": {"data": data}, "results": [ROW]}))
    refresh_card(adapter)
    card = ModelCard.load(adapter / "README.md")
    assert "![" not in card.text
    assert {(r.dataset_type, r.dataset_name) for r in card.data.eval_results} == {("mine.jsonl", "mine.jsonl")}
    assert "jsonl`" not in card.text.replace("`mine.jsonl`", "")
    assert "/home" not in str(card)
    assert "`mine.jsonl` not known here" in card.text
    assert "96.0% (95.0 to 97.0) of the KL without documents, on 40 held-out questions" in card.text
    assert "at the start 90.0% (88.0 to 92.0) |" in card.text
    for name in ("loss.png", "results.png"):
        (adapter / name).touch()
    refresh_card(adapter)
    text = (adapter / "README.md").read_text()
    assert "](loss.png)" in text
    assert "](results.png)" in text


def test_a_name_is_one_piece_of_code_whatever_is_in_it(adapter: Path) -> None:
    data = {"dataset": "a`b](x) <i>|\r\n.jsonl"}
    argv = ["comb", "train", "data=a`b"]
    (adapter / "training.json").write_text(json.dumps({"argv": argv, "config": {"data": data}}))
    (adapter / "results 1.json").write_text(json.dumps({"argv": argv, "config": {"data": data}, "results": [ROW]}))
    (adapter / "results 1.png").touch()
    edit(adapter / "config.json", "owner/backbone", "/data/back`bone")
    refresh_card(adapter)
    text = ModelCard.load(adapter / "README.md").text
    assert r"| data | `` a`b](x) <i>\|\r\n.jsonl `` (not on the Hub) |" in text
    assert r"`` a`b](x) <i>|\r\n.jsonl `` (`` comb train 'data=a`b' ``):" in text
    assert "| backbone | `` back`bone `` (" in text
    assert "](results%201.png)" in text


def test_known_names_have_licences_languages_and_a_base_model(adapter: Path) -> None:
    path = adapter / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "backbone_name_or_path": "smollm2-135m"}))
    sets = [{"dataset": "squad", "path": "train-v2.0.json"}, {"dataset": "mine.jsonl"}]
    (adapter / "training.json").write_text(json.dumps({"config": {"data": {"mixture": sets}}}))
    refresh_card(adapter)
    card = ModelCard.load(adapter / "README.md")
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en"])
    assert "| languages | of the backbone: en |" in card.text
    assert "| `squad` cc-by-sa-4.0, en; `mine.jsonl` not known here |" in card.text
    for name in backbones:  # whatever has a name of ours
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "backbone_name_or_path": name}))
        refresh_card(adapter)
        assert ModelCard.load(adapter / "README.md").data.license == "apache-2.0"


def test_the_cards_lines_work_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("comb_training")
    CombForCausalLM.from_backbone("nano", num_encoder_layers=2).save_pretrained(tmp_path / "made-here")
    text = (tmp_path / "made-here" / "README.md").read_text()
    assert "pip install comb-pic\n" in text
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) == 4
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.strip()


def test_ids_of_datasets() -> None:
    assert hub_id("jsonl", "hf://me/data?split=train") == "me/data"
    assert hub_id("hotpotqa", "hf:///data/hotpot") == hub_id("hotpotqa", "dev.json") == "hotpotqa/hotpot_qa"
    assert hub_id("squad", "/data/train-v1.1.json") == "rajpurkar/squad"
    assert hub_id("samsum", "dialogsum.jsonl") == "knkarthick/dialogsum"
    assert hub_id("nano") is None
    assert hub_id("no such set") is None


def test_what_a_person_wrote_stays(adapter: Path) -> None:
    path = adapter / "README.md"
    path.write_text(path.read_text().replace("---\n\n<!--", "---\n\nBy hand.\n\n<!--") + "\n## Limits\nMine.\n")
    model = CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama"))
    model.config.backbone_name_or_path = "owner/other"
    model.save_pretrained(adapter)
    text = path.read_text()
    assert "By hand." in text
    assert text.endswith("## Limits\nMine.\n")
    assert "base_model: owner/other" in text
    assert "huggingface.co/owner/other" in text
    assert text.count("# my-adapter") == 1
    path.write_text("all my own")
    model.save_pretrained(adapter)
    assert path.read_text() == "all my own"


def test_a_persons_header_stays_and_the_rest_is_rewritten(adapter: Path) -> None:
    path = adapter / "README.md"
    write_results(adapter, "nano", ROW)
    refresh_card(adapter)
    edit(path, "tags:\n", "language: [en, de]\ntags:\n- medical\n")
    write_results(adapter, "nano", {**ROW, "em": 0.5})
    for _ in range(3):
        refresh_card(adapter)
    card = ModelCard.load(path)
    assert card.data.language == ["en", "de"]
    assert card.data.tags == [*TAGS, "medical"]
    assert card.data.eval_results[0].metric_value == 50.0
    (adapter / "results-nano.json").unlink()
    refresh_card(adapter)
    assert ModelCard.load(path).data.eval_results is None
    edit(path, "library_name: comb", "library_name: [comb")
    with pytest.raises(ValueError, match=r"README\.md: the header between the --- lines is not valid YAML"):
        refresh_card(adapter)


def test_the_licence_is_the_backbones_or_not_known(adapter: Path, tmp_path: Path) -> None:
    path = adapter / "README.md"
    assert ModelCard.load(path).data.license is None
    assert "**not known**: the card of owner/backbone was not looked up" in path.read_text()
    assert any("states no licence" in warning for warning in plan_push(adapter, "me/x").warnings)
    backbone = tmp_path / "backbone"
    backbone.mkdir()
    assert inherited_licence(str(backbone), None, adapter)[0] == {}
    assert "there is no backbone 'runs/a--b'" in inherited_licence("runs/a--b", None, adapter)[1]
    for card, wanted in (
        ("---\nlicense: other\nlicense_name: mine\n---\n", {"license": "other", "license_name": "mine"}),
        ("\ufeff---\nlicense: mit\n---\n", {"license": "mit"}),  # as Windows editors begin a file
        ("---\nlicense: other\nlicense_link: LICENSE\n---\n", {"license": "other"}),  # in no folder of the adapter's
        ("# no header", {}),
        ("---\nlicense: [mit\n---\n", {}),
        ("---\nlicense: [mit, gpl-3.0]\n---\n", {"license": ["mit", "gpl-3.0"]}),
    ):
        (backbone / "README.md").write_text(card)
        assert inherited_licence(str(backbone), None, adapter)[0] == wanted
    assert inherited_licence("nano", None, adapter)[0] == {"license": "apache-2.0"}
    edit(path, "tags:", "license: mit\ntags:")
    refresh_card(adapter)
    refresh_card(adapter)
    assert ModelCard.load(path).data.license == "mit"
    assert "| licence | mit, as this card states |" in path.read_text()


def test_a_licence_that_was_found_once_is_not_lost(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = adapter.parent / "card.md"
    card.write_text("---\nlicense: mit\n---\n")

    def download(*args: Any, local_files_only: bool, **kwargs: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        return str(card)

    monkeypatch.setattr(HfApi, "hf_hub_download", download)
    monkeypatch.setattr("comb.hub.push._read_remote", lambda *args: (None, None, set()))
    (adapter / "README.md").write_text(plan_push(adapter, "me/x", api=HfApi()).card)
    refresh_card(adapter)
    assert ModelCard.load(adapter / "README.md").data.license == "mit"
    model = CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama"))
    model.config.backbone_name_or_path = "owner/other"  # another backbone, another licence
    model.save_pretrained(adapter)
    assert ModelCard.load(adapter / "README.md").data.license is None


def test_secrets_are_told_by_name() -> None:
    for text in (
        '{"token": "abcdefgh"}', '{"a": ["--hf_token", "abcdefgh"]}', '["model.options={api_key: abcdefgh}"]',
        '{"hub_token": "abcdefgh"}', '{"a": "{\\"token\\": \\"abcdefgh\\"}"}', '["--wandb.api-key=abcdefgh"]',
        '["PASSWORD=abcdefgh"]',
    ):  # fmt: skip
        assert b"abcdefgh" not in redact_json(text.encode()), text
        json.loads(redact_json(text.encode()))
    for text in (
        '{"eos_token": "<|endoftext|>"}', '["train.batch_document_tokens=1000000"]', '{"commit": "c0ffee00c0ffee00"}',
    ):  # fmt: skip
        assert redact_json(text.encode()) == text.encode()
        assert not holds_secret(text.encode()), text


def test_the_sets_of_a_mixture_are_named_and_other_folders_left_alone(tmp_path: Path) -> None:
    mixture = [{"dataset": "squad", "path": "dev-v2.0.json"}, {"dataset": "babi", "path": "en-10k"}]
    for data, named in (
        ({"dataset": "mixture", "mixture": mixture}, ("squad, babi", None)),
        (mixture[1], ("babi", hub_id("babi", "en-10k"))),
    ):
        record = {"config": {"data": data}, "results": [{"method": "comb", "n": 3}]}
        (tmp_path / "results.json").write_text(json.dumps(record))
        [evaluation] = read_evaluations(tmp_path)
        assert (evaluation["dataset"], evaluation["hub_id"]) == named
    LlamaConfig().save_pretrained(tmp_path)
    refresh_card(tmp_path)
    assert not (tmp_path / "README.md").exists()
