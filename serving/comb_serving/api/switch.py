"""/v1/comb: how documents are linked, asked and set while the server runs, and what of the pool the asker has.

Not beside vLLM's own /sleep and /wake_up: those exist in its development mode only and ask for no key.
"""

from __future__ import annotations

from typing import Any

from comb_serving.api.body import parse_object
from comb_serving.api.preprocessor import Preprocessor
from comb_serving.api.request_error import RequestError
from comb_serving.api.routes import SWITCH
from comb_serving.config.serve_options import ServeOptions
from comb_serving.config.tenants import authorized


def check_key(options: ServeOptions, method: str, authorization: str | None) -> None:
    """Who may ask or change the state, before the body is read.

    Raises:
        RequestError: 401 without the right key, 403 if the server was started without an admin key, 405.
    """
    admin = options.admin_hash is not None and authorized(authorization, (options.admin_hash,))
    if method == "POST":
        if options.admin_hash is None:
            raise RequestError(403, "start the server with COMB_ADMIN_KEY or --comb-admin-key to switch it")
        if not admin:
            raise RequestError(401, "Unauthorized: send the admin key as 'Authorization: Bearer ...'")
    elif method != "GET":
        raise RequestError(405, f"{method} {SWITCH} is no route: there are GET and POST")
    elif not admin:
        check_api_key(options, authorization)


def check_api_key(options: ServeOptions, authorization: str | None) -> None:
    """Raises RequestError (401) without one of the server's keys, where it has any."""
    if not authorized(authorization, options.key_hashes):
        raise RequestError(401, "Unauthorized: send an API key as 'Authorization: Bearer ...'")


def answer(preprocessor: Preprocessor, method: str, raw: bytes, tenant: str) -> dict[str, Any]:
    """The state, after the change that a POST asks for, and who asks; requests under way end as they began.

    Raises:
        RequestError: 400, or 409 if the server was started with nothing linked.
    """
    choice = preprocessor.choice
    if method == "POST":
        choice.switch(parse_object(raw))
    state = {"object": "comb", **choice.about(choice.current), "switchable": choice.switchable}
    return {**state, "quota": preprocessor.quota(tenant)}
