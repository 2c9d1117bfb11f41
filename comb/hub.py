"""Publishing adapters: the model card, what a push would upload, and the push itself."""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from jinja2 import Template
from safetensors import safe_open

from comb.config import CombConfig

CARD = "README.md"
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
TRAINING, RESULTS = "training.json", "results.json"
BEGIN, END = "<!-- comb: generated, rewritten on every save -->", "<!-- comb: end of the generated part -->"

# what an adapter repository holds; everything else in the folder (optimizer state, logs) stays at home
PUBLISHED = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "README.md",
    "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "added_tokens.json",
    TRAINING, RESULTS, "*.png",
)  # fmt: skip


def write_card(config: CombConfig, folder: Path, *, dtype: Any, repo: str | None = None) -> str:
    """Writes the generated part of the model card, and leaves alone what a person wrote around it.

    Args:
        dtype: of the adapter's weights, and so of its cache.
        repo: name of the repository it is for; the folder's by default.

    Returns:
        the card's text.
    """
    card = merged_card(config, folder, dtype=dtype, repo=repo)
    (folder / CARD).write_text(card)
    return card


def merged_card(config: CombConfig, folder: Path, *, dtype: Any, repo: str | None = None) -> str:
    """The text `write_card` would write: the generated part anew, everything else as it stands in the folder."""
    path = folder / CARD
    fresh = render_card(config, repo or folder.name, _facts(folder), dtype=dtype)
    if not path.exists():
        return fresh
    old = path.read_text()
    if BEGIN not in old or END not in old:
        return old
    body = fresh[fresh.index(BEGIN) : fresh.index(END) + len(END)]
    return old[: old.index(BEGIN)] + body + old[old.index(END) + len(END) :]


def render_card(config: CombConfig, repo: str, facts: dict[str, Any], *, dtype: Any) -> str:
    """The model card of an adapter as Markdown with the Hub's YAML header.

    Args:
        facts: further rows for the card's table, such as scores with the command that made them.
    """
    encoder: Any = config.encoder_config
    dtype = str(dtype).removeprefix("torch.")
    layers = config.cross_attention_layers or []
    size = {"float64": 8, "float32": 4}.get(dtype, 2)
    backbone = config.backbone_name_or_path
    data = ModelCardData(
        # the Hub links adapters to their backbone by this field, which must be a Hub id
        base_model=backbone if is_hub_id(backbone) else None,
        library_name="comb",
        pipeline_tag="text-generation",
        tags=["comb", "position-independent-caching", "kv-cache", "rag"],
    )
    card: str = Template(TEMPLATE.read_text(), keep_trailing_newline=True).render(
        card_data=data.to_yaml(), begin=BEGIN, end=END, title=repo.split("/")[-1], repo=repo, backbone=backbone,
        revision=config.backbone_revision, model_type=config.get_text_config().model_type,
        encoder_layers=encoder.num_hidden_layers, causal=encoder.causal, cross_layers=layers, dtype=dtype,
        max_document_tokens=encoder.max_position_embeddings, facts=sorted(facts.items()),
        bytes_per_token=2 * len(layers) * encoder.num_key_value_heads * encoder.head_dim * size,
    )  # fmt: skip
    return card


def is_hub_id(name: str) -> bool:
    """Whether a backbone's name is an ``owner/name`` on the Hub, not a folder or a registered short name."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def refresh_card(folder: Path) -> None:
    """Renders an adapter folder's card again, with what training and evaluation have written beside it since."""
    write_card(CombConfig.from_pretrained(folder), folder, dtype=_check_weights(folder))


def _facts(folder: Path) -> dict[str, Any]:
    """Rows for the card from what `comb train` and `comb eval` leave in the folder; each names its command."""
    facts: dict[str, Any] = {}
    if (training := _read_json(folder / TRAINING)) is not None:
        config = training.get("config", {})
        facts["trained on"] = (
            f"{config.get('data', {}).get('dataset')}, {training['tokens']['examples']} examples, "
            f"{config.get('train', {}).get('answers')} answers, {training['steps']} steps, seed {training['seed']} "
            f"(`{_command(training)}`)"
        )
    if (evaluation := _read_json(folder / RESULTS)) is not None:
        for row in evaluation["results"]:
            scores = f"{100 * row['em']:.1f}% exact match, {100 * row['f1']:.1f}% F1"
            facts[f"method `{row['method']}`"] = f"{scores}, n = {row['n']} (`{_command(evaluation)}`)"
    return facts


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _command(record: dict[str, Any]) -> str:
    argv = record.get("argv") or ["?"]
    return " ".join([Path(argv[0]).name, *argv[1:]])


@dataclass(frozen=True)
class PushPlan:
    """What a push uploads: (path in the repository, bytes) pairs, what stays at home, the card, and warnings."""

    files: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...]
    card: str
    warnings: tuple[str, ...] = ()


def plan_push(folder: str | Path, repo: str) -> PushPlan:
    """Checks that `folder` is a complete adapter and says what would be uploaded; changes nothing on the Hub.

    Raises:
        ValueError: if the folder is no adapter, or its weights file holds more than an adapter.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json: give the folder that save_pretrained or `comb train` wrote")
    config = CombConfig.from_pretrained(folder)
    card = merged_card(config, folder, dtype=_check_weights(folder), repo=repo)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} | {CARD}
    # fnmatch's * crosses slashes; only files at the top are published
    chosen = {name for name in names if "/" not in name and any(fnmatch.fnmatch(name, p) for p in PUBLISHED)}
    sizes = {name: len(card.encode()) if name == CARD else (folder / name).stat().st_size for name in chosen}
    return PushPlan(
        files=tuple(sorted(sizes.items())),
        left_out=tuple(sorted(names - chosen)),
        card=card,
        warnings=_warnings(config, chosen),
    )


def _warnings(config: CombConfig, names: set[str]) -> tuple[str, ...]:
    found = []
    if not is_hub_id(config.backbone_name_or_path):
        found.append(
            f"the backbone {config.backbone_name_or_path!r} is not a Hub id: others can load this adapter only with "
            "backbone=..."
        )
    if "tokenizer.json" not in names:
        found.append("there is no tokenizer.json: the backbone's tokenizer will be used")
    return tuple(found)


def _check_weights(folder: Path) -> str:
    """Refuses weights files with more or less than an adapter. Returns the weights' dtype."""
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise ValueError(f"{folder} has no model.safetensors: the adapter's weights are missing")
    dtypes: set[str] = set()
    for path in weights:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            dtypes.update(str(file.get_tensor(name).dtype) for name in names[:1])
        foreign = [name for name in names if not name.startswith(("encoder.", "cross_blocks."))]
        if foreign:
            raise ValueError(f"{path} holds weights that belong to no adapter, among them {foreign[0]!r}")
    return min(dtypes)


def push(folder: str | Path, repo: str, *, private: bool = False, api: HfApi | None = None) -> str:
    """Uploads an adapter to the Hub (`HF_TOKEN` or a login is used). Returns the commit's address."""
    plan = plan_push(folder, repo)
    (Path(folder) / CARD).write_text(plan.card)
    api = api or HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo,
        folder_path=str(folder),
        allow_patterns=[name for name, _ in plan.files],
        commit_message="Upload comb adapter",
    )
    return str(commit.commit_url)
