"""Hybrids through the methods, the store, the engine and the command line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from comb import CombForCausalLM, methods
from comb.bench.drift import drift_of, exact_states
from comb.cache.picache import deserialize, serialize
from comb.cli.info import describe, describe_hybrid
from comb.hybrid.picache import HybridPICache
from comb.methods.base import LinkRequest
from tests.comb.test_hybrid_link import EXACT, PRIMER, QUERY, A, B, C, error, ids, logits, model_of
from tests.helpers.families import open_gates, tiny
from tests.helpers.hybrids import BASE, GDN, HYBRIDS, MAMBA2, tiny_hybrid
from tests.helpers.hybrids import text_model as text_model
from tests.helpers.ring_model import tiny_ring
from tests.helpers.stores import same

# ---- the methods ----


@pytest.mark.parametrize("name", list(HYBRIDS))
def test_full_in_a_batch(name: str) -> None:
    """Rows of different lengths."""
    full = methods.create("full", model_of(name))
    rows = [LinkRequest(full.compile([A]), QUERY), LinkRequest(full.compile([A, B]), QUERY), LinkRequest([], QUERY)]
    batch = full.link_batch(rows)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    generated = batch.generate(**settings)
    for index, row in enumerate(rows):
        alone = full.link_batch([row])
        assert error(batch.logits[index], alone.logits[0]) < EXACT
        assert torch.equal(generated[index, -4:], alone.generate(**settings)[0, -4:])
    assert error(batch.logits[0], batch.logits[1]) > 20 * EXACT


@pytest.mark.parametrize("name", ["jamba", "mamba2", "qwen3_5"])
def test_settings_of_generate_change_nothing_else_in_a_hybrid(name: str) -> None:
    """Guidance, which asks the model without a prompt beside our cache; and chunks, whose scans would begin anew."""
    model = model_of(name)
    linked = methods.create("full", model).link([], [*A, *B])
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    plain = linked.generate(**settings)
    assert torch.equal(linked.generate(**settings, prefill_chunk_size=5), plain)
    guided = linked.generate(**settings, guidance_scale=3.0)
    expected = model.generate(torch.tensor([[*A, *B]]), **settings, guidance_scale=3.0)
    assert torch.equal(guided, expected)


def drifts_of(method: Any, documents: list[list[int]], query: list[int]) -> list[dict[str, Any]]:
    return drift_of(method.backbone, method.link(method.compile(documents), query))


def test_drift_is_relative_to_full_recompute() -> None:
    """Against states of four times the length the error is 3/4: not 3, as against one's own."""
    model = model_of("qwen3_5")
    linked = methods.create("hypic:100", model)  # everything recomputed: no drift of its own
    state = linked.link(linked.compile([A]), QUERY)

    def longer(model: Any, token_ids: tuple[int, ...]) -> dict[int, torch.Tensor]:
        return {layer: 4 * found for layer, found in exact_states(model, token_ids).items()}

    drifts = drift_of(model, state, longer)
    assert drifts
    for drift in drifts:
        assert drift["error"] == pytest.approx(0.75, abs=1e-4)
        assert drift["degrees"] < 0.1


@pytest.mark.parametrize("name", list(HYBRIDS))
def test_drift_grows_from_an_exact_first_layer(name: str) -> None:
    model = model_of(name)
    if name == "lfm2":  # whose convolutions have none
        with pytest.raises(ValueError, match="keeps a state"):
            drifts_of(methods.create("hypic", model), [A, B], QUERY)
        return
    specs = ("hypic", "addition", "addition:rotate=true", "hypic:compose=false", "hypic:100")
    drifts = {spec: drifts_of(methods.create(spec, model), [A, B, C], QUERY) for spec in specs}
    assert drifts["hypic"][0]["error"] < EXACT
    assert drifts["hypic"][0]["degrees"] < 1e-3
    assert drifts["hypic"][-1]["error"] > 1e-3
    for spec in ("addition", "hypic:compose=false"):
        assert all(ours["error"] < naive["error"] for ours, naive in zip(drifts["hypic"], drifts[spec], strict=True))
    assert all(drift["error"] < EXACT for drift in drifts["hypic:100"])
    for spec in ("hypic", "prefix"):  # caches that cover the whole prompt but its last token, or less
        assert drifts_of(methods.create(spec, model), [A], [5])[-1]["error"] < EXACT
    with pytest.raises(ValueError, match="no state to compare"):
        drifts_of(methods.create("full", model), [A], [5])


def test_modes_leave_out_what_their_names_say() -> None:
    """Each step of the ablation changes what it should, from PICaches that differ in seams alone."""
    model = model_of("qwen3_next")
    found = {mode: logits(model, f"hypic:mode={mode}", [A, B, C])
             for mode in ("addition", "transition", "rotation", "seam")}  # fmt: skip
    reference = logits(model, "full", [A, B, C])
    assert torch.equal(found["addition"], logits(model, "addition", [A, B, C]))
    assert len({tuple(value.flatten().tolist()) for value in found.values()}) == 4
    assert error(found["seam"], reference) < error(found["addition"], reference)
    fingerprints = {methods.create(f"hypic:mode={mode}", model).fingerprint for mode in found}
    assert len(fingerprints) == 2
    # eq. 6 alone: what is left of each mode when states are only added up
    added = {mode: logits(model, f"hypic:mode={mode},compose=false", [A, B, C]) for mode in found}
    assert torch.equal(added["addition"], added["transition"])
    assert torch.equal(added["addition"], found["addition"])
    assert torch.equal(added["rotation"], logits(model, "addition:rotate=true", [A, B, C]))
    assert all(error(added[mode], found[mode]) > 1e-3 for mode in ("rotation", "seam"))
    # without rotary positions there is nothing to turn
    still = model_of("nemotron_h")
    assert torch.equal(*(logits(still, f"hypic:mode={mode}", [A, B]) for mode in ("transition", "rotation")))


def test_seams_are_as_wide_as_asked_for_and_as_the_convolution() -> None:
    model = model_of("qwen3_next")
    widths = {"hypic": (8, 8), "hypic:4": (4, 4), "hypic:0": (3, 0), "hypic:2": (3, 2), "addition": (0, 0),
              "hypic:mode=rotation": (0, 0)}  # fmt: skip
    for spec, expected in widths.items():
        method: Any = methods.create(spec, model)
        assert method.seams == expected
        (picache,) = method.compile([A])
        assert (picache.start, len(A) - picache.end) == expected
    state = methods.create("hypic:2", model)
    assert state.link(state.compile([A, B]), QUERY).recomputed_tokens == 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "kimi_linear", "jamba"])
def test_sixteen_bit_models(name: str, dtype: torch.dtype) -> None:
    """States stay in float32; what is left is the model's own rounding."""
    model = tiny_hybrid(name).to(dtype)
    assert error(logits(model, "hypic", [A]), logits(model, "full", [A])) < 3e-2
    reference = logits(model, "full", [A, B])
    covered = error(logits(model, "hypic:100", [A, B]), reference)
    assert covered < 3e-2
    assert error(logits(model, "addition", [A, B]), reference) > 1.5 * max(covered, 1e-3)  # the control
    (picache,) = methods.create("hypic", model).compile([A])
    assert isinstance(picache, HybridPICache)
    assert {part.state.dtype for part in picache.linear.values() if part.state is not None} == {torch.float32}
    assert {keys.dtype for keys, _ in picache.attention.values()} == {dtype}


def test_compact_storage() -> None:
    model = model_of("qwen3_next")
    large, small = methods.create("hypic", model), methods.create("hypic:storage=float16", model)
    assert small.compile([A])[0].nbytes < 0.75 * large.compile([A])[0].nbytes
    reference = large.link(large.compile([A, B]), QUERY).logits
    found = small.link(small.compile([A, B]), QUERY).logits
    assert 0 < error(found, reference) < 1e-2
    with pytest.raises(ValueError, match="another dtype"):
        small.link(large.compile([A]), QUERY)


# ---- what is refused ----


def test_a_cache_of_a_models_own_is_gone_on_from_by_nothing_but_its_own_generate() -> None:
    """MiniMax, whose batches transformers masks by the length of a layer of states: rows go one by one."""
    model = tiny_hybrid("minimax")
    for name in ("hypic", "addition", "naive", "prefix"):
        with pytest.raises(ValueError, match=r"used with this model.*'full'(, or 'comb' .* can take one)?$"):
            methods.create(name, model)
    full = methods.create("full", model)
    assert not full.batches
    assert full.why_not_continue()
    documents = full.compile([A, B])
    prompt = torch.tensor([[*A, *B, *QUERY]])
    generated = full.link(documents, QUERY).generate(max_new_tokens=4, min_new_tokens=4, do_sample=False)
    for _ in range(4):
        prompt = torch.cat([prompt, model(input_ids=prompt, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(generated, prompt)
    for method in (full, methods.create("comb", CombForCausalLM.from_backbone(model, num_encoder_layers=2))):
        with pytest.raises(NotImplementedError, match="link one row"):
            method.link_batch([LinkRequest([], A), LinkRequest([], B)])


def test_a_front_needs_a_seam_and_has_picaches_of_its_own() -> None:
    model = model_of("bamba")
    for spec in ("hypic:mode=rotation", "addition"):
        with pytest.raises(ValueError, match="front needs a seam"):
            methods.create(spec, model, front=PRIMER)
    primed, plain = methods.create("hypic", model, front=PRIMER), methods.create("hypic", model)
    with pytest.raises(ValueError, match="another model, or with other seams"):
        primed.link(plain.compile([A]), QUERY)
    longest = 4096 - 1 - len(PRIMER)
    assert (primed.max_segment_tokens, plain.max_segment_tokens) == (longest, 4096 - 1)
    covered = methods.create("hypic:100", model, front=PRIMER)
    assert error(covered.link(covered.compile([A, B]), QUERY).logits, logits(model, "full", [A, B])) < EXACT


def test_models_that_it_is_not_for() -> None:
    for spec in ("hypic", "hypic:front=prose"):  # the model is looked at before its tokenizer, which it may not have
        with pytest.raises(ValueError, match=r"no linear-attention layers: use method='attnlink'"):
            methods.create(spec, tiny("llama"))
    with pytest.raises(ValueError, match="use method='hypic' or 'full'"):
        methods.create("legolink", model_of("qwen3_next"))
    sliding = tf.Qwen3NextConfig(**BASE, **GDN, head_dim=16, num_experts=4, num_experts_per_tok=2,
                                 moe_intermediate_size=16, shared_expert_intermediate_size=16, sliding_window=8,
                                 layer_types=["linear_attention", "sliding_attention"] * 2)  # fmt: skip
    with pytest.raises(ValueError, match=r"sliding windows drop early tokens.*use method='full'"):
        methods.create("hypic", tf.AutoModelForCausalLM.from_config(sliding).eval())
    scaled = tf.BambaConfig(**BASE, **MAMBA2, attn_layer_indices=[2],
                            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})  # fmt: skip
    with pytest.raises(ValueError, match="length of the prompt"):
        methods.create("hypic", tf.AutoModelForCausalLM.from_config(scaled).eval())
    mlps = HYBRIDS["nemotron_h"]()
    mlps.layers_block_type = ["full_attention", "mlp"] * 2
    # the latter until transformers 5.22, where MLPs have layers of states in a cache
    with pytest.raises(ValueError, match=r"between its layers with keys and values|keep a state, not keys and values"):
        methods.create("legolink", tf.AutoModelForCausalLM.from_config(mlps).eval())


def test_a_layer_that_is_not_affine_is_refused() -> None:
    """The probe's own control: a state that is squared on the way."""
    model = tiny_ring()
    layer = model.model.layers[1].self_attn
    plain = layer.forward

    def squared(hidden_states: Any, position_embeddings: Any, **given: Any) -> Any:
        output = plain(hidden_states, position_embeddings, **given)
        cache = given.get("cache", given.get("past_key_values"))  # the second until transformers 5.24
        if cache is not None:
            cache.layers[1].recurrent_states[0].tanh_()
        return output

    layer.forward = squared
    with pytest.raises(ValueError, match=r"doesn't follow from the state before it|doesn't continue a cache"):
        methods.create("hypic", model)


def test_picaches_of_others() -> None:
    model = model_of("bamba")
    method: Any = methods.create("hypic", model)
    with pytest.raises(ValueError, match="got a TokenPICache"):
        method.link(methods.create("full", model).compile([A]), QUERY)
    for other in (methods.create("hypic:4", model), methods.create("hypic", tiny_hybrid("bamba", seed=1))):
        with pytest.raises(ValueError, match="another model, or with other seams"):
            method.link(other.compile([A]), QUERY)
    with pytest.raises(ValueError, match="the prompt is empty"):
        method.link([], [])
    with pytest.raises(ValueError, match="empty segment"):
        method.compile([[]])
    with pytest.raises(ValueError, match="outside of the model's"):
        method.compile([[5000]])
    with pytest.raises(ValueError, match="4096 positions"):
        method.link(method.compile([ids(2050, 1)]) * 2, QUERY)


def test_damaged_weights_give_no_picache() -> None:
    model = tiny_hybrid("bamba")
    method = methods.create("hypic", model)
    with torch.no_grad():
        model.model.layers[0].mamba.in_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        method.compile([A])


# ---- storage ----


@pytest.mark.parametrize("name", list(HYBRIDS))
def test_files_hold_everything(name: str) -> None:
    method = methods.create("hypic", model_of(name), front=PRIMER)
    (picache,) = method.compile([A])
    again = deserialize(serialize(picache, "k"), "k")
    assert same([again], [picache])
    assert torch.equal(method.link([again], QUERY).logits, method.link([picache], QUERY).logits)
    assert picache.standalone().nbytes == picache.nbytes


# ---- together with COMB's encoder; what `comb info` shows ----


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name not in ("mamba", "falcon_mamba")])  # no heads
def test_the_encoder_attaches_to_every_hybrid(name: str) -> None:
    backbone = tiny_hybrid(name)
    plain = logits(backbone, "hypic", [A, B])
    model = open_gates(CombForCausalLM.from_backbone(backbone, num_encoder_layers=2))
    # torch multiplies by frozen weights in another shape (Jamba), hence not bitwise
    assert error(logits(model, "hypic", [A, B]), plain) < EXACT
    with_documents, others = (logits(model, "comb", documents) for documents in ([A, B], [A, C]))
    swapped = logits(model, "comb", [B, A])
    assert error(swapped, with_documents) < 1e-5
    assert error(others, with_documents) > 1e-4
    # the encoder's documents don't leak into the next prompt
    assert error(logits(model, "hypic", [A, B]), plain) < EXACT


@pytest.mark.parametrize("name", list(HYBRIDS))
def test_info_counts_a_segments_bytes(name: str) -> None:
    """Against a real PICache of another length. The control: a table for a model without linear layers has none."""
    rows = describe_hybrid(model_of(name))
    fixed, per_token = (int(rows["cache per segment"].split(text)[index].strip().split()[place].replace(",", ""))
                        for text, index, place in ((" bytes", 0, -1), (" and ", 1, 0)))  # fmt: skip
    method = methods.create("hypic:4", model_of(name))
    picache = method.compile([A])[0]
    own = picache.tensors()["interior"].nbytes + picache.tensors()["token_ids"].nbytes
    assert picache.nbytes - own == fixed + per_token * (len(A) - 8)
    assert describe_hybrid(tiny("llama")) == {}


def test_info_table() -> None:
    model = CombForCausalLM.from_backbone(tiny_hybrid("falcon_h1"), num_encoder_layers=2)
    table = describe(model)
    assert "hybrid layers" in list(table.columns[0].cells)
    assert any("3 of them both; 3 scalar" in str(cell) for cell in table.columns[1].cells)
    assert "refused" in describe_hybrid(tiny_ring("diagonal"))["hybrid linking"]
