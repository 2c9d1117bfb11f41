"""Link tokens: `naive` over documents that begin with them, on every family; without documents the backbone itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from comb import LinkTokensConfig, LinkTokensForCausalLM, PICEngine, Prompt, PromptBuilder, methods
from comb.backbones.discovery import UnsupportedBackboneError
from comb.cli.doctor import check_methods
from comb.cli.main import app
from comb.engine.engine import make_method
from comb.hub.push import plan_push
from comb.methods.decode_state import DecodeState
from comb.model.source import ModelSource
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.families import tiny
from tests.helpers.hybrids import HYBRIDS, tiny_hybrid

LINK = [40, 41, 42]
PREFIX, GAPS, QUERY, ANSWER = [1, 5], [[60], []], [7, 8, 9], [50, 51]
DOCUMENTS = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]]
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "mistral", "deepseek_v3", "yarn", "gptj", "cohere2", "bloom")


def adapter(family: str = "llama", **options: Any) -> LinkTokensForCausalLM:
    model = tiny(family, std=0.15)
    return LinkTokensForCausalLM.from_backbone(model, **{"num_link_tokens": 3, "token_ids": LINK, **options})


def link(model: Any, method: str, documents: list[list[int]], spec: str = "") -> DecodeState:
    made = methods.create(method + spec, model)
    return made.link(made.compile(documents), QUERY, prefix_ids=PREFIX, gaps=GAPS)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_document_behind_a_head_that_the_link_tokens_are_is_full_recompute(family: str) -> None:
    model = adapter(family)
    for prefix, same in ((LINK, True), (LINK[::-1], False)):
        found, full = (
            made.link(made.compile(DOCUMENTS[:1]), QUERY, prefix_ids=prefix).answer_logits(ANSWER)
            for made in (methods.create("linktokens", model), methods.create("full", model))
        )
        assert torch.allclose(found, full, rtol=1e-4, atol=2e-5) == same
    without, behind = (link(model, name, DOCUMENTS).answer_logits(ANSWER) for name in ("naive", "linktokens"))
    assert (behind - without).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_rows_in_training_are_what_is_linked(family: str) -> None:
    """Several rows with other numbers of documents, padded; with gradients for what is learned alone."""
    model = adapter(family)
    documents = [DOCUMENTS, DOCUMENTS[:1]]
    prompts = [Prompt(tuple(PREFIX), tuple(map(tuple, row)), tuple(QUERY)) for row in documents]
    longest = max(len(prompt.flat) for prompt in prompts) + len(ANSWER)
    ids, segments = torch.zeros(2, longest, dtype=torch.long), torch.full((2, longest), -1)
    for row, prompt in enumerate(prompts):
        tokens = [*prompt.flat, *ANSWER]
        numbers = [0, 0, *(n for n, document in enumerate(prompt.segments, 1) for _ in document), *[0] * 5]
        ids[row, : len(tokens)], segments[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(numbers)
    logits = model(ids, segments=segments).logits
    bare = model(ids, segments=segments, linked=False).logits
    method = methods.create("linktokens", model)
    for row, prompt in enumerate(prompts):
        last = len(prompt.flat) - 1
        linked = method.link(method.compile(prompt.segments), QUERY, prefix_ids=PREFIX).answer_logits(ANSWER)
        torch.testing.assert_close(logits[row, last : last + 2].float(), linked, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            alone = model(torch.tensor([PREFIX + QUERY + ANSWER])).logits[0, -3:-1]
        torch.testing.assert_close(bare[row, last : last + 2], alone, rtol=1e-4, atol=1e-5)
    logits.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name.partition(".")[0] for name in gradients} == {"front"}
    assert all(float(gradient.abs().sum()) > 0 for gradient in gradients.values())


@pytest.mark.parametrize("family", [name for name in HYBRIDS if name not in ("jamba", "mamba", "falcon_mamba")])
def test_hybrids_begin_documents_with_learned_states(family: str, tmp_path: Path) -> None:
    """As untrained link tokens they are the tokens that they start as; trained is what is linked, and saved."""
    model = LinkTokensForCausalLM.from_backbone(tiny_hybrid(family), token_ids=LINK)
    documents, prefix, gap = [list(range(20, 50)), list(range(60, 84))], [1, 5], [9]

    def linked(spec: str, on: Any = model, **options: Any) -> torch.Tensor:
        method = methods.create(spec, on, **options)
        prompt = method.link(method.compile(documents), QUERY, prefix_ids=prefix, gaps=[gap])
        return prompt.answer_logits(ANSWER)

    def close(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-4, atol=1e-4)

    learned = linked("linktokens")
    assert close(learned, linked("hypic:8", front=LINK))
    assert not close(learned, linked("hypic:8"))

    tokens = [*prefix, *documents[0], *gap, *documents[1], *QUERY, *ANSWER]
    numbers = [0] * 2 + [1] * 30 + [0] + [2] * 24 + [0] * 5
    ids, segments = torch.tensor([[*tokens, 0], [5, *tokens]]), torch.tensor([[*numbers, -1], [0, *numbers]])
    logits = model(ids, segments=segments).logits
    last = len(tokens) - 3
    assert close(logits[0, last : last + 2], learned)
    bare = model(ids, segments=segments, linked=False).logits[0, last : last + 2]
    assert close(bare, model(torch.tensor([prefix + gap + QUERY + ANSWER])).logits[0, -3:-1])
    logits[0, last : last + 2].square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == {name for name, _ in model.named_parameters() if name.startswith("front.")}
    assert any(float(gradient.abs().sum()) > 0 for name, gradient in gradients.items() if "states" in name)

    with torch.no_grad():  # against differences, over everything that is learned
        steps = {name: torch.randn_like(gradient) for name, gradient in gradients.items()}
        around = []
        for sign in (1, -2):
            for name, parameter in model.front.named_parameters():
                parameter += sign * 1e-3 * steps[f"front.{name}"]
            around.append(model(ids[:1], segments=segments[:1]).logits[0, last : last + 2].double().square().sum())
        expected = sum(float((steps[name] * gradient).sum()) for name, gradient in gradients.items())
        assert float(around[0] - around[1]) / 2e-3 == pytest.approx(expected, rel=0.1, abs=0.02)
        for parameter in model.front.parameters():
            parameter *= 2
    moved = linked("linktokens")
    assert not close(moved, learned)
    model.save_pretrained(tmp_path)
    assert "`; on one rank, where" in (tmp_path / "README.md").read_text()  # how it is served
    again = LinkTokensForCausalLM.from_pretrained(tmp_path, backbone=model.backbone)
    assert torch.equal(linked("linktokens", again), moved)
    assert torch.equal(linked("hypic:8", model.backbone, front=str(tmp_path)), moved)


def test_documents_in_any_order() -> None:
    model = adapter()
    [verdict] = check_methods(model, ["linktokens"])
    assert verdict.checks
    assert verdict.passed
    method = methods.create("linktokens", model)
    picaches = method.compile(DOCUMENTS)
    again = method.compile(DOCUMENTS[::-1])[::-1]
    for one, other in zip(picaches, again, strict=True):
        assert all(torch.equal(one.tensors()[name], tensor) for name, tensor in other.tensors().items())
    assert [picache.num_tokens for picache in picaches] == list(map(len, DOCUMENTS))


@pytest.mark.parametrize("rule", ["naive", "legolink:2", "attnlink:2", "focus:0.3", "cacheblend:0.3"])
def test_every_rule_selects_behind_what_was_learned(rule: str, tmp_path: Path) -> None:
    """On the adapter, and on the plain model, which is told where the adapter is."""
    model, plain = adapter(), tiny("llama", std=0.15)
    model.save_pretrained(tmp_path / "links")
    own = link(model, rule, DOCUMENTS, ",front=adapter")
    there = link(plain, rule, DOCUMENTS, f",front={tmp_path / 'links'}")
    assert torch.equal(there.logits, own.logits)
    assert there.recomputed == own.recomputed
    assert not torch.allclose(link(model, rule, DOCUMENTS).logits, own.logits, atol=1e-4)  # the control: compiled alone
    if rule != "naive":
        everything = rule.partition(":")[0] + ":" + ("1.0" if "." in rule else "10")
        whole = link(model, everything, DOCUMENTS, ",front=adapter")
        torch.testing.assert_close(whole.logits, link(model, "full", DOCUMENTS).logits, rtol=1e-4, atol=2e-5)


def test_a_front_that_is_no_adapters_or_anothers_is_refused(tmp_path: Path) -> None:
    adapter().save_pretrained(tmp_path / "links")
    tiny("llama").save_pretrained(tmp_path / "plain")
    for model, front, message in (
        (tiny("llama", seed=1, std=0.15), "links", "backbone"),
        (tiny("llama", std=0.15), "plain", "is no adapter of link tokens, its model_type is 'llama'"),
        (tiny("llama", std=0.15), "nothing", "there is no such file or folder"),
        (tiny("bamba"), "links", "."),
    ):
        with pytest.raises(ValueError, match=message):
            methods.create("naive", model, front=str(tmp_path / front))
        with pytest.raises(ValueError, match=r".+"):
            methods.create("hypic", model, front=str(tmp_path / front))
    config = tmp_path / "links" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"backbone_fingerprint": {}}))
    with pytest.raises(ValueError, match=r"links can't be loaded \(KeyError: 'embedding_shape'\): see its config.json"):
        methods.create("naive", tiny("llama", std=0.15), front=str(tmp_path / "links"))


def test_without_documents_it_is_the_backbone_to_the_bit() -> None:
    model, ids = adapter(), torch.tensor([PREFIX + QUERY])
    plain = tiny("llama", std=0.15)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, plain.generate(ids, max_new_tokens=4, do_sample=False))
    assert torch.equal(link(model, "full", DOCUMENTS).logits, link(plain, "full", DOCUMENTS).logits)


def test_an_adapter_is_a_folder_of_kilobytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny("llama", std=0.15).save_pretrained(tmp_path / "backbone")
    model = LinkTokensForCausalLM.from_backbone(str(tmp_path / "backbone"), num_link_tokens=3, token_ids=LINK)
    model.save_pretrained(tmp_path / "adapter")
    with caplog.at_level(logging.WARNING, logger="comb"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert not caplog.records
    assert isinstance(loaded, LinkTokensForCausalLM)
    assert isinstance(AutoConfig.from_pretrained(tmp_path / "adapter"), LinkTokensConfig)
    assert loaded.fingerprint == model.fingerprint
    assert torch.equal(link(loaded, "linktokens", DOCUMENTS).logits, link(model, "linktokens", DOCUMENTS).logits)
    assert (tmp_path / "adapter" / "model.safetensors").stat().st_size < 10_000
    elsewhere = ModelSource(str(tmp_path / "adapter"), {"backbone": str(tmp_path / "backbone")}).load()
    assert elsewhere.fingerprint == model.fingerprint
    plan = plan_push(tmp_path / "adapter", "me/links")
    assert {"config.json", "model.safetensors", "README.md"} <= {name for name, _ in plan.files}
    assert "3 learned\nlink tokens" in plan.card
    assert "comb serve" in plan.card
    with pytest.raises(ValueError, match="embedding differs"):
        LinkTokensForCausalLM.from_pretrained(tmp_path / "adapter", backbone=tiny("llama", seed=1))
    with pytest.raises(ValueError, match="not an adapter of link tokens"):
        LinkTokensForCausalLM.from_pretrained(tmp_path / "backbone")


def test_it_is_asked_by_its_own_method(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    backbone = tiny("llama", std=0.15)
    backbone.resize_token_embeddings(len(tokenizer))
    backbone.save_pretrained(tmp_path / "backbone")
    model = LinkTokensForCausalLM.from_backbone(str(tmp_path / "backbone"), num_link_tokens=3)
    model.save_pretrained(tmp_path / "adapter", tokenizer=tokenizer)
    engine = PICEngine.from_pretrained(tmp_path / "adapter")
    reports = [engine.ask("What?", ["a text", "b"], max_new_tokens=3).report for _ in range(2)]
    assert [report.method for report in reports] == ["linktokens"] * 2
    assert [[each.state for each in report.documents] for report in reports] == [["compiled"] * 2, ["hit"] * 2]
    assert reports[1].recomputed_tokens == 0
    off = engine.ask("What?", ["a text"], max_new_tokens=3, encoder=False)
    assert off.text == PICEngine(backbone, tokenizer, method="full").ask("What?", ["a text"], max_new_tokens=3).text
    (tmp_path / "a.txt").write_text("a text")
    options = ["--doc", str(tmp_path / "a.txt"), "--max-new-tokens", "2"]
    asked = CliRunner().invoke(app, ["ask", str(tmp_path / "adapter"), "What?", *options])
    assert asked.exit_code == 0, asked.output
    assert "linktokens" in asked.output


def test_link_tokens_that_are_the_chat_templates_head_need_no_training() -> None:
    tokenizer = byte_tokenizer()
    backbone = tiny("llama", std=0.15, vocab_size=len(tokenizer))
    prefix = PromptBuilder(tokenizer).build("any question", [[0]]).prefix
    assert prefix
    engine = PICEngine(LinkTokensForCausalLM.from_backbone(backbone, token_ids=prefix), tokenizer)
    full = PICEngine(backbone, tokenizer, method="full")
    answers = [each.ask("What?", ["a longer text"], max_new_tokens=6) for each in (engine, full)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].report.recomputed_tokens == 0


def test_picaches_of_other_link_tokens_are_refused() -> None:
    model = adapter()
    picaches, before = methods.create("linktokens", model).compile(DOCUMENTS), model.fingerprint
    with torch.no_grad():
        model.front.values[1][0, 0, 0] += 1
    assert model.fingerprint != before
    for name, other in (("linktokens", adapter(token_ids=[40, 41, 43])), ("linktokens", model), ("naive", model)):
        with pytest.raises(ValueError, match="compile the document again"):
            methods.create(name, other).link(picaches, QUERY)


def test_what_has_no_link_tokens_or_can_not_have_them() -> None:
    with pytest.raises(ValueError, match=r"has none: train some with `comb train"):
        methods.create("linktokens", tiny("llama"))
    with pytest.raises(ValueError, match="trained encoder"):
        make_method("comb", adapter(), None, {})
    with pytest.raises(UnsupportedBackboneError, match="adapter on a backbone already"):
        LinkTokensForCausalLM.from_backbone(adapter())
    with pytest.raises(ValueError, match="at least 1, got 0"):
        adapter(num_link_tokens=0)
    with pytest.raises(ValueError, match="expected 3 tokens, one for each link token, got 2"):
        adapter(token_ids=[4, 5])
    with pytest.raises(UnsupportedBackboneError, match=r"can't be put on this backbone: .*learned absolute positions"):
        adapter("gpt2")
    with pytest.raises(UnsupportedBackboneError, match="its scans can't start from a state"):
        LinkTokensForCausalLM.from_backbone(tiny_hybrid("jamba"))
    with pytest.raises(ValueError, match="takes no mask by position"):
        adapter("bloom")(torch.tensor([[5, 6]]), segments=torch.tensor([[1, 0]]))
    with pytest.raises(ValueError, match="at most 252 at once"):
        methods.create("linktokens", adapter()).compile([[5] * 253])
