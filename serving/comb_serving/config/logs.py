"""How the processes of `comb serve` log: to standard error, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class JSONFormatter(logging.Formatter):
    """A line is a JSON object: time, level, logger, message, and the values of a request."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "comb", None)
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self.who,
            "logger": record.name,
            "message": record.getMessage() if fields is None else "request",
            **(fields or {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(log_format: str, who: str) -> None:
    """Sends what this package logs to standard error; leaves it alone if someone has set it up already.

    Args:
        who: which process this is.
    """
    ours = logging.getLogger("comb_serving")
    if ours.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(levelname)s %(asctime)s {who}: %(message)s")
    handler.setFormatter(JSONFormatter(who) if log_format == "json" else text)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
