"""Joint attention: the decoder's own layers read documents, one softmax over both as in a prompt."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from comb import PICEngine, methods
from comb.mac import mac
from comb.methods.base import LinkRequest
from comb.model.modeling import CombForCausalLM
from tests.helpers.families import tiny
from tests.helpers.tiny_engine import make_backbone, make_tokenizer

FAMILIES = ("llama", "qwen3", "mixtral", "phi3")
DOCUMENTS = [(5, 6, 7, 8, 9), (10, 11), (3, 4, 12)]
QUERY = torch.tensor([[4, 5, 6, 20, 21]])


def joint(backbone: Any, layers: list[int] | None = None, **options: Any) -> CombForCausalLM:
    if not isinstance(backbone, (str, Path)):
        layers = list(range(backbone.config.num_hidden_layers)) if layers is None else layers
    options = {
        "shared_layers": True,
        "joint_attention": True,
    } | options
    return CombForCausalLM.from_backbone(backbone, cross_attention_layers=layers, **options)


def prompt(behind: list[int], attention: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The query with documents in it, each of which sees nothing but itself; and where the query's tokens are."""
    ids, owner, own = [], [], []
    for place, token in enumerate(QUERY[0].tolist()):
        for number, document in enumerate(DOCUMENTS):
            if behind[number] == place:
                ids += document
                owner += [number] * len(document)
        own.append(len(ids))
        ids.append(token)
        owner.append(-1)
    whose = torch.tensor(owner)
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    seen &= (whose[:, None] == -1) | (whose[:, None] == whose[None])
    mask = seen[None, None]
    if attention == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -1e30)
    return {"input_ids": torch.tensor([ids]), "attention_mask": mask}, own


@torch.no_grad()
@pytest.mark.parametrize("behind", [[0, 0, 0], [2, 2, 2], [1, 3, 3]])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_read_by_all_layers_are_the_prompt_itself(family: str, attention: str, behind: list[int]) -> None:
    """Nothing is trained yet: keys and values are the backbone's own, and so are their places."""
    backbone = tiny(family, attn_implementation=attention)
    model = joint(backbone)
    whole, own = prompt(behind, attention)
    wanted = backbone(**whole).logits[:, own]
    found = model(QUERY, documents=[DOCUMENTS], behind=[behind]).logits
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    plain = backbone(QUERY).logits
    front = slice(behind[0])  # nothing reads documents there
    torch.testing.assert_close(found[:, front], plain[:, front], atol=1e-6, rtol=1e-5)
    assert (found - plain).abs().max() > 1e-3  # control: without documents it says something else
    fewer = joint(backbone, [1])(QUERY, documents=[DOCUMENTS], behind=[behind]).logits
    assert (fewer - wanted).abs().max() > 1e-4  # and where one layer reads
    other_order = model(QUERY, documents=[DOCUMENTS[::-1]], behind=[behind]).logits
    assert (other_order - wanted).abs().max() > 1e-5  # and in another order, as in a prompt


@torch.no_grad()
def test_generation_goes_on_from_its_cache() -> None:
    backbone = tiny("llama")
    model = joint(backbone)
    document = DOCUMENTS[0]
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain = torch.cat(backbone.generate(QUERY, **options).logits)
    output = model.generate(QUERY, documents=[[document]], **options)
    found = torch.cat(output.logits)
    again = model(output.sequences[:, :-1], documents=[[document]]).logits[0, QUERY.shape[1] - 1 :]
    torch.testing.assert_close(found, again, atol=2e-5, rtol=1e-4)
    assert (found - plain).abs().amax(-1).min() > 1e-3  # at every step


@torch.no_grad()
def test_rows_read_their_own_documents_and_those_without_are_the_plain_ones() -> None:
    backbone = tiny("llama")
    model = joint(backbone, [1, 2])
    queries = torch.tensor([[4, 5, 6], [7, 8, 9], [10, 11, 12]])
    rows: list[list[Any]] = [[DOCUMENTS[0]], [], [DOCUMENTS[2], DOCUMENTS[1]]]
    together = model(queries, documents=rows).logits
    assert torch.equal(together[1], backbone(queries).logits[1])
    for index in (0, 2):
        alone = model(queries[index : index + 1], documents=[rows[index]]).logits
        torch.testing.assert_close(together[index], alone[0], atol=1e-5, rtol=1e-5)
    padded = torch.tensor([[0, 0, 4, 5, 6], [7, 8, 9, 10, 11]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    left = model(padded, mask, documents=[rows[0], rows[2]], position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    torch.testing.assert_close(left[0, 2:], together[0], atol=1e-5, rtol=1e-5)
    beams = model.generate(queries, documents=rows, num_beams=2, max_new_tokens=4, do_sample=False)
    one = model.generate(queries[:1], documents=rows[:1], num_beams=2, max_new_tokens=4, do_sample=False)
    assert torch.equal(beams[0], one[0])


@torch.no_grad()
def test_off_is_the_plain_model_also_beside_a_thread_that_reads() -> None:
    backbone = tiny("llama")
    plain = backbone(QUERY).logits
    model = joint(backbone)
    inside, done = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        inside.wait(10)
        with torch.no_grad():
            seen.append(model(QUERY).logits)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with model.linked([[DOCUMENTS[0]]]):
        inside.set()
        assert done.wait(10)
        heard = model.backbone(QUERY).logits
        [within] = model.encode([DOCUMENTS[1]])  # documents are compiled without those that are linked
    thread.join()
    assert torch.equal(seen[0], plain)
    assert not torch.equal(heard, plain)
    assert torch.equal(within.keys, model.encode([DOCUMENTS[1]])[0].keys)
    assert torch.equal(model(QUERY).logits, plain)
    assert backbone.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_only_heads_are_saved_and_a_copy_reads_by_itself(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    model = joint(tmp_path / "backbone", [1, 3], primer=[7, 8, 9])
    model.save_pretrained(tmp_path / "adapter")
    again = CombForCausalLM.from_pretrained(tmp_path / "adapter")
    wanted = model(QUERY, documents=[DOCUMENTS]).logits
    for other in (again, copy.deepcopy(model)):
        assert other.fingerprint == model.fingerprint
        assert not [name for name, p in other.named_parameters() if p.requires_grad and "key_value_heads" not in name]
        assert torch.equal(other(QUERY, documents=[DOCUMENTS]).logits, wanted)


def test_gradients_reach_the_heads_with_and_without_checkpointing() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = joint(tiny("llama"), [1, 2]).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(QUERY, documents=[list(DOCUMENTS)], labels=QUERY).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert gradient.abs().sum() > 0 or "norm" in name, name
        torch.testing.assert_close(gradients[1][name], gradient)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_documents_behind_a_primer_are_what_they_are_in_that_text(family: str) -> None:
    backbone = tiny(family)
    primer = [20, 21, 22]
    # another adapter on the same backbone, which needs fewer layers of the primer
    CombForCausalLM.from_backbone(backbone, cross_attention_layers=[1], shared_layers=True, primer=primer).encode(
        [(3, 4)]
    )
    options = {"cross_attention_layers": [1, 3], "shared_layers": True}
    primed = CombForCausalLM.from_backbone(backbone, primer=primer, **options)
    plain = CombForCausalLM.from_backbone(backbone, **options)
    inside = plain.encode([tuple(primer) + document for document in DOCUMENTS])
    for picache, whole, alone in zip(primed.encode(DOCUMENTS), inside, plain.encode(DOCUMENTS), strict=True):
        torch.testing.assert_close(picache.keys, whole.keys[:, len(primer) :], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(picache.values, whole.values[:, len(primer) :], atol=1e-5, rtol=1e-5)
        assert (picache.keys - alone.keys).abs().max() > 1e-3
    assert primed.fingerprint != plain.fingerprint
    assert primed.max_document_tokens == plain.max_document_tokens - len(primer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key_distance": 1}, "leave key_distance out"),
        ({"shared_layers": False}, "shared_layers"),
        ({"gate": 0.5}, "no gates"),
        ({"primer": True}, "no tokenizer beside its weights"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        joint(tiny("llama"), [1, 2], **options)


def test_mac_beside_it_is_refused() -> None:
    model = joint(tiny("llama"), [1, 2])
    with pytest.raises(ValueError, match="leave mac out"):
        mac(model)
    with pytest.raises(ValueError, match="leave mac out"):
        PICEngine(joint(make_backbone(), [1]), make_tokenizer(), mac="generation")


def test_layers_without_softmax_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="no softmax attention"):
        joint(tiny("qwen3_next"), [0])


# --- as a method ---------------------------------------------------------------------------------------------------

HEAD, GAP = [2, 30, 31, 32], [33, 34]


@pytest.mark.parametrize("primer", [None, [7, 8, 9]])
@pytest.mark.parametrize("gap", [[], GAP])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_untrained_and_in_all_layers_it_is_naive(family: str, gap: list[int], primer: list[int] | None) -> None:
    """Or `primed`: what COMB's documents are to start with, at the same places."""
    backbone = tiny(family)
    comb = methods.create("comb", joint(backbone, **({"primer": primer} if primer else {})))
    named = {"method": "primed", "front": primer} if primer else {"method": "naive"}
    other = methods.create(named.pop("method"), backbone, **named)
    answers = []
    for method in (comb, other):
        picaches = method.compile(DOCUMENTS)
        state = method.link(picaches, QUERY[0].tolist(), head_ids=HEAD, gaps=[gap, []] if gap else [])
        answers.append((state.logits, state.answer_logits([40, 41, 42]), state.generate(max_new_tokens=6)[0, -6:]))
    for found, wanted in zip(*answers, strict=True):
        if found.dtype == torch.float32:
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
        else:
            assert torch.equal(found, wanted)
    # control: the same in another order
    turned = comb.link(comb.compile(DOCUMENTS[::-1]), QUERY[0].tolist(), head_ids=HEAD).logits
    assert (turned - answers[0][0]).abs().max() > 1e-4


def test_the_head_is_computed_once_and_rows_of_a_batch_are_as_alone() -> None:
    backbone = tiny("llama")
    comb = methods.create("comb", joint(backbone, [1, 2]))
    picaches = comb.compile(DOCUMENTS)
    first, again = (comb.link(picaches, QUERY[0].tolist(), head_ids=HEAD) for _ in range(2))
    assert (first.head_tokens, again.head_tokens) == (0, len(HEAD))
    assert again.computed == (QUERY.shape[1],)
    assert torch.equal(first.logits, again.logits)
    rows = [
        LinkRequest(picaches, QUERY[0].tolist(), HEAD),
        LinkRequest(picaches[:1], [8, 9], HEAD[:2]),
        LinkRequest([], [8, 9], HEAD),
    ]
    batch = comb.link_batch(rows).logits
    for row, found in zip(rows, batch, strict=True):
        torch.testing.assert_close(comb.link_row(row).logits[0], found, atol=2e-5, rtol=1e-4)


def test_a_prompt_that_begins_with_documents_has_a_token_to_rest_on() -> None:
    """The question's first, in front of them; and of a prompt that ends with documents, the last is behind them."""
    model = joint(tiny("llama"), primer=[7, 8, 9])
    comb = methods.create("comb", model)
    picaches = comb.compile(DOCUMENTS)
    bare = comb.link(picaches, QUERY[0].tolist()).logits
    moved = comb.link(picaches, QUERY[0, 1:].tolist(), head_ids=QUERY[0, :1].tolist()).logits
    torch.testing.assert_close(bare, moved, atol=2e-5, rtol=1e-4)
    plain = methods.create("comb", joint(tiny("llama")))  # documents that have a first token of a text among them
    first = plain.link(plain.compile(DOCUMENTS), QUERY[0].tolist()).logits
    naive = methods.create("naive", tiny("llama"))
    wanted = naive.link(naive.compile(DOCUMENTS), QUERY[0].tolist()).logits
    torch.testing.assert_close(first, wanted, atol=2e-5, rtol=1e-4)
    ending = comb.link(picaches, [], head_ids=QUERY[0].tolist()).logits
    before = comb.link(picaches, QUERY[0, -1:].tolist(), head_ids=QUERY[0, :-1].tolist()).logits
    torch.testing.assert_close(ending, before, atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="the prompt is empty"):
        comb.link(picaches, [])
    lone = comb.link(picaches, [4]).logits
    assert (lone - model.backbone(torch.tensor([[4]])).logits[:, -1]).abs().max() > 1e-3  # it reads them


def test_documents_take_up_positions() -> None:
    backbone = tiny("llama")
    limit = backbone.config.max_position_embeddings
    comb = methods.create("comb", joint(backbone, [1]))
    picaches = comb.compile([[5] * (limit // 2)] * 2)
    with pytest.raises(ValueError, match=f"but the backbone has {limit} positions"):
        comb.link(picaches, [4, 5])
    comb.link(picaches[:1], [4, 5])


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        ([[1]], "for 3 documents"), ([[3, 2, 3]], "ascending"), ([], "0 lists"),
        ([[1, 1, 5]], "behind 5 tokens, and the prompt has 5"),
    ],
)  # fmt: skip
def test_places_that_do_not_fit_are_refused(behind: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        joint(tiny("llama"), [1])(QUERY, documents=[DOCUMENTS], behind=behind)


@torch.no_grad()
def test_padding_on_the_left_is_no_token() -> None:
    model = joint(tiny("llama"))
    padded = torch.tensor([[0, 0, 4, 5, 6], [0, 0, 0, 0, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]])
    together = model(padded, mask, documents=[DOCUMENTS] * 3).logits[:, -1]
    answers = model.generate(padded, attention_mask=mask, documents=[DOCUMENTS] * 3, max_new_tokens=4, do_sample=False)
    for row in range(3):
        own = padded[row, mask[row] == 1][None]
        torch.testing.assert_close(together[row], model(own, documents=[DOCUMENTS]).logits[0, -1], atol=2e-5, rtol=1e-4)
        alone = model.generate(own, documents=[DOCUMENTS], max_new_tokens=4, do_sample=False)
        assert torch.equal(answers[row, -4:], alone[0, -4:])


@pytest.mark.parametrize("family", ["longrope", "dynamic_ntk"])
def test_frequencies_that_change_with_the_length_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match="with the length of the prompt"):
        joint(tiny(family))


@pytest.mark.parametrize("family", ["cohere", "gemma3", "gpt_neox", "bloom"])
def test_layers_that_give_keys_their_places_otherwise_are_refused(family: str) -> None:
    """Pairs of neighbours, another set of frequencies in some layers, none at all."""
    if family == "gpt_neox":  # a part of each head, by halves: as it is here
        joint(tiny(family))
        return
    with pytest.raises(ValueError, match=r"otherwise|AttentionInterface|attention"):
        joint(tiny(family))
