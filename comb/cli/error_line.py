"""Any exception as one line: what is wrong, where, and what to do."""

from __future__ import annotations

import errno

from comb.backbones.tracebacks import frames, in_comb, raised_by_us

DEBUG = "--debug shows the traceback"

_PERMISSION = "see who may read and write it (ls -l), or take another place"
_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EEXIST: "something of that name is in the way: move it, or take another place",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "part of that path is a file",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "take a place that can be written to",
    errno.ENOSPC: "free some space on that disk, or take another one (HF_HOME moves the caches)",
    errno.EDQUOT: "free some space of your quota, or take another disk (HF_HOME moves the caches)",
    errno.ENAMETOOLONG: "check the path",
}


def one_line(error: BaseException) -> str:
    """Comb's own words as they are, anyone else's with the name of the exception.

    What nobody foresaw is said to be a fault of comb's, with where it happened.
    """
    message = " ".join(str(error).split())
    if raised_by_us(error) and message:
        return message
    if isinstance(error, OSError) and error.strerror and error.errno in _REMEDIES:
        names = ", ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names + ': ' if names else ''}{error.strerror}: {_REMEDIES[error.errno]}"
    kind = type(error).__name__
    named = f"{kind}: {message}" if message else kind
    if any(frame.tb_frame.f_code.co_filename == "<template>" for frame in frames(error)):
        return (
            f"the tokenizer's chat template (chat_template.jinja, or in tokenizer_config.json) raises {named}: mend it "
            "there, or take the one that the model was published with"
        )
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError":
        return f"out of memory ({named}): take a smaller model, dtype or batch, or fewer documents at once"
    if isinstance(error, ValueError | OSError | RuntimeError | ImportError):
        return f"{named} ({DEBUG})"
    last = [frame for frame in frames(error) if in_comb(frame)][-1:]
    place = "".join(f" at {frame.tb_frame.f_globals['__name__']}:{frame.tb_lineno}" for frame in last)
    return f"unexpected {named}{place}: that is a fault of comb's, please report it; {DEBUG}"
