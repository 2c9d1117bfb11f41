"""What happens beside the optimisation: the sampler's epoch, the clock, the progress bar, and the signal to stop."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from comb_training.trainer import distributed
from comb_training.trainer.sampler import BatchSampler
from comb_training.trainer.schedule import Schedule

logger = logging.getLogger(__name__)


class EpochCallback(TrainerCallback):
    """Tells the sampler its epoch; the Trainer loses that call when it resumes in the middle of one."""

    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


class ClockCallback(TrainerCallback):
    """Counts the seconds of optimisation for the schedule, and ends the run when they are used up.

    With several ranks the first one's clock holds for all: their learning rates must be the same.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.last = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.last = time.monotonic()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.monotonic()
        self.schedule.used += now - self.last
        self.last = now
        if self.schedule.max_seconds is not None:
            [self.schedule.used] = distributed.summed(self.schedule.used if distributed.is_main() else 0.0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        limit = self.schedule.max_seconds
        if limit is not None and self.schedule.used >= limit:
            control.should_training_stop = True
        if control.should_training_stop or state.global_step >= state.max_steps:
            control.should_log = True  # the last steps count too


class TerminationCallback(TrainerCallback):
    """SIGTERM (a scheduler's warning) ends the run after the step under way, with a checkpoint.

    All ranks agree on the step. `terminated` says that it happened.
    """

    def __init__(self) -> None:
        self.asked = False
        self.terminated = False
        self._before: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = signal.signal(signal.SIGTERM, self._ask)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if distributed.any_true(self.asked):
            self.terminated = True
            control.should_save = control.should_training_stop = control.should_log = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class JsonLines(TrainerCallback):
    """Every record of the log as a line of a file, as soon as it is there; a resumed run goes on where its step was."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if state.global_step and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):  # the last line of a killed run may be half of one
                    if json.loads(line)["step"] <= state.global_step:
                        kept.append(f"{line}\n")
        self.path.write_text("".join(kept), encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        record = {"step": state.global_step, "time": datetime.now(UTC).isoformat(), **(logs or {})}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # a full disk is the checkpoint's to report, with what is safe
            logger.warning("%s: a record is lost (%s)", self.path, error)


class ProgressBar(TrainerCallback):
    """One bar over the run, in steps or in seconds: tokens per second, time left, last loss beside the first one."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.bar: tqdm[Any] | None = None
        self.first: float | None = None
        self.start = 0.0
        self.progress_before = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start, self.progress_before = time.monotonic(), self.schedule.progress(state.global_step)
        self.bar = tqdm(
            total=1000, desc="training", bar_format="{desc} {percentage:3.0f}%|{bar:30}| {elapsed}{postfix}"
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(int(1000 * self.schedule.progress(state.global_step)) - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.bar is None or not logs or "loss" not in logs:
            return
        self.first = logs["loss"] if self.first is None else self.first
        done = self.schedule.progress(state.global_step)
        parts = [f"step {state.global_step}", f"loss {logs['loss']:.3f} (first {self.first:.3f})"]
        if "tokens_per_second" in logs:
            parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
        if done > self.progress_before:
            left = (time.monotonic() - self.start) * (1 - done) / (done - self.progress_before)
            parts.append(f"{tqdm.format_interval(left)} left")
        self.bar.set_postfix_str(", ".join(parts))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.close()
