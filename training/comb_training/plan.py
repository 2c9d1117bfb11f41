"""What a run would be, before any weight is loaded: parameter counts, memory per GPU, data and batches.

The model is built from the backbone's *configuration* on torch's meta device, where tensors have shapes and no memory:
its parameters are counted exactly. Bytes of weights, gradients and optimizer states follow from them and from how
DeepSpeed shards; activations are estimated from the token budgets. `EXPLANATION` says what is counted and what isn't.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from comb.adapter import HUB_ARGUMENTS, resolve_name
from comb.backbone import text_config
from comb.compatibility import load_tokenizer
from comb.config import CombConfig
from comb.documents import PromptBuilder
from comb.evaluation.datasets import Counts
from comb.model import CombForCausalLM
from comb_training import distributed, plugin
from comb_training.batches import TokenStatistics, TrainingExample, tokenize
from comb_training.config import Config, TrainConfig
from comb_training.sampler import BatchSampler, bucket_rows, row_length
from comb_training.schedule import total_steps
from comb_training.train import _dtype, read_examples
from comb_training.trainer import batch_sampler

logger = logging.getLogger(__name__)

FLOAT32, BFLOAT16 = 4, 2

EXPLANATION = (
    "Counted: weights in the dtype they are kept in; float32 gradients and two Adam moments of what is trained; under "
    "ZeRO a second float32 copy of the trained weights, and the buffers that gradients and gathered weights pass "
    "through; under DDP its gradient buckets. Activations (an estimate): what layers keep for the backward pass at "
    "the largest batch the budgets allow, from the first cross block on, logits included; with gradient checkpointing "
    "the inputs of the layers and one layer in full. The optimizer's temporaries come when activations are gone, so "
    "the total has the larger of the two. Not counted: CUDA's context (about 1 GiB), fragmentation, the communication "
    "library, attention matrices of the eager implementation, and the K/V cache while the backbone answers "
    "(train.answers: on_policy)."
)


@dataclass(frozen=True)
class Parameters:
    """How many parameters each part has, and the bytes they are kept in."""

    frozen: int
    encoder_layers: int
    key_value_heads: int
    cross_blocks: int
    frozen_bytes: int
    trained_bytes: int

    @classmethod
    def of(cls, model: CombForCausalLM) -> Parameters:
        """Counts those of a model on any device."""
        groups: dict[str, list[Any]] = {
            "frozen": list(model.backbone.parameters()),
            "encoder_layers": list(model.encoder.layers.parameters()),
            "key_value_heads": list(model.encoder.key_value_heads.parameters()),
            "cross_blocks": list(model.cross_blocks.parameters()),
        }
        counts = {name: sum(parameter.numel() for parameter in group) for name, group in groups.items()}
        sizes = {name: sum(parameter.nbytes for parameter in group) for name, group in groups.items()}
        return cls(**counts, frozen_bytes=sizes.pop("frozen"), trained_bytes=sum(sizes.values()))

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.encoder_layers + self.key_value_heads + self.cross_blocks


@dataclass(frozen=True)
class Sharding:
    """How a run spreads weights, gradients and optimizer states over its GPUs.

    Args:
        stage: of ZeRO; 0: every GPU has everything.
        ranks: GPUs.
        autocast: whether trained layers compute in 16 bits.
        gathered: parameters at most that ZeRO-3 holds whole at one time.
        bucket: gradients, in elements, that ZeRO reduces at once; None: hidden size squared, as transformers sets it.
        offload_optimizer, offload_parameters: kept in CPU memory instead.
    """

    stage: int = 0
    ranks: int = 1
    autocast: bool = False
    gathered: int = 10**9
    bucket: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @classmethod
    def of(cls, config: TrainConfig, ranks: int) -> Sharding:
        """What `config` and the DeepSpeed configuration it names say. Raises ValueError if that is none."""
        if config.deepspeed is None:
            return cls(ranks=ranks, autocast=config.bf16)
        try:
            settings = json.loads(Path(config.deepspeed).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"train.deepspeed={config.deepspeed!r} is no DeepSpeed configuration: {error}") from error
        zero = settings.get("zero_optimization", {})
        autocast = settings.get("torch_autocast", {}).get("enabled", config.bf16)
        bucket = zero.get("reduce_bucket_size", 5 * 10**8)
        return cls(
            stage=int(zero.get("stage", 0)),
            ranks=ranks,
            autocast=bool(autocast),
            gathered=int(zero.get("stage3_max_live_parameters", 10**9)),
            bucket=None if bucket == "auto" else int(bucket),
            offload_optimizer=_offloaded(zero, "optimizer"),
            offload_parameters=_offloaded(zero, "param"),
        )

    @property
    def name(self) -> str:
        """As people say it."""
        if self.stage == 0:
            return "DDP" if self.ranks > 1 else "one process"
        return f"ZeRO-{self.stage}"


def _offloaded(zero: dict[str, Any], what: str) -> bool:
    return (zero.get(f"offload_{what}") or {}).get("device", "none") != "none"


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
        sizes = []
        for indices in sampler.batches(0):
            batch = [examples[index] for index in indices]
            read = max(sum(map(len, example.segments)) for example in batch)
            sizes.append(
                (
                    sum(map(len, {segment for example in batch for segment in example.segments})),
                    len(batch) * max(map(row_length, batch)),
                    sum(len(example.target) for example in batch),
                    len(batch) * read,
                )
            )
        return cls(*(max(values) for values in zip(*sizes, strict=True)))


@dataclass(frozen=True)
class Shapes:
    """The widths that activations depend on, in channels; `first` is the first backbone layer with a cross block."""

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
            adapter_bytes=model.encoder.dtype.itemsize,
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


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU at the largest moment of a step.

    Args:
        states: by what they are for, there all the time.
        activations: during forward and backward; None where the size of a batch isn't known.
        temporaries: of the optimizer, when activations are gone.
        host: per rank in CPU memory.
        start: the whole model on every GPU, before DeepSpeed shards it.
    """

    sharding: Sharding
    states: dict[str, int]
    activations: int | None
    temporaries: int
    host: int
    start: int

    @property
    def total(self) -> int:
        """All of it at the largest moment."""
        return max(self.start, sum(self.states.values()) + max(self.activations or 0, self.temporaries))


def memory_of(
    parameters: Parameters, sharding: Sharding, shapes: Shapes, size: PassSize | None, *, checkpointing: bool
) -> Memory:
    """An estimate for one way of sharding.

    Args:
        size: of a batch; None leaves activations out.
        checkpointing: gradient checkpointing.
    """
    stage, ranks = sharding.stage, sharding.ranks
    weights, trained = parameters.trained_bytes, parameters.trained
    # who holds one part in `ranks` of what
    optimizer_share, gradient_share, weight_share = (
        ranks if stage >= least else 1 for least in (1, 2, 3)
    )  # fmt: skip
    states = {
        "frozen weights": _part(parameters.frozen_bytes, weight_share),
        "trained weights": _part(weights, weight_share),
        "their float32 copy (ZeRO)": _part(FLOAT32 * trained, optimizer_share) if stage else 0,
        "gradients": _part(weights if not stage else FLOAT32 * trained, gradient_share),
        "Adam's two moments": 2 * _part(weights if not stage else FLOAT32 * trained, optimizer_share),
        "buffers": _buffers(parameters, sharding, shapes),
    }
    host = 0
    if sharding.offload_optimizer and stage:
        host += sum(states.pop(name) for name in ("their float32 copy (ZeRO)", "gradients", "Adam's two moments"))
    if sharding.offload_parameters and stage == 3:
        host += sum(states.pop(name) for name in ("frozen weights", "trained weights"))
    activations = None
    if size is not None:
        # autocast keeps a 16-bit copy of every trained matrix; ZeRO-3 gathers them in 16 bits
        copies = BFLOAT16 * trained if sharding.autocast and stage < 3 else 0
        activations = activation_bytes(
            shapes, size, autocast=sharding.autocast, checkpointing=checkpointing, copies=copies
        )
    return Memory(
        sharding=sharding,
        states=states,
        activations=activations,
        # AdamW works on all tensors at once and makes one temporary as large as what it updates
        temporaries=0 if sharding.offload_optimizer and stage else _part(weights, optimizer_share),
        host=host,
        start=parameters.frozen_bytes + weights,
    )


def _part(value: int, parts: int) -> int:
    return -(-value // parts)


def _buffers(parameters: Parameters, sharding: Sharding, shapes: Shapes) -> int:
    """What gradients and gathered weights pass through."""
    if sharding.ranks == 1 and sharding.stage == 0:
        return 0
    if sharding.stage == 0:  # DDP copies gradients into its buckets
        return parameters.trained_bytes
    bucket = shapes.hidden**2 if sharding.bucket is None else sharding.bucket
    reduced = 2 * FLOAT32 * min(bucket, parameters.trained)  # two, so that one travels while the other fills
    if sharding.stage < 3 or sharding.ranks == 1:
        return reduced
    everything = parameters.frozen + parameters.trained
    share = min(1.0, sharding.gathered / everything)
    trained_bytes = BFLOAT16 * parameters.trained if sharding.autocast else parameters.trained_bytes
    return reduced + int(share * (parameters.frozen_bytes + trained_bytes))


def activation_bytes(shapes: Shapes, size: PassSize, *, autocast: bool, checkpointing: bool, copies: int = 0) -> int:
    """An estimate of what is kept for the backward pass at its largest moment, logits included.

    Args:
        copies: bytes of the trained weights' 16-bit copies; with checkpointing gone when the backward pass begins.
    """
    s, residual = shapes, shapes.adapter_bytes
    work = BFLOAT16 if autocast else residual
    frozen_work = BFLOAT16 if autocast else s.backbone_bytes
    # two norms, each its input and its normalised input; autocast casts the input of each of five matrices anew
    trained_norms = 4 * residual * s.hidden + (5 * BFLOAT16 if autocast else 2 * residual) * s.hidden
    mlp = 4 * work * s.intermediate  # gate, its activation, up, and their product
    # query, result, the result laid out for the output projection; keys and values as many heads as queries
    attention = 5 * work * s.queries
    qk_norm = (FLOAT32 + BFLOAT16) * (s.queries + s.keys)
    encoder_layer = size.documents * (trained_norms + mlp + attention + (qk_norm if s.qk_norm else 0))
    heads = size.documents * (2 * residual * s.hidden + 4 * residual * s.keys)
    # laid out for all blocks at once; each repeats its own for as many heads as there are queries
    linked, repeated = size.linked * 2 * residual * s.keys, size.linked * 2 * work * s.queries
    block = (
        size.queries * (trained_norms + mlp + 3 * work * s.queries + (FLOAT32 + BFLOAT16) * s.queries)
        # its input in the adapter's dtype, and what each gate multiplies
        + size.queries * s.hidden * (residual + 2 * work)
        + repeated
    )  # fmt: skip
    # frozen matrices don't keep their inputs: norms, rotated queries with keys and values, and the MLP's three
    decoder_layer = size.queries * (
        2 * FLOAT32 * s.hidden + 4 * frozen_work * s.queries + 3 * frozen_work * s.backbone_intermediate
    )
    decoder_layers = s.backbone_layers - s.first
    loss = s.vocabulary * (2 * frozen_work * size.queries + (frozen_work + 3 * FLOAT32) * size.targets)
    always = s.cross_blocks * (heads + linked)
    if not checkpointing:
        layers = s.encoder_layers * encoder_layer + s.cross_blocks * block + decoder_layers * decoder_layer
        return always + layers + loss + copies
    inputs = residual * s.hidden * s.encoder_layers * size.documents
    inputs += s.backbone_bytes * s.hidden * decoder_layers * size.queries
    return always + inputs + max(encoder_layer, block + decoder_layer, loss, copies)


@dataclass
class Plan:
    """What a run would be; `left_out` says which parts are missing, and why.

    Args:
        memory: this run's way of sharding first, then the others for comparison.
        steps: optimizer steps at most.
    """

    config: Config
    ranks: int
    parameters: Parameters | None = None
    memory: list[Memory] = field(default_factory=list)
    counts: Counts | None = None
    statistics: TokenStatistics | None = None
    buckets: list[dict[str, Any]] = field(default_factory=list)
    steps: int | None = None
    size: PassSize | None = None
    left_out: list[str] = field(default_factory=list)


def plan(config: Config, *, ranks: int | None = None) -> Plan:
    """Plans a run without loading a weight or writing a file.

    Args:
        ranks: GPUs; those of ``WORLD_SIZE`` by default.

    Raises:
        ValueError: for options that make no sense, data that is damaged, or a backbone that isn't supported.
    """
    plugin.register()
    ranks = distributed.world_size() if ranks is None else ranks
    sharding = Sharding.of(config.train, ranks)
    result = Plan(config, ranks, size=PassSize.of_budget(config.train))
    try:
        model = meta_model(config)
    except OSError as error:
        result.left_out.append(
            f"parameters, memory and data: the configuration of {config.model.init_from or config.model.backbone!r} "
            f"is not here and can't be fetched ({_first_line(error)})"
        )
        return result
    result.parameters = Parameters.of(model)
    _add_data(result, model)
    if result.size is None:
        result.left_out.append(
            "activations: neither train.batch_document_tokens and train.batch_query_tokens nor the data say how large "
            "a batch gets"
        )
    quantised = sorted(name for name in config.model.options if name.startswith(("load_in_", "quantization")))
    if quantised:
        result.left_out.append(f"model.options {', '.join(quantised)}: the backbone's bytes are given without it")
    shapes = Shapes.of(model)
    others = [replace(sharding, stage=stage, offload_optimizer=False, offload_parameters=False) for stage in (0, 2, 3)]
    for way in [sharding, *(other for other in others if other.stage != sharding.stage)]:
        result.memory.append(
            memory_of(result.parameters, way, shapes, result.size, checkpointing=config.train.gradient_checkpointing)
        )
    return result


def meta_model(config: Config) -> CombForCausalLM:
    """The model that would be trained, on the meta device: shapes and dtypes, no memory.

    Raises:
        OSError: when the backbone's configuration isn't here and can't be fetched.
        UnsupportedBackboneError: if no encoder can be attached to such a backbone.
    """
    options = config.model.options
    adapter_dtype = options.get("adapter_dtype", torch.float32)  # as comb_training.train does
    settings: CombConfig | None = None
    if config.model.init_from is not None:
        settings = CombConfig.from_pretrained(resolve_name(config.model.init_from))
        described: Any = settings.backbone_config
    else:
        described = backbone_config(config)
    dtype = _dtype(config.model.dtype)
    loading = {} if dtype == "auto" else {"dtype": dtype}
    if options.get("trust_remote_code"):
        loading["trust_remote_code"] = True
    own = set(inspect.signature(CombForCausalLM.from_backbone).parameters) - {"adapter_dtype", "revision", "loading"}
    with torch.device("meta"):
        backbone = AutoModelForCausalLM.from_config(described, **loading)
        if settings is not None:
            model = CombForCausalLM(settings, backbone)
            model.encoder.to(adapter_dtype)
            model.cross_blocks.to(adapter_dtype)
            return model
        return CombForCausalLM.from_backbone(
            backbone,
            num_encoder_layers=config.model.num_encoder_layers,
            cross_attention_layers=config.model.cross_attention_layers,
            encoder_causal=config.model.encoder_causal,
            adapter_dtype=adapter_dtype,
            **{name: value for name, value in options.items() if name in own},
        )


def backbone_config(config: Config) -> Any:
    """The backbone's configuration, from its folder or the Hub. Raises OSError when it can't be had."""
    known = ("revision", "trust_remote_code", *HUB_ARGUMENTS)
    options = {name: value for name, value in config.model.options.items() if name in known}
    return AutoConfig.from_pretrained(resolve_name(config.model.backbone), **options)


def _add_data(result: Plan, model: CombForCausalLM) -> None:
    """Reads and tokenises the data, if it and the tokenizer are here."""
    config = result.config
    path = config.data.path
    if path is not None and not Path(path).exists():
        result.left_out.append(f"data: there is no file or folder {path!r} (data.path)")
        return
    try:
        tokenizer = load_tokenizer(config.model.init_from or config.model.backbone, model)
    except (OSError, ValueError) as error:
        result.left_out.append(f"data: the backbone's tokenizer is not here ({_first_line(error)})")
        return
    builder = PromptBuilder(tokenizer, document_template=config.data.document_template)
    try:
        examples, counts = read_examples(
            config, builder, model.max_document_tokens, split="train", limit=config.data.limit
        )
    except ValueError as error:
        if path is not None or "needs a path" not in str(error):  # something else is wrong, and to be mended
            raise
        result.left_out.append(f"data: {_first_line(error)}")
        return
    tokenized = tokenize(
        examples,
        builder,
        counts,
        query_template=config.data.query_template,
        max_query_tokens=config.data.max_query_tokens,
    )
    result.counts, result.statistics = counts, TokenStatistics.of(tokenized)
    sampler = batch_sampler(tokenized, config.train, ranks=result.ranks)
    result.buckets = bucket_rows(sampler, tokenized)
    result.steps = total_steps(config.train, sampler.steps_per_epoch)
    result.size = PassSize.of_data(sampler, tokenized)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
