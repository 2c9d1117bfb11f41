"""Training configuration: frozen dataclasses, read from YAML with ``section.key=value`` overrides.

A key that is not known is an error that names the nearest one: a misspelt option must never be ignored.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")

MIXTURE = "mixture"
"""`DataConfig.dataset` where there is a mixture: what tables and plots call the data."""


@dataclass(frozen=True)
class ModelConfig:
    """The backbone and the shape of the encoder that is trained on it."""

    backbone: str = "nano"
    """Hub id, folder, or registered name of the frozen backbone."""
    num_encoder_layers: int = 8
    """Layers of the chunk encoder."""
    cross_attention_layers: tuple[int, ...] | None = None
    """Backbone layers with a cross block in front of them; null spreads one per encoder layer evenly."""
    encoder_causal: bool = False
    """A causal mask inside the encoder (the paper's equation); false is bidirectional, as in the published code."""
    dtype: str = "float32"
    """Weights' dtype: float32, bfloat16, float16 or auto."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one. (CUDA_VISIBLE_DEVICES chooses among several.)"""
    init_from: str | None = None
    """An adapter folder to go on from, instead of a fresh encoder."""
    cpu_threads: int | None = None
    """Threads of torch on a CPU; null is torch's default. Tiny models are fastest with one: more only wait."""
    options: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments of `CombForCausalLM.from_backbone`."""


@dataclass(frozen=True)
class MixtureEntry:
    """One set of a mixture (`DataConfig.mixture`). What is null is as in `DataConfig`.

    Raises:
        ValueError: for a value out of range, or an option that the mixture decides.
    """

    dataset: str
    """A registered dataset: squad, babi, nano, jsonl, ..."""
    path: str | None = None
    """The dataset's file or folder; null for generated data."""
    name: str | None = None
    """What the set is called in counts and ids; null is `dataset`. Two sets can't have the same name."""
    weight: float = 1.0
    """Share of the epoch's examples, relative to the other weights."""
    num_documents: int | None = None
    """Documents per example."""
    heldout_share: float | None = None
    """Share of the groups (articles, stories) kept for evaluation."""
    limit: int | None = None
    """Different examples of this set at most, for training."""
    query_template: str | None = None
    """How a question is written; {query} is replaced."""
    options: dict[str, Any] = field(default_factory=dict)
    """More options of the dataset's reader."""

    def __post_init__(self) -> None:
        if self.name is None:
            object.__setattr__(self, "name", Path(self.dataset).stem)
        where = f"data.mixture, set {self.name!r}"
        if not self.name or "/" in self.name or "@" in self.name:
            raise ValueError(f"{where}: a name is a text without / and @, which ids have behind it")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"{where}: weight must be greater than 0, not {self.weight}")
        for name in ("num_documents", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{where}: {name} must be at least 1, not {value}")
        if self.query_template is not None and "{query}" not in self.query_template:
            raise ValueError(f"{where}: query_template {self.query_template!r} has no {{query}}")
        decided = sorted({"split", "limit"} & self.options.keys())
        if decided:
            raise ValueError(f"{where}: options can't hold {decided[0]!r}, which the mixture decides")


@dataclass(frozen=True)
class DataConfig:
    """Which examples, and how they become tokens."""

    dataset: str = ""
    """A registered dataset: squad, babi, nano, jsonl, ... Left out it is nano, or with a mixture "mixture"."""
    path: str | None = None
    """The dataset's file or folder, null for generated data; with a mixture, the folder that its paths are in."""
    mixture: tuple[MixtureEntry, ...] = ()
    """Several sets instead of one `dataset`, each with a weight."""
    epoch_examples: int | None = None
    """Examples of an epoch of the mixture; null: as many as `max_repeats` allows."""
    max_repeats: float = 1.0
    """How often an epoch of the mixture holds each example of a set at most, in the mean over the set. The set that
    runs out first decides how long the epoch is."""
    num_documents: int | None = None
    """Documents per example; null is the dataset's own default."""
    heldout_share: float | None = None
    """Share of the groups (articles, stories) kept for evaluation; null is the dataset's own default."""
    limit: int | None = None
    """Examples at most, for training."""
    seed: int = 0
    """Decides splits, distractors and shuffles."""
    max_document_tokens: int | None = None
    """Longer documents are cut (counted and said); null is what the encoder can take."""
    splitter: str | None = None
    """A splitter with its budget, fixed:512 say: documents of more tokens become several documents, and nothing of
    them is cut off (counted and said); null cuts at `max_document_tokens`."""
    max_prompt_tokens: int | None = None
    """Examples with a longer full prompt get no answer from the backbone and are dropped (counted and said)."""
    max_query_tokens: int = 1024
    """Examples whose query and answer are longer are dropped (counted and said)."""
    document_template: str | None = None
    """How a document is written, with {text} and {title}; null is the title, if there is one, and the text."""
    query_template: str = "{query}"
    """How a question is written; {query} is replaced."""
    options: dict[str, Any] = field(default_factory=dict)
    """More options of the dataset's reader."""
    cache: bool = True
    """Keep the tokenised examples on disk, for the next run over the same data."""
    cache_dir: str | None = None
    """Where; null is the folder comb/tokens in the Hugging Face cache (HF_HOME)."""

    @property
    def label(self) -> str:
        """The datasets' names, for titles."""
        return ", ".join(dict.fromkeys(entry.dataset for entry in self.mixture)) or self.dataset

    def __post_init__(self) -> None:
        for name in (
            "num_documents", "limit", "max_document_tokens", "max_prompt_tokens", "max_query_tokens", "epoch_examples"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, not {value}")
        if not 1 <= self.max_repeats < float("inf"):
            raise ValueError(f"data.max_repeats must be at least 1, not {self.max_repeats}")
        self._check_mixture()

    def _check_mixture(self) -> None:
        if not self.mixture:
            if self.dataset == MIXTURE:
                raise ValueError(f"data.dataset={MIXTURE} needs data.mixture: a list of sets, each with a dataset")
            if self.epoch_examples is not None or self.max_repeats != 1:
                raise ValueError("data.epoch_examples and data.max_repeats are for data.mixture, and there is none")
            object.__setattr__(self, "dataset", self.dataset or "nano")
            return
        for name, given in (
            ("dataset", self.dataset not in ("", MIXTURE)), ("options", self.options)
        ):  # fmt: skip
            if given:
                raise ValueError(f"data.{name} and data.mixture are both given: it belongs to the sets of the mixture")
        object.__setattr__(self, "dataset", MIXTURE)
        names = [entry.name for entry in self.mixture]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"data.mixture has two sets called {twice[0]!r}: give them a name each")


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation. Training stops at the first of `steps`, `epochs` and `max_seconds` that is reached."""

    method: Literal["comb", "block"] = "comb"
    """comb trains an encoder and cross blocks on the frozen backbone; block fine-tunes the backbone itself (all of it,
    or LoRA) to read documents that see only themselves."""
    steps: int | None = None
    """Optimizer steps."""
    epochs: float | None = None
    """Passes over the data."""
    max_seconds: float | None = None
    """Wall-clock seconds of optimisation; the learning rate then follows the clock."""
    batch_size: int = 32
    """Questions per forward pass and rank, at most."""
    batch_document_tokens: int | None = None
    """Tokens of different documents per forward pass and rank, at most; null: no limit."""
    batch_query_tokens: int | None = None
    """Questions times tokens of the longest one (query and answer) per forward pass and rank, at most; null: no limit.
    With either budget, examples of like length share a batch."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimizer step."""
    learning_rate: float = 2e-3
    """Peak learning rate of everything but the gates."""
    gate_learning_rate_multiplier: float = 10.0
    """The gates start at zero and decide how soon the encoder is heard: they learn faster by this factor."""
    warmup: float = 0.05
    """Share of the run in which the learning rate rises linearly."""
    final_learning_rate: float = 0.02
    """Where the cosine ends, as a share of the peak."""
    kl_weight: float = 0.0
    """Weight of the divergence from the backbone that reads the documents in its prompt, beside the cross-entropy; it
    costs a forward pass over the full prompts."""
    kl_top_k: int = 64
    """Likeliest tokens of the backbone that the divergence tells apart; all others count as one."""
    lora_rank: int | None = None
    """LoRA of this rank on the encoder's layers (method block: the backbone's) instead of training them in full; what
    is published is merged."""
    lora_alpha: float = 16.0
    """LoRA's scale is lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout in front of LoRA's matrices."""
    weight_decay: float = 0.01
    """AdamW's, on matrices only (not on norms, biases and gates)."""
    adam_beta2: float = 0.98
    """AdamW's second beta."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 turns clipping off."""
    gradient_checkpointing: bool = False
    """Less memory for more time."""
    bf16: bool = False
    """Mixed precision (autocast to bfloat16); under DeepSpeed its own configuration decides."""
    deepspeed: str | None = None
    """A DeepSpeed configuration (JSON), passed through as it is: see configs/deepspeed. Needs `torchrun`."""
    max_bad_steps: int = 0
    """Batches with a NaN or infinite loss that are left out (each is kept in a file) before the run stops."""
    seed: int = 0
    """Initialisation of new weights, and the order of the data."""
    answers: Literal["on_policy", "gold"] = "on_policy"
    """on_policy trains on the backbone's own greedy answers with the documents in its prompt; gold on the data's."""
    answer_max_new_tokens: int = 48
    """Longest answer the backbone may give."""
    answer_batch_size: int = 64
    """Questions answered at once by the backbone."""
    answers_dir: str | None = None
    """Folder where answers are kept for the next run; null is answers in output_dir."""
    teacher: str | None = None
    """Hub id, folder or registered name of another model that answers in the backbone's place."""
    logging_steps: int = 5
    """Steps between two loss records."""
    save_steps: int | None = None
    """Steps between two resumable checkpoints; null writes the final adapter only."""
    eval_steps: int | None = None
    """Steps between two records of the loss on held-out examples (`eval.limit` of them); null: none."""
    eval_answers: int = 32
    """Held-out questions answered at each of these evaluations, for exact match and F1; 0: none (as under ZeRO-3)."""
    save_total_limit: int = 2
    """Older resumable checkpoints are removed."""
    output_dir: str = "out/comb"
    """Folder of the adapter, training.json and the loss plot."""
    report_to: tuple[str, ...] = ()
    """tensorboard, wandb, trackio: whatever is installed."""
    run_name: str | None = None
    """Name of the run there; null is output_dir."""

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None and self.max_seconds is None:
            object.__setattr__(self, "epochs", 1.0)
        for name in (
            "steps", "epochs", "max_seconds", "save_steps", "eval_steps", "batch_document_tokens", "batch_query_tokens"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"train.{name} must be greater than 0, not {value}")
        for name in ("batch_size", "gradient_accumulation_steps", "answer_max_new_tokens", "answer_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be at least 1, not {getattr(self, name)}")
        if self.kl_weight < 0 or self.kl_top_k < 1:
            raise ValueError(
                f"train.kl_weight must be at least 0 and train.kl_top_k at least 1, not {self.kl_weight} and "
                f"{self.kl_top_k}"
            )
        if self.method == "block" and self.kl_weight > 0 and self.lora_rank is None:
            raise ValueError(
                "train.kl_weight needs the backbone as it was, which train.method=block keeps only with train.lora_rank"
            )
        if self.eval_answers < 0:
            raise ValueError(f"train.eval_answers must be at least 0, not {self.eval_answers}")
        if self.max_bad_steps < 0:
            raise ValueError(f"train.max_bad_steps must be at least 0, not {self.max_bad_steps}")
        if self.teacher is not None and self.answers != "on_policy":
            raise ValueError(f"train.teacher answers only with train.answers=on_policy, not {self.answers!r}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"train.warmup is a share of the run, 0 <= warmup < 1, not {self.warmup}")


@dataclass(frozen=True)
class EvalConfig:
    """The evaluation on held-out groups after training."""

    methods: tuple[str, ...] = ("full", "comb")
    """Methods to compare; "none" is the control without documents."""
    limit: int = 100
    """Held-out examples at most."""
    max_new_tokens: int = 48
    """Longest answer."""
    batch_size: int = 32
    """Questions answered at once."""
    timing_examples: int = 8
    """Examples of which the time to the first token is measured, one request at a time; 0 measures none."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.train.method == "block":
            if self.model.init_from is not None:
                raise ValueError("model.init_from is an adapter; with train.method=block, go on from model.backbone")
            if self.eval == EvalConfig():
                object.__setattr__(self, "eval", EvalConfig(methods=("full", "block")))
            if "comb" in self.eval.methods:
                raise ValueError("eval.methods has comb, but train.method=block trains no encoder; use full, block")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return _plain(dataclasses.asdict(self))  # type: ignore[no-any-return]  # a dict stays a dict


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies ``section.key=value`` overrides (values are YAML: ``train.steps=20``).

    Raises:
        ValueError: for a missing or malformed file, an unknown key (naming the nearest one and the file), or a value
            of the wrong type.
    """
    content: dict[str, Any] = {}
    source = "the command line"
    if path is not None:
        source = str(path)
        if not Path(path).is_file():
            raise ValueError(f"there is no configuration file {source!r}")
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{source} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{source}: expected sections model, data, train and eval, got {type(content).__name__}")
    for item in overrides:
        # checked alone first, so that a mistake on the command line is not blamed on the file
        _build(Config, _override({}, item), "", "the command line")
        content = _override(content, item)
    return config_from_dict(content, source)


def config_from_dict(content: Mapping[str, Any], source: str = "configuration") -> Config:
    """A `Config` from nested plain values. Raises ValueError as `load_config` does."""
    return _build(Config, content, "", source)


def override(config: Config, items: Sequence[str]) -> Config:
    """`config` with ``section.key=value`` items applied, the last one winning. Raises ValueError as `load_config`."""
    content: dict[str, Any] = config.to_dict()
    for item in items:
        content = _override(content, item)
    return _build(Config, content, "", "the command line")


def _override(content: Mapping[str, Any], item: str) -> dict[str, Any]:
    """`content` with one ``section.key=value`` applied."""
    name, equals, text = item.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"expected section.key=value, got {item!r} (for example train.steps=20)")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise ValueError(f"{item!r}: the value is not YAML ({error})") from error
    changed = copy.deepcopy(dict(content))
    _assign(changed, name.strip().split("."), value, item)
    return changed


def _assign(content: dict[str, Any], path: list[str], value: Any, item: str) -> None:
    target = content
    for depth, part in enumerate(path[:-1]):
        # unknown sections and keys are left to _build, which knows what would be right
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ValueError(f"{item!r}: {'.'.join(path[: depth + 1])} is a value and has no keys")
    target[path[-1]] = value


def _build(kind: type[T], content: Mapping[str, Any], prefix: str, source: str) -> T:
    hints = get_type_hints(kind)
    unknown = [key for key in content if key not in hints]
    if unknown:
        raise ValueError(_unknown_key(str(unknown[0]), prefix, list(hints), source))
    values = {}
    for key, value in content.items():
        hint = hints[key]
        name = f"{prefix}{key}"
        if dataclasses.is_dataclass(hint):
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"{source}: {name} is a section of keys, got {value!r}")
            values[key] = _build(hint, value or {}, f"{name}.", source)  # type: ignore[arg-type]  # a class
        else:
            values[key] = _convert(value, hint, name, source)
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _build_item(kind: type[T], item: Any, name: str, source: str) -> T:
    """One section of a list of them."""
    if not isinstance(item, Mapping):
        raise ValueError(f"{source}: {name} is a section of keys, got {item!r}")
    for wanted in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass
        required = wanted.default is dataclasses.MISSING and wanted.default_factory is dataclasses.MISSING
        if required and wanted.name not in item and not set(item) - set(get_type_hints(kind)):
            raise ValueError(f"{source}: {name} needs a {wanted.name}")
    return _build(kind, item, f"{name}.", source)


def _unknown_key(key: str, prefix: str, known: list[str], source: str) -> str:
    sections = {section: list(get_type_hints(hint)) for section, hint in get_type_hints(Config).items()}
    close = [f"{prefix}{name}" for name in difflib.get_close_matches(key, known, n=1)]
    # a right key in the wrong section is the other common slip
    close += [f"{section}.{key}" for section, keys in sections.items() if key in keys]
    hint = f"did you mean {' or '.join(close)}?" if close else f"known keys: {', '.join(sorted(known))}"
    return f"{source}: unknown key {prefix}{key}; {hint}"


def _convert(value: Any, hint: Any, name: str, source: str) -> Any:
    """`value` as the annotated type. Raises ValueError naming key, file, expected type and value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        if value is None and type(None) in arguments:
            return None
        [inner] = [argument for argument in arguments if argument is not type(None)]
        return _convert(value, inner, name, source)
    if origin is Literal:
        if value in arguments:
            return value
        raise ValueError(f"{source}: {name} is one of {', '.join(map(repr, arguments))}, not {value!r}")
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        if value is None:
            raise ValueError(f"{source}: {name} must be a list of {arguments[0].__name__}, not null")
        if dataclasses.is_dataclass(arguments[0]):
            return tuple(
                _build_item(arguments[0], item, f"{name}[{place}]", source)  # type: ignore[arg-type]  # a class
                for place, item in enumerate(items)
            )
        return tuple(_convert(item, arguments[0], name, source) for item in items)
    if origin is dict:
        if isinstance(value, dict):
            return value
        raise ValueError(f"{source}: {name} must be a section of keys, not {value!r}")
    if hint is float:
        # YAML 1.1 reads 1e-3 (no dot) as text
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                pass
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{source}: {name} must be {_name(hint)}, not {value!r}")


def _name(hint: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(hint, str(hint))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
