"""Files to the Hub in one commit: what passes is retried with growing waits, what doesn't is explained."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils._validators import validate_repo_id

logger = logging.getLogger(__name__)

T = TypeVar("T")

HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
"""What all errors of the Hub client's HTTP library derive from: that is httpx, or httpx2, by the client's version."""
# some of the client's errors only wrap what went wrong: `_cause`
HUB_ERRORS: tuple[Any, ...] = (HTTP_ERROR, OSError, RuntimeError)

ATTEMPTS = 4
FIRST_WAIT_S = 2.0  # doubled each time; within an attempt, the client repeats single requests itself
PASSING = (408, 425, 429, 500, 502, 503, 504)
MOVED = (409, 412)  # the parent commit is no longer the newest


class UploadFailedError(RuntimeError):
    """The Hub refused or couldn't be reached; the message says what is there and how to go on."""


def check_repo_name(repo: str) -> None:
    """Raises ValueError for a name that is no ``owner/name`` of the Hub."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no name for a repository: {error}") from error
    if repo.count("/") != 1:
        raise ValueError(f"expected owner/name, for example me/comb-qwen3-8b, got {repo!r}")


def persist(action: Callable[[], T], what: str) -> T:
    """What `action` returns; errors that pass (connections, 5xx, 429) are waited out and it is called again."""
    wait = FIRST_WAIT_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except HUB_ERRORS as error:
            if attempt == ATTEMPTS or not is_passing(error):
                raise
            logger.warning("%s: %s; trying again in %.0f s", what, reason(error), wait)
        time.sleep(wait)
        wait *= 2
    raise AssertionError("unreachable")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns an error of the Hub's client into an `UploadFailedError` that begins with `what`."""
    try:
        yield
    except UploadFailedError:
        raise
    except HUB_ERRORS as error:
        raise UploadFailedError(f"{what}: {reason(error)}. Nothing was uploaded") from error


def upload(api: HfApi, repo: str, files: Mapping[str, Path | bytes], *, parent: str | None, message: str) -> str:
    """Uploads `files` (path in the repository -> file or content) as one commit on top of `parent`.

    Returns:
        the commit's address.

    Raises:
        UploadFailedError: if the Hub refuses, goes on failing, or somebody else has pushed since `parent`.
    """
    mark = f"comb push {uuid.uuid4().hex}"  # finds our commit again when its answer got lost

    def commit() -> str:
        # the client keeps an upload's state in them: new ones each time. Files that came through aren't sent again
        operations = [CommitOperationAdd(name, content) for name, content in sorted(files.items())]
        try:
            done = api.create_commit(
                repo, operations, commit_message=message, commit_description=mark, parent_commit=parent
            )
        except HUB_ERRORS as error:
            if _status(error) in MOVED and (address := _landed(api, repo, mark)) is not None:
                return address
            raise
        return str(done.commit_url)

    try:
        return persist(commit, f"uploading to {repo}")
    except HUB_ERRORS as error:
        raise UploadFailedError(_failure(api, repo, mark, error)) from error


def reason(error: BaseException) -> str:
    """An error of the Hub's client in a few words, with what to do where that is known."""
    error = _cause(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the Hub is not asked: unset it"
    status = _status(error)
    if status == 401:
        return "no valid token (401): set HF_TOKEN or run `hf auth login`, with a token that may write"
    if status == 403:
        return "the token may not write there (403): take one with write access to this owner's repositories"
    if status is not None:
        server = str(getattr(error, "server_message", None) or "").strip()
        return f"the Hub answered {status}{f' ({server})' if server else ''}"
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}{f' ({said[0]})' if said else ''}"


def is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed later."""
    error = _cause(error)
    if isinstance(error, OfflineModeIsEnabled):
        return False
    status = _status(error)
    return status in PASSING if status is not None else isinstance(error, HTTP_ERROR | ConnectionError | TimeoutError)


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    return getattr(getattr(_cause(error), "response", None), "status_code", None)


def _failure(api: HfApi, repo: str, mark: str, error: BaseException) -> str:
    what = f"the upload to {repo} failed{f' after {ATTEMPTS} attempts' if is_passing(error) else ''}: {reason(error)}"
    try:
        address = _landed(api, repo, mark)
    except HUB_ERRORS:
        return (
            f"{what}. The Hub could not be asked whether anything of it is there: files appear all together or not at "
            "all. Run the same command again; it is safe to repeat"
        )
    if address is not None:
        return f"{what}. It is complete on the Hub all the same: {address}"
    if _status(error) in MOVED:
        return (
            f"{what}. Somebody else has pushed to it in the meantime, and nothing of this push is in it. Run the same "
            "command again: it starts from what is there now"
        )
    return (
        f"{what}. The repository is there, and nothing of this push is in it: files appear all together or not at all. "
        "Run the same command again; weights that came through whole are not sent a second time"
    )


def _landed(api: HfApi, repo: str, mark: str) -> str | None:
    """The address of the commit with `mark` in its description, if it is there."""
    for commit in api.list_repo_commits(repo):
        if mark in commit.message:
            return f"{api.endpoint}/{repo}/commit/{commit.commit_id}"
    return None
