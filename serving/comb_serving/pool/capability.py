"""What the engine believes of a request: a statement that the front has signed.

Whatever names blocks of the pool reads documents, and numbers are easily guessed; vLLM passes on what clients send, and
some of its ways lose what it was given. So documents, the prompt over them, the salt of the prefix cache and the
request are stated together, under the instance's secret. A salt that begins with `MARK` demands the statement that
names it, and no statement is good under another salt: they come to the engine together, or the request fails.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

KEY = "comb_docs"  # in `SamplingParams.extra_args`; over HTTP in ``vllm_xargs``
MARK = "comb-documents-"
_DIGITS = 64


@dataclass(frozen=True)
class Capability:
    """One request's documents.

    Args:
        request_id: part of the engine's name for the request; empty where the engine alone chooses it.
        salt: of the prefix cache, made from tenant and documents.
        documents: their places, as `handles.pack` writes them; empty where documents stand in the prompt.
        prompts: `digest` of each prompt; empty where vLLM renders the messages itself.
    """

    request_id: str
    salt: str
    documents: tuple[int, ...]
    prompts: tuple[str, ...]

    def sign(self, secret: bytes) -> str:
        """As a request carries it."""
        text = json.dumps([self.request_id, self.salt, self.documents, self.prompts], separators=(",", ":"))
        return _code(text, secret) + text

    @classmethod
    def verify(cls, token: object, secret: bytes) -> Capability:
        """Reads what `sign` has written. Raises ValueError for anything else."""
        if not isinstance(token, str) or not hmac.compare_digest(
            token[:_DIGITS].encode(), _code(token[_DIGITS:], secret).encode()
        ):
            raise ValueError(f"{KEY} is not signed by this instance: send documents in the field 'documents'")
        request_id, salt, documents, prompts = json.loads(token[_DIGITS:])
        return cls(request_id, salt, tuple(documents), tuple(prompts))

    def check(self, request_id: str, salt: str | None, prompt: Sequence[int] | None) -> None:
        """Raises ValueError unless it was made for this request."""
        if not self.salt.startswith(MARK) or self.salt != salt:
            raise ValueError("its salt is not the one of its documents")
        if self.request_id not in request_id:
            raise ValueError(f"its documents are those of request {self.request_id}")
        if self.prompts and (prompt is None or digest(prompt) not in self.prompts):
            raise ValueError("its prompt is not the one over its documents")


def digest(prompt: Sequence[int]) -> str:
    """A name for token ids."""
    return hashlib.sha256(array("I", prompt).tobytes()).hexdigest()[:32]


def _code(text: str, secret: bytes) -> str:
    return hmac.new(secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
