"""The routes that vLLM hasn't: /v1/documents, to name documents by id in requests, and /v1/comb, how they are linked.

The latter isn't beside vLLM's own /sleep and /wake_up: those exist in its development mode only and ask for no key.
"""

from __future__ import annotations

import sys
from typing import Any

from comb.documents.catalog import KeyedSegment, UnknownDocumentError
from comb_serving.api.fields import FIELDS, TEXTS
from comb_serving.api.http import RequestError
from comb_serving.api.preprocessor import Preprocessor, wanted
from comb_serving.api.routes import DOCUMENTS

_FIELDS = {*FIELDS, "pin", "ttl_s"}


def state(preprocessor: Preprocessor, tenant: str, ranks: int) -> dict[str, Any]:
    """How documents are linked now, and what of the pool, of all `ranks`, a tenant has and may have."""
    choice, manager = preprocessor.choice, preprocessor.manager
    registered = len(preprocessor.registered.of(tenant).ids())
    quota = {"documents": {"used": registered, "limit": preprocessor.max_documents}}
    if manager is not None:
        layout, used = manager.layout, manager.blocks_of(tenant)
        block = ranks * layout.block_size * layout.bytes_per_token
        for name, blocks, share in zip(
            ("bytes", "pinned_bytes"), used, (manager.held_share, manager.pinned_share), strict=True
        ):
            quota[name] = {"used": blocks * block, "limit": int(share * layout.num_blocks) * block}
    return {"object": "comb", **choice.about(choice.current), "switchable": not choice.started.full, "quota": quota}


async def documents(
    preprocessor: Preprocessor, method: str, path: str, body: dict[str, Any], tenant: str
) -> dict[str, Any]:
    """The answer to one request. Raises RequestError, and what `PICManager.acquire` raises."""
    name, registered = path.removeprefix(DOCUMENTS).removeprefix("/"), preprocessor.registered
    registered.check_restored()
    if method == "POST" and not name:
        return await _add(preprocessor, body, tenant)
    try:
        if method == "GET":
            found = registered.of(tenant).find([name] if name else registered.of(tenant).ids())
            data = [_describe(preprocessor, segment) for segment in found]
            return data[0] if name else {"object": "list", "data": data}
        if method == "DELETE" and name:
            await registered.remove(tenant, name)
            return {"id": name, "object": "document", "deleted": True}
    except UnknownDocumentError:
        raise RequestError(404, f"unknown document {name!r}", param="id") from None
    raise RequestError(405, f"{method} {path} is no route: there are GET and POST {DOCUMENTS}, GET and DELETE of an id")


async def _add(preprocessor: Preprocessor, body: dict[str, Any], tenant: str) -> dict[str, Any]:
    if unknown := sorted(body.keys() - _FIELDS):
        raise RequestError(400, f"unknown field {unknown[0]!r}; there are {sorted(_FIELDS)}", param=unknown[0])
    pin, ttl = body.pop("pin", False), body.pop("ttl_s", None)
    if not isinstance(pin, bool):
        raise RequestError(400, "pin is true or false", param="pin")
    if ttl is not None and (type(ttl) not in (int, float) or not 0 < ttl <= sys.float_info.max):
        raise RequestError(400, "ttl_s is a positive number of seconds", param="ttl_s")
    if all(body.get(name) is None for name in (*TEXTS, "data", "token_ids")):
        raise RequestError(400, "a document needs text or token_ids", param="text")
    # while nothing is linked too: the key must name the weights, for the time when something is again
    (segment,) = await preprocessor.tokenize([body], tenant, linked=True)
    registered = preprocessor.registered

    def check() -> None:
        """Whether the tenant may add the document now, and pin it. Raises RequestError or TenantQuotaError."""
        catalog = registered.of(tenant)
        known = catalog.ids()
        if segment.id not in known and len(known) >= preprocessor.max_documents:
            raise RequestError(429, f"{len(known)} documents are registered: delete some", retry_after=60)
        try:
            catalog.check([[segment]])
        except ValueError:
            advice = f"DELETE {DOCUMENTS}/{segment.id} first, or choose another id"
            raise RequestError(400, f"{segment.id!r} stands for another text already: {advice}", param="id") from None
        if pin and preprocessor.manager is not None:
            preprocessor.manager.check_pin(wanted(segment, tenant))

    if not preprocessor.linking:
        await registered.add(tenant, segment, pin=pin, ttl=ttl, check=check)
        return {**_describe(preprocessor, segment), "state": "inlined"}
    check()  # before anything is encoded for it
    lease = await preprocessor.acquire([segment], tenant)
    try:
        await registered.add(tenant, segment, pin=pin, ttl=ttl, check=check)
        made = lease.documents[0].state
        preprocessor.counters.count_hits(lease.documents)
    finally:
        lease.release()
    return {**_describe(preprocessor, segment), "state": made}


def _describe(preprocessor: Preprocessor, segment: KeyedSegment) -> dict[str, Any]:
    cached = preprocessor.manager is not None and preprocessor.manager.lookup(segment.key)
    return {"id": segment.id, "object": "document", "tokens": len(segment.token_ids), "cached": cached}
