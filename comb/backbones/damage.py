"""What is wrong with a checkpoint that couldn't be loaded: the file, what is the matter with it, and what to do.

The libraries that read checkpoints say neither which file it was nor, often, what is wrong ("header too large" is what
a git-lfs pointer gives), so the files are looked at once loading has failed.
"""

from __future__ import annotations

import fnmatch
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from tokenizers import Tokenizer, __version__
from torch import Tensor

from comb.backbones.tracebacks import raised_by_us
from comb.backbones.transformers_private import conversion_errors
from comb.documents.files import read_json

MODEL_FILES = ("config.json", "generation_config.json", "model*", "pytorch_model*", "adapter_*")
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "chat_template*", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "tekken.json",
)  # fmt: skip
_AGAIN = "download or copy it again"


class DamagedError(ValueError):
    """A file of a checkpoint isn't what it should be."""


@contextmanager
def explained(place: str | Path, *, tokenizer: bool = False) -> Iterator[None]:
    """Turns what loading from `place` raises into one line with the file and the remedy; comb's own errors stay.

    Args:
        tokenizer: its tokenizer is loaded, and not its model.

    Raises:
        ImportError: a package that it needs is missing.
        DamagedError: a file is damaged.
        ValueError, OSError: all else.
    """
    try:
        yield
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        # out of memory on a GPU says nothing of files; nor does an option that nobody knows
        known = type(error).__name__ == "OutOfMemoryError" or "unexpected keyword argument" in str(error)
        if known or raised_by_us(error):
            raise
        raise _explanation(error, str(place), tokenizer) from error


def _explanation(error: Exception, place: str, tokenizer: bool) -> Exception:
    message = " ".join(str(error).split())
    what = f"the tokenizer of {place}" if tokenizer else place
    if isinstance(error, ImportError):
        install = "" if "install" in message or not error.name else f": pip install {error.name}"
        return ImportError(f"{what} can't be loaded, a package is missing: {message}{install}")
    if Path(place).is_file():
        why = f"({type(error).__name__}: {message}): it is damaged or cut off, or of a kind that isn't known"
        return DamagedError(damage_of(Path(place)) or f"{place} can't be read as a model {why}; {_AGAIN}")
    folder = local_folder(place)
    found = None if folder is None else damage_in(folder, tokenizer=tokenizer)
    if found is not None:
        return DamagedError(found)
    if parts := conversion_errors(error):
        name, why = next(iter(parts.items()))
        return DamagedError(f"{place} has weights that can't be put together for {len(parts)} of the model's, among "
                            f"them {name} ({why}): some are missing, or of another model; {_AGAIN}")  # fmt: skip
    if folder is None and isinstance(error, OSError):
        return OSError(f"no model {place!r}: there is no such folder, and as a Hub id it can't be read: {message}")
    kind = ValueError if isinstance(error, ValueError) else OSError
    return kind(f"{what} can't be loaded ({type(error).__name__}: {message})")


def local_folder(place: str | Path) -> Path | None:
    """A checkpoint's folder: itself, or what the Hub's cache has of it."""
    if Path(place).is_dir():
        return Path(place)
    try:
        cached = try_to_load_from_cache(str(place), "config.json")
    except ValueError:  # no name that the Hub takes
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def damage_in(folder: Path, *, tokenizer: bool = False) -> str | None:
    """The first file of a checkpoint that can't be right, why, and what to do; None if each looks well.

    Only headers of weights are read.
    """
    patterns = ("config.json", *TOKENIZER_FILES) if tokenizer else MODEL_FILES
    chosen = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return next((found for path in chosen if (found := damage_of(path)) is not None), None)


def check_files(place: str | Path, *, weights: bool = False) -> None:
    """Raises DamagedError for a checkpoint here with a file that can't be right; weights are looked at by headers.

    Args:
        weights: they must be there.
    """
    folder = local_folder(place)
    if weights and Path(place).is_dir():
        kinds = ("*.safetensors", "*.bin", "*.pt", "*.pth")
        if not any(path.is_file() for kind in kinds for path in Path(place).glob(kind)):
            raise DamagedError(f"{place} has no weights ({', '.join(kinds)}): {_AGAIN}")
    for tokenizer in (False, True):
        if folder is not None and (found := damage_in(folder, tokenizer=tokenizer)) is not None:
            raise DamagedError(found)


def headers(folder: Path) -> dict[str, Tensor]:
    """The tensors that ``from_pretrained`` would read there, without their values (on the meta device)."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        names = sorted({*read_json(index)["weight_map"].values()}) if index.is_file() else []
    found = {}
    for name in names:
        with explained(folder), safe_open(folder / name, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            found.update({key: torch.empty(part.get_shape(), device="meta") for key, part in slices.items()})
    return found


def damage_of(path: Path) -> str | None:
    """Why a file can't be right, and what to do; None if it looks well."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        return f"{path} can't be read ({error.strerror}): see who may read it (ls -l)"
    if head.startswith(b"version https://git-lfs"):
        return f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in {path.parent}"
    if not head:
        return f"{path} is empty: {_AGAIN}"
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                return None
        except Exception as error:  # safetensors' own class is no OSError or ValueError
            return f"{path} is damaged or cut off, it is no safetensors file ({error}): {_AGAIN}"
    # torch.save's formats: a zip file, and before that a pickle
    whole = zipfile.is_zipfile(path) if head.startswith(b"PK") else path.suffix != ".bin" or head.startswith(b"\x80")
    if not whole:
        return f"{path} is damaged or cut off, it is no file of torch.save: {_AGAIN}"
    return _damage_in_json(path) if path.suffix == ".json" else None


def _damage_in_json(path: Path) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{path} is damaged or cut off, it is not JSON ({error}): {_AGAIN}"
    if path.name == "tokenizer.json":
        try:
            Tokenizer.from_file(str(path))
        except Exception as error:  # it raises nothing more special
            return (
                f"{path} can't be read by tokenizers {__version__} ({error}): it is damaged, or of a newer version: "
                f"{_AGAIN}, or pip install -U tokenizers transformers"
            )
    if path.name == "config.json":
        if not isinstance(content, dict):
            return f"{path} should be a JSON object, it is a {type(content).__name__}: {_AGAIN}"
        if not content.get("model_type"):
            return f"{path} has no model_type, so it is no model's: {_AGAIN}"
    if path.name.endswith(".index.json"):
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict):
            return f"{path} has no weight_map: {_AGAIN}"
        gone = sorted(name for name in {*map(str, shards.values())} if not (path.parent / name).is_file())
        if gone:
            return f"{path} names {len(gone)} files that aren't in {path.parent}, among them {gone[0]}: {_AGAIN}"
    return None
