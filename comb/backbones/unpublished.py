"""What nobody else needs to know of an adapter's folder: where things lie on this machine's disk. Published files name
them by their last part alone; the paths are kept where neither `comb push` nor the Hub's tools take anything from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePath
from typing import Any

from comb.files import read_json

_PART = r"[^/\\\s'\"=,;:()\[\]{}<>|]+"
_PATH = re.compile(rf"(?<![\w.:/~-])(?:(?:~\w*|\.{{1,2}})?(?:/{_PART}){{2,}}/?|[A-Za-z]:(?:[/\\]{_PART})+)")
"""A path from the root, a home, the working folder or a drive, with one folder in it at least."""


def private_file(folder: str | Path) -> Path:
    """The file that is kept: the Hub's tools leave that place out, as their own notes are there."""
    return Path(folder) / ".cache" / "huggingface" / "comb.json"


def read_private(folder: str | Path) -> dict[str, Any]:
    """What is kept beside `folder`, empty if nothing. Raises ValueError for a damaged file."""
    path = private_file(folder)
    return read_json(path, "remove it") if path.is_file() else {}


def write_private(folder: str | Path, **values: Any) -> None:
    """Keeps `values` beside what is kept already; None forgets one."""
    kept = {name: value for name, value in {**read_private(folder), **values}.items() if value is not None}
    path = private_file(folder)
    if not kept:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def public(value: Any, *, here: bool = False) -> Any:
    """`value` (of JSON) with every path in it by its last part: ``/home/me/data.jsonl`` is ``data.jsonl``.

    Args:
        here: it was made on this machine, so that texts which name something here are paths, relative ones too.
    """
    if isinstance(value, dict):
        return {public(key, here=here): public(item, here=here) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public(item, here=here) for item in value]
    if isinstance(value, PurePath):
        return public_name(value)
    if not isinstance(value, str):
        return value
    if "\n" not in value:
        option, equals, path = value.rpartition("=")
        parts = PurePath(path).parts
        # one part is a slash command of a chat template, or nobody's folder
        if (path.startswith("/") and len(parts) > 2) or (here and len(parts) > 1 and _exists(path)):
            return option + equals + public_name(path)
    return _PATH.sub(lambda found: public_name(found[0]), value)


def public_name(path: str | PurePath) -> str:
    """The last part of a path; of a home folder, which is called after its owner, nothing but ``~``."""
    whole = Path(path).expanduser()
    return "~" if whole == Path.home() else whole.name or str(path)


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # no name that a file can have
        return False
