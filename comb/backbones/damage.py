"""What is wrong with a checkpoint that couldn't be loaded: the file, what is the matter with it, and what to do. The
libraries that read checkpoints often say neither ("header too large" is what a git-lfs pointer gives).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from tokenizers import Tokenizer, __version__
from torch import Tensor

from comb.backbones.tracebacks import DamagedError, raised_by_us
from comb.backbones.transformers_private import conversion_errors, why_no_template
from comb.files import read_json

PEFT = "adapter_config.json"
_MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors*", "pytorch_model*", "adapter_*")
TOKENIZER_FILES = (
    "tokenizer.*", "tokenizer_config.json", "special_tokens_map.json", "chat_template*", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "tekken.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
_SETTINGS = ("config.json", "generation_config.json")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                       "additional_chat_templates/*.jinja")  # fmt: skip
_AGAIN = "download or copy it again"
_MEND = f"mend it there, or {_AGAIN}"
# where a file of one of these is, there is a vocabulary
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "tekken.json", "tokenizer*.py", "*.tiktoken")


@contextmanager
def explained(place: str | Path, *, tokenizer: bool = False) -> Iterator[None]:
    """Turns what loading a model, or its tokenizer, from `place` raises into one line with the file and the remedy;
    comb's own errors stay.

    Raises:
        ImportError: a package that it needs is missing.
        DamagedError: a file is damaged.
        ValueError, OSError: all else.
    """
    try:
        yield
    except (MemoryError, RecursionError, DamagedError):
        raise
    except Exception as error:
        # out of memory on a GPU says nothing of files; nor does an option that nobody knows
        if type(error).__name__ == "OutOfMemoryError" or "unexpected keyword argument" in str(error):
            raise
        folder = local_folder(place)
        # what comb's own classes say of a configuration's values is without its file
        found = None if folder is None else damage_in(folder, tokenizer=tokenizer)
        if found is None and folder is not None and not tokenizer:
            found = _refused(folder)
        if found is not None and not isinstance(error, ImportError):
            raise DamagedError(found) from error
        if raised_by_us(error):
            raise
        raise _explanation(error, str(place), folder, tokenizer) from error


def _explanation(error: Exception, place: str, folder: Path | None, tokenizer: bool) -> Exception:
    said, what = _words_of(error), f"the tokenizer of {place}" if tokenizer else place
    if isinstance(error, ImportError):
        install = "" if "install" in said or not error.name else f": pip install {error.name}"
        return ImportError(f"{what} can't be loaded, a package is missing: {said}{install}")
    why = f"({type(error).__name__}: {said})"
    if Path(place).is_file():
        kind = "it is damaged or cut off, or of a kind that isn't known"
        return DamagedError(f"{place} can't be read as a model {why}: {kind}; {_AGAIN}")
    if parts := conversion_errors(error):
        name, (*lines, which) = next(iter(parts.items()))
        if any("quantization_operation.convert(" in line for line in lines):
            return ValueError(f"{place} can't be quantised ({lines[-1]}): mend that, or choose another quantization")
        return DamagedError(f"{place} has weights that can't be put together for {len(parts)} of the model's, among "
                            f"them {name} ({which}): some are missing, or of another model; {_AGAIN}")  # fmt: skip
    if folder is None and isinstance(error, OSError):
        return OSError(f"no model {place!r}: there is no such folder, and as a Hub id it can't be read: {said}")
    if folder is None:
        return (ValueError if isinstance(error, ValueError) else OSError)(f"{what} can't be loaded {why}")
    if "not available yet" in said:  # transformers' words for a quantiser that it can't load by (HQQ)
        return ValueError(f"{what} can't be loaded {why}: upgrade transformers, or choose another quantization")
    remedy = f"see its config.json and generation_config.json, and the options that were given, or {_AGAIN}"
    if tokenizer:
        remedy = f"see tokenizer_config.json and what is beside it, or {_AGAIN}"
    elif (folder / PEFT).is_file():
        return DamagedError(f"{folder / PEFT} doesn't fit its weights, model or peft {why}: {_MEND}, or upgrade peft")
    elif not (folder / "config.json").is_file():
        return DamagedError(f"{place} has no config.json, so it is no model's folder: {_AGAIN}, or name another one")
    elif (gone := _no_weights(folder)) is not None:
        return DamagedError(gone)
    elif isinstance(error, FileNotFoundError):
        remedy = _AGAIN
    return DamagedError(f"{what} can't be loaded {why}: {remedy}")


def local_folder(place: str | Path, revision: str | None = None) -> Path | None:
    """A checkpoint's folder: itself, or what the Hub's cache has of it."""
    if Path(place).is_dir():
        return Path(place)
    try:
        cached = try_to_load_from_cache(str(place), "config.json", revision=revision)
    except ValueError:  # no name that the Hub takes
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def damage_in(folder: Path, *, tokenizer: bool = False) -> str | None:
    """The first file of a checkpoint that can't be right, why, and what to do; of weights only headers are read."""
    patterns = ("config.json", *TOKENIZER_FILES) if tokenizer else _MODEL_FILES
    chosen = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    if any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        chosen = [path for path in chosen if not path.name.startswith("pytorch_model")]  # which nobody reads then
    for path in chosen:
        if (found := damage_of(path)) is not None:
            return found
    settings = folder / "tokenizer_config.json"
    if tokenizer and settings.is_file():
        kind = str(read_json(settings).get("tokenizer_class"))
        # bytes need no vocabulary
        needed = kind.endswith(("Fast", "TokenizersBackend"))
        if needed and not any(path.is_file() for pattern in _VOCABULARIES for path in folder.glob(pattern)):
            return f"{folder} has {settings.name} and no tokenizer.json, in which its tokens are: {_AGAIN}"
    return None


def check_settings(place: str | Path, *, tokenizer: bool = False) -> None:
    """Raises DamagedError for settings of a checkpoint here that can't be right, of the model or its tokenizer.

    transformers goes on where it can't read them, or computes with what they say: another end of an answer, or NaN.
    """
    if (folder := local_folder(place)) is None:
        return
    for pattern in _TOKENIZER_SETTINGS if tokenizer else _SETTINGS:
        for path in folder.glob(pattern):
            if (found := damage_of(path)) is not None:
                raise DamagedError(found)


def check_files(place: str | Path, *, weights: bool = False) -> None:
    """Raises DamagedError for a checkpoint here with a file that can't be right, of weights by their headers; and for
    one without weights, if these must be there."""
    if (folder := local_folder(place)) is None:
        return
    found = _no_weights(folder) if weights and Path(place).is_dir() else None
    found = found or damage_in(folder) or damage_in(folder, tokenizer=True) or _refused(folder)
    if found is not None:
        raise DamagedError(found)


def _no_weights(folder: Path) -> str | None:
    kinds = ("*.safetensors", "*.bin", "*.pt", "*.pth")
    if not any(path.is_file() for kind in kinds for path in folder.glob(kind)):
        return f"{folder} has no weights ({', '.join(kinds)}): {_AGAIN}"
    for single, parts in (("model.safetensors", "model-*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin")):
        whole = (folder / single).is_file() or (folder / f"{single}.index.json").is_file()
        if not whole and any(folder.glob(parts)):
            return f"{folder} has parts of its weights ({parts}) and no {single}.index.json: {_AGAIN}"
    return None


def weight_files(folder: Path) -> list[Path]:
    """The files of weights that ``from_pretrained`` would read there."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return [folder / shard for shard in sorted({*read_json(index)["weight_map"].values()})]
    return []


def headers(folder: Path) -> dict[str, Tensor]:
    """The tensors that ``from_pretrained`` would read there, without their values (on the meta device)."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with explained(folder):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
                    shapes = {key: part.get_shape() for key, part in slices.items()}
                found.update((key, torch.empty(shape, device="meta")) for key, shape in shapes.items())
            else:
                held: Mapping[str, Any] = torch.load(path, map_location="meta", weights_only=True)
                found.update((key, value) for key, value in held.items() if isinstance(value, Tensor))
    return found


def damage_of(path: Path) -> str | None:
    """Why a file can't be right, and what to do; None if it looks well."""
    if path.is_dir():
        return f"{path} is a folder, where a file should be: {_AGAIN}"
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
    if path.suffix == ".gguf" and not head.startswith(b"GGUF"):
        return f"{path} is no GGUF file, by its first bytes: {_AGAIN}"
    # torch.save's formats: a zip file, and before that a pickle
    if head.startswith(b"PK") or path.suffix == ".bin":
        try:
            torch.load(path, map_location="meta", weights_only=True).items()
        except Exception:  # its messages speak of options that nobody has here
            return f"{path} is damaged or cut off, it is no file of weights by torch.save: {_AGAIN}"
    if path.suffix == ".jinja":
        try:
            why = why_no_template(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            return f"{path} is not UTF-8 text ({error}): {_AGAIN}"
        return why and f"{path} is no chat template ({why}): {_MEND}"
    return _damage_in_json(path) if path.suffix == ".json" else None


def _damage_in_json(path: Path) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"{path} is damaged or cut off, it is not JSON ({error}): {_AGAIN}"
    if path.name == "tokenizer.json":
        try:
            Tokenizer.from_file(str(path))
        except Exception as error:  # it raises nothing more special
            return (
                f"{path} can't be read by tokenizers {__version__} ({error}): it is damaged, or of a newer version: "
                f"{_AGAIN}, or pip install -U tokenizers transformers"
            )
        return None
    if not isinstance(content, dict) and path.name != "vocab.json":
        return f"{path} should be a JSON object, it is a {type(content).__name__}: {_AGAIN}"
    if path.name == "config.json" and not (isinstance(content.get("model_type"), str) and content["model_type"]):
        return f"{path} has no model_type, so it is no model's: {_AGAIN}"
    if path.name == "generation_config.json":
        ids = content.get("eos_token_id")  # which is read when an answer begins
        if not all(isinstance(each, int | float | None) for each in (ids if isinstance(ids, list) else [ids])):
            return f"{path}: eos_token_id is {ids!r}, not a token's number: {_MEND}"
    template = content.get("chat_template") if path.name == "tokenizer_config.json" else None
    if isinstance(template, str) and (why := why_no_template(template)) is not None:
        return f"{path}: its chat_template is none ({why}): {_MEND}"
    if path.name.endswith(".index.json"):
        shards = content.get("weight_map")
        kinds = (".safetensors", ".bin")
        if not isinstance(shards, dict) or not shards or not all(str(name).endswith(kinds) for name in shards.values()):
            return f"{path} has no weight_map to files of weights: {_AGAIN}"
        if not isinstance(content.get("metadata"), dict | None):
            return f"{path} has {content['metadata']!r} as its metadata, not an object: {_AGAIN}"
        gone = sorted(name for name in {*shards.values()} if not (path.parent / name).is_file())
        if gone:
            return f"{path} names {len(gone)} files that aren't in {path.parent}, among them {gone[0]}: {_AGAIN}"
    return None


def _refused(folder: Path) -> str | None:
    """Why transformers can't make the model of a folder's config.json, without weights; None if it can, and for models
    with code of their own, or of a type that isn't known."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers import __version__ as version
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = folder / "config.json"
    if not path.is_file():
        return None
    content = read_json(path)
    kind = content.get("model_type")
    if content.get("auto_map") or kind not in CONFIG_MAPPING:
        return None
    try:
        config = AutoConfig.from_pretrained(folder)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return f"{path}: transformers {version} has no causal language model of model_type {kind!r}: take another"
        if getattr(config, "backbone_config", config) is not None:  # an adapter may leave that to its backbone
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config)
    except (ImportError, MemoryError, RecursionError):
        return None
    except Exception as error:  # whatever a value makes a class do
        named = [name for name, value in _values_in(content) if isinstance(error, KeyError) and value == error.args[0]]
        if named:  # a name that a table of transformers doesn't have
            return f"{path}: {named[0]} is {error.args[0]!r}, which transformers {version} doesn't know: {_MEND}"
        words = _words_of(error)
        if not raised_by_us(error) and not _is_validation(error):
            words = f"{type(error).__name__}: {words}"
        return f"{path} gives no model ({words}){'' if 'pip install' in words else f': {_MEND}'}"
    return None


def _values_in(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All values with their names, however deep."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _values_in(value, key)
    elif isinstance(content, list):
        for value in content:
            yield from _values_in(value, name)
    else:
        yield name, content


def _is_validation(error: Exception) -> bool:
    return type(error).__name__.startswith("StrictDataclass")


def _words_of(error: Exception) -> str:
    """What an error says, in one line; of a value of another type than it should have, without the frame around it."""
    said = " ".join(str(error).split())
    frame = r"^(Class )?[Vv]alidation error for .*?: \w+Error: |\. Errors: .*$"
    return re.sub(frame, "", said) if _is_validation(error) else said
