"""An estimate of what the largest forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comb.backbones.discovery import text_config
from comb.model.modeling import CombForCausalLM
from comb_training.config import TrainConfig
from comb_training.data.batches import TrainingExample
from comb_training.trainer.sampler import BatchSampler, row_length

FLOAT32, BFLOAT16 = 4, 2

FACTOR = 1.4
"""How far the estimate is from the measured peak at most, either way (tests/training/test_plan_memory.py)."""


@dataclass(frozen=True)
class PassSize:
    """Tokens of the largest forward pass of one rank.

    Args:
        documents: of different documents.
        queries: rows times the longest one.
        targets: tokens that count in the loss.
        linked: rows times the tokens of the documents of one row: each row reads its own copy.
    """

    documents: int
    queries: int
    targets: int
    linked: int

    @classmethod
    def of_budget(cls, config: TrainConfig) -> PassSize | None:
        """What the budgets allow, each document read by one row; None without both budgets."""
        if config.batch_document_tokens is None or config.batch_query_tokens is None:
            return None
        return cls(
            documents=config.batch_document_tokens,
            queries=config.batch_query_tokens,
            # an answer and its end token per row
            targets=min(config.batch_query_tokens, config.batch_size * (config.answer_max_new_tokens + 1)),
            linked=config.batch_document_tokens,
        )

    @classmethod
    def of_data(cls, sampler: BatchSampler, examples: Sequence[TrainingExample]) -> PassSize:
        """The largest of each kind over the first epoch's batches."""
        batches = [[examples[index] for index in indices] for indices in sampler.batches(0)]
        return cls(
            documents=max(sum(map(len, {s for example in batch for s in example.segments})) for batch in batches),
            queries=max(len(batch) * max(map(row_length, batch)) for batch in batches),
            targets=max(sum(len(example.target) for example in batch) for batch in batches),
            linked=max(len(batch) * max(sum(map(len, example.segments)) for example in batch) for batch in batches),
        )


@dataclass(frozen=True)
class Shapes:
    """The widths that activations depend on, in channels.

    Args:
        queries, keys: heads of that kind times their size, in the encoder.
        first: the first backbone layer with a cross block: nothing is kept of those before it.
        adapter_bytes, backbone_bytes: of one number, in the dtype they are kept in.
    """

    hidden: int
    queries: int
    keys: int
    intermediate: int
    qk_norm: bool
    encoder_layers: int
    cross_blocks: int
    backbone_layers: int
    first: int
    backbone_intermediate: int
    vocabulary: int
    adapter_bytes: int
    backbone_bytes: int

    @classmethod
    def of(cls, model: CombForCausalLM) -> Shapes:
        """Those of a model on any device."""
        config: Any = model.config.encoder_config
        layers: list[int] = model.config.cross_attention_layers or []
        return cls(
            hidden=config.hidden_size,
            queries=config.num_attention_heads * config.head_dim,
            keys=config.num_key_value_heads * config.head_dim,
            intermediate=config.intermediate_size,
            qk_norm=config.qk_norm != "none",
            encoder_layers=config.num_hidden_layers,
            cross_blocks=len(layers),
            backbone_layers=model.info.num_layers,
            first=layers[0] if layers else model.info.num_layers,
            backbone_intermediate=_active_intermediate(text_config(model.backbone), model.info.intermediate_size),
            vocabulary=model.info.vocab_size,
            adapter_bytes=next(model.cross_blocks.parameters()).itemsize,
            backbone_bytes=model.backbone.dtype.itemsize,
        )


def _active_intermediate(config: Any, dense: int) -> int:
    """Channels of the MLP that one token passes: in a mixture, those of its experts."""
    width, experts = getattr(config, "moe_intermediate_size", None), getattr(config, "num_experts_per_tok", None)
    if not width or not experts:
        return dense * (experts or 1)
    shared = getattr(config, "shared_expert_intermediate_size", 0) or width * (
        getattr(config, "n_shared_experts", 0) or 0
    )
    return int(width * experts + shared)


def activation_bytes(shapes: Shapes, size: PassSize, *, autocast: bool, checkpointing: bool, copies: int = 0) -> int:
    """Bytes at the largest moment, logits included.

    With w bytes per number that is computed with (2 under autocast), a and b per number of adapter and backbone, h
    hidden channels, m of the MLP, q of the query heads, k of the key heads::

        encoder layer    (norms + 4wm + 5wq) x document tokens         norms: 4ah, and 2ah or the five casts 10h
        K/V head         (2ah + 4ak) x document tokens                 one per cross block, beside its laid-out K/V:
        linked K/V       2ak x linked tokens
        cross block      (norms + 4wm + 3wq + (4 + 2)q + h(a + 2w)) x query tokens + 2wq x linked tokens
        backbone layer   (8h + 4wq + 3w x its own m) x query tokens    from the first cross block on
        loss             12 x vocabulary x targets

    Without checkpointing that is all kept. With it, the inputs of all layers are, and at the larger of two moments

    - while the decoder goes back: all K/V heads and linked K/V; the largest of one cross block with one backbone layer
      and the gradient of linked K/V, the loss, and `copies` with the logits (the end of the forward pass);
    - while the encoder goes back: one layer, the gradient inside its MLP, and those of what the K/V heads read.

    The backbone's layers count as softmax attention with a gated MLP, also where they are linear; attention matrices
    are never kept (scaled_dot_product_attention, FlashAttention).

    Args:
        copies: bytes of the trained weights' 16-bit copies under autocast.
    """
    s, residual = shapes, shapes.adapter_bytes
    work = BFLOAT16 if autocast else residual
    frozen_work = BFLOAT16 if autocast else s.backbone_bytes
    # two norms, each its input and its normalised input; autocast casts the input of each of five matrices anew
    norms = (4 * residual + (5 * BFLOAT16 if autocast else 2 * residual)) * s.hidden
    mlp = 4 * work * s.intermediate  # gate, its activation, up, and their product
    # query, result, the result laid out for the output projection; keys and values as many heads as queries
    attention = 5 * work * s.queries
    if s.qk_norm:
        attention += (FLOAT32 + BFLOAT16) * (s.queries + s.keys)
    encoder_layer = size.documents * (norms + mlp + attention)
    heads = size.documents * (2 * residual * s.hidden + 4 * residual * s.keys)
    # laid out for all blocks at once; each repeats its own for as many heads as there are queries
    linked, repeated = size.linked * 2 * residual * s.keys, size.linked * 2 * work * s.queries
    cross_block = repeated + size.queries * (
        norms + mlp + (3 * work + FLOAT32 + BFLOAT16) * s.queries
        # its input in the adapter's dtype, and what each gate multiplies
        + s.hidden * (residual + 2 * work)
    )  # fmt: skip
    # frozen matrices don't keep their inputs: norms, rotated queries with keys and values, and the MLP's three
    backbone_layer = size.queries * (
        2 * FLOAT32 * s.hidden + 4 * frozen_work * s.queries + 3 * frozen_work * s.backbone_intermediate
    )
    backbone_layers = s.backbone_layers - s.first
    # the backward pass of a softmax in float32: its result, the gradient of it, and the one that it hands on
    loss = 3 * FLOAT32 * s.vocabulary * size.targets
    always = s.cross_blocks * (heads + linked)
    if not checkpointing:
        layers = s.encoder_layers * encoder_layer + s.cross_blocks * cross_block + backbone_layers * backbone_layer
        return always + layers + loss + copies
    inputs = residual * s.hidden * s.encoder_layers * size.documents
    inputs += s.backbone_bytes * s.hidden * backbone_layers * size.queries
    logits = frozen_work * s.vocabulary * size.targets
    decoding = always + max(cross_block + backbone_layer + s.cross_blocks * linked, loss, copies + logits)
    encoding = encoder_layer + size.documents * (work * s.intermediate + residual * s.hidden * s.cross_blocks)
    return inputs + max(decoding, encoding)
