"""Publishing adapters: the card in the folder, what a push would upload, and the push itself."""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not re-exported by name
from safetensors import safe_open
from transformers import PreTrainedConfig

from comb.backbones import backbones, damage
from comb.backbones.adapter import AdapterConfig, is_adapter
from comb.backbones.loading import is_hub_id, load_config
from comb.files import read_text, rewritten
from comb.hub.card import HUB_ERRORS, Card, reason, render
from comb.hub.facts import RESULTS, TRAINING
from comb.hub.redaction import clean_files, known_secrets

logger = logging.getLogger(__name__)

CARD = "README.md"

# what an adapter repository holds; everything else in the folder (optimizer state, logs, code) stays at home
PUBLISHED = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "README.md",
    *damage.TOKENIZER_FILES, TRAINING, RESULTS, "*.png",
)  # fmt: skip


class UploadFailedError(RuntimeError):
    """The Hub refused or couldn't be reached."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns an error of the Hub's client into an `UploadFailedError` that begins with `what`."""
    try:
        yield
    except HUB_ERRORS as error:
        raise UploadFailedError(f"{what}: {reason(error)}") from error


@dataclass(frozen=True)
class PushPlan:
    """What a push uploads."""

    folder: Path
    repo: str
    private: bool
    files: tuple[tuple[str, int], ...]  # paths in the repository, and bytes
    left_out: tuple[str, ...]  # what stays at home
    card: str
    warnings: tuple[str, ...]
    contents: Mapping[str, bytes]  # of files that go up changed: the card, records that a token was taken out of
    parent: str | None  # the commit that the push goes on from
    deleted: tuple[str, ...]  # what the push before left there, and the folder hasn't


def write_card(config: Any, folder: Path) -> None:
    """Writes the generated part of the model card, and leaves alone what a person wrote."""
    weights = read_weights(folder, config.parts) if any(folder.glob("model*.safetensors")) else (None, None)
    card, _ = render(config, folder, folder.name, weights, here=read_card(folder))
    with rewritten(folder) as fresh:
        (fresh / CARD).write_text(str(card), encoding="utf-8")


def refresh_card(folder: Path) -> None:
    """Renders an adapter's card again, with what training and evaluation have written beside it since.

    Any other folder is left alone.
    """
    config, _ = PreTrainedConfig.get_config_dict(folder) if (folder / "config.json").is_file() else ({}, None)
    if is_adapter(config):
        write_card(load_config(folder), folder)


def plan_push(folder: str | Path, repo: str, *, api: HfApi | None = None, private: bool = False) -> PushPlan:
    """Checks that `folder` is a complete adapter and says what would be uploaded; changes nothing, here or there.

    Args:
        api: asks the Hub for the card that is there and the backbone's licence; without it nothing is asked.
        private: whether the repository is to be private.

    Raises:
        ValueError: if the folder is no adapter, its weights file holds more than one, a file holds a token, the name
            is none the Hub takes, or the repository is public and shouldn't be.
        UploadFailedError: if the Hub can't be asked.
    """
    folder = Path(folder)
    if repo.count("/") != 1:
        raise ValueError(f"expected owner/name, for example me/comb-qwen3-8b, got {repo!r}")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no name for a repository: {error}") from error
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json: give the folder that save_pretrained or `comb train` wrote")
    config = load_config(folder)
    if not isinstance(config, AdapterConfig):
        raise ValueError(f"{folder} holds a checkpoint of model_type {config.model_type!r}, not a COMB adapter")
    damage.check_files(folder)
    weights = read_weights(folder, config.parts)
    there, parent, old = (None, None, set[str]()) if api is None else _read_remote(api, repo, private)
    card, replaces = render(config, folder, repo, weights, here=read_card(folder), there=there, api=api)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} | {CARD}
    chosen = _matching(names, PUBLISHED)
    # a picture that the card shows is a person's
    deleted = sorted(
        name for name in _matching(old, PUBLISHED) - chosen if not (name.endswith(".png") and name in str(card))
    )
    warnings, backbone = [], config.backbone_name
    if not is_hub_id(backbone) and backbone not in backbones:
        warnings.append(
            f"the backbone {backbone!r} is not a Hub id: others can load this adapter only with backbone=..."
        )
    if not _matching(chosen, damage.TOKENIZER_FILES):
        warnings.append("there is no tokenizer: the backbone's will be used")
    if card.is_own:
        warnings.append(f"{CARD} has no generated part and goes up as it is; without that file, one is generated")
    if "license" not in card.header:
        warnings.append(f"the card states no licence: write `license: ...` into the header of {CARD}")
    contents = {CARD: str(card).encode()}
    token = api.token if api is not None and isinstance(api.token, str) else None
    records = {name for name in chosen if name == TRAINING or fnmatch.fnmatch(name, RESULTS)}
    warnings += clean_files(folder, chosen, records, contents, known_secrets(token, get_token()))
    if replaces:
        warnings.append(
            f"{CARD} on the Hub has words of a person's that the folder's hasn't, and is replaced; they stay in "
            f"https://huggingface.co/{repo}/blob/{parent}/{CARD}"
        )
    if deleted:
        warnings.append(
            f"{', '.join(deleted)} on the Hub, which {folder} hasn't, is deleted there; it stays in "
            f"https://huggingface.co/{repo}/tree/{parent}"
        )
    sizes = {name: len(contents[name]) if name in contents else (folder / name).stat().st_size for name in chosen}
    return PushPlan(
        folder,
        repo,
        private,
        files=tuple(sorted(sizes.items())),
        left_out=tuple(sorted(names - chosen)),
        card=str(card),
        warnings=tuple(warnings),
        contents=contents,
        parent=parent,
        deleted=tuple(deleted),
    )


def push(folder: str | Path, repo: str, *, private: bool = False, api: HfApi | None = None) -> str:
    """Plans and uploads (`HF_TOKEN` or a login is used); the plan's warnings are logged. Returns the commit's address,
    and raises as `plan_push` and `upload` do."""
    api = api or HfApi()
    plan = plan_push(folder, repo, api=api, private=private)
    for warning in plan.warnings:
        logger.warning("%s", warning)
    return upload(plan, api)


def upload(plan: PushPlan, api: HfApi) -> str:
    """Uploads what was planned in one commit. Returns its address.

    Raises:
        UploadFailedError: if the Hub refuses or can't be reached: then nothing of the push is there.
    """
    repo = plan.repo
    with explained(f"the repository {repo} could not be made or opened, nothing was uploaded"):
        api.create_repo(repo, private=plan.private, exist_ok=True)
    # one commit: files appear all together or not at all. The client retries requests, and sends no file a second time
    added = [CommitOperationAdd(name, plan.contents.get(name, plan.folder / name)) for name, _ in plan.files]
    deleted = [CommitOperationDelete(name, is_folder=False) for name in plan.deleted]
    with explained(f"the upload to {repo} failed, and nothing of it is there; the same command goes on"):
        done = api.create_commit(
            repo, [*added, *deleted], commit_message="Upload comb adapter", parent_commit=plan.parent
        )
    return str(done.commit_url)


def read_weights(folder: Path, parts: Sequence[str]) -> tuple[str, int]:
    """The dtype and number of an adapter's weights, from the headers of its files.

    Raises ValueError for files with more or less than an adapter's `parts` (`AdapterConfig.parts`).
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no model.safetensors: the adapter's weights are missing")
    dtypes: set[str] = set()
    parameters = 0
    for path in files:
        with damage.explained(path), safe_open(path, framework="pt") as file:
            names = list(file.keys())
            dtypes.update(str(file.get_tensor(name).dtype) for name in names[:1])
            parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        foreign = [name for name in names if name.partition(".")[0] not in parts]
        if foreign:
            raise ValueError(f"{path} holds weights that belong to no adapter, among them {foreign[0]!r}")
    return min(dtypes), parameters


def read_card(folder: Path) -> Card | None:
    """The card in a folder, None without one. Raises ValueError if it can't be read."""
    path = folder / CARD
    return Card.parse(read_text(path), str(path)) if path.exists() else None


def _matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    # fnmatch's * crosses slashes
    return {name for name in names for p in patterns if name.count("/") == p.count("/") and fnmatch.fnmatch(name, p)}


def _read_remote(api: HfApi, repo: str, private: bool) -> tuple[Card | None, str | None, set[str]]:
    """The card on the Hub, the newest commit and its files, where there are any."""
    with explained(f"the Hub could not be asked about {repo}, nothing was uploaded"):
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            return None, None, set()
        try:
            text = read_text(api.hf_hub_download(repo, CARD, revision=info.sha))
        except RemoteEntryNotFoundError:
            text = None
    if private and info.private is False:
        raise ValueError(
            f"{repo} is on the Hub already, and public: --private holds for new repositories. Make it private in its "
            "settings, or take another name"
        )
    card = None if text is None else Card.parse(text, f"{repo}/{CARD} on the Hub")
    return card, info.sha, {file.rfilename for file in info.siblings or ()}
