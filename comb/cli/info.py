"""What `comb info` shows: a backbone's discovered structure, its adapter's size, what a hybrid's segments cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.table import Table
from torch import Tensor

from comb.backbones.identity import exclusive
from comb.hybrid.caches import is_hybrid
from comb.hybrid.compile import compile_segment
from comb.hybrid.support import find_hybrid_support
from comb.linking.positions import UnmovableError
from comb.model.modeling import CombForCausalLM


def describe(model: CombForCausalLM) -> Table:
    """A two-column table of everything discovery found, with parameter counts and cache bytes per token."""
    info, encoder = model.info, model.encoder.config
    trainable, total = model.num_trainable_parameters()
    table = Table(show_header=False, title=f"{info.model_type} backbone with a COMB encoder")
    counts = Counter(info.layer_kinds)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    runs = " ".join(f"{kind}x{len(list(run))}" for kind, run in groupby(info.layer_kinds))
    if len(counts) == 1:
        kinds = f"all {info.layer_kinds[0]}"
    elif len(runs) < 60:
        kinds = f"{kinds} ({runs})"
    mask = "causal" if encoder.causal else "bidirectional"
    size = 2 * model.num_cross_layers * encoder.num_key_value_heads * encoder.head_dim * model.encoder.dtype.itemsize
    cached = f"{size} bytes"
    attending = sum(kind not in ("linear", "none") for kind in info.layer_kinds)
    if attending and not info.latent_attention:
        full = 2 * attending * info.num_key_value_heads * info.head_dim * model.backbone.dtype.itemsize
        cached += f" ({100 * size / full:.0f}% of the backbone's {full})"
    rows = {
        "decoder layers": f"{info.num_layers} at {info.layers_path}",
        "layer kinds": kinds,
        "hidden, MLP": f"{info.hidden_size}, {info.intermediate_size} ({info.hidden_act})",
        "heads": f"{info.num_attention_heads} query, {info.num_key_value_heads} key/value, head_dim {info.head_dim}"
        + (" (the backbone's own attention is latent)" if info.latent_attention else ""),
        "rotary": ", ".join(f"{key} {value}" for key, value in sorted(info.rope_parameters.items())),
        "vocabulary": f"{info.vocab_size}, embeddings {'tied' if info.tied_embeddings else 'not tied'} to the head, "
        f"scaled by {info.embedding_scale:g}",
        "context": f"{info.max_position_embeddings} tokens; documents up to {model.max_document_tokens}",
        "encoder": f"{encoder.num_hidden_layers} layers, {mask}, {encoder.norm_placement}-norm, "
        f"q/k norm {encoder.qk_norm}" + (f", a front of {encoder.front_tokens}" if encoder.front_tokens else ""),
        "cross blocks": f"before layers {model.config.cross_attention_layers}, reading encoder layers "
        f"{model.config.cross_encoder_layers}",
        "parameters": f"{total:,d}, of them {trainable:,d} ({100 * trainable / total:.1f}%) in the adapter",
        "cache per document token": cached,
        **describe_hybrid(model.backbone),
        "fingerprint": model.fingerprint,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for note in info.notes:
        table.add_row("note", note)
    return table


_TOKENS = 32


def describe_hybrid(model: Any) -> dict[str, str]:
    """Rows of the table; none for a model without linear layers."""
    if not is_hybrid(model):
        return {}
    try:
        with exclusive(model):
            support = find_hybrid_support(model)
            picache = compile_segment(model, support, "", [1] * _TOKENS, seams=(0, 0))
    except UnmovableError as reason:
        return {"hybrid linking": f"refused: {reason}"}
    families = Counter(
        layer.family + (" with rotary positions" if layer.rotation else "") for layer in support.linear.values()
    )
    both = len(set(support.linear) & set(support.attention))
    layers = f"{len(support.linear)} linear, {len(support.attention)} with keys and values, {both} of them both"
    parts = list(picache.linear.values())
    states, columns = (_nbytes(getattr(part, name) for part in parts) for name in ("state", "columns"))
    transitions = _nbytes(None if part.transition is None else part.transition.tensor for part in parts)
    fixed = states + transitions + columns
    per_token = _nbytes(tensor for pair in picache.attention.values() for tensor in pair) // _TOKENS
    rows = {
        "hybrid layers": f"{layers}; " + ", ".join(f"{count} {name}" for name, count in families.most_common()),
        "seams": f"at least {max(0, support.kernel - 1)} tokens at a segment's start"
        + (", taken one by one" if support.step else ""),
        "cache per segment": f"{fixed:,d} bytes (S {states:,d}, T {transitions:,d}, columns {columns:,d}) and "
        f"{per_token:,d} per token of its interior",
    }
    if per_token:
        rows["short segments"] = f"below {-(-fixed // per_token):,d} tokens most of a segment's bytes are its states"
    return rows


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
