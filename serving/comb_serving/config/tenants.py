"""Who sends a request: its API key decides, never its body."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence


def key_hash(key: str) -> str:
    """How a key is kept and compared: sha256, hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def authorized(authorization: str | None, key_hashes: Sequence[str]) -> bool:
    """Whether the header holds one of the server's API keys (vLLM's rule); True if the server has none."""
    if not key_hashes:
        return True
    scheme, _, key = (authorization or "").partition(" ")
    digest = key_hash(key)
    matches = [secrets.compare_digest(digest, known) for known in key_hashes]
    return scheme.lower() == "bearer" and any(matches)


def sender_of(authorization: str | None) -> str:
    """The header as ``Bearer KEY``, however its scheme and spaces are written; empty without a key."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    if key:
        return f"{scheme.capitalize()} {key.strip()}"
    return "" if scheme.lower() == "bearer" else scheme


def tenant_of(authorization: str | None) -> str:
    """A name for the sender that doesn't give the key away; empty without one."""
    sender = sender_of(authorization)
    if not sender:
        return ""
    return hashlib.sha256(b"comb-tenant:" + sender.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def prefix_salt(tenant: str, keys: Sequence[str], user_salt: str | None) -> str | None:
    """The salt of the decoder's prefix cache; None where the plain server would have none.

    The decoder's keys and values depend on the linked documents and their order, so these belong to it; a salt from
    the body can only narrow further, and is never passed on as it is.
    """
    if not tenant and not keys and user_salt is None:
        return None
    text = json.dumps([tenant, list(keys), user_salt])
    return hashlib.sha256(text.encode()).hexdigest()
