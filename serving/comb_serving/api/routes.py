"""Which routes there are (an allow-list: a route of vLLM that nobody has looked at does nothing), and who may ask them.

With documents: `GENERATION`. The others of `PASSED` go on to vLLM without, and a body that names documents is refused
there. Both ask for a key where the server has one, whatever vLLM itself does, and get the tenant's salt.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence

from comb_serving.api.http import RequestError
from comb_serving.config.serve_options import ServeOptions, key_hash

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COHERE = "/cohere/v2/chat"  # goes on as a chat
COUNT = "/v1/messages/count_tokens"
DOCUMENTS, SWITCH = "/v1/documents", "/v1/comb"
WEIGHTS = "x-comb-weights"  # of /health: a name for what documents are compiled with, by which replicas are compared
GENERATION = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
PASSED = {
    "/v1/chat/completions/batch", COUNT, "/invocations", "/generative_scoring", "/tokenize",
    "/detokenize", "/start_profile", "/stop_profile",
}  # fmt: skip
OPEN = ("/ping",)  # without a key, a body or a tenant
_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
ASKING = ("GET", "HEAD", "OPTIONS")  # they have no body, and nothing is generated for them


def is_documents(path: str) -> bool:
    """Whether a path is one of those for registered documents."""
    return path == DOCUMENTS or path.startswith(f"{DOCUMENTS}/")


def is_ours(path: str) -> bool:
    """Whether a path is one of the routes that vLLM hasn't."""
    return path == SWITCH or is_documents(path)


def error_body(path: str, error: RequestError) -> bytes:
    """An error as a route's clients read it: OpenAI's object, or Anthropic's."""
    if path not in (MESSAGES, COUNT):
        return json.dumps({"error": error.error}).encode()
    said = {**error.error, "type": _ANTHROPIC.get(error.status, "api_error")}
    return json.dumps({"type": "error", "error": said}).encode()


def check_request(options: ServeOptions, method: str, path: str, authorization: str | None) -> None:
    """Whether there is such a route and the sender may ask it, before the body is read.

    Raises:
        RequestError: 404 for what isn't on the list, 401 without the right key; of `SWITCH` 405, and 403 where nobody
            may change anything.
    """
    if not (is_ours(path) or (method == "POST" and path in (*GENERATION, COHERE, *PASSED, *OPEN))):
        raise RequestError(404, f"comb serve has no route {method} {path}")
    if path in OPEN:
        return
    if path == SWITCH:
        admin = options.admin_hash is not None and _authorized(authorization, (options.admin_hash,))
        if method == "POST":
            if options.admin_hash is None:
                raise RequestError(403, "start the server with COMB_ADMIN_KEY or --comb-admin-key to switch it")
            if not admin:
                raise RequestError(401, "Unauthorized: send the admin key as 'Authorization: Bearer ...'")
        elif method != "GET":
            raise RequestError(405, f"{method} {SWITCH} is no route: there are GET and POST")
        if admin:
            return
    if options.key_hashes and not _authorized(authorization, options.key_hashes):
        raise RequestError(401, "Unauthorized: send an API key as 'Authorization: Bearer ...'")


def _authorized(authorization: str | None, key_hashes: Sequence[str]) -> bool:
    """Whether the header holds one of these keys (vLLM's rule)."""
    scheme, _, key = (authorization or "").partition(" ")
    digest = key_hash(key)
    matches = [secrets.compare_digest(digest, known) for known in key_hashes]  # all of them: time tells nothing
    return scheme.lower() == "bearer" and any(matches)


def sender_of(authorization: str | None) -> str:
    """The header as ``Bearer KEY``, however its scheme and spaces are written; empty without a key."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    if key:
        return f"{scheme.capitalize()} {key.strip()}"
    return "" if scheme.lower() == "bearer" else scheme


def tenant_of(authorization: str | None) -> str:
    """A name for the sender that doesn't give the key away; empty without one. The body has no say in it."""
    sender = sender_of(authorization)
    if not sender:
        return ""
    return hashlib.sha256(b"comb-tenant:" + sender.encode("utf-8", "surrogateescape")).hexdigest()[:32]
