"""/v1/comb: whether documents are encoded, asked and set while the server runs.

Not beside vLLM's own /sleep and /wake_up: those exist in its development mode only and ask for no key.
"""

from __future__ import annotations

import logging
from typing import Any

from comb_serving.api.body import parse_object
from comb_serving.api.errors import RequestError
from comb_serving.api.preprocessor import Preprocessor
from comb_serving.config.options import ServeOptions
from comb_serving.config.tenants import authorized

logger = logging.getLogger(__name__)

SWITCH = "/v1/comb"


def answer(
    preprocessor: Preprocessor, options: ServeOptions, method: str, raw: bytes, authorization: str | None
) -> dict[str, Any]:
    """The state, after the change that a POST asks for; requests under way end as they began.

    Raises:
        RequestError: 401 without the right key, 403 if the server was started without an admin key, 409 if it was
            started with the encoder off, 400, 405.
    """
    admin = options.admin_hash is not None and authorized(authorization, (options.admin_hash,))
    if method == "POST":
        if options.admin_hash is None:
            raise RequestError(403, "start the server with COMB_ADMIN_KEY or --comb-admin-key to switch the encoder")
        if not admin:
            raise RequestError(401, "Unauthorized: send the admin key as 'Authorization: Bearer ...'")
        _switch(preprocessor, parse_object(raw))
    elif method != "GET":
        raise RequestError(405, f"{method} {SWITCH} is no route: there are GET and POST")
    elif not admin and not authorized(authorization, options.key_hashes):
        raise RequestError(401, "Unauthorized: send an API key as 'Authorization: Bearer ...'")
    return {"object": "comb", "encoder": preprocessor.linking, "switchable": preprocessor.manager is not None}


def _switch(preprocessor: Preprocessor, body: dict[str, Any]) -> None:
    wanted = body.get("encoder")
    if set(body) != {"encoder"} or not isinstance(wanted, bool):
        raise RequestError(400, 'the body is {"encoder": true} or {"encoder": false}', param="encoder")
    if wanted and preprocessor.manager is None:
        raise RequestError(409, "the server was started with --encoder off, so it has neither pool nor encoder")
    if preprocessor.enabled != wanted:
        logger.warning("the encoder was switched %s", "on" if wanted else "off")
    preprocessor.enabled = wanted
