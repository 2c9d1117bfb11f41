"""comb: compile a document once, link it anywhere."""

from comb import methods
from comb.cache.picache import PICache
from comb.cache.store import PICacheStore, PICacheTooLargeError, StoreFullError
from comb.documents.catalog import UnknownDocumentError
from comb.documents.document import Document, Example, Prompt, PromptBuilder
from comb.documents.splitting import splitters
from comb.engine.conversation import Conversation
from comb.engine.engine import Answer, PICEngine, Report, Request
from comb.linktokens.config import LinkTokensConfig
from comb.linktokens.modeling import LinkTokensForCausalLM
from comb.model.config import CombConfig, CombEncoderConfig
from comb.model.modeling import CombForCausalLM

__version__ = "0.2.0"

__all__ = [
    "Answer",
    "CombConfig",
    "CombEncoderConfig",
    "CombForCausalLM",
    "Conversation",
    "Document",
    "Example",
    "LinkTokensConfig",
    "LinkTokensForCausalLM",
    "PICEngine",
    "PICache",
    "PICacheStore",
    "PICacheTooLargeError",
    "Prompt",
    "PromptBuilder",
    "Report",
    "Request",
    "StoreFullError",
    "UnknownDocumentError",
    "methods",
    "splitters",
]
