"""What a run says while it trains: a file of records, a progress bar, and whatever `train.report_to` names."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from comb_training.config import TrainConfig
from comb_training.trainer import distributed
from comb_training.trainer.optimizer import LearningRateSchedule

logger = logging.getLogger(__name__)

LOG = "log.jsonl"
"""File in the run's folder that holds every record of its log."""
LENGTHS = ("steps", "epochs", "max_seconds")
"""Keys of `train` that a run ends by."""


def how_it_ended(folder: Path) -> dict[str, Any] | None:
    """The log's last line, with `LENGTHS`, if the run in this folder has nothing left to train; else None."""
    try:
        *_, last = (folder / LOG).read_text(encoding="utf-8").splitlines()
        record: dict[str, Any] = json.loads(last)
    except (OSError, ValueError):
        return None
    return record if "ended_by" in record else None


def last_run(folder: Path) -> str | None:
    """`RunLog.run` of the run that was begun or gone on with last in this folder; None if its log doesn't tell."""
    run = None
    with suppress(OSError):
        for line in (folder / LOG).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, AttributeError):
                run = json.loads(line).get("run", run)
    return run


class RunLog:
    """The records of a run: in memory on every rank; in a file, on a bar and in trackers on the first one."""

    def __init__(
        self,
        config: TrainConfig,
        schedule: LearningRateSchedule,
        accelerator: Accelerator,
        *,
        settings: Mapping[str, Any],
        progress: bool,
    ) -> None:
        self.config = config
        self._settings = {f"{part}.{key}": value for part, keys in settings.items() for key, value in keys.items()}
        self.schedule = schedule
        self.accelerator = accelerator
        self.history: list[dict[str, Any]] = []
        """Every record, with its step."""
        self.run = _now()
        """Tells the run from others in its folder; a resumed one keeps it."""
        self.path = Path(config.output_dir) / LOG
        self._progress = progress
        self._bar: tqdm[Any]  # from `start` to `close`
        self._tokens = 0
        self._since = math.inf

    def start(self, step: int) -> None:
        """Opens everything for a run that goes on from `step`."""
        if distributed.is_main():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = []  # of this run's file, the records up to `step`; of another's place those that the checkpoint has
            if step and not (self.path.is_file() and last_run(self.path.parent) in (None, self.run)):
                kept = [f"{json.dumps(row)}\n" for row in self.history]
            elif step:
                for line in self.path.read_text(encoding="utf-8").splitlines():
                    with suppress(ValueError, KeyError, TypeError):  # the last line of a killed run may be half of one
                        if json.loads(line)["step"] <= step:
                            kept.append(f"{line}\n")
            self.path.write_text("".join(kept), encoding="utf-8")
            self._add({"step": step, "time": _now(), "run": self.run})
        if self.config.report_to:
            self.accelerator.init_trackers(
                os.environ.get("WANDB_PROJECT", "huggingface"),  # as transformers names it
                config={k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self._settings.items()},
                init_kwargs={"wandb": {"name": self.config.output_dir}},
            )
        self._bar = tqdm(
            total=1.0, initial=self.schedule.progress(step), smoothing=0, desc="training",
            bar_format="{desc} {percentage:3.0f}%|{bar:30}| {elapsed}{postfix}, {remaining} left",
            disable=not (self._progress and distributed.is_main()),
        )  # fmt: skip

    def count(self, tokens: int) -> None:
        """Adds tokens that this rank trained on (of different documents, queries and answers, no padding)."""
        self._tokens += tokens

    def tokens_per_second(self) -> dict[str, float]:
        """What all ranks counted since the call before, as a record; empty at the first call. Collective."""
        now = time.monotonic()
        [tokens] = distributed.summed(self._tokens)
        rate = {"tokens_per_second": round(tokens / (now - self._since), 1)} if self._since < now else {}
        self._tokens, self._since = 0, now
        return rate

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """What takes its time inside is no training: `tokens_per_second` is without it, and the bar says `what`."""
        start = time.monotonic()
        self._bar.set_description_str(what)
        yield
        self._bar.set_description_str("training")
        if self._since == math.inf:  # in front of the first step: the time that is left is reckoned from here
            self._bar.unpause()
        self._since += time.monotonic() - start

    def advance(self, step: int) -> None:
        """Moves the bar: over the steps or over the seconds, whichever is nearer to the end."""
        self._bar.update(self.schedule.progress(step) - self._bar.n)

    def write(self, step: int, record: dict[str, float]) -> None:
        """Adds a record, everywhere; on the terminal one without a loss is a line of its own, which stays."""
        row = {"step": step, "time": _now(), **record}
        self.history.append(row)
        if not distributed.is_main():
            return
        self._add(row)
        if "loss" in record:
            first = next(row["loss"] for row in self.history if "loss" in row)
            said = f"step {step}, loss {record['loss']:.3f} (first {first:.3f})"
            if "tokens_per_second" in record:
                said += f", {record['tokens_per_second']:,.0f} tokens/s"
            self._bar.set_postfix_str(said)
        elif self._progress:
            self._bar.write(f"step {step}: {', '.join(f'{name} {value:.4g}' for name, value in record.items())}")
        if self.config.report_to:
            sides = {name: f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}" for name in record}
            self.accelerator.log({sides[name]: value for name, value in record.items()}, step=step)

    def end(self, step: int, by: str) -> None:
        """The last line of the file, as `how_it_ended` finds it: nothing is left to train."""
        if distributed.is_main():
            self._add(
                {"step": step, "time": _now(), "ended_by": by} | {name: getattr(self.config, name) for name in LENGTHS}
            )

    def _add(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:  # a full disk is the checkpoint's to report, with what is safe
            logger.warning("%s: a record is lost (%s)", self.path, error)

    def close(self) -> None:
        """Ends the bar and the trackers."""
        self._bar.close()
        for tracker in self.accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:  # each tracker has its own; what was trained is still to be written
                logger.warning("train.report_to: %s could not be ended (%s)", tracker.name, error)


def _now() -> str:
    return datetime.now(UTC).isoformat()
