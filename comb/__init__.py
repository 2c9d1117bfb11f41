"""comb: compile a document once, link it anywhere."""

from comb import methods
from comb.config import CombConfig, CombEncoderConfig
from comb.conversation import Conversation
from comb.documents import Document, Example, Prompt, PromptBuilder
from comb.engine import Answer, PICEngine, Report, Request
from comb.model import CombForCausalLM
from comb.picache import PICache
from comb.splitting import splitters
from comb.store import PICacheStore

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "CombConfig",
    "CombEncoderConfig",
    "CombForCausalLM",
    "Conversation",
    "Document",
    "Example",
    "PICEngine",
    "PICache",
    "PICacheStore",
    "Prompt",
    "PromptBuilder",
    "Report",
    "Request",
    "methods",
    "splitters",
]
