"""What decides tokenised examples: data, tokenizer, templates and code, as JSON values to be hashed."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comb import documents
from comb.documents.document import PromptBuilder

FORMAT = 4
"""Goes into every key: raise it when files get other bytes."""


def builder_key(builder: PromptBuilder) -> dict[str, Any]:
    """All of a prompt builder that decides token ids: vocabulary, rules, templates, and what they make of a probe.

    The probe is for what no setting shows: a chat template may write today's date.
    """
    tokenizer = builder.tokenizer
    from comb.backbones.tokenizer import tokenizer_fingerprint

    backend = getattr(tokenizer, "backend_tokenizer", None)
    probe = builder.build("Where is it?", [builder.segment("A document.")])
    return {
        "vocabulary": tokenizer_fingerprint(tokenizer),
        "rules": digest(backend.to_str() if backend is not None else repr(tokenizer)),
        "chat_template": digest(str(tokenizer.chat_template)),
        "chat_template_kwargs": repr(sorted(builder.chat_template_kwargs.items())),
        "document_template": builder.document_template,
        "stop": builder.stop,
        "probe": [list(probe.head), list(probe.flat), list(builder.answer("There."))],
    }


def file_key(path: str | Path | None) -> str | None:
    """A hash of a file's content, or of all names and contents in a folder: moving it changes nothing.

    None where there is nothing to read.
    """
    if path is None or not Path(path).exists():  # the reader says what is wrong
        return None
    path = Path(path)
    if not path.is_dir():
        return _file_digest(path)
    inside = sorted(item for item in path.rglob("*") if item.is_file())
    return digest([[item.relative_to(path).as_posix(), _file_digest(item)] for item in inside])


def code_key(*functions: Callable[..., Any]) -> str:
    """A hash of the source of what makes examples: documents, this room, nano's world, and these functions' modules.

    A YAML file of a module's name is a part of it.
    """
    here = Path(__file__).parent
    files = {*here.glob("*.py"), *(here.parent / "nano").glob("*.py"), *Path(documents.__path__[0]).rglob("*.py")}
    for module in {function.__module__ for function in functions}:
        source = getattr(sys.modules.get(module), "__file__", None)
        if source is not None and Path(source).is_file():
            files.add(Path(source))
    files |= {beside for file in files if (beside := file.with_suffix(".yaml")).is_file()}
    return digest([FORMAT, *sorted([file.name, _file_digest(file)] for file in files)])


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def plain(value: Any) -> Any:
    """`value` as JSON gives it back; other objects (a function in an option) by their repr."""
    return json.loads(json.dumps(value, sort_keys=True, default=repr))
