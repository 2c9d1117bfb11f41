"""Which method a request's documents are linked with: what it asks for, of what the server has and is switched to.

A server has either an adapter, whose encoder is on or off, or a plain model, which vLLM links in several ways.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

from comb_serving.api.errors import RequestError
from comb_serving.config.options import ServeOptions
from comb_serving.linking.methods import FULL, LinkMethod

logger = logging.getLogger(__name__)

ENCODER = LinkMethod("comb")  # an adapter's: documents are encoded, and stand beside the prompt
INLINED = LinkMethod(FULL)


class MethodChoice(ABC):
    """What a server was started with, and what it links with now: requests that ask for nothing get that.

    Args:
        started: `INLINED` where there is no pool: then nothing can be linked.
    """

    in_prompt: bool
    """Whether documents stand in the prompt also where they are linked."""

    def __init__(self, started: LinkMethod) -> None:
        self.started = self.current = started

    @abstractmethod
    def read(self, asked: dict[str, Any], param: str) -> LinkMethod:
        """What a body asks for. Raises RequestError (400) for what such a server doesn't have."""

    @abstractmethod
    def about(self, method: LinkMethod) -> dict[str, Any]:
        """A method as answers and logs say it."""

    @property
    def switchable(self) -> bool:
        """Whether something can be linked at all."""
        return not self.started.full

    def of_request(self, asked: Any) -> LinkMethod:
        """The method of a request with this `comb`; while linking is switched off, none can switch it on for itself."""
        if asked is None or asked == {}:
            return self.current
        if not isinstance(asked, dict):
            raise RequestError(400, f"comb is an object, not {str(asked)[:80]}", param="comb")
        wanted = self.read(asked, "comb")
        return self.current if self.current.full else wanted

    def switch(self, asked: dict[str, Any]) -> None:
        """Changes what requests get from now on. Raises RequestError: 400, or 409 where there is no pool."""
        wanted = self.read(asked, next(iter(self.about(INLINED))))
        if not wanted.full and not self.switchable:
            raise RequestError(409, "the server was started with nothing linked, so it has no pool for documents")
        if self.current != wanted:
            logger.warning("switched to %s", self.about(wanted))
        self.current = wanted


class EncoderChoice(MethodChoice):
    """Of an adapter: on or off."""

    in_prompt = False

    def read(self, asked: dict[str, Any], param: str) -> LinkMethod:
        """``{"encoder": true}``."""
        if "method" in asked:
            raise RequestError(
                400, 'this server has an adapter, which is the method: choose with {"encoder": false}', param=param
            )
        if set(asked) != {"encoder"} or not isinstance(asked["encoder"], bool):
            found = str(asked)[:80]
            raise RequestError(400, f'expected {{"encoder": true}} or {{"encoder": false}}, not {found}', param=param)
        return ENCODER if asked["encoder"] else INLINED

    def about(self, method: LinkMethod) -> dict[str, Any]:
        """``{"encoder": true}``."""
        return {"encoder": not method.full}


class LinkChoice(MethodChoice):
    """Of a plain model: all methods that share the documents which the server's own method compiles."""

    in_prompt = True

    def read(self, asked: dict[str, Any], param: str) -> LinkMethod:
        """``{"method": "legolink:16"}``."""
        if "encoder" in asked:
            raise RequestError(
                400, 'this server has a plain model and no encoder: choose with {"method": "full"}', param=param
            )
        if set(asked) != {"method"} or not isinstance(asked["method"], str):
            raise RequestError(400, f'expected {{"method": "legolink:16"}}, not {str(asked)[:80]}', param=param)
        try:
            method = LinkMethod.parse(asked["method"])
        except ValueError as error:
            raise RequestError(400, str(error), param=param) from error
        if self.switchable and not method.full and method.compiled != self.started.compiled:
            alike = {"alone": "naive, legolink:k", "primed": "primed:k"}.get(self.started.compiled, self.started.name)
            raise RequestError(
                400,
                f"{method.name} wants documents compiled in another way than those here: ask for {alike} or full",
                param=param,
            )
        return method

    def about(self, method: LinkMethod) -> dict[str, Any]:
        """``{"method": "legolink:16"}``."""
        return {"method": method.name}


def choice_of(options: ServeOptions) -> MethodChoice:
    """What a server with these options has."""
    if options.method is not None:
        return LinkChoice(LinkMethod.parse(options.method))
    return EncoderChoice(ENCODER if options.encoder else INLINED)
