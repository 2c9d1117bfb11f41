"""Which method a request's documents are linked with: what it asks for, of what the server has and is switched to.

A server has either an adapter, whose encoder is on or off, or a plain model, which vLLM links in several ways.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from comb_serving.api.http import RequestError
from comb_serving.config.serve_options import ServeOptions
from comb_serving.linking.methods import FULL, LinkMethod

logger = logging.getLogger(__name__)

ENCODER = LinkMethod("comb")  # an adapter's: documents are encoded, and stand beside the prompt
INLINED = LinkMethod(FULL)


class MethodChoice:
    """What a server was started with, and what it links with now: requests that ask for nothing get that."""

    def __init__(self, options: ServeOptions) -> None:
        self.plain = options.method is not None  # a plain model: documents stand in the prompt, linked or not
        # `INLINED` where there is no pool: then nothing can be linked
        self.started = ENCODER if options.encoder else INLINED
        if options.method is not None:
            self.started = LinkMethod.parse(options.method)
        self.current = self.started
        self._chosen = {self.started.name}  # by who runs the server
        self.segments = options.segments

    def about(self, method: LinkMethod) -> dict[str, Any]:
        """A method as answers and logs say it: ``{"encoder": true}`` or ``{"method": "legolink:16"}``."""
        return {"method": method.name} if self.plain else {"encoder": not method.full}

    def label(self, method: LinkMethod) -> str:
        """A method as metrics say it: one that clients alone have chosen without its numbers, which have no end."""
        return method.name if method.name in self._chosen else re.split("[:,]", method.name)[0]

    def of_request(self, asked: Any) -> tuple[LinkMethod, bool]:
        """The method of a request with this `comb`, and whether segments are looked for in it.

        While linking is switched off, no request can switch it on for itself. Raises RequestError (400).
        """
        if asked is not None and not isinstance(asked, dict):
            raise RequestError(400, f"comb is an object, not {str(asked)[:80]}", param="comb")
        asked = dict(asked or {})
        segments = asked.pop("segments", self.segments)
        if segments not in ("auto", "off"):
            raise RequestError(400, f'comb.segments is "auto" or "off", not {str(segments)[:40]}', param="comb")
        if segments == "auto" and self.segments == "off":
            raise RequestError(400, "this server was started without --comb-segments", param="comb")
        wanted = self._read(asked, "comb") if asked else self.current
        return self.current if self.current.full else wanted, segments == "auto"

    def switch(self, asked: dict[str, Any]) -> None:
        """Changes what requests get from now on. Raises RequestError: 400, or 409 where there is no pool."""
        wanted = self._read(asked, "method" if self.plain else "encoder")
        if self.started.full and not wanted.full:
            raise RequestError(409, "the server was started with nothing linked, so it has no pool for documents")
        if self.current != wanted:
            logger.warning("switched to %s", self.about(wanted))
        self.current = wanted
        self._chosen.add(wanted.name)

    def _read(self, asked: dict[str, Any], param: str) -> LinkMethod:
        """What a body asks for. Raises RequestError (400) for what such a server doesn't have."""

        def refusal(message: str) -> RequestError:
            return RequestError(400, message, param=param)

        if not self.plain:
            if "method" in asked:
                raise refusal('this server has an adapter, which is the method: choose with {"encoder": false}')
            if set(asked) != {"encoder"} or not isinstance(asked["encoder"], bool):
                raise refusal(f'expected {{"encoder": true}} or {{"encoder": false}}, not {str(asked)[:80]}')
            return ENCODER if asked["encoder"] else INLINED
        if "encoder" in asked:
            raise refusal('this server has a plain model and no encoder: choose with {"method": "full"}')
        if set(asked) != {"method"} or not isinstance(asked["method"], str):
            raise refusal(f'expected {{"method": "legolink:16"}}, not {str(asked)[:80]}')
        try:
            method = LinkMethod.parse(asked["method"])
        except ValueError as error:
            raise refusal(str(error)) from error
        method = method.on_hybrids if self.started.states else method
        if method.rule.by_query and not self.started.rule.by_query:
            raise refusal(
                f"{method.name} has to see what questions look at: start the server with --method {method.name}"
            )
        if not self.started.full and not method.full and method.compiled != self.started.compiled:
            alike = {"alone": "naive, legolink:k", "prose": "primed:k"}.get(self.started.compiled, self.started.name)
            raise refusal(
                f"{method.name} wants documents compiled in another way than those here: ask for {alike} or full"
            )
        return method
