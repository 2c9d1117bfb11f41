"""Weights that are written where torch doesn't count: what was computed before answers no question behind it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from comb import LinkTokensForCausalLM, PICacheStore, PICEngine
from comb.backbones.identity import forget_identity, identity_of, weights_fingerprint
from comb.backbones.names import Names
from comb.locks import lock_of
from tests.helpers.families import tiny
from tests.helpers.tiny_engine import (
    BOOK,
    CITY,
    LAKE,
    NEW,
    QUESTION,
    TEMPLATE,
    make_backbone,
    make_comb,
    make_tokenizer,
    states,
)  # fmt: skip

DOCUMENTS = [LAKE, CITY]


def other_weights(model: Any) -> Any:
    """The same model, trained a little further."""
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    for tensor in other.parameters():
        tensor.data.add_(torch.randn_like(tensor) * 0.3)
    return other


def write(model: Any, source: Any) -> None:
    for old, new in zip(model.parameters(), source.parameters(), strict=True):
        torch._foreach_copy_([old.data], [new.data])


@pytest.fixture
def engine() -> PICEngine:
    """Links naively, on a model that no other test writes into."""
    return PICEngine(make_backbone(), make_tokenizer(), method="naive")


def asked(engine: PICEngine) -> str:
    """What becomes of a document."""
    (state,) = states(engine.ask(QUESTION, [LAKE], max_new_tokens=1))
    return state


def name_of(model: Any) -> str:
    """What documents are called after."""
    return str(getattr(model, "fingerprint", None) or weights_fingerprint(model))


MODELS: dict[str, Callable[[], Any]] = {
    "comb": make_comb,
    "linktokens": lambda: LinkTokensForCausalLM.from_backbone(make_backbone(), token_ids=[40, 41, 42]),
    "prefix": make_backbone,
    "full": make_backbone,
    "legolink:2": make_backbone,
    "primed": make_backbone,
    "naive:quantize=int8": make_backbone,
    "hypic:4": lambda: tiny("qwen3_next", vocab_size=260),
}
PARTS = [(name, part) for name in MODELS for part in ("all", "embedding")]
PARTS += [(name, "adapter") for name in MODELS if name.startswith(("comb", "linktokens"))]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_whatever_was_computed_before_is_computed_again(name: str, part: str) -> None:
    """Documents and what they are compiled behind, the prefix, an encoder, what a conversation goes on from."""
    model = MODELS[name]()
    method = None if name.startswith(("comb", "linktokens")) else name
    source = other_weights(model)
    for each, tensor in source.named_parameters():
        if part != "all" and not ("embed" in each if part == "embedding" else not each.startswith("backbone.")):
            tensor.data.copy_(model.get_parameter(each))
    options: dict[str, Any] = {"method": method}
    if name == "primed":
        options["front"] = list(range(60, 90))
    engine = PICEngine(model, make_tokenizer(template=TEMPLATE), **options)
    chat = engine.conversation(DOCUMENTS, messages=[{"role": "system", "content": "Answer."}])
    chat.ask(QUESTION, max_new_tokens=NEW)
    engine.ask(QUESTION, DOCUMENTS, max_new_tokens=NEW)
    write(model, source)
    fresh = PICEngine(copy.deepcopy(model), make_tokenizer(template=TEMPLATE), **options)
    assert fresh.ask(QUESTION, DOCUMENTS, max_new_tokens=NEW).token_ids == (
        engine.ask(QUESTION, DOCUMENTS, max_new_tokens=NEW).token_ids
    )
    turn = chat.ask("And?", max_new_tokens=NEW)
    assert "have changed" in turn.report.relinked
    assert not turn.report.continued_tokens


def each_tensor(model: Any) -> Iterator[None]:
    """However small."""
    for tensor in model.parameters():
        tensor.data.mul_(1.5)
        yield


def each_expert(model: Any) -> Iterator[None]:
    """Matrices that lie in one tensor; larger than what is read of it."""
    for tensor in (tensor for tensor in model.parameters() if tensor.ndim == 3):
        for index in range(len(tensor)):
            tensor.data[index] += 0.01
            yield


def shares(model: Any) -> Iterator[None]:
    """Blocks of rows and columns, as heads are, and few elements here and there, as small steps are in 16 bits."""
    queries, out = model.model.layers[0].self_attn.q_proj.weight, model.model.layers[1].self_attn.o_proj.weight
    few = torch.rand(queries.shape, generator=torch.Generator().manual_seed(1)) < 0.02
    heads = [slice(64 * head, 64 * (head + 1)) for head in (0, 5, 8)]
    changes = [*((queries, (head,)) for head in heads), *((out, (slice(None), head)) for head in heads)]
    for tensor, where in [*changes, (queries, (few,))]:
        tensor.data[where] = tensor.data[where] * 2
        yield


def rows_of_the_table(model: Any) -> Iterator[None]:
    """Counted by torch, and read by an encoder; the backbone goes by another few of its rows."""
    for row in make_tokenizer()("lake").input_ids:
        with torch.no_grad():
            model.get_input_embeddings().weight[row] += 1.0
        yield


def rows_of_positions(model: Any) -> Iterator[None]:
    for place in range(0, 20, 3):
        model.transformer.wpe.weight.data[place] += 0.5
        yield


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_backbone, each_tensor),
        (lambda: tiny("qwen3_moe", vocab_size=260, num_hidden_layers=1, moe_intermediate_size=128, num_experts=16),
         each_expert),
        (lambda: make_backbone(hidden_size=576, head_dim=64, num_attention_heads=9, num_key_value_heads=3).bfloat16(),
         shares),
        (lambda: make_comb(make_backbone(vocab_size=1000)), rows_of_the_table),
        (lambda: tiny("gpt2", vocab_size=260, n_positions=600), rows_of_positions),
    ],
)  # fmt: skip
def test_a_part_of_the_weights_is_enough(make: Callable[[], Any], changes: Callable[[Any], Iterator[None]]) -> None:
    model = make()
    seen, names = [identity_of(model)], {name_of(model)}
    for _ in changes(model):
        seen.append(identity_of(model))
        names.add(name_of(model))
    assert len(names) == len(set(map(id, seen))) == len(seen) > 3


CROSS_BLOCKS: dict[str, Callable[[Any], Any]] = {
    "weight": lambda block: block.attention_gate.data.fill_(0.25),
    "hook": lambda block: block.register_forward_hook(scaled),
}


@pytest.mark.parametrize("name", CROSS_BLOCKS)
def test_a_conversation_does_not_go_on_from_what_other_cross_blocks_computed(name: str) -> None:
    model = make_comb()
    chat = PICEngine(model, make_tokenizer(template=TEMPLATE)).conversation(DOCUMENTS)
    chat.ask(QUESTION, max_new_tokens=1)
    CROSS_BLOCKS[name](model.cross_blocks[0])
    turn = chat.ask("And?", max_new_tokens=1)
    assert "weights have changed" in turn.report.relinked
    assert states(turn) == ["hit", "hit"]  # what the encoder made of them is the same


def test_what_no_sample_shows_can_be_said() -> None:
    model = make_backbone(vocab_size=5000)
    engine = PICEngine(model, make_tokenizer(template=TEMPLATE), method="naive")
    chat = engine.conversation(DOCUMENTS)
    chat.ask(QUESTION, max_new_tokens=1)
    engine.model_changed()  # nothing has: documents are good, what else was found out isn't relied upon
    turn = chat.ask("And?", max_new_tokens=1)
    assert (states(turn), bool(turn.report.relinked)) == (["hit", "hit"], True)
    table = model.get_input_embeddings().weight
    table.data[ord("z")] += 1.0
    engine.model_changed()
    assert states(engine.ask(QUESTION, DOCUMENTS, max_new_tokens=1)) == ["compiled", "compiled"]


@pytest.mark.parametrize("when", ["while it waits", "before it compiles", "while it compiles"])
def test_weights_that_change_during_a_call_end_it(
    engine: PICEngine, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, errors = engine.model, []
    engine.ask(QUESTION, [LAKE], max_new_tokens=1)
    documents = [LAKE] if when == "while it waits" else [LAKE, CITY]

    def question() -> None:
        try:
            engine.ask(QUESTION, documents, max_new_tokens=1)
        except ValueError as error:
            errors.append(str(error))

    if when == "while it waits":
        lock, began = lock_of(model), threading.Event()
        acquire = engine.store.acquire
        engine.store.acquire = lambda *args, **more: (began.set(), acquire(*args, **more))[1]  # type: ignore[method-assign]
        with lock:  # somebody else's answer
            asking = threading.Thread(target=question)
            asking.start()
            began.wait(5)
            while not engine.store.stats().in_use:
                pass
            write(model, other_weights(model))
        asking.join()
    else:
        compile = engine.method.compile

        def changing(segments: Any) -> Any:
            if when == "before it compiles":
                write(model, other_weights(model))
            compiled = compile(segments)
            if when == "while it compiles":
                write(model, other_weights(model))
            return compiled

        monkeypatch.setattr(engine.method, "compile", changing)
        question()
        monkeypatch.undo()
    assert ["have changed" in error and "ask again" in error for error in errors] == [True]
    answer = engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
    assert states(answer) == ["compiled", "compiled"]
    fresh = PICEngine(copy.deepcopy(model), make_tokenizer(), method="naive")
    assert answer.token_ids == fresh.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW).token_ids


# ---- what a sample of the weights doesn't hold ----


@pytest.mark.parametrize("name", ["naive", "comb", "prefix", "primed", "naive:quantize=int8"])
def test_the_rows_that_a_prompt_reads_are_all_looked_at(name: str) -> None:
    """One row alone, written through ``.data``, of a table that is too large to be looked at whole."""
    model = make_comb(make_backbone(vocab_size=20_000)) if name == "comb" else make_backbone(vocab_size=20_000)
    options: dict[str, Any] = {"front": list(range(15_000, 15_030))} if name == "primed" else {}
    engine = PICEngine(model, make_tokenizer(template=TEMPLATE), method=name, **options)
    chat = engine.conversation([LAKE], messages=[{"role": "system", "content": "Answer in Xhosa."}])
    table = model.get_input_embeddings().weight
    tokens = {*make_tokenizer()(LAKE).input_ids, *options.get("front", [])}
    for token in sorted(tokens)[::4]:
        engine.ask(QUESTION, [LAKE], max_new_tokens=1)
        table.data[token] += 0.5
        answer = engine.ask(QUESTION, [LAKE], max_new_tokens=NEW)
        assert states(answer) == ["compiled"], token
    fresh = PICEngine(copy.deepcopy(model), make_tokenizer(template=TEMPLATE), method=name, **options)
    assert answer.token_ids == fresh.ask(QUESTION, [LAKE], max_new_tokens=NEW).token_ids
    # rows that only the prefix or the conversation has read
    chat.ask(QUESTION, max_new_tokens=1)
    table.data[ord("X")] += 0.5
    assert "have changed" in chat.ask("And?", max_new_tokens=1).report.relinked
    engine.ask(QUESTION, [LAKE], max_new_tokens=1)
    table.data[19_999] += 0.5  # that nobody reads
    assert asked(engine) == "hit"


def scaled(module: Any, args: Any, output: Any) -> Any:
    return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5


def both(module: Any, args: Any, output: Any) -> Any:
    """Of keys and values, or pairs of them."""
    return type(output)(both(module, args, each) if isinstance(each, tuple) else each * 1.5 for each in output)


def patched(module: Any) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: scaled(module, args, own(*args, **kwargs))


SETTINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "frequencies": ("llama", lambda model: model.model.rotary_emb.inv_freq.data.mul_(1.5)),
    "frequencies, counted": ("llama", lambda model: model.model.rotary_emb.inv_freq.mul_(1.5)),
    "other frequencies": ("llama", lambda model: model.model.rotary_emb.register_buffer(
        "inv_freq", model.model.rotary_emb.inv_freq * 1.5, persistent=False
    )),
    "the same bytes read otherwise": ("llama", lambda model: setattr(
        model.model.layers[0].self_attn.q_proj.weight, "data", model.model.layers[0].self_attn.q_proj.weight.data.t()
    )),
    "magnitude": ("llama", lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.2)),
    "scale": ("llama", lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.9)),
    "epsilon": ("llama", lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5)),
    "window": ("mistral", lambda model: setattr(model.config, "sliding_window", 6)),
    "activation": ("llama", lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.ReLU())),
    "hook": ("llama", lambda model: model.model.layers[0].mlp.register_forward_hook(scaled)),
    "hook in front": ("llama", lambda model: model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: (args[0] * 1.5,)
    )),
    "forward": ("llama", lambda model: patched(model.model.layers[0].self_attn.v_proj)),
    "encoder's hook": ("comb", lambda model: model.encoder.layers[0].mlp.register_forward_hook(scaled)),
    "head's hook": ("comb", lambda model: model.encoder.key_value_heads[1].register_forward_hook(both)),
    "embedding's hook": ("comb", lambda model: model.get_input_embeddings().register_forward_hook(scaled)),
    "front's hook": ("linktokens", lambda model: model.front.register_forward_hook(both)),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_what_else_decides_what_is_computed_is_noticed(name: str) -> None:
    """Of a backbone, and of an adapter's own modules."""
    kind, change = SETTINGS[name]
    model = MODELS[kind]() if kind in MODELS else tiny(kind, vocab_size=260)
    before, known, called = copy.deepcopy(model), identity_of(model), name_of(model)
    changed = change(model)
    assert identity_of(model) is not known
    assert name_of(model) != called == name_of(before)
    if "hook" in name:
        changed.remove()
        assert name_of(model) == called


def test_nothing_lies_on_disk_under_the_name_of_the_model_before(tmp_path: Path) -> None:
    model, tokenizer = make_backbone(), make_tokenizer(template=TEMPLATE)
    before = copy.deepcopy(model)
    engine = PICEngine(model, tokenizer, method="naive", store=PICacheStore(disk_path=tmp_path))
    first = engine.ask(QUESTION, DOCUMENTS, max_new_tokens=NEW)
    write(model, other_weights(model))
    answer = engine.ask(QUESTION, [*DOCUMENTS, BOOK], max_new_tokens=NEW)
    assert states(answer) == ["compiled"] * 3
    assert states(engine.ask(QUESTION, DOCUMENTS, max_new_tokens=1)) == ["hit", "hit"]
    engine.store.flush()
    again = PICEngine(before, tokenizer, method="naive", store=PICacheStore(disk_path=tmp_path))
    found = again.ask(QUESTION, [*DOCUMENTS, BOOK], max_new_tokens=NEW)
    assert states(found) == ["hit", "hit", "compiled"]
    assert again.ask(QUESTION, DOCUMENTS, max_new_tokens=NEW).token_ids == first.token_ids


def test_what_passes_write_changes_nothing(engine: PICEngine) -> None:
    rotary = engine.model.model.rotary_emb
    own = rotary.forward

    def counting(x: Tensor, position_ids: Tensor) -> Any:
        """As embeddings of older files do, that keep the longest pass in mind."""
        rotary.longest = max(getattr(rotary, "longest", 0), int(position_ids.max()))
        rotary.register_buffer("table", torch.arange(rotary.longest), persistent=False)
        return own(x, position_ids)

    rotary.forward = counting
    for documents in ([LAKE], [LAKE, CITY], [LAKE, CITY, BOOK]):
        assert states(engine.ask(QUESTION, documents, max_new_tokens=1))[-1] == "compiled"
        assert states(engine.ask(QUESTION, documents, max_new_tokens=1)) == ["hit"] * len(documents)


def offloading(model: Any) -> Any:
    return pytest.importorskip("accelerate").dispatch_model(model, {"": "cpu"}, force_hooks=True)


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False))


def compiled(model: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward)
    return model


@pytest.mark.parametrize("change", [offloading, adapted, compiled, SETTINGS["activation"][1]])
def test_installed_parts_have_the_same_names_in_every_process(change: Callable[[Any], Any]) -> None:
    """Nothing of them goes by itself, whose name is another behind `forget_identity`."""
    model = tiny("gemma2")
    model = change(model) or model
    called = name_of(model)
    forget_identity(model)
    assert name_of(model) == called
    model.model.register_forward_hook(scaled)
    called = name_of(model)
    forget_identity(model)
    assert name_of(model) != called


def test_a_callable_object_of_a_package_goes_by_what_it_holds_if_that_is_plain() -> None:
    """As quanto's layers have one; more may hold what isn't known, as torch.jit's do, in C."""
    warm, cold = (Names().of(TemperatureLogitsWarper(each)) for each in (2.0, 0.5))
    assert warm == Names().of(TemperatureLogitsWarper(2.0)) != cold
    for make in (lambda: SuppressTokensLogitsProcessor([1]), lambda: torch.jit.trace(torch.sin, torch.ones(1))):
        assert Names().of(make()) != Names().of(make())


# ---- values that are replaced by others of their kind ----


def function(text: str) -> Any:
    """The one that the text defines, as if this file was edited."""
    found: dict[str, Any] = {"__name__": __name__}
    exec(text, found)
    return [*found.values()][-1]


class Steerer:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output * self.scale

    def hook(self, module: Any, args: Any, output: Any) -> Any:
        return output * self.scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output * self.scale


def defined(function: Any) -> Any:
    """It is now what its name leads to."""
    globals()[getattr(function, "__name__", "_")] = function
    return function


def hooked(hook: Any) -> Any:
    return lambda model: model.model.layers[0].mlp.register_forward_hook(defined(hook))


def placed(forward: Any) -> Any:
    def place(model: Any) -> None:
        mlp = model.model.layers[0].mlp
        mlp.forward = types.MethodType(defined(forward), mlp)

    return place


def attribute(value: Any) -> Any:
    return lambda model: setattr(model.model.layers[0].mlp, "factor", value)


def option(value: Any) -> Any:
    return lambda model: setattr(model.config, "factor", value)


def forward_of(factor: float) -> Any:
    return function(f"def forward(self, x): return self.down_proj(self.up_proj(x)) * {factor}")


STEER = "def steer(module, args, output): return output * 3.0"
Kind = enum.Enum("Kind", "FIRST SECOND")
Options = dataclasses.make_dataclass("Options", ["scale"])
OTHERS: dict[str, tuple[Any, Any]] = {
    "a function of the same text": (hooked(function(STEER)), hooked(function(STEER))),
    "a forward": (placed(forward_of(3.0)), placed(forward_of(-2.0))),
    "a callable object": (hooked(Steerer(3.0)), hooked(Steerer(-2.0))),
    "a method": (hooked(Steerer(3.0).hook), hooked(Steerer(-2.0).hook)),
    "an object that keeps it to itself": (hooked(Slotted(3.0)), hooked(Slotted(-2.0))),
    **{
        f"{where.__name__}: {type(one).__name__}": (where(one), where(other))
        for where in (attribute, option)
        for one, other in (
            (np.float32(0.3), np.float32(3.0)), (np.arange(3), np.arange(3) * 2), ({1, 2}, {1, 3}),
            (Kind.FIRST, Kind.SECOND), (Options(1), Options(2)), (Steerer(1.0), Steerer(2.0)),
            (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_of_the_same_name_or_type_is_noticed(name: str) -> None:
    model = make_backbone()
    seen, names = [identity_of(model)], {name_of(model)}
    for change in OTHERS[name]:
        handle = change(model)
        seen.append(identity_of(model))
        names.add(name_of(model))
        assert identity_of(model) is seen[-1]
        if handle is not None:
            handle.remove()
    assert len(names) == len(set(map(id, seen))) == 3


def test_a_forward_that_its_class_is_given_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is the second of one name."""
    model = make_backbone()
    names = {name_of(model)}
    for factor in (3.0, -2.0):
        monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", defined(forward_of(factor)))
        names.add(name_of(model))
    assert len(names) == 3


def test_what_changes_inside_of_a_hook_can_be_said(engine: PICEngine) -> None:
    steerer = Steerer(3.0)
    engine.model.model.layers[0].mlp.register_forward_hook(steerer)
    for scale in (3.0, -2.0, 3.0):
        steerer.scale = scale
        engine.model_changed()
        assert [asked(engine), asked(engine)] == ["compiled", "hit"]


LOOP: list[Any] = [1]
LOOP.append(LOOP)


@pytest.mark.parametrize("where", [attribute, option])
@pytest.mark.parametrize(
    "value",
    [threading.Lock(), LOOP, torch.tensor([1.0, 2.0]), np.arange(5000), iter([1])],
    ids=["lock", "list in itself", "tensor", "array", "iterator"],
)
def test_what_can_not_be_compared_or_copied_raises_nothing(where: Any, value: Any) -> None:
    model = make_backbone()
    known = identity_of(model)
    where(value)(model)
    assert name_of(model)
    assert known is not identity_of(model) is identity_of(model)


def test_what_a_user_changes_while_an_answer_is_decoded_is_not_the_pass_s_own(engine: PICEngine) -> None:
    model = engine.model
    for scale in (0.9, 0.3):
        stream = iter(engine.stream(QUESTION, [LAKE], max_new_tokens=NEW))
        next(stream)
        model.model.layers[0].self_attn.scaling = scale
        model.model.rotary_emb.attention_scaling = scale
        for _ in stream:
            pass
        assert asked(engine) == "compiled"


def test_what_passes_write_is_forgotten_when_the_model_is_said_to_have_changed(engine: PICEngine) -> None:
    model = engine.model
    mlp = model.model.layers[0].mlp
    own = mlp.forward

    def keeping(x: Tensor) -> Any:
        mlp.seen = x.shape[1]
        return own(x) * getattr(mlp, "factor", 1)

    mlp.forward, mlp.seen = keeping, 0
    assert [asked(engine), asked(engine)] == ["compiled", "hit"]
    mlp.seen = -1
    engine.model_changed()
    assert asked(engine) == "compiled"


def test_what_nothing_is_computed_from_changes_nothing(engine: PICEngine) -> None:
    model = engine.model
    model.model.layers[0].register_forward_hook(scaled).remove()
    assert asked(engine) == "compiled"
    model.gradient_checkpointing_enable()
    model.config.output_hidden_states, model.config.pad_token_id = True, 7
    assert [asked(engine), asked(engine)] == ["hit", "hit"]  # transformers has put its hooks around the layers


def test_what_is_known_of_a_model_goes_with_it_and_with_its_weights() -> None:
    model = make_backbone(vocab_size=20_000)
    engine = PICEngine(model, make_tokenizer(), method="naive")
    alive: list[Any] = []
    for _ in range(4):
        engine.ask(QUESTION, [LAKE], max_new_tokens=1)
        alive.append(weakref.ref(identity_of(model)))
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    engine.ask(QUESTION, [LAKE], max_new_tokens=1)
    gc.collect()
    assert [each() for each in alive] == [None] * 4
    gone = weakref.ref(model.model.embed_tokens)
    del engine, model
    gc.collect()
    assert gone() is None
