"""Bytes per GPU: what DeepSpeed's stages, or DDP, keep there, and what the largest forward pass keeps (estimated)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from torch import nn

from comb.backbones.discovery import BackboneInfo, inspect_backbone, text_config
from comb.linktokens.modeling import LinkTokensForCausalLM
from comb.model.adapter import floating
from comb_training.config import TrainConfig
from comb_training.data.batches import TrainingExample
from comb_training.plan.counting import Parameters, Trained
from comb_training.trainer.accelerator import read_deepspeed
from comb_training.trainer.sampler import BatchSampler, row_length

FACTOR = 1.4
"""How far the estimate of activations is from the measured peak at most, either way (test_plan_memory.py)."""
FLOAT32, BFLOAT16 = 4, 2
LIVE_PARAMETERS = 10**9  # DeepSpeed's default of what ZeRO-3 holds whole at one time
OFFLOADED = {"device": "cpu"}


@dataclass(frozen=True)
class GpuMemory:
    """Bytes per GPU at the largest moment of a step."""

    way: str  # of sharding, as people say it
    states: dict[str, int]  # by what they are for, there all the time
    activations: int | None  # during forward and backward; None where the size of a batch isn't known
    temporaries: int  # of the optimizer, when activations are gone
    host: int  # per rank in CPU memory
    start: int  # the whole model on every GPU, before DeepSpeed shards it

    @property
    def total(self) -> int:
        """All of it at the largest moment."""
        return max(self.start, sum(self.states.values()) + max(self.activations or 0, self.temporaries))


def deepspeed_settings(config: TrainConfig) -> dict[str, Any]:
    """The DeepSpeed configuration of a run; without one, DDP's. Raises ValueError if the file is none."""
    settings: dict[str, Any] = {"torch_autocast": {"enabled": config.bf16}, "zero_optimization": {}}
    return settings if config.deepspeed is None else {**settings, **read_deepspeed(config)}


def other_ways(deepspeed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same settings with other stages of ZeRO, and with stage 3 in CPU memory, to compare with."""
    zero = {name: value for name, value in deepspeed["zero_optimization"].items() if not name.startswith("offload_")}
    ways = [zero | {"stage": stage} for stage in range(4)]
    ways.append(zero | {"stage": 3, "offload_optimizer": OFFLOADED, "offload_param": OFFLOADED})
    return (
        {**deepspeed, "zero_optimization": way} for way in ways if _name(way) != _name(deepspeed["zero_optimization"])
    )


def memory_of(
    model: Trained,
    parameters: Parameters,
    size: PassSize | None,
    deepspeed: Mapping[str, Any],
    *,
    ranks: int = 1,
    checkpointing: bool,
) -> GpuMemory:
    """Bytes of one way of sharding.

    DDP's buffers are its gradient buckets; one process has none. AdamW's temporary is as large as what a rank updates.

    Args:
        model: on any device; for its widths. size: of a batch; None leaves activations out.
        deepspeed: as `deepspeed_settings` gives them. checkpointing: gradient checkpointing.
    """
    zero, autocast = deepspeed["zero_optimization"], bool(deepspeed["torch_autocast"].get("enabled"))
    stage = int(zero.get("stage", 0))
    weights, trained = parameters.trained_bytes, parameters.trained
    # ZeRO-1 shards the optimizer, 2 gradients too, 3 weights too
    optimizer_parts, gradient_parts, weight_parts = (ranks if stage >= least else 1 for least in (1, 2, 3))
    master = FLOAT32 * trained if stage else weights
    # what gradients and gathered weights pass through; "auto" is what transformers makes of it
    buffers = weights if ranks > 1 else 0
    if stage:
        bucket = zero.get("reduce_bucket_size", 5 * 10**8)
        bucket = text_config(model.backbone).hidden_size ** 2 if bucket == "auto" else int(bucket)
        buffers = 2 * FLOAT32 * min(bucket, trained)  # two, so that one travels while the other fills
    if stage == 3 and ranks > 1:
        live = zero.get("stage3_max_live_parameters", "auto")
        share = min(1.0, (LIVE_PARAMETERS if live == "auto" else int(live)) / parameters.total)
        buffers += int(share * (parameters.frozen_bytes + (BFLOAT16 * trained if autocast else weights)))
    states = {
        "frozen weights": _part(parameters.frozen_bytes, weight_parts),
        "trained weights": _part(weights, weight_parts),
        "float32 copy": _part(master, optimizer_parts) if stage else 0,
        "gradients": _part(master, gradient_parts),
        "moments": _part(2 * master, optimizer_parts),
        "buffers": buffers,
    }
    moved = ["float32 copy", "gradients", "moments"] if stage and _offloads(zero, "optimizer") else []
    moved += ["frozen weights", "trained weights"] if stage == 3 and _offloads(zero, "param") else []
    activations = None
    if size is not None:
        # autocast keeps a 16-bit copy of every trained matrix; ZeRO-3 gathers them in 16 bits
        copies = BFLOAT16 * trained if autocast and stage < 3 else 0
        activations = activation_bytes(model, size, autocast=autocast, checkpointing=checkpointing, copies=copies)
    return GpuMemory(
        way=_name(zero) if stage or ranks > 1 else "one process",
        host=sum(states.pop(name) for name in moved),
        states=states,
        activations=activations,
        # AdamW works on all tensors at once
        temporaries=0 if "moments" in moved else _part(weights, optimizer_parts),
        start=parameters.frozen_bytes + weights,
    )


@dataclass(frozen=True)
class ServedMemory:
    """Bytes of the adapter's file, of weights in `comb serve`, without vLLM's own, and of a document's token in the
    pool."""

    file: int
    decoder: int  # backbone and cross blocks, in vLLM
    encoder: int  # encoder, K/V heads and the embedding, in each encoder process; 0 where there is none
    document_token: int


def served_memory(model: Trained) -> ServedMemory:
    """What will be served of `model`, in the backbone's dtype; LoRA is merged by then."""
    item = floating(model.backbone.dtype).itemsize

    def size(*modules: nn.Module) -> int:
        named = (each for module in modules for each in module.named_parameters())
        return item * sum(parameter.numel() for name, parameter in named if ".lora_" not in name)

    if isinstance(model, LinkTokensForCausalLM):
        front = size(model.front)
        token = size(model.front.keys, model.front.values) // model.num_link_tokens
        return ServedMemory(front, size(model.backbone) + front, 0, token)
    heads: Any = model.config.encoder_config
    return ServedMemory(
        file=item * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        decoder=size(model.backbone, model.cross_blocks),
        encoder=size(model.encoder, model.get_input_embeddings()),
        document_token=2 * model.num_cross_layers * heads.num_key_value_heads * heads.head_dim * item,
    )


def _name(zero: Mapping[str, Any]) -> str:
    stage = int(zero.get("stage", 0))
    offloads = _offloads(zero, "optimizer") or _offloads(zero, "param")
    return f"ZeRO-{stage}{'+CPU' if offloads else ''}" if stage else "DDP"


def _offloads(zero: Mapping[str, Any], what: str) -> bool:
    return bool((zero.get(f"offload_{what}") or {}).get("device", "none") != "none")


def _part(value: int, parts: int) -> int:
    return -(-value // parts)


@dataclass(frozen=True)
class PassSize:
    """Tokens of the largest forward pass of one rank."""

    documents: int  # of different documents; 0 where they are in the rows (link tokens)
    queries: int  # rows times the longest one
    targets: int  # tokens that count in the loss
    # rows times the tokens of the documents of one row, each of which reads its own copy; of link tokens, rows times
    # those in front of all documents of one
    linked: int
    rows: int = 1  # questions

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
    def of_data(cls, sampler: BatchSampler, examples: Sequence[TrainingExample], model: Trained) -> PassSize:
        """The largest of each kind over the first epoch's batches."""
        batches = [[examples[index] for index in indices] for indices in sampler.batches(0)]
        targets = max(sum(len(example.target) for example in batch) for batch in batches)
        if isinstance(model, LinkTokensForCausalLM):
            longest = [max(len(example.prompt.flat) + len(example.target) for example in batch) for batch in batches]
            most = [model.num_link_tokens * max(len(example.segments) for example in batch) for batch in batches]
            rows = [len(batch) for batch in batches]
            return cls(0, max(map(mul, rows, longest)), targets, max(map(mul, rows, most)), max(rows))
        return cls(
            documents=max(sum(map(len, {s for example in batch for s in example.segments})) for batch in batches),
            queries=max(len(batch) * max(map(row_length, batch)) for batch in batches),
            targets=targets,
            linked=max(len(batch) * max(sum(map(len, example.segments)) for example in batch) for batch in batches),
            rows=max(map(len, batches)),
        )


def activation_bytes(model: Trained, size: PassSize, *, autocast: bool, checkpointing: bool, copies: int = 0) -> int:
    """Bytes at the largest moment, logits included.

    With w bytes per number that is computed with (2 under autocast), a and b per number of adapter and backbone, h
    hidden channels, m of the MLP, q of the query heads, k of the key heads::

        encoder layer    (norms + 4wm + 5wq) x document tokens         norms: 4ah, and 2ah or the five casts 10h
        K/V head         (2ah + 4ak) x document tokens                 one per cross block, beside its laid-out K/V:
        linked K/V       2ak x linked tokens
        cross block      (norms + 4wm + 3wq + (4 + 2)q + h(a + 2w)) x query tokens + 2wq x linked tokens
        backbone layer   (8h + 4wq + 3w x its own m) x query tokens    from the first cross block on
        loss             12 x vocabulary x targets

    Link tokens have backbone layers alone, all of them over whole rows, and 2b(2k + q) x their number in each; and one
    mask.

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
    info = inspect_backbone(model.backbone)
    if isinstance(model, LinkTokensForCausalLM):
        work = BFLOAT16 if autocast else model.backbone.dtype.itemsize
        wide, narrow = info.num_attention_heads * info.head_dim, info.num_key_value_heads * info.head_dim
        layer = _backbone_layer(model, info, size, work) + size.linked * 2 * work * (2 * narrow + wide)
        mask = size.queries * (size.queries + size.linked) // size.rows * work
        # one layer more: the gradients inside the one that goes back
        return int((info.num_layers + 1) * layer + mask + 3 * FLOAT32 * info.vocab_size * size.targets + copies)
    config: Any = model.config.encoder_config
    crosses: list[int] = model.config.cross_attention_layers or []
    hidden, vocabulary = config.hidden_size, info.vocab_size
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
    depth = config.num_hidden_layers
    heads = size.documents * (2 * residual * hidden + 4 * residual * keys)
    # laid out for all blocks at once; each repeats its own for as many heads as there are queries
    linked, repeated = size.linked * 2 * residual * keys, size.linked * 2 * work * queries
    cross_block = repeated + size.queries * (
        norms + mlp + (3 * work + FLOAT32 + BFLOAT16) * queries
        # its input in the adapter's dtype, and what each gate multiplies
        + hidden * (residual + 2 * work)
    )  # fmt: skip
    backbone_layer = _backbone_layer(model, info, size, frozen_work)
    # nothing is kept of the layers before the first cross block
    backbone_layers = info.num_layers - crosses[0] if crosses else 0
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


def _backbone_layer(model: Trained, info: BackboneInfo, size: PassSize, work: int) -> int:
    # frozen matrices don't keep their inputs: norms, rotated queries with keys and values, and the MLP's three
    config: Any = text_config(model.backbone)
    width, experts = getattr(config, "moe_intermediate_size", None), getattr(config, "num_experts_per_tok", None)
    if not width or not experts:
        width = info.intermediate_size * (experts or 1)
    else:  # of a mixture's MLP the experts that one token passes
        shared = getattr(config, "n_shared_experts", 0) or 0
        width = width * experts + (getattr(config, "shared_expert_intermediate_size", 0) or width * shared)
    queries = info.num_attention_heads * info.head_dim
    return size.queries * (2 * FLOAT32 * info.hidden_size + 4 * work * queries + 3 * work * int(width))
