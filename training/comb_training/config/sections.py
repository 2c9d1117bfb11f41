"""The sections of a training run's configuration, their keys, and the types of these: strict, but for what YAML writes
in its own way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from comb.documents.datasets import HUB

T = TypeVar("T")

KNOWN_KEYS = ConfigDict(extra="forbid")
"""For pydantic's `dataclass`: a key that is not known is an error."""


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 (no dot) as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _heard(value: float) -> float:
    """Refuses rates, weights and norms below AdamW's epsilon, with which nothing would be learned."""
    if 0 < value < 1e-8:
        raise PydanticCustomError("greater_than_equal", "too small", {"ge": "1e-8, or 0"})
    return value


def _items(value: Any) -> Any:
    """A list, or one value instead of it."""
    return value if value is None or isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)


# beyond these bounds float32 overflows, and lists of so many don't end
Number = Annotated[float, Field(strict=True, allow_inf_nan=False, lt=1e9), BeforeValidator(_number)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0), AfterValidator(_heard)]
Share = Annotated[Number, Field(ge=0, lt=1)]
AboveZero = Annotated[StrictInt, Field(gt=0, lt=2**31)]
AtLeastZero = Annotated[StrictInt, Field(ge=0, lt=2**31)]
AtLeastOne = Annotated[StrictInt, Field(ge=1, lt=2**31)]
Few = Annotated[StrictInt, Field(ge=1, lt=2**10)]
Items = Annotated[tuple[T, ...], BeforeValidator(_items)]
Options = dict[str, Any]


HeldoutShare = Annotated[Number, Field(gt=0, lt=1)]

MIXTURE = "mixture"
"""`DataConfig.dataset` where there is a mixture: what tables and plots call the data."""
ROWS = (
    "dataset", "path", "mixture", "epoch_examples", "max_repeats", "num_documents", "heldout_share", "limit", "options",
)  # fmt: skip
"""Keys of `DataConfig` that say which rows are read; the others, how text is written, hold for other rows as well."""


def other_rows(section: Mapping[str, Any], named: str | Sequence[Any]) -> dict[str, Any]:
    """The keys of a `data` section with the rows `named` in the place of its own (``data=mine.jsonl``): what
    `comb.documents.datasets.locate` finds, or a list of that, a mixture of all their rows."""
    kept = {name: value for name, value in section.items() if name not in ROWS}
    if isinstance(named, str):
        return kept | {"dataset": named}
    names = [_stem(each) if isinstance(each, str) else None for each in named]
    mixture = list(named)
    for place, name in enumerate(names):
        if name is not None and names.count(name) > 1:  # files of one name in several folders: by their whole paths
            mixture[place] = {"dataset": named[place], "name": re.sub(r"[^\w.-]+", "-", named[place]).strip("-.")}
    return kept | {"mixture": mixture}


def _stem(dataset: str) -> str:
    return Path(dataset.partition("?")[0]).stem


def _check_template(template: str | None, where: str) -> None:
    if template is not None and "{query}" not in template:
        raise ValueError(f"{where}: query_template {template!r} has no {{query}}: every question would be the same")


@dataclass(frozen=True, config=KNOWN_KEYS)
class MixtureEntry:
    """One set of a mixture (`DataConfig.mixture`). What is null is as in `DataConfig`. Raises ValueError for a value
    out of range, or an option that the mixture decides."""

    dataset: str
    """As in `DataConfig`: a registered dataset, or a file, folder or set on the Hub."""
    path: str | None = None
    """The dataset's file or folder; null for generated data."""
    name: str | None = None
    """What the set is called in counts and ids; null is `dataset`. Two sets can't have the same name."""
    weight: Positive | None = None
    """Share of the epoch's examples, relative to the other weights; null is 1, or, where no set of the mixture has a
    weight, all that it has."""
    num_documents: AtLeastOne | None = None
    """Documents per example."""
    heldout_share: HeldoutShare | None = None
    """Share of the groups (articles, stories) kept for evaluation."""
    limit: AtLeastOne | None = None
    """Different examples of this set at most, for training."""
    query_template: str | None = None
    """How a question is written; {query} is replaced."""
    options: Options = Field(default_factory=dict)
    """More options of the dataset's reader."""

    def __post_init__(self) -> None:
        if self.name is None:
            object.__setattr__(self, "name", _stem(self.dataset))
        where = f"data.mixture, set {self.name!r}"
        if not self.name or "/" in self.name or "@" in self.name:
            raise ValueError(f"{where}: a name is a text without / and @, which ids have behind it")
        _check_template(self.query_template, where)
        decided = sorted({"split", "limit"} & self.options.keys())
        if decided:
            raise ValueError(f"{where}: options can't hold {decided[0]!r}, which the mixture decides")


def _entry(value: Any) -> Any:
    return {"dataset": value} if isinstance(value, str) else value


@dataclass(frozen=True, config=KNOWN_KEYS)
class DataConfig:
    """Which examples, and how they become tokens."""

    dataset: str = ""
    """A registered dataset (squad, babi, nano, ...), or what is read: a file or folder of rows with documents, query
    and answer, or a set on the Hub, hf://org/name?split=train. Left out it is nano, or with a mixture "mixture"."""
    path: str | None = None
    """The dataset's file or folder, null for generated data; with a mixture, the folder that its paths are in."""
    mixture: Items[Annotated[MixtureEntry, BeforeValidator(_entry)]] = ()
    """Several sets instead of one `dataset`, each with a weight, or by its name alone."""
    epoch_examples: AtLeastOne | None = None
    """Examples of an epoch of the mixture; null: as many as `max_repeats` allows."""
    max_repeats: Annotated[Number, Field(ge=1, lt=1000)] = 1.0
    """How often an epoch of the mixture holds each example of a set at most, in the mean over the set. The set that
    runs out first decides how long the epoch is."""
    num_documents: AtLeastOne | None = None
    """Documents per example; null is the dataset's own default."""
    heldout_share: HeldoutShare | None = None
    """Share of the groups (articles, stories) kept for evaluation; null is the dataset's own default."""
    limit: AtLeastOne | None = None
    """Examples at most, for training."""
    seed: StrictInt = 0
    """Decides splits, distractors and shuffles."""
    max_document_tokens: AtLeastOne | None = None
    """Longer documents are cut (counted and said); null is what the encoder can take."""
    splitter: str | None = None
    """A splitter with its budget, fixed:512 say: documents of more tokens become several documents, and nothing of
    them is cut off (counted and said); null cuts at `max_document_tokens`."""
    max_prompt_tokens: AtLeastOne | None = None
    """Examples with a longer full prompt get no answer from the backbone and are dropped (counted and said)."""
    max_query_tokens: AtLeastOne = 1024
    """Examples whose query and answer are longer are dropped (counted and said)."""
    document_template: str | None = None
    """How a document is written, with {text} and {title}; null is the title, if there is one, and the text."""
    query_template: str = "{query}"
    """How a question is written; {query} is replaced."""
    questions_per_row: AtLeastOne = 1
    """Questions over the same documents that a row of training asks one after the other, at most; the answers of all of
    them are learned. Above 1 it needs `prefix`."""
    prefix: str | None = None
    """Plain text in front of the documents, examples say, for a model that answers best so; there is no chat template
    then. As in a file of evaluation sets (configs/evaluation.yaml)."""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """What the chat template is given, {enable_thinking: false} for Qwen3 say. The adapter's template has it from then
    on, wherever it is asked and served, unless a request says otherwise."""
    stop: str = ""
    """Characters that end an answer, each of them, where no chat template does; the data's answers get the first."""
    options: Options = Field(default_factory=dict)
    """More options of the dataset's reader."""

    @property
    def label(self) -> str:
        """The datasets' names, for titles; a person's own rows are called by their file."""
        sets = [(entry.dataset, entry.path) for entry in self.mixture] or [(self.dataset, self.path)]
        names = [path if name == "jsonl" and path else name for name, path in sets]
        return ", ".join(dict.fromkeys(name if name.startswith(HUB) else Path(name).name for name in names))

    def __post_init__(self) -> None:
        if self.questions_per_row > 1 and self.prefix is None:
            raise ValueError(
                "data.questions_per_row joins questions as plain text: give data.prefix ('' for none, on a command "
                "line data.prefix=\"''\"), as without one the tokenizer's chat template writes them"
            )
        if self.chat_template_kwargs and self.prefix is not None:
            raise ValueError("data.chat_template_kwargs are for a chat template, and with data.prefix there is none")
        _check_template(self.query_template, "data")
        if "split" in self.options:
            raise ValueError("data.options can't hold 'split': what is trained on would count as held out")
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
                raise ValueError(
                    f"data.{name} and data.mixture are both given: it belongs to the sets of the mixture; data=FILE "
                    "takes other rows in the place of all of them"
                )
        object.__setattr__(self, "dataset", MIXTURE)
        names = [entry.name for entry in self.mixture]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"data.mixture has two sets called {twice[0]!r}: give them a name each")


@dataclass(frozen=True, config=KNOWN_KEYS)
class TrainConfig:
    """Optimisation. Training stops at the first of `steps`, `epochs` and `max_seconds` that is reached."""

    method: Literal["comb", "linktokens"] = "comb"
    """comb trains an encoder and cross blocks on the frozen backbone, linktokens a few vectors in front of every
    document."""
    steps: AboveZero | None = None
    """Optimizer steps."""
    epochs: Positive | None = None
    """Passes over the data."""
    max_seconds: Positive | None = None
    """Wall-clock seconds of optimisation; the learning rate then follows the clock."""
    batch_size: AtLeastOne = 32
    """Questions per forward pass and rank, at most."""
    batch_document_tokens: AboveZero | None = None
    """Tokens of different documents per forward pass and rank, at most; null: no limit."""
    batch_query_tokens: AboveZero | None = None
    """Questions times tokens of the longest one (query and answer) per forward pass and rank, at most; null: no limit.
    With either budget, examples of like length share a batch."""
    gradient_accumulation_steps: AtLeastOne = 1
    """Forward passes per optimizer step."""
    learning_rate: NotNegative = 2e-3
    """Peak learning rate of everything but the gates, which learn ten times as fast."""
    warmup: Share = 0.05
    """Share of the run in which the learning rate rises linearly."""
    ce_weight: NotNegative = 1.0
    """Weight of the cross-entropy on the answers; 0 with `kl_weight` distils alone, which sharpens nothing."""
    kl_weight: NotNegative = 0.0
    """Weight of the divergence from the backbone that reads the documents in its prompt, beside the cross-entropy; it
    costs a forward pass over the full prompts."""
    kl_top_k: AtLeastOne = 64
    """Likeliest tokens of the backbone that the divergence tells apart; all others count as one."""
    lora_rank: AtLeastOne | None = None
    """LoRA of this rank beside the encoder's layers and the blocks' MLPs instead of training those in full: they stay
    the backbone's, and the adapter doesn't hold them."""
    weight_decay: NotNegative = 0.01
    """AdamW's, on matrices only (not on norms, biases and gates)."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this norm; 0 turns clipping off."""
    gradient_checkpointing: StrictBool = False
    """Less memory for more time."""
    bf16: StrictBool = False
    """Mixed precision (autocast to bfloat16); under DeepSpeed its own configuration decides."""
    deepspeed: str | None = None
    """A DeepSpeed configuration (JSON) without optimizer and scheduler: see configs/deepspeed. Needs `torchrun`."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**32)] = 0
    """Initialisation of new weights, and the order of the data."""
    answers: Literal["on_policy", "gold"] = "on_policy"
    """on_policy trains on the backbone's own greedy answers with the documents in its prompt; gold on the data's."""
    answer_max_new_tokens: AtLeastOne = 48
    """Longest answer the backbone may give."""
    answer_batch_size: AtLeastOne = 64
    """Questions answered at once by the backbone."""
    answers_dir: str | None = None
    """Folder where answers are kept for the next run; null is answers in output_dir."""
    teacher: str | None = None
    """Hub id, folder or registered name of another model that answers in the backbone's place."""
    logging_steps: AtLeastOne = 5
    """Steps between two loss records."""
    save_steps: AboveZero | None = None
    """Steps between two resumable checkpoints; null writes the final adapter only."""
    eval_steps: AboveZero | None = None
    """Steps between two records of the loss on held-out examples (`eval.limit` of them); null: none."""
    save_total_limit: AtLeastZero = 2
    """Older resumable checkpoints are removed; 0 keeps all."""
    output_dir: str = "out/comb"
    """Folder of the adapter, training.json and the loss plot."""
    report_to: Items[str] = ()
    """tensorboard, wandb, trackio: whatever is installed. The run is called as its output_dir."""

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None and self.max_seconds is None:
            object.__setattr__(self, "epochs", 1.0)
        if self.report_to == ("none",):  # as in transformers' TrainingArguments
            object.__setattr__(self, "report_to", ())
        if self.ce_weight == self.kl_weight == 0:
            raise ValueError("train.ce_weight and train.kl_weight are both 0: there is nothing to learn")
        if self.teacher is not None and self.answers != "on_policy":
            raise ValueError(f"train.teacher answers only with train.answers=on_policy, not {self.answers!r}")
        for name, why in (
            ("lora_rank", "link tokens are no layers"),
            ("gradient_checkpointing", "link tokens stand in a cache, which checkpointing turns off"),
        ):
            if self.method == "linktokens" and getattr(self, name):
                raise ValueError(f"train.{name}: {why}; leave it out with train.method=linktokens")


@dataclass(frozen=True, config=KNOWN_KEYS)
class ModelConfig:
    """The backbone and the shape of the encoder that is trained on it (of other methods, `options` alone)."""

    backbone: str = "nano"
    """Hub id, folder, or registered name of the frozen backbone."""
    num_encoder_layers: Few | None = None
    """Layers of the encoder; null: 8 (the paper)."""
    cross_attention_layers: Items[StrictInt] | None = None
    """Backbone layers with a cross block in front of them; null: evenly spread, one per encoder layer."""
    encoder_causal: StrictBool = False
    """A causal mask inside the encoder (the paper's equation); false is bidirectional, as in the published code."""
    dtype: str = "float32"
    """Weights' dtype: float32, bfloat16, float16 or auto."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one. (CUDA_VISIBLE_DEVICES chooses among several.)"""
    init_from: str | None = None
    """An adapter folder to go on from, instead of a fresh encoder."""
    cpu_threads: Few | None = None
    """Threads of torch on a CPU; null is torch's default. Tiny models are fastest with one: more only wait."""
    options: Options = Field(default_factory=dict)
    """More keyword arguments of `CombForCausalLM.from_backbone`, or `LinkTokensForCausalLM.from_backbone`."""


@dataclass(frozen=True, config=KNOWN_KEYS)
class EvalConfig:
    """The evaluation on held-out groups after training."""

    methods: Items[str] = ("full", "comb", "none")
    """Methods to compare; "none" is the control without documents."""
    limit: AtLeastZero = 100
    """Held-out examples at most; 0: no evaluation."""
    max_new_tokens: AtLeastOne = 48
    """Longest answer."""


@dataclass(frozen=True, config=KNOWN_KEYS)
class Config:
    """One training run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.train.eval_steps is not None and self.eval.limit == 0:
            raise ValueError(
                "train.eval_steps measures held-out examples and eval.limit=0 takes none: --no-eval leaves out the "
                "evaluation behind the training alone; train.eval_steps=null measures nothing"
            )
        method = self.train.method
        if method != "comb":
            if self.eval == EvalConfig():
                object.__setattr__(self, "eval", EvalConfig(methods=("full", method, "none")))
            if "comb" in self.eval.methods:
                raise ValueError(
                    f"eval.methods has comb, but train.method={method} trains no encoder; use full, {method}, none"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return TypeAdapter(Config).dump_python(self, mode="json")  # type: ignore[no-any-return]  # a dict

    def changed(self) -> dict[str, Any]:
        """`to_dict` without keys that have their defaults, except for what is trained on what."""
        usual, shown = Config().to_dict(), self.to_dict()
        return {
            name: {
                key: value
                for key, value in section.items()
                if value != usual[name][key] or key in ("backbone", "dataset", "output_dir")
            }
            for name, section in shown.items()
        }
