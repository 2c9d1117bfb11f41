"""Publishing adapters: the card in the folder, what a push would upload, and the push itself."""

from __future__ import annotations

import fnmatch
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig

from comb.backbones.loading import backbones, is_hub_id
from comb.hub.card.facts import RESULTS, TRAINING, read_evaluations, read_training
from comb.hub.card.licence import KEYS, Licence, inherited_licence
from comb.hub.card.merge import WHOLE, Card, Deleted, compose, digest, merge_edits, parse_card
from comb.hub.card.render import render
from comb.hub.redaction import holds_secret, known_secrets, named_secrets, redact_json
from comb.hub.upload import check_repo_name, explained, persist, upload

logger = logging.getLogger(__name__)

CARD = "README.md"
ADAPTER_TYPE = "comb"  # model_type of an adapter: its configuration is registered with transformers by `comb.model`

# what an adapter repository holds; everything else in the folder (optimizer state, logs) stays at home
PUBLISHED = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "README.md",
    "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "added_tokens.json",
    TRAINING, RESULTS, "*.png",
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """What the headers of an adapter's weights files say."""

    dtype: str
    parameters: int


@dataclass(frozen=True)
class Remote:
    """A repository as it is on the Hub: its newest commit (None: there is no repository), its card, its visibility."""

    commit: str | None = None
    card: str | None = None
    private: bool | None = None


@dataclass(frozen=True)
class PushPlan:
    """What a push uploads: (path in the repository, bytes) pairs, what stays at home, the card, and warnings.

    `contents` are the bytes of those files that go up changed: the card, and records that a token was taken out of.
    """

    files: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...]
    card: str
    warnings: tuple[str, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    parent: str | None = None


def write_card(config: Any, folder: Path, *, dtype: Any, repo: str | None = None) -> str:
    """Writes the generated part of the model card, and leaves alone what a person wrote. Returns the card's text.

    Args:
        dtype: of the adapter's weights, and so of its cache.
        repo: name of the repository it is for; the folder's by default.
    """
    weights = read_weights(folder) if any(folder.glob("model*.safetensors")) else None
    parameters = weights.parameters if weights else None
    card, warnings = _merged(config, folder, repo or folder.name, dtype=dtype, parameters=parameters)
    for warning in warnings:
        logger.warning(warning)
    (folder / CARD).write_text(str(card), encoding="utf-8")
    return str(card)


def refresh_card(folder: Path) -> None:
    """Renders an adapter's card again, with what training and evaluation have written beside it since.

    Any other folder is left alone.
    """
    config, _ = PreTrainedConfig.get_config_dict(folder) if (folder / "config.json").is_file() else ({}, None)
    if config.get("model_type") != ADAPTER_TYPE:
        return
    write_card(AutoConfig.from_pretrained(folder), folder, dtype=read_weights(folder).dtype)


def plan_push(
    folder: str | Path,
    repo: str,
    *,
    api: HfApi | None = None,
    private: bool = False,
    prefer_card: str | None = None,
) -> PushPlan:
    """Checks that `folder` is a complete adapter and says what would be uploaded; changes nothing, here or there.

    Args:
        api: asks the Hub for the card that is there and the backbone's licence; without it nothing is asked.
        private: whether the repository is to be private.
        prefer_card: ``folder`` or ``hub``: whose edits hold where the card was edited in both places.

    Raises:
        ValueError: if the folder is no adapter, its weights file holds more than one, a file holds a token, the name
            is none the Hub takes, the card was edited in both places, or the repository is public and shouldn't be.
        UploadFailedError: if the Hub can't be asked.
    """
    folder = Path(folder)
    check_repo_name(repo)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json: give the folder that save_pretrained or `comb train` wrote")
    config = AutoConfig.from_pretrained(folder)
    weights = read_weights(folder)
    remote = Remote() if api is None else read_remote(api, repo)
    if private and remote.private is False:
        raise ValueError(
            f"{repo} is on the Hub already, and public: --private holds for new repositories. Make it private in its "
            "settings, or take another name"
        )
    card, warnings = _merged(
        config, folder, repo, dtype=weights.dtype, parameters=weights.parameters, remote=remote, api=api,
        prefer=prefer_card, pushing=True,
    )  # fmt: skip
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} | {CARD}
    # fnmatch's * crosses slashes; only files at the top are published
    chosen = {name for name in names if "/" not in name and any(fnmatch.fnmatch(name, p) for p in PUBLISHED)}
    contents = {CARD: str(card).encode()}
    token = api.token if api is not None and isinstance(api.token, str) else None
    found = _without_secrets(folder, chosen, contents, known_secrets(token, get_token()))
    sizes = {name: len(contents[name]) if name in contents else (folder / name).stat().st_size for name in chosen}
    return PushPlan(
        files=tuple(sorted(sizes.items())),
        left_out=tuple(sorted(names - chosen)),
        card=str(card),
        warnings=(*warnings, *_warnings(config, card, chosen), *found),
        contents=contents,
        parent=remote.commit,
    )


def push(
    folder: str | Path,
    repo: str,
    *,
    private: bool = False,
    api: HfApi | None = None,
    prefer_card: str | None = None,
) -> str:
    """Uploads an adapter to the Hub (`HF_TOKEN` or a login is used) in one commit. Returns the commit's address.

    Args:
        private, prefer_card: as for `plan_push`.

    Raises:
        ValueError: as `plan_push` does, before anything is uploaded.
        UploadFailedError: if the Hub refuses, or goes on failing; it says what is on the Hub then.
    """
    api = api or HfApi()
    plan_push(folder, repo, prefer_card=prefer_card)  # what is wrong with the folder shows before a repository is made
    with explained(f"the repository {repo} could not be made or opened"):
        persist(lambda: api.create_repo(repo, private=private, exist_ok=True), f"making {repo}")
    plan = persist(
        lambda: plan_push(folder, repo, api=api, private=private, prefer_card=prefer_card), f"reading {repo}"
    )
    files = {name: plan.contents.get(name, Path(folder) / name) for name, _ in plan.files}
    address = upload(api, repo, files, parent=plan.parent, message="Upload comb adapter")
    # only now: the card's record says what was pushed
    (Path(folder) / CARD).write_text(plan.card, encoding="utf-8")
    return address


def read_remote(api: HfApi, repo: str) -> Remote:
    """The repository on the Hub, if there is one. Raises UploadFailedError if the Hub can't be asked."""
    with explained(f"the Hub could not be asked about {repo}"), tempfile.TemporaryDirectory() as temporary:
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            return Remote()
        try:
            path = api.hf_hub_download(repo, CARD, revision=info.sha, local_dir=temporary)
            card = Path(path).read_text(encoding="utf-8")
        except RemoteEntryNotFoundError:
            card = None
        return Remote(info.sha, card, info.private)


def read_weights(folder: Path) -> Weights:
    """The dtype and number of an adapter's weights. Raises ValueError for files with more or less than an adapter."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no model.safetensors: the adapter's weights are missing")
    dtypes: set[str] = set()
    parameters = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            dtypes.update(str(file.get_tensor(name).dtype) for name in names[:1])
            parameters += sum(_product(file.get_slice(name).get_shape()) for name in names)
        foreign = [name for name in names if not name.startswith(("encoder.", "cross_blocks."))]
        if foreign:
            raise ValueError(f"{path} holds weights that belong to no adapter, among them {foreign[0]!r}")
    return Weights(min(dtypes), parameters)


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _merged(
    config: Any,
    folder: Path,
    repo: str,
    *,
    dtype: Any,
    parameters: int | None,
    remote: Remote | None = None,
    api: HfApi | None = None,
    prefer: str | None = None,
    pushing: bool = False,
) -> tuple[Card, list[str]]:
    """The card with what a person wrote in the folder and on the Hub, and warnings."""
    path = folder / CARD
    here = parse_card(path.read_text(encoding="utf-8"), str(path)) if path.exists() else None
    there = parse_card(remote.card, f"{repo}/{CARD} on the Hub") if remote and remote.card is not None else None
    pushed: dict[str, str] = dict(here.record.get("pushed", {})) if here else {}
    ours = here.edits() if here else {}
    edits = ours if there is None else merge_edits(ours, there.edits(), pushed, prefer=prefer)
    licence = _licence(config, folder, edits, (here, there), api)
    generated = render(
        config, repo, dtype=dtype, parameters=parameters, licence=licence, training=read_training(folder),
        evaluations=read_evaluations(folder),
    )  # fmt: skip
    if "license" in edits:  # a person's: said in the text, but not ours to rewrite
        own = {name: value for name, value in generated.header.items() if name not in KEYS}
        generated = replace(generated, header=own)
    # what is written as it would be generated anyway needs no keeping
    if WHOLE not in edits:
        edits = {name: value for name, value in edits.items() if generated.header.get(name, edits) != value}
    if pushing:
        pushed = {name: digest(value) for name, value in edits.items()}
    warnings = [
        f"{where}: what was written inside the generated part is replaced; write above or below it"
        for card, where in ((here, str(path)), (there, f"{repo}/{CARD} on the Hub"))
        if card is not None and card.body_was_edited
    ]
    like = here if here is not None and here.header else there
    return compose(generated, edits, like, pushed), warnings


def _licence(
    config: Any, folder: Path, edits: Mapping[str, Any], cards: tuple[Card | None, ...], api: HfApi | None
) -> Licence:
    """A person's, else the backbone's, else what an earlier card found when the backbone's could be read."""
    if isinstance(edits.get("license"), Deleted):
        return Licence({}, "its author took it out of this card")
    if "license" in edits:
        given = {key: edits[key] for key in KEYS if key in edits and not isinstance(edits[key], Deleted)}
        return Licence(given, "as the author of this card states")
    found = inherited_licence(config.backbone_name_or_path, config.backbone_revision, folder, api=api)
    if found.header:
        return found
    base_model = config.backbone_name_or_path if is_hub_id(config.backbone_name_or_path) else None
    for card in cards:
        if card is not None and "license" in card.header and card.header.get("base_model") == base_model:
            known = {key: card.header[key] for key in KEYS if key in card.header}
            return Licence(known, f"from an earlier look at the backbone's card ({found.why} this time)")
    return found


def _warnings(config: Any, card: Card, names: set[str]) -> tuple[str, ...]:
    found = []
    backbone = config.backbone_name_or_path
    if not is_hub_id(backbone) and backbone not in backbones:
        found.append(f"the backbone {backbone!r} is not a Hub id: others can load this adapter only with backbone=...")
    if "tokenizer.json" not in names:
        found.append("there is no tokenizer.json: the backbone's tokenizer will be used")
    if card.is_own:
        found.append(f"{CARD} has no generated part and goes up as it is; without that file, one is generated")
    if "license" not in card.header:
        found.append(f"the card states no licence: write `license: ...` into the header of {CARD}")
    return tuple(found)


def _without_secrets(folder: Path, names: set[str], contents: dict[str, bytes], secrets: frozenset[str]) -> list[str]:
    """Takes tokens out of records (into `contents`). Raises ValueError for any other file that holds one."""
    warnings = []
    records = {name for name in names if name == TRAINING or fnmatch.fnmatch(name, RESULTS)}
    for name in records:
        data = (folder / name).read_bytes()
        secrets |= named_secrets(json.loads(data))
    for name in sorted(names):
        data = contents[name] if name in contents else _readable(folder / name)
        if name in records and (clean := redact_json(data, secrets)) != data:
            contents[name] = data = clean
            warnings.append(f"{name} goes up without the token that it holds here")
        if holds_secret(data, secrets):
            raise ValueError(
                f"{folder / name} holds what is or looks like a token or password: take it out (and revoke it, if "
                "others could see it). Nothing was uploaded"
            )
    return warnings


def _readable(path: Path) -> bytes:
    """What of a file can hold text: all, or the header of a weights file."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with path.open("rb") as file:
        return file.read(8 + int.from_bytes(file.read(8), "little"))
