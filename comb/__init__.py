"""comb: compile a document once, link it anywhere."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from comb.registry import when_imported

if TYPE_CHECKING:
    from comb import methods as methods
    from comb.cache.picache import PICache as PICache
    from comb.cache.store import PICacheStore as PICacheStore
    from comb.cache.store import PICacheTooLargeError as PICacheTooLargeError
    from comb.cache.store import StoreFullError as StoreFullError
    from comb.documents.catalog import UnknownDocumentError as UnknownDocumentError
    from comb.documents.document import Document as Document
    from comb.documents.document import Example as Example
    from comb.documents.document import Prompt as Prompt
    from comb.documents.document import PromptBuilder as PromptBuilder
    from comb.documents.splitting import splitters as splitters
    from comb.engine.conversation import Conversation as Conversation
    from comb.engine.engine import Answer as Answer
    from comb.engine.engine import PICEngine as PICEngine
    from comb.engine.engine import Report as Report
    from comb.engine.engine import Request as Request
    from comb.linktokens.front import LinkTokensConfig as LinkTokensConfig
    from comb.linktokens.modeling import LinkTokensForCausalLM as LinkTokensForCausalLM
    from comb.model.config import CombConfig as CombConfig
    from comb.model.config import CombEncoderConfig as CombEncoderConfig
    from comb.model.modeling import CombForCausalLM as CombForCausalLM

__version__ = "0.2.0"

# Imported when they are asked for: `comb --help` needs neither torch nor transformers. A configuration is had through
# the file of its model, which registers the model with AutoModelForCausalLM.
_HOMES = {
    "comb.cache.picache": ("PICache",),
    "comb.cache.store": ("PICacheStore", "PICacheTooLargeError", "StoreFullError"),
    "comb.documents.catalog": ("UnknownDocumentError",),
    "comb.documents.document": ("Document", "Example", "Prompt", "PromptBuilder"),
    "comb.documents.splitting": ("splitters",),
    "comb.engine.conversation": ("Conversation",),
    "comb.engine.engine": ("Answer", "PICEngine", "Report", "Request"),
    "comb.linktokens.modeling": ("LinkTokensConfig", "LinkTokensForCausalLM"),
    "comb.model.modeling": ("CombConfig", "CombEncoderConfig", "CombForCausalLM"),
}
_IMPORTING = threading.RLock()  # transformers' own lazy names aren't safe when threads ask for them at once
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF, "methods"]


def __getattr__(name: str) -> Any:
    if name == "methods":
        with _IMPORTING:
            return import_module("comb.methods")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'comb' has no attribute {name!r}")
    with _IMPORTING:
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _known_to_auto_classes(auto: ModuleType) -> None:
    """Has AutoConfig find our models in this package, as it finds its own in ``transformers.models.<type>``."""
    for model_type, config in (("comb", "CombConfig"), ("comb_linktokens", "LinkTokensConfig")):
        auto.CONFIG_MAPPING_NAMES[model_type] = config
        sys.modules[f"transformers.models.{model_type}"] = sys.modules[__name__]


when_imported("transformers.models.auto.configuration_auto", _known_to_auto_classes)
