"""/v1/documents: documents that a tenant registers, to name them by id in requests."""

from __future__ import annotations

import math
from typing import Any

from comb.documents.catalog import DocumentCatalog, KeyedSegment, UnknownDocumentError
from comb_serving.api.fields import FIELDS, TEXTS
from comb_serving.api.preprocessor import Preprocessor, wanted
from comb_serving.api.request_error import RequestError
from comb_serving.api.routes import DOCUMENTS
from comb_serving.manager.leases import WantedDocument

_FIELDS = {*FIELDS, "pin", "ttl_s"}


async def answer(
    preprocessor: Preprocessor, method: str, path: str, body: dict[str, Any], tenant: str
) -> tuple[int, dict[str, Any]]:
    """Status and body for one request. Raises RequestError, and what `PICManager.acquire` raises."""
    name = path.removeprefix(DOCUMENTS).removeprefix("/")
    if method == "POST" and not name:
        return 200, await _add(preprocessor, body, tenant)
    if method == "GET":
        if name:
            return 200, _describe(preprocessor, _find(preprocessor, tenant, name))
        catalog = preprocessor.catalog(tenant)
        data = [_describe(preprocessor, segment) for segment in catalog.find(catalog.ids())]
        return 200, {"object": "list", "data": data}
    if method == "DELETE" and name:
        segment = _find(preprocessor, tenant, name)
        preprocessor.catalog(tenant).remove([name])
        return 200, {"id": segment.id, "object": "document", "deleted": True}
    raise RequestError(405, f"{method} {path} is no route: there are GET and POST {DOCUMENTS}, GET and DELETE of an id")


async def _add(preprocessor: Preprocessor, body: dict[str, Any], tenant: str) -> dict[str, Any]:
    unknown = sorted(body.keys() - _FIELDS)
    if unknown:
        raise RequestError(400, f"unknown field {unknown[0]!r}; there are {sorted(_FIELDS)}", param=unknown[0])
    pin, ttl = body.pop("pin", False), body.pop("ttl_s", None)
    if not isinstance(pin, bool):
        raise RequestError(400, "pin is true or false", param="pin")
    if ttl is not None and (type(ttl) not in (int, float) or not 0 < ttl < math.inf):
        raise RequestError(400, "ttl_s is a positive number of seconds", param="ttl_s")
    if all(body.get(name) is None for name in (*TEXTS, "data", "token_ids")):
        raise RequestError(400, "a document needs text or token_ids", param="text")
    # while nothing is linked too: the key must name the weights, for the time when something is again
    (segment,) = await preprocessor.tokenize([body], tenant, linked=True)
    catalog = preprocessor.catalog(tenant, keep=True)
    if not preprocessor.linking:
        _check(preprocessor, catalog, segment)
        catalog.add([segment], pin=pin, ttl=ttl)
        return {**_describe(preprocessor, segment), "state": "inlined"}
    pins = wanted(segment, tenant) if pin else None
    _check(preprocessor, catalog, segment, pins)  # before anything is encoded for it
    lease = await preprocessor.acquire([segment], tenant)
    try:
        _check(preprocessor, catalog, segment, pins)  # others may have come meanwhile, and none does from here on
        catalog.add([segment], pin=pin, ttl=ttl)
        state = lease.documents[0].state
    finally:
        lease.release()
    return {**_describe(preprocessor, segment), "state": state}


def _check(
    preprocessor: Preprocessor, catalog: DocumentCatalog, segment: KeyedSegment, pins: WantedDocument | None = None
) -> None:
    """Whether a tenant may add a document now, and pin it. Raises RequestError or TenantQuotaError."""
    known = catalog.ids()
    if segment.id not in known and len(known) >= preprocessor.max_documents:
        raise RequestError(429, f"{len(known)} documents are registered: delete some", retry_after=60)
    try:
        catalog.check([[segment]])
    except ValueError:
        advice = f"DELETE {DOCUMENTS}/{segment.id} first, or choose another id"
        raise RequestError(400, f"{segment.id!r} stands for another text already: {advice}", param="id") from None
    if pins is not None and preprocessor.manager is not None:
        preprocessor.manager.check_pin(pins)


def _find(preprocessor: Preprocessor, tenant: str, name: str) -> KeyedSegment:
    try:
        return preprocessor.catalog(tenant).find([name])[0]
    except UnknownDocumentError:
        raise RequestError(404, f"unknown document {name!r}", param="id") from None


def _describe(preprocessor: Preprocessor, segment: KeyedSegment) -> dict[str, Any]:
    cached = preprocessor.manager is not None and preprocessor.manager.lookup(segment.key)
    return {"id": segment.id, "object": "document", "tokens": len(segment.token_ids), "cached": cached}
