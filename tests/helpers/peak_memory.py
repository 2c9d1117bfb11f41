"""How much memory a piece of work needs on the CPU."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch


def peak_memory(work: Callable[[], Any]) -> int:
    """Runs `work` and returns the peak of bytes that torch allocated on top of what it held before.

    torch's profiler records every allocation and release, so the result is exact and repeatable; scratch memory that
    libraries such as MKL take on their own is not in it.
    """
    # 6 is above every level: the profiler's own lines would stand between ours
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return max(accumulate((int(event["args"]["Bytes"]) for event in changes), initial=0))
