"""The licence an adapter inherits: the one its backbone's own card states, or none, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError

from comb.backbones.loading import backbone_beside, is_hub_id, resolve_name
from comb.hub.card.parts import parse_card
from comb.hub.errors import HUB_ERRORS, reason

KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Licence:
    """The header keys that state it, empty if it isn't known; `why` says where it is from, or why it isn't known."""

    header: dict[str, Any]
    why: str


def inherited_licence(backbone: str, revision: str | None, folder: Path, *, api: HfApi | None = None) -> Licence:
    """What the card of `backbone` says.

    Args:
        folder: of the adapter; a backbone may be kept beside it.
        api: asks the Hub; without it only folders and the Hub's cache on this machine are looked into.
    """
    if not backbone:
        return Licence({}, "the adapter names no backbone")
    nowhere = Licence({}, f"there is no backbone {backbone!r} to read it from")
    try:
        place = Path(resolve_name(backbone_beside(backbone, folder)))
    except OSError:
        return nowhere
    if place.is_dir():
        if not (place / "README.md").is_file():
            return Licence({}, "the backbone's folder has no model card")
        return _stated(place / "README.md", "the backbone's card")
    if not is_hub_id(backbone):
        return nowhere
    try:
        card = (api or HfApi()).hf_hub_download(backbone, "README.md", revision=revision, local_files_only=api is None)
    except HFValidationError:  # looks like an id, and is none: a folder that isn't there any more
        return nowhere
    except HUB_ERRORS as error:
        why = "was not looked up" if api is None else f"could not be read ({reason(error)})"
        return Licence({}, f"the card of {backbone} {why}")
    return _stated(Path(card), f"the card of {backbone}")


def _stated(card: Path, where: str) -> Licence:
    try:
        header = parse_card(card.read_text(encoding="utf-8"), where).header
    except ValueError:
        return Licence({}, f"{where} has a header that can't be read")
    found = {key: header[key] for key in KEYS if isinstance(header.get(key), str | list)}
    if "license" not in found:
        return Licence({}, f"{where} doesn't state one")
    return Licence(found, f"from {where}")
