"""Errors that a client sees: a status, and an OpenAI error object."""

from __future__ import annotations

import json

TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 409: "ConflictError", 413: "RequestTooLargeError", 429: "RateLimitError",
}  # fmt: skip


class RequestError(Exception):
    """What is wrong with a request, for the one who sent it.

    Args:
        param: the field of the body that is meant.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    @property
    def body(self) -> bytes:
        """The OpenAI error object."""
        error = {
            "message": self.message,
            "type": TYPES.get(self.status, "InternalServerError"),
            "param": self.param,
            "code": self.status,
        }
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
