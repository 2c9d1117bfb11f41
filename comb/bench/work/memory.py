"""Peak memory of a piece of work: the most bytes of tensors it holds beyond what was there before."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def peak_memory(device: torch.device | str, work: Callable[[], Any]) -> int:
    """Runs `work` and returns the peak of bytes that torch allocated on `device` on top of what it held before.

    On CUDA the caching allocator counts. On the CPU, torch's profiler records every allocation and release of torch's
    CPU allocator, so the result is exact and repeatable, and work is slower meanwhile; scratch memory that libraries
    such as MKL take on their own is not in it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
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
    return running_maximum(event["args"]["Bytes"] for event in changes)


def running_maximum(changes: Iterable[int]) -> int:
    """The highest sum of a beginning of `changes`, at least 0."""
    now = peak = 0
    for change in changes:
        now += int(change)
        peak = max(peak, now)
    return peak
