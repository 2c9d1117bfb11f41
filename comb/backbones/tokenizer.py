"""The tokenizer that belongs to a model, what its chat template is told, and fronts as token ids."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from comb.backbones.damage import TOKENIZER_FILES, check_settings, explained, local_folder
from comb.backbones.identity import backbone_of
from comb.backbones.loading import HUB_ARGUMENTS, backbone_beside, resolve_name
from comb.backbones.rotary import compile_limit
from comb.documents.rendering import TEMPLATE_RESERVED
from comb.files import read_text

logger = logging.getLogger(__name__)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short name for what the tokenizer's ids mean: its whole vocabulary.

    Roles of special tokens don't count: `tokenizer.pad_token = tokenizer.eos_token` is no other tokenizer.
    """
    text = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def load_tokenizer(
    name_or_path: str | Path, model: Any = None, *, chat_template_kwargs: Mapping[str, Any] | None = None, **hub: Any
) -> Any:
    """The tokenizer of a checkpoint; for an adapter folder without one, its backbone's.

    Args:
        model: what was loaded from there, or has its configuration as ``config``; not needed for a plain model.
        chat_template_kwargs: what its chat template is given where nothing else is said (`set_template_defaults`).
        hub: `revision`, `subfolder`, `token` and the like of the checkpoint.

    Raises:
        ValueError, OSError, ImportError: there is none, or as `set_template_defaults` and `explained` do.
    """
    place, tokenizer = resolve_name(name_or_path), None
    backbone = getattr(getattr(model, "config", None), "backbone_name_or_path", "")
    if not Path(place).is_dir() or _has_tokenizer(place):
        try:
            check_settings(place, tokenizer=True)
            with explained(place, tokenizer=True):
                tokenizer = AutoTokenizer.from_pretrained(place, **hub)
        except (OSError, ValueError):
            if not backbone or _has_tokenizer(place):  # it is damaged: another one would be a silent change
                raise
    if tokenizer is None and not backbone:
        raise ValueError(
            f"no tokenizer found in {str(name_or_path)!r}: save the model's own there with "
            "tokenizer.save_pretrained(...)"
        )
    if tokenizer is None:
        shared = {key: value for key, value in hub.items() if key in HUB_ARGUMENTS}
        tokenizer = load_tokenizer(backbone_beside(backbone, place), revision=model.config.backbone_revision, **shared)
    if chat_template_kwargs:
        set_template_defaults(tokenizer, chat_template_kwargs)
    return tokenizer


def set_template_defaults(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Makes what a chat template takes part of it, as ``enable_thinking: false``: whoever renders a chat with the
    tokenizer, or saves and loads it, has the same without a word, and can still say otherwise. Thinking that a template
    doesn't speak of is turned off already.

    Raises:
        ValueError: for a tokenizer without a Jinja template, a name that the template doesn't ask for, or a value that
            is no text, number, true or false.
    """
    template = getattr(tokenizer, "chat_template", None) or {}
    named: dict[str, str] = template if isinstance(template, dict) else {"": template}
    for name, value in arguments.items():
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in named.values()):
            if name == "enable_thinking" and value is False:
                continue
            if not named:
                raise ValueError(f"chat_template_kwargs: this tokenizer has no chat template to take {name!r}")
            raise ValueError(f"chat_template_kwargs: the model's chat template knows no {name!r}")
        if not name.isidentifier() or name in TEMPLATE_RESERVED:
            raise ValueError(
                f"chat_template_kwargs can't set {name!r}, which the messages and whoever renders them say"
            )
        if not isinstance(value, str | bool | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"chat_template_kwargs: {name!r} is a text, a number, true or false, not {value!r}")
        # whoever says it last decides; the newline behind a block is not printed
        told = re.compile(rf"^{{% if {name} is not defined %}}{{% set {name} = .* %}}{{% endif %}}\n", re.MULTILINE)
        default = f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}"
        line = f"{{% if {name} is not defined %}}{default}{{% endif %}}\n"
        named = {key: line + told.sub("", text, count=1) for key, text in named.items()}
    if named:
        tokenizer.chat_template = named if isinstance(template, dict) else named[""]


def _has_tokenizer(place: str) -> bool:
    folder = local_folder(place)
    return folder is not None and any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer with ids that have no embedding, or another than the model was trained with
    (``config.tokenizer_fingerprint``)."""
    if not hasattr(tokenizer, "get_vocab"):
        raise ValueError(f"expected the model's tokenizer, for example AutoTokenizer's, not {type(tokenizer).__name__}")
    rows = int(backbone_of(model).get_input_embeddings().weight.shape[0])
    beyond = [token for token, number in tokenizer.get_vocab().items() if number >= rows]
    added = tokenizer.get_added_vocab() if beyond and hasattr(tokenizer, "get_added_vocab") else {}
    if any(token not in added for token in beyond):
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding table has {rows} rows: "
            "this is another model's tokenizer, load the one from the model's own folder"
        )
    if beyond:  # Gemma 3's text models come with the image token of their multimodal siblings
        logger.warning("the model has no embedding for %s: prompts that use them will fail", ", ".join(beyond[:5]))
    recorded = getattr(model.config, "tokenizer_fingerprint", None)
    if recorded is not None and (found := tokenizer_fingerprint(tokenizer)) != recorded:
        raise ValueError(
            f"the tokenizer is not the one this checkpoint was trained with (fingerprint {found}, expected "
            f"{recorded}): load the one from the checkpoint's folder"
        )


# --- fronts: text that documents are compiled behind, as token ids -------------------------------------------

PASSAGE = (
    "The harbour of Vellin lies at the mouth of the river Arne, where ships have loaded salt and timber since the "
    "twelfth century. A stone bridge was built in 1784, and a railway came in 1862; the town then had about 4,000 "
    "inhabitants. Today most people work in the shipyard, in schools or in small firms.\n\n"
    "Glass was made in the valley until 1931. Sand came from the lake, and the furnaces burned beech wood. One of the "
    "old workshops is now a museum, which shows bottles, windows and lamps. It is open from May to October.\n\n"
)
"""Plain prose about nothing that anybody will ask for. Which passage matters little, prose matters: see
docs/training-free.md."""


def front_ids(front: str, tokenizer: Any, most: int | None = None) -> list[int]:
    """Token ids of a front that is text, behind whatever the tokenizer begins a text with.

    Args:
        front: ``prose``, which is `PASSAGE`, or a text file.
        most: tokens that `PASSAGE` is cut to, so that documents fit behind it; a text of one's own is never cut.

    Raises:
        ValueError: for a file that can't be read or is empty.
    """
    text = PASSAGE
    if front != "prose":
        try:
            text = read_text(front)
        except (OSError, ValueError) as error:
            raise ValueError(f"no text to compile documents behind: {error}") from error
        if not text.strip():
            raise ValueError(f"{front} is empty: documents are compiled behind its text")
    ids: list[int] = list(tokenizer(text)["input_ids"])
    ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
    return ids[:most] if front == "prose" else ids


def check_front(ids: Sequence[int], backbone: Any) -> None:
    """Raises ValueError for token ids that the model doesn't have, or that leave no room for documents."""
    vocabulary, most = backbone.get_input_embeddings().weight.shape[0], compile_limit(backbone)
    if wrong := [each for each in ids if not isinstance(each, int) or not 0 <= each < vocabulary]:
        raise ValueError(f"a front has token ids below {vocabulary}, got {wrong[0]!r}")
    if most is not None and 2 * len(ids) > most:
        raise ValueError(
            f"the front's {len(ids)} tokens take more than half of the {most} positions that the model has to "
            "compile in: documents stand behind them, so give a shorter one"
        )


def own_tokenizer(model: Any) -> Any:
    """The tokenizer beside a loaded model's weights. Raises ValueError when there is none."""
    name = getattr(model, "name_or_path", "")
    ways = "give its token ids, or ask through a PICEngine, which has a tokenizer"
    if not name:
        raise ValueError(
            f"documents are compiled behind text, and this model has no tokenizer beside its weights: {ways}"
        )
    try:
        return load_tokenizer(name, model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"documents are compiled behind text, and the tokenizer of {name!r} can't be had ({error}): {ways}"
        ) from error
