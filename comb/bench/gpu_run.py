"""The frame of `scripts/bench-*-gpu`: what is asked for, on which device, for how long, and what was left out."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from comb.bench.gpu_time import Clock
from comb.kernels.interpreter import INTERPRETED


def parser_for(doc: str | None, files: str, seconds: float) -> argparse.ArgumentParser:
    """The options that these benchmarks share; `doc`: the module's text, `files`: what is written into ``--out``."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--out", type=Path, default=Path("out"), help=f"folder of {files}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few small sizes, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=seconds, help="after which nothing further is begun")
    return parser


def chosen_device(parser: argparse.ArgumentParser, name: str) -> tuple[torch.device, str]:
    """The device with its number, and its name for the report; ends the program where no kernel can run."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)  # streams, free memory and single launches are the current device's
        return device, torch.cuda.get_device_name(device)
    if not INTERPRETED:
        parser.error(f"the kernels run on {device.type} only interpreted: set TRITON_INTERPRET=1")
    return device, "cpu, interpreted: times mean nothing"


class GpuRun:
    """A benchmark under way; `seconds` after its start nothing further is begun.

    Attributes:
        left_out: what wasn't measured, and why.
    """

    def __init__(self, device: torch.device, repeats: int, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.begun = time.perf_counter()
        self.clock = Clock(device, repeats)
        self.left_out: dict[str, str] = {}

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begun

    def late(self, what: str) -> bool:
        """Whether time is up; what is therefore not measured is noted."""
        if self.elapsed() < self.seconds:
            return False
        self.left_out[what] = f"time is up after {self.seconds:.0f} s"
        return True

    def say(self, text: str) -> None:
        """A line on the terminal, with the time in front."""
        print(f"{self.elapsed():6.1f} s  {text}", flush=True)  # noqa: T201

    def say_left_out(self) -> None:
        """A line for each thing that was left out."""
        for what, why in self.left_out.items():
            print(f"left out: {what}: {why}", flush=True)  # noqa: T201
