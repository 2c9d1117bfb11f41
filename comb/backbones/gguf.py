"""GGUF files as backbones: dequantised once into an ordinary Hugging Face folder, in the cache.

transformers reads a GGUF file, but what it has read can't be saved, and no other engine would take it. A folder can be
loaded, saved, trained on and served by everything that takes a Hub id.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from comb.cache.atomic import hub_folder

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"


def cache_folder() -> Path:
    """Where converted backbones are kept."""
    return hub_folder("backbones")


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only one in a folder that has no other model in it.

    Raises:
        OSError: for a folder with several.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise OSError(f"{path} holds {len(found)} GGUF files: name one of {', '.join(file.name for file in found)}")
    return found[0] if found else None


def convert(file: Path) -> Path:
    """The folder with the file's model and tokenizer, made at the first call. bfloat16: F16 and F32 are rounded.

    Raises:
        OSError: if the file can't be read as a model, or the package gguf is missing.
    """
    file = file.resolve()
    state = file.stat()
    identity = hashlib.sha256(f"{file}:{state.st_size}:{state.st_mtime_ns}".encode()).hexdigest()[:12]
    return converted(file, f"{file.stem}-{identity}")


def converted(file: Path, name: str) -> Path:
    """The folder `name` in the cache, converted from `file` unless it is there."""
    target = cache_folder() / name
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    logger.warning("converting %s into %s, once", file.name, target)
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        _save(file, Path(made) / name)
        with suppress(OSError):  # another process may have been faster
            (Path(made) / name).rename(target)
    if not (target / "config.json").exists():
        raise OSError(f"the converted model can't be kept in {target}: is something else in the way?")
    return target


def _save(file: Path, folder: Path) -> None:
    place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**place, **_dequantised(), dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except ImportError as error:
        raise OSError(f"reading {file.name} needs the package gguf: pip install gguf") from error
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise OSError(f"{file} can't be read as a model: {error}") from error
    # the loaded model remembers its file and refuses to be saved: the same weights in a model that never had one
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(model)._from_config(type(model.config).from_dict(settings), dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = GenerationConfig.from_model_config(plain.config)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantised() -> dict[str, Any]:
    """transformers from 5.19 on may leave weights in GGUF's blocks; versions before always unpack them."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
