"""What the Hub's client raises, said in a line with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

# the client's HTTP library's own errors (httpx or httpx2, by the client's version), and those that wrap what went wrong
HUB_ERRORS: tuple[Any, ...] = (HfHubHTTPError.__bases__[0], OSError, RuntimeError)

_MEANING = {
    401: "no valid token (401): set HF_TOKEN or run `hf auth login`, with a token that may write",
    403: "the token may not write there (403): take one with write access to this owner's repositories",
    412: "somebody else has pushed to it in the meantime (412): run the same command again, from what is there now",
}


class UploadFailedError(RuntimeError):
    """The Hub refused or couldn't be reached."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns an error of the Hub's client into an `UploadFailedError` that begins with `what`."""
    try:
        yield
    except HUB_ERRORS as error:
        raise UploadFailedError(f"{what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error of the Hub's client in a few words, with what to do where that is known."""
    while isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the Hub is not asked: unset it"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _MEANING:
        return _MEANING[status]
    if status is not None:
        server = str(getattr(error, "server_message", None) or "").strip()
        return f"the Hub answered {status}{f' ({server})' if server else ''}"
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}{f' ({said[0]})' if said else ''}"
