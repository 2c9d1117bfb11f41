"""Training-free methods: exact where they must be, on every family, and different where they must be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from comb import methods
from comb.cache.picache import DecoderPICache
from comb.linking import passes
from comb.linking.cache import RoomyLayer, ScatterCache, Span, assemble, fork_cache
from comb.linking.masks import Masks, masked_attention
from comb.linking.passes import recompute, recompute_in_order
from comb.linking.positions import Rerotation, Rotation, UnmovableError, find_positions
from comb.linking.support import find_support
from comb.methods.linked import Linked
from tests.helpers.families import FAMILIES, LINK_FAMILIES, tiny

REFUSED = {"gpt2", "opt", "llama4", "qwen3_next", "bamba", "falcon_h1", "lfm2"}
LINKABLE = sorted({*FAMILIES, *LINK_FAMILIES} - REFUSED)
RUN_BY_RUN = ("bloom", "mpt", "falcon_alibi")
UNSEEN = ("bloom", "falcon", "falcon_alibi", "mpt")  # whose attention can't be asked for its weights
PREFIX, QUERY = [5, 6, 7], [90, 17, 33, 41, 12]
FRONT = [3, 41, 17, 8, 99, 23]
_generator = torch.Generator().manual_seed(1)
DOCUMENTS = [torch.randint(3, 120, (n,), generator=_generator).tolist() for n in (11, 7, 13)]


@cache
def model_of(family: str) -> Any:
    return tiny(family, std=0.15)


def link(
    model: Any,
    spec: str,
    documents: Any = DOCUMENTS,
    *,
    query: Any = QUERY,
    prefix: Any = (),
    gaps: Any = (),
    **options: Any,
) -> Any:
    method = methods.create(spec, model, **options)
    return method.link(method.compile(documents), query, prefix_ids=prefix, gaps=gaps)


def error(left: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((left - right).abs().max() / right.abs().max())


# ---- exactness, on every family ----


# frequencies that follow the length differ from run to run, so there the order is no reference
@pytest.mark.parametrize("family", sorted({*LINKABLE} - {"dynamic_ntk", "longrope"}))
def test_the_one_pass_equals_run_by_run(family: str) -> None:
    """Scattered rows with NaN wherever something is to be computed, so that nothing else can be read."""
    model = model_of(family)
    support = find_support(model)
    assert (support.masks is None) == (family in RUN_BY_RUN)
    if support.masks is None:
        return
    picaches = methods.create("naive", model).compile(DOCUMENTS)
    spans, tokens, length = spans_of(DOCUMENTS, PREFIX, QUERY)
    rows = torch.tensor([0, 1, 2, 5, 6, 14, 15, 20, 27, 34, 35, 36, 37, 38])

    def passed(masks: Masks | None, unread: float) -> list[Tensor]:
        cache = assemble(support.positions, picaches, spans, end=length, length=length)
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor[:, :, rows] = unread
                tensor[:, :, length:] = unread
        with torch.no_grad():
            if masks is None:
                recompute_in_order(model, cache, tokens, rows)
            else:
                recompute(model, cache, tokens, rows, masks)
        return held(cache, length)

    for left, right in zip(passed(support.masks, torch.nan), passed(None, torch.nan), strict=True):
        assert torch.isfinite(left).all()
        assert error(left, right) < 1e-4
    if family == "llama":  # the control for all tests here: the mask that published implementations use
        right, wrong = passed(support.masks, 0.0), passed(Corner(support.masks.windows, False), 0.0)
        assert max(error(*pair) for pair in zip(right, wrong, strict=True)) > 1e-2


class Corner(Masks):
    """Aligned with the corner of rows and keys, wherever the rows stand."""

    def build(self, rows: Any, model: Any) -> Tensor:
        count = len(rows.positions)
        return torch.ones(count, rows.visible).tril(rows.visible - count).bool()[None, None]


@pytest.mark.parametrize("family", LINKABLE)
def test_moved_keys_are_those_computed_at_the_other_place(family: str) -> None:
    """Compiled at 0 and turned to 17 == computed alone at positions 17, 18, ... (ALiBi takes no positions)."""
    model = model_of(family)
    if family in RUN_BY_RUN:
        assert set(find_support(model).positions.layers) == {(None, None)}
        return
    (picache,) = methods.create("naive", model).compile(DOCUMENTS[:1])
    count = picache.num_tokens
    moved = assemble(find_support(model).positions, [picache], [Span(17, count)], end=17 + count, length=17 + count)
    there = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor(DOCUMENTS[:1]), position_ids=torch.arange(17, 17 + count)[None],
              past_key_values=there, use_cache=True)  # fmt: skip
    for layer, (got, expected) in enumerate(zip(moved.layers, there.layers, strict=True)):
        for name in ("keys", "values"):
            assert error(getattr(got, name)[:, :, 17 : 17 + count], getattr(expected, name)) < 1e-4, (layer, name)


@pytest.mark.parametrize(
    ("family", "spec", "query", "limits"),
    [
        ("gemma2", "legolink:5", QUERY, {"_MAX_ROWS": 3}),
        ("gemma2", "legolink:5", QUERY, {"_MAX_MASK_ELEMENTS": 40}),
        ("llama", "focus:0.4", list(range(20, 60)), {"_MAX_ROWS": 7}),  # a long question asks in portions, too
        # where each has the last row with it, which asks once
        ("dynamic_ntk", "focus:0.2,seam=0", list(range(20, 80)), {"_MAX_ROWS": 7}),
        ("longrope", "focus:0.2,seam=0", list(range(20, 80)), {"_MAX_ROWS": 7}),
    ],
)
def test_portions_change_nothing(
    family: str, spec: str, query: list[int], limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = link(model_of(family), spec, query=query, prefix=PREFIX)
    for name, value in limits.items():
        monkeypatch.setattr(f"comb.linking.passes.{name}", value)
    portions = link(model_of(family), spec, query=query, prefix=PREFIX)
    assert portions.recomputed == whole.recomputed
    assert error(portions.logits, whole.logits) < 1e-5


@pytest.mark.parametrize("family", ["dynamic_ntk", "longrope"])
def test_embeddings_that_depend_on_the_length(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and long prompts in turn: the frequencies of one must not stick to the other."""
    model = model_of(family)
    for documents in (DOCUMENTS, DOCUMENTS[:1], DOCUMENTS):
        reference = link(model, "full", documents, prefix=PREFIX).logits
        assert error(link(model, "legolink:99", documents, prefix=PREFIX).logits, reference) < 1e-4
        with monkeypatch.context() as patched:
            patched.setattr("comb.linking.passes._MAX_ROWS", 4)  # in portions, none of which is as long as the prompt
            assert error(link(model, "cacheblend:1.0", documents, prefix=PREFIX).logits, reference) < 1e-4
    with pytest.raises(ValueError, match="at most 31"):
        methods.create("naive", model).compile([list(range(3, 40))])


# ---- what each method recomputes ----


@pytest.mark.parametrize(
    ("spec", "rows"),
    [("legolink:3", [4, 5, 6, 11, 12, 13]), ("legolink:0", []), ("attnlink:4", [2, 3, 4, 5, 11, 12]),
     ("attnlink:20", [*range(9), *range(11, 16)])],
)  # fmt: skip
def test_starts_or_both_sides_of_a_boundary_are_recomputed(spec: str, rows: list[int]) -> None:
    spans = [Span(0, 4, first=True), Span(4, 5), Span(11, 5)]  # a gap of two fresh tokens before the last
    method = methods.create(spec, model_of("llama"))
    assert isinstance(method, Linked)
    assert method.rule.choose(spans, **method.parameters) == rows


def test_cacheblend_chooses_by_deviation_from_the_right_keys_and_values() -> None:
    """Against full prefill's own keys and values of layer 1, computed apart."""
    model, method = model_of("qwen3"), methods.create("cacheblend:0.25", model_of("qwen3"))
    assert isinstance(method, Linked)
    picaches = method.compile(DOCUMENTS)
    spans, tokens, length = spans_of(DOCUMENTS, PREFIX, QUERY)
    right = DynamicCache()
    with torch.no_grad():
        model(input_ids=tokens[None], past_key_values=right, use_cache=True)
    cached = assemble(find_support(model).positions, picaches, spans, end=length, length=length)
    deviation = sum(
        (getattr(right.layers[1], n) - getattr(cached.layers[1], n)[:, :, :length]).double().square().sum(dim=(0, 1, 3))
        for n in ("keys", "values")
    )
    documents = torch.tensor([p for span in spans for p in range(span.start, span.end)])
    expected = sorted(documents[deviation[documents].topk(8).indices].tolist())
    chosen = recorded(method)
    state = method.link(picaches, QUERY, prefix_ids=PREFIX)
    assert chosen == [expected]
    assert state.recomputed == (8,)
    # layer 0 and the keys of layer 1 are exact for every token, chosen or not
    for layer in (0, 1):
        keys = state.past_key_values.layers[layer].keys
        assert error(keys, right.layers[layer].keys[:, :, : keys.shape[2]]) < 1e-4
    assert error(state.past_key_values.layers[3].keys, right.layers[3].keys[:, :, : length - 1]) > 1e-3


def test_naive_is_a_forward_pass_under_a_block_diagonal_mask() -> None:
    model = tiny("llama", std=0.15)
    got = link(model, "naive").logits
    spans, tokens, length = spans_of(DOCUMENTS, [], QUERY)
    allowed = torch.ones(length, length).tril().bool()
    for span in spans:
        allowed[span.start : span.end, : span.start] = False
    with torch.no_grad():
        expected = model(input_ids=tokens[None], attention_mask=allowed[None, None]).logits[:, -1]
    assert error(got, expected) < 1e-4


# ---- caches, generation, precision ----


def test_generation_from_a_linked_cache_equals_generation_from_scratch() -> None:
    for family in ("llama", "gemma3", "mistral", "deepseek_v3", "bloom"):
        model = model_of(family)
        settings = {"max_new_tokens": 150, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        state = link(model, "legolink:99", prefix=PREFIX)
        expected = link(model, "full", prefix=PREFIX).generate(**settings)
        assert torch.equal(state.generate(**settings), expected), family
        assert torch.equal(state.generate(**settings), expected), f"{family}: the state changed"
        beams = {**settings, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
        assert torch.equal(state.generate(**beams), link(model, "full", prefix=PREFIX).generate(**beams)), family


def test_only_one_fork_writes_into_the_room() -> None:
    keys = torch.arange(8.0).reshape(1, 1, 8, 1)
    state = DynamicCache()
    state.layers = [RoomyLayer(keys.clone(), keys.clone(), 4)]
    new = [torch.full((1, 1, 2, 1), value) for value in (-1.0, -2.0)]
    forks = [fork_cache(state) for _ in new]
    for fork, tensor in zip(forks, new, strict=True):
        fork.update(tensor, tensor, 0)
    assert [fork.layers[0].keys.flatten().tolist() for fork in forks] == [[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, -2, -2]]
    assert state.layers[0].keys.flatten().tolist() == [0, 1, 2, 3]
    for _ in range(9):  # beyond the room
        forks[0].update(new[1], new[1], 0)
    assert forks[0].layers[0].keys.flatten().tolist() == [0, 1, 2, 3, -1, -1] + [-2] * 18
    forks[1].crop(-1)
    forks[1].update(new[0], new[0], 0)
    assert forks[1].layers[0].values.flatten().tolist() == [0, 1, 2, 3, -2, -1, -1]


def test_keys_are_turned_in_float32_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 50, 16, generator=generator, dtype=torch.float64)
    angles = torch.rand(50, 8, generator=generator, dtype=torch.float64) * 100
    rerotation = Rerotation(((angles.cos().float(), angles.sin().float()),))
    rotation = Rotation(0, 0, interleaved=False)
    stored = keys.bfloat16()
    exact = Rerotation(((angles.cos(), angles.sin()),)).apply(stored.double(), rotation)
    got = rerotation.apply(stored.clone(), rotation)
    assert torch.equal(got, exact.bfloat16()) or float((got.double() - exact).abs().max()) < 2**-7
    assert float((got.double() - exact).abs().mean()) <= 1.01 * float((exact.bfloat16().double() - exact).abs().mean())
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()  # the control: all of it in bfloat16
    first, second = stored[..., :8], stored[..., 8:]
    rounded = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    assert float((rounded.double() - exact).abs().mean()) > 1.5 * float((got.double() - exact).abs().mean())


def test_eager_attention_and_another_implementation() -> None:
    from transformers.modeling_utils import AttentionInterface

    reference = link(model_of("gemma2"), "legolink:3", prefix=PREFIX).logits
    eager = tiny("gemma2", std=0.15)
    eager.set_attn_implementation("eager")
    softcap = link(eager, "full", prefix=PREFIX).logits  # eager applies the soft cap that sdpa leaves out
    assert error(link(eager, "legolink:99", prefix=PREFIX).logits, softcap) < 1e-4
    AttentionInterface.register("takes_no_mask", lambda *args, **kwargs: pytest.fail("a pass went through it"))
    other = tiny("gemma2", std=0.15)
    other.config._attn_implementation = "takes_no_mask"
    with masked_attention(other):
        assert other.config._attn_implementation in ("sdpa", "eager")  # the latter from transformers 5.24 on
        assert error(link(other, "legolink:3", prefix=PREFIX).logits, reference) < 1e-5
    assert other.config._attn_implementation == "takes_no_mask"


def test_a_prompt_that_ends_with_a_document() -> None:
    model = model_of("llama")
    reference = link(model, "full", query=[]).logits
    for spec, recomputed in {"legolink:99": 20, "attnlink:98": 31, "cacheblend:1.0": 31, "focus:1.0": 20}.items():
        state = link(model, spec, query=[])
        assert state.recomputed == (recomputed,), spec
        assert error(state.logits, reference) < 1e-4
    assert link(model, "naive", query=[]).recomputed == (1,)
    assert link(model, "focus:0.1", query=[]).recomputed[0] in (4, 5)  # the last token is computed in any case
    # the first document is right already, unless its frequencies are another prompt's
    ntk = model_of("dynamic_ntk")
    assert link(ntk, "legolink:99", [[5, 6, 7], [8, 9]], query=[]).recomputed == (2,)
    # of a document of one token there is nothing to choose from, also where the prefix isn't cached
    short, reference = (link(ntk, spec, [[8]], prefix=PREFIX, query=[]).logits for spec in ("cacheblend:0.3", "full"))
    assert error(short, reference) < 1e-4


# ---- bad input ----


def test_caches_of_others_are_refused() -> None:
    model, other = model_of("llama"), tiny("llama", seed=1, std=0.15)
    method = methods.create("naive", model)
    with pytest.raises(ValueError, match="another model, dtype or method"):
        method.link(methods.create("naive", other).compile(DOCUMENTS), QUERY)
    with pytest.raises(ValueError, match="another model, dtype or method"):
        method.link(methods.create("legolink-0", model).compile(DOCUMENTS), QUERY)
    with pytest.raises(ValueError, match="another model, dtype or method"):
        method.link(methods.create("naive", tiny("llama", std=0.15).bfloat16()).compile(DOCUMENTS), QUERY)
    with pytest.raises(ValueError, match="TokenPICache"):
        method.link(methods.create("full", model).compile(DOCUMENTS), QUERY)
    bare = method.compile(DOCUMENTS[:1])[0]
    with pytest.raises(ValueError, match="no token ids"):
        method.link([DecoderPICache(bare.fingerprint, bare.keys, bare.values)], QUERY)


def test_lengths_are_checked_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    method = methods.create("legolink:2", model_of("llama"))
    with pytest.raises(ValueError, match="256 positions"):  # each fits, all together don't
        method.link(method.compile([list(range(3, 103))] * 3), QUERY)
    monkeypatch.setattr("comb.linking.passes.run_decoder", lambda *a, **k: pytest.fail("computed"))
    with pytest.raises(ValueError, match="at most 255"):
        method.compile([DOCUMENTS[0], list(range(3, 120)) * 3])
    with pytest.raises(ValueError, match="empty segment"):
        method.compile([DOCUMENTS[0], []])


def test_broken_weights_never_reach_a_cache() -> None:
    model = tiny("llama", std=0.15)
    method = methods.create("naive", model)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        method.compile(DOCUMENTS)


def test_rows_of_a_pass_may_differ_by_rounding() -> None:
    """Kernels take rows in blocks: the same token may come out a little different in another row (seen in bfloat16)."""
    model = tiny("llama", std=0.15)  # of its own: hooks stay on it
    with torch.no_grad():
        expected = find_positions(model)
        passes: list[int] = []
        for layer in model.model.layers:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                linear.register_forward_hook(
                    lambda _, __, out: out * (1 + 0.01 * torch.arange(len(out))[:, None, None])
                )
        model.model.embed_tokens.register_forward_hook(lambda _, __, out: passes.append(len(out)))
        assert find_positions(model).layers == expected.layers
        assert passes == [40] + [4] * 10
        model.model.embed_tokens.register_forward_hook(lambda _, __, out: out + 0.1 * len(passes))
        with pytest.raises(UnmovableError, match="no rotary embedding"):  # what differs between passes is no rounding
            find_positions(model)


def test_what_is_computed_run_by_run_follows_a_layer_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's later layers may lie on another device than what is kept of documents."""

    def run(model: Any, token_ids: Tensor, cache: Any, **_: Any) -> Tensor:
        new = torch.empty(1, 2, token_ids.shape[1], 4, device="meta")
        cache.update(new, new, 0)
        return torch.zeros(*token_ids.shape, 4)

    monkeypatch.setattr(passes, "run_decoder", run)
    for rows in ([0, 1, 4], [2, 3, 6]):
        cache = ScatterCache(8, [(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4))])
        recompute_in_order(model_of("llama"), cache, torch.arange(8), torch.tensor(rows))
        assert cache.layers[0].keys.device.type == "meta"


def recorded(method: Any) -> list[list[int]]:
    """What the method's rule chooses from now on."""
    chosen: list[list[int]] = []
    inner = method.rule.choose
    note = lambda *a, **k: chosen.append(inner(*a, **k)) or chosen[-1]  # noqa: E731
    method.rule = replace(method.rule, choose=note)
    return chosen


def spans_of(documents: Any, prefix: Any, query: Any) -> tuple[list[Span], Tensor, int]:
    tokens, spans = list(prefix), []
    for document in documents:
        spans.append(Span(len(tokens), len(document), first=not tokens))
        tokens += document
    tokens += query
    return spans, torch.tensor(tokens), len(tokens)


def held(cache: Any, length: int) -> list[Tensor]:
    assert isinstance(cache, (ScatterCache, DynamicCache))
    return [t[:, :, :length] for layer in cache.layers for t in (layer.keys, layer.values)]
