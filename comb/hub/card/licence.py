"""The licence an adapter inherits: the one its backbone's own card states, or none, with the reason."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache

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
        path = place / "README.md"
        if not path.is_file():
            return Licence({}, "the backbone's folder has no model card")
        return _stated(path.read_text(encoding="utf-8"), "the backbone's card")
    if not is_hub_id(backbone):
        return nowhere
    cached = try_to_load_from_cache(backbone, "README.md", revision=revision)
    if isinstance(cached, str):
        return _stated(Path(cached).read_text(encoding="utf-8"), f"the card of {backbone}")
    if api is None:
        return Licence({}, f"the card of {backbone} was not looked up")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            path = Path(api.hf_hub_download(backbone, "README.md", revision=revision, local_dir=temporary))
        except HUB_ERRORS as error:
            return Licence({}, f"the card of {backbone} could not be read ({reason(error)})")
        return _stated(path.read_text(encoding="utf-8"), f"the card of {backbone}")


def _stated(card: str, where: str) -> Licence:
    try:
        header = parse_card(card, where).header
    except ValueError:
        return Licence({}, f"{where} has a header that can't be read")
    found = {key: header[key] for key in KEYS if isinstance(header.get(key), str | list)}
    if "license" not in found:
        return Licence({}, f"{where} doesn't state one")
    return Licence(found, f"from {where}")
