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
        rows: questions.
    """

    documents: int
    queries: int
    targets: int
    linked: int
    rows: int = 1

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
            rows=config.batch_size,
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
            rows=max(map(len, batches)),
        )


def activation_bytes(
    model: CombForCausalLM, size: PassSize, *, autocast: bool, checkpointing: bool, copies: int = 0
) -> int:
    """Bytes at the largest moment, logits included.

    With w bytes per number that is computed with (2 under autocast), a and b per number of adapter and backbone, h
    hidden channels, m of the MLP, q of the query heads, k of the key heads::

        encoder layer    (norms + 4wm + 5wq) x document tokens         norms: 4ah, and 2ah or the five casts 10h
        K/V head         (2ah + 4ak) x document tokens                 one per cross block, beside its laid-out K/V:
        linked K/V       2ak x linked tokens
        cross block      (norms + 4wm + 3wq + (4 + 2)q + h(a + 2w)) x query tokens + 2wq x linked tokens
        joint attention  2bq x (linked + query tokens), instead of a cross block
        backbone layer   (8h + 4wq + 3w x its own m) x query tokens    from the first cross block on
        loss             12 x vocabulary x targets

    Without checkpointing that is all kept. With it, the inputs of all layers are, and at the larger of two moments

    - while the decoder goes back: all K/V heads and linked K/V; the largest of one cross block with one backbone layer
      and the gradient of linked K/V, the loss, and `copies` with the logits (the end of the forward pass);
    - while the encoder goes back: one layer, the gradient inside its MLP, and those of what the K/V heads read.

    The backbone's layers count as softmax attention with a gated MLP, also where they are linear; attention matrices
    are never kept (scaled_dot_product_attention, FlashAttention).

    Args:
        model: on any device.
        copies: bytes of the trained weights' 16-bit copies under autocast.
    """
    config: Any = model.config.encoder_config
    crosses: list[int] = model.config.cross_attention_layers or []
    hidden, vocabulary = config.hidden_size, model.info.vocab_size
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    residual = next(model.encoder.key_value_heads.parameters()).itemsize
    kept = model.backbone.dtype.itemsize
    work, frozen_work = (BFLOAT16, BFLOAT16) if autocast else (residual, kept)
    # two norms, each its input and its normalised input; autocast casts the input of each of five matrices anew
    norms = (4 * residual + (5 * BFLOAT16 if autocast else 2 * residual)) * hidden
    mlp = 4 * work * config.intermediate_size  # gate, its activation, up, and their product
    # query, result, the result laid out for the output projection; keys and values as many heads as queries
    attention = 5 * work * queries
    if config.qk_norm != "none":
        attention += (FLOAT32 + BFLOAT16) * (queries + keys)
    encoder_layer = size.documents * (norms + mlp + attention)
    # shared layers are the backbone's and run without a gradient: nothing of them is kept
    depth = 0 if config.shared_layers else config.num_hidden_layers
    heads = size.documents * (2 * residual * hidden + 4 * residual * keys)
    # laid out for all blocks at once; each repeats its own for as many heads as there are queries
    laid_out = work if config.joint_attention else residual
    linked, repeated = size.linked * 2 * laid_out * keys, size.linked * 2 * work * queries
    if config.joint_attention:  # keys and values of documents and queries end to end, for all heads
        cross_block = (size.linked + size.queries) * 2 * frozen_work * queries
    else:
        cross_block = repeated + size.queries * (
            norms + (mlp if config.cross_mlp else 0) + (3 * work + FLOAT32 + BFLOAT16) * queries
            # its input in the adapter's dtype, and what each gate multiplies
            + hidden * (residual + 2 * work)
        )  # fmt: skip
    # frozen matrices don't keep their inputs: norms, rotated queries with keys and values, and the MLP's three
    width = _active_intermediate(text_config(model.backbone), model.info.intermediate_size)
    backbone_layer = size.queries * (2 * FLOAT32 * hidden + 4 * frozen_work * queries + 3 * frozen_work * width)
    # nothing is kept of the layers before the first cross block
    backbone_layers = model.info.num_layers - crosses[0] if crosses else 0
    # the backward pass of a softmax in float32: its result, the gradient of it, and the one that it hands on
    loss = 3 * FLOAT32 * vocabulary * size.targets
    always = len(crosses) * (heads + linked)
    if not checkpointing:
        layers = depth * encoder_layer + len(crosses) * cross_block
        return int(always + layers + backbone_layers * backbone_layer + loss + copies)
    inputs = hidden * (residual * depth * size.documents + kept * backbone_layers * size.queries)
    logits = frozen_work * vocabulary * size.targets
    decoding = always + max(cross_block + backbone_layer + len(crosses) * linked, loss, copies + logits)
    encoding = (encoder_layer if depth else 0) + size.documents * (
        work * config.intermediate_size + residual * hidden * len(crosses)
    )
    return int(inputs + max(decoding, encoding))


def _active_intermediate(config: Any, dense: int) -> int:
    """Channels of the MLP that one token passes: in a mixture, those of its experts."""
    width, experts = getattr(config, "moe_intermediate_size", None), getattr(config, "num_experts_per_tok", None)
    if not width or not experts:
        return dense * (experts or 1)
    shared = getattr(config, "shared_expert_intermediate_size", 0) or width * (
        getattr(config, "n_shared_experts", 0) or 0
    )
    return int(width * experts + shared)
