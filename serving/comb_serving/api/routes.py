"""Which routes there are: an allow-list, so that a route of vLLM that nobody has looked at does nothing.

With documents: `GENERATION`. The others of `PASSED` go on to vLLM without, and a body that names documents is refused
there. Both ask for a key where the server has one, whatever vLLM itself does, and get the tenant's salt.
"""

from __future__ import annotations

from typing import Any

from comb_serving.api.request_error import RequestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COHERE = "/cohere/v2/chat"  # goes on as a chat
DOCUMENTS, SWITCH = "/v1/documents", "/v1/comb"
GENERATION = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
PASSED = {
    "/v1/chat/completions/batch", "/v1/messages/count_tokens", "/invocations", "/generative_scoring", "/tokenize",
    "/detokenize", "/start_profile", "/stop_profile",
}  # fmt: skip
OPEN = ("/ping",)  # without a key, a body or a tenant
ASKING = ("GET", "HEAD", "OPTIONS")  # they have no body, and nothing is generated for them


def is_documents(path: str) -> bool:
    """Whether a path is one of those for registered documents."""
    return path == DOCUMENTS or path.startswith(f"{DOCUMENTS}/")


def is_ours(path: str) -> bool:
    """Whether a path is one of the routes that vLLM hasn't."""
    return path == SWITCH or is_documents(path)


def check_route(method: str, path: str) -> None:
    """Raises RequestError (404) for what isn't on the list."""
    if not (is_ours(path) or (method == "POST" and path in (*GENERATION, COHERE, *PASSED, *OPEN))):
        raise RequestError(404, f"comb serve has no route {method} {path}")


def check_passed(path: str, body: dict[str, Any]) -> None:
    """Raises RequestError (400) for a body with documents, which would be ignored."""
    for name in ("documents", "comb"):
        if body.get(name) is not None:
            raise RequestError(
                400,
                f"{path} takes no {name}: there are {', '.join(GENERATION)}, and encoding at {DOCUMENTS}",
                param=name,
            )
