"""Prefixes: computed once for all methods and engines on a backbone, exactly; every computed token is counted."""

from __future__ import annotations

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from comb import CombForCausalLM, PICEngine, methods
from comb.linking.cache import RoomyLayer
from comb.methods import prefix as caching
from comb.methods.base import LinkRequest
from comb.methods.decode_state import DecodeState
from comb.methods.prefix import prefixes_of
from tests.comb.test_conversation import engine_of
from tests.comb.test_conversation import model_of as text_model
from tests.comb.test_linking import error
from tests.helpers import hybrids
from tests.helpers.families import open_gates, tiny
from tests.helpers.layer_tokens import layer_tokens
from tests.helpers.tiny_engine import CITY, LAKE, QUESTION, TEMPLATE, idle, make_backbone, make_comb, make_tokenizer

EXACT, CONTROL = 2e-5, 1e-3
_generator = torch.Generator().manual_seed(1)


def ids(count: int) -> list[int]:
    return torch.randint(3, 100, (count,), generator=_generator).tolist()


PREFIX, DOCUMENTS, QUERY = ids(40), [ids(41), ids(30)], ids(6)
SYSTEM = "You answer in a few words, from the documents, and never from memory. " * 3

# the query and, of each document, what the method recomputes: 4 at the start of each, of 71 tokens 0.3 and all in one
# of four layers, 4 and 4 at both ends; focus asks with the query first, and answers with its last token
WARM = {
    "naive": 6, "legolink-0": 6, "legolink:4": 6 + 8, "attnlink:4": 6 + 6, "prefix": 6,
    "cacheblend:0.3": 6 + 22 + math.ceil((71 + 5) / 4), "naive:quantize=int8": 6,
    "focus:0.3": 2 * 6 + 22 + 1,
}  # fmt: skip
WARM_HYBRID = {"hypic:4": 6 + 16, "addition": 6, "prefix": 6}
ATTENTION = ("llama", "gemma3", "mistral", "deepseek_v3", "bloom", "qwen3")
HYBRIDS = ("qwen3_next", "bamba", "jamba", "lfm2", "falcon_h1", "mamba", "mamba2")
# learned positions and none, sinks, other windows; and the rest of the hybrids
OTHERS = ("gpt2", "opt", "gptj", "gpt_oss", "exaone4", "mpt", *sorted({*hybrids.HYBRIDS} - {*HYBRIDS}))
CASES = [
    *((family, spec) for family in ATTENTION for spec in WARM if (family, spec) != ("bloom", "focus:0.3")),
    *((family, spec) for family in HYBRIDS for spec in WARM_HYBRID),
    *((family, "prefix") for family in OTHERS),
]


@cache
def model_of(family: str) -> Any:
    if family == "mistral":  # a window that ends inside of the prefix
        return tiny(family, std=0.15, sliding_window=90)
    return hybrids.tiny_hybrid(family) if family in hybrids.HYBRIDS else tiny(family, std=0.15)


@pytest.fixture(autouse=True)
def empty() -> None:
    """Models are shared by the tests, their heads aren't."""
    for family in (*ATTENTION, *HYBRIDS, *OTHERS):
        prefixes_of(model_of(family)).clear()


def linked(
    method: Any, picaches: Any, prefix: Any = PREFIX, query: Any = QUERY, salt: str = ""
) -> tuple[DecodeState, int]:
    """The state of a prompt, its logits read once, and the tokens that this took."""
    with layer_tokens(method.backbone) as passed:
        state = method.link_batch([LinkRequest(picaches, query, prefix, salt=salt)])
        _ = state.logits
    return state, passed.tokens


def afresh(
    method: Any, picaches: Any, monkeypatch: pytest.MonkeyPatch, prefix: Any = PREFIX, query: Any = QUERY
) -> Tensor:
    """Logits with a prefix that is computed with all the rest, as if nothing were ever cached."""
    if method.name == "prefix":
        method = methods.create("full", method.model)
    with monkeypatch.context() as patched:
        for module in ("linked", "hypic"):
            patched.setattr(f"comb.methods.{module}.behind_prefix", lambda method, row, past: (past, 0, row))
        state, tokens = linked(method, picaches, prefix, query)
    assert (state.prefix_tokens, tokens >= len(prefix) + len(query)) == (0, True)
    return state.logits


@pytest.mark.parametrize(
    ("family", "wrapper"), [
        *((family, wrapper) for family in ("mamba2", "bamba") for wrapper in ("comb", "peft", "compiled")),
        ("falcon_mamba", "peft"),
    ],
)  # fmt: skip
def test_a_model_in_another_computes_its_prefix_once(family: str, wrapper: str) -> None:
    """The states of a prefix tell nobody how much they cover, and what `generate` calls is the model inside."""
    model: Any = copy.deepcopy(model_of(family))
    if wrapper == "comb":
        model = open_gates(CombForCausalLM.from_backbone(model, num_encoder_layers=2)).eval()
    elif wrapper == "peft":
        peft = pytest.importorskip("peft")
        targets = ["x_proj"] if family == "falcon_mamba" else ["in_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM")).eval()
    else:
        model = torch.compile(model, backend="eager")
    method = methods.create("comb" if wrapper == "comb" else "prefix", model)
    state, _ = linked(method, method.compile(DOCUMENTS))
    again, _ = linked(method, method.compile(DOCUMENTS))
    whole = torch.tensor([[*PREFIX, *([] if wrapper == "comb" else chain(*DOCUMENTS)), *QUERY]])
    given = {"documents": [method.compile(DOCUMENTS)], "prefix_tokens": [len(PREFIX)]} if wrapper == "comb" else {}
    with torch.no_grad():
        expected = model(whole, use_cache=False, **given).logits[:, -1]
    assert again.prefix_tokens == len(PREFIX)
    for each in (state, again):
        assert error(each.logits, expected) < EXACT


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_a_warm_question_computes_neither_head_nor_documents(
    family: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = methods.create(spec, model_of(family))
    picaches = method.compile(DOCUMENTS)
    expected = afresh(method, picaches, monkeypatch)
    first, cold = linked(method, picaches)
    again, warm = linked(method, picaches)
    assert (first.computed, again.computed) == ((cold,), (warm,))
    assert (first.prefix_tokens, again.prefix_tokens) == (0, len(PREFIX))
    assert cold >= len(PREFIX) + warm
    most = (WARM_HYBRID if family in HYBRIDS else WARM)[spec]
    if spec.startswith("cacheblend") and family == "bloom":  # run by run, no pass is broken off
        most += 76 - 76 // 4
    assert warm == most
    for state in (first, again):
        assert error(state.logits, expected) < EXACT
    if spec == "prefix":
        full = methods.create("full", method.model)
        answer = full.link(full.compile(DOCUMENTS), QUERY, prefix_ids=PREFIX).answer_logits([41, 42, 43])
        assert error(again.answer_logits([41, 42, 43]), answer) < EXACT
    # the control: another prefix is another answer
    assert error(linked(method, picaches, PREFIX[::-1])[0].logits, expected) > CONTROL


@pytest.mark.parametrize("family", ["llama", "mistral", "bloom", "qwen3_next", "jamba"])
@pytest.mark.parametrize("documents", [0, 2])
def test_questions_without_documents_or_query(family: str, documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method = methods.create("hypic:4" if family in HYBRIDS else "legolink:4", model_of(family))
    picaches, query = method.compile(DOCUMENTS[:documents]), QUERY if documents == 0 else []
    expected = afresh(method, picaches, monkeypatch, query=query)
    for reused in (0, len(PREFIX)):
        state, tokens = linked(method, picaches, query=query)
        assert (state.prefix_tokens, state.computed) == (reused, (tokens,))
        assert error(state.logits, expected) < EXACT
    assert tokens == (6 if documents == 0 else 16 if family in HYBRIDS else 9)
    alone, tokens = linked(method, [], query=[])  # a prefix and nothing else: its last token has to be computed
    assert tokens == len(PREFIX)
    if documents == 0:
        assert error(alone.logits, expected) > CONTROL


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next", "jamba"])
def test_a_new_head_is_found_as_far_as_it_begins_like_another(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = methods.create("hypic:4" if family in HYBRIDS else "naive", model_of(family))
    picaches = method.compile(DOCUMENTS)
    linked(method, picaches, [])  # what is tried out once, is
    # what comes, and how much of it is there: states can't be cut
    cuts = family not in HYBRIDS
    steps = [
        (PREFIX, 0), ([*PREFIX[:30], PREFIX[30] - 1, *ids(8)], 30 if cuts else 0),
        ([*PREFIX[:30], PREFIX[30] - 2, *ids(19)], 30 if cuts else 0), (PREFIX[:-1], 39 if cuts else 0),
        ([*PREFIX, 7], 40), ([PREFIX[0] - 1, *PREFIX[1:]], 0), ([*PREFIX, 7, 8], 41),
    ]  # fmt: skip
    for prefix, reused in steps:
        state, tokens = linked(method, picaches, prefix)
        assert (state.prefix_tokens, state.computed) == (reused, (tokens,)), prefix
        again, _ = linked(method, picaches, prefix)
        assert again.prefix_tokens == len(prefix)
        expected = afresh(method, picaches, monkeypatch, prefix)
        assert error(state.logits, expected) < EXACT
        assert error(again.logits, expected) < EXACT
    kept = prefixes_of(method.backbone)  # each piece counts once, a cut one with all that it was cut from
    pieces = {id(piece): piece for prefix in kept._found.values() for piece in prefix.pieces}.values()
    assert kept.nbytes == sum(one.untyped_storage().nbytes() for piece in pieces for one in piece.tensors().values())


@pytest.mark.parametrize("spec", ["naive", "prefix"])
def test_one_other_token_or_weight_or_tenant_is_another_head(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", std=0.15)
    method = methods.create(spec, model)
    picaches = method.compile(DOCUMENTS)
    assert linked(method, picaches)[0].prefix_tokens == 0
    for place in (0, 20, 39):
        other = [*PREFIX[:place], PREFIX[place] + 1, *PREFIX[place + 1 :]]
        state, _ = linked(method, picaches, other, salt=f"place {place}")
        assert state.prefix_tokens == 0
        assert error(state.logits, afresh(method, picaches, monkeypatch, other)) < EXACT
    tenant, _ = linked(method, picaches, salt="tenant")
    assert tenant.prefix_tokens == 0
    if spec == "prefix":  # nor are the documents behind it another tenant's
        assert tenant.uses is not None
        assert [use.state for use in tenant.uses[0]] == ["compiled", "compiled"]
    assert linked(method, picaches)[0].prefix_tokens == len(PREFIX)
    with torch.no_grad():  # a fine-tune of the same object
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.5
    picaches = method.compile(DOCUMENTS)
    state, _ = linked(method, picaches)
    assert state.prefix_tokens == 0
    assert error(state.logits, afresh(method, picaches, monkeypatch)) < EXACT
    # copies and pickles of a model take no cached prefix along
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert linked(methods.create(spec, clone), picaches)[0].prefix_tokens == 0


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_what_is_linked_never_changes_the_cached_head(family: str) -> None:
    method = methods.create("hypic:4" if family in HYBRIDS else "cacheblend:0.3", model_of(family))
    picaches, expected = method.compile(DOCUMENTS), None
    for _ in range(3):
        for documents in (picaches, []):
            state, _ = linked(method, documents)
            state.generate(max_new_tokens=4, do_sample=False, num_beams=2)
            logits = state.logits
            if documents:
                expected = logits if expected is None else expected
                assert error(logits, expected) < EXACT
            for layer in state.past_key_values.layers:  # somebody scribbles over all that was handed out
                for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                    if tensor is not None:
                        tensor.fill_(7.0)
                for states in (getattr(layer, "recurrent_states", {}), getattr(layer, "conv_states", {})):
                    for tensor in states.values():
                        if tensor is not None:
                            tensor.fill_(7.0)
            assert error(state.logits, logits) > CONTROL  # the control: it was handed out


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "PREFIX_BYTES", 3 * 40 * 4 * 2 * 2 * 8 * 4)  # three prefixes of the tiny model
    model = tiny("llama", std=0.15)
    method = methods.create("naive", model)
    picaches = method.compile(DOCUMENTS)
    every = [ids(40) for _ in range(6)]
    asked = [*every, *every[:2], every[5], every[0]]
    assert [linked(method, picaches, prefix)[0].prefix_tokens for prefix in asked] == [0] * 8 + [40] * 2
    assert 0 < prefixes_of(model).nbytes <= caching.PREFIX_BYTES
    for _ in range(2):  # longer than all of it: used, not kept
        state, tokens = linked(method, picaches, ids(125))
        assert (state.prefix_tokens, tokens) == (0, 125 + 6)
    prefix = ids(125)
    assert error(linked(method, picaches, prefix)[0].logits, afresh(method, picaches, monkeypatch, prefix)) < EXACT
    monkeypatch.setattr(caching, "_MOST", 4)
    for prefix in every:
        linked(method, picaches, prefix[1:])
    assert len(prefixes_of(model)._found) == 3  # as many as there is room for
    prefixes_of(model).clear()
    assert prefixes_of(model).nbytes == 0


def test_a_cached_head_follows_a_layer_to_its_device() -> None:
    """A model's later layers may lie on another device than its embeddings, and so than the cached prefix."""
    kept = torch.ones(1, 2, 5, 4)
    layer, new = RoomyLayer.of(kept, kept, 9), torch.empty(1, 2, 3, 4, device="meta")
    for length in (8, 11):
        assert {(tensor.device.type, tensor.shape[2]) for tensor in layer.update(new, new)} == {("meta", length)}
    assert kept.device.type == "cpu"


# ---- the engine ----


@pytest.mark.parametrize("spec", ["full", "prefix", "naive", "legolink:4", "legolink-0", "cacheblend:0.3", "comb"])
def test_reports_count_every_token(spec: str) -> None:
    model = make_comb(make_backbone())
    engine = PICEngine(model, make_tokenizer(template=TEMPLATE), method=spec)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    engine.method.why_not_continue()  # tried once, by a pass that belongs to no question
    found = []
    for new in (1, 4, 1):
        with layer_tokens(model.backbone) as passed:
            report = engine.chat(messages, [LAKE, CITY], max_new_tokens=new).report
        assert report.computed_tokens == passed.tokens - (new - 1), (spec, new)  # a pass for each token but the first
        found.append(report)
    cold, _, warm = found
    documents = sum(document.tokens for document in cold.documents)
    rest = warm.prompt_tokens - (0 if spec == "comb" else documents)
    if spec == "full":
        assert cold.computed_tokens == warm.computed_tokens == warm.prompt_tokens
        return
    prefix = len(f"<|system|>{SYSTEM}") + 1 + len("<|user|>")
    assert (cold.prefix_tokens, warm.prefix_tokens) == (0, prefix)
    selected = math.ceil((documents + rest - prefix - 1) / 2) if "blend" in spec else 0  # in one of two layers
    assert warm.computed_tokens == rest - prefix + warm.recomputed_tokens + selected
    # an encoder's documents pass through none of the backbone
    assert cold.computed_tokens >= warm.computed_tokens + prefix + (0 if spec == "comb" else documents)
    assert (cold.compiled_tokens, warm.compiled_tokens) == (
        {"prefix": 0, "comb": 0, "legolink-0": documents + 4}.get(spec, documents),
        0,
    )
    assert f"of a cached prefix), {warm.computed_tokens} computed," in str(warm)
    idle(engine.store)


def test_a_document_of_a_batch_is_compiled_once() -> None:
    engine = PICEngine(make_backbone(), make_tokenizer(), method="naive")
    with layer_tokens(engine.model) as passed:
        answers = engine.ask_batch([(QUESTION, [LAKE, CITY]), ("How small?", [CITY, LAKE, CITY])], max_new_tokens=1)
    assert sum(answer.report.computed_tokens for answer in answers) == passed.tokens
    assert [answer.report.compiled_tokens for answer in answers] == [len(LAKE) + len(CITY) + 2, 0]


def test_engines_and_conversations_share_heads() -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    question = [*messages, {"role": "user", "content": "who?"}]
    documents = ["The mill burnt down in spring.", "Rill is a small city by the sea."]
    for family, specs in (("llama", ("naive", "legolink:2", "prefix")), ("bamba", ("hypic:4", "addition"))):
        prefixes_of(text_model(family)).clear()
        first, *others = (engine_of(family, spec) for spec in specs)
        assert first.chat(question, documents, max_new_tokens=2).report.prefix_tokens == 0
        for engine in (first, *others):
            report = engine.chat(question, documents, max_new_tokens=2).report
            assert report.prefix_tokens > len(SYSTEM)
            chat = engine.conversation(documents, messages=messages)
            turns = [chat.ask(text, max_new_tokens=2).report for text in ("who?", "when?")]
            assert turns[0].prefix_tokens == report.prefix_tokens
            assert (turns[1].prefix_tokens, turns[1].continued_tokens > report.prefix_tokens) == (0, True)
            with layer_tokens(engine.method.backbone) as passed:
                last = chat.ask("where?", max_new_tokens=1).report
            assert last.computed_tokens == passed.tokens == last.prompt_tokens - last.continued_tokens
        other = engine_of(family, specs[0], salt="x")
        assert other.chat(question, documents, max_new_tokens=1).report.prefix_tokens == 0
        engine.prefixes.clear()
        assert first.chat(question, documents, max_new_tokens=1).report.prefix_tokens == 0


def test_threads_share_a_head() -> None:
    backbone = make_backbone()
    tokenizer = make_tokenizer(template=TEMPLATE)
    engines = [PICEngine(backbone, tokenizer, method=spec) for spec in ("naive", "legolink:4", "prefix", "cacheblend")]
    systems = [SYSTEM, SYSTEM + "Be brief.", SYSTEM[:100] + "Take your time. " * 5]

    def ask(number: int) -> tuple[int, ...]:
        messages = [{"role": "system", "content": systems[number % 3]}, {"role": "user", "content": QUESTION}]
        return engines[number % 4].chat(messages, [LAKE, CITY], max_new_tokens=4).token_ids

    expected = [ask(number) for number in range(12)]
    for engine in engines:
        engine.store.clear()
    engines[0].prefixes.clear()
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, list(range(12)) * 3)) == expected * 3
    assert len(set(expected)) > 4
    for engine in engines:
        idle(engine.store)
