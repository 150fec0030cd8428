"""The training log on disk: one line of JSON per step, and TensorBoard events.

Notable here:
- when a run resumes from a checkpoint, lines logged after it are deleted, so every step is in the log once
- TensorBoard events are written to `tensorboard/` if that library is installed (extra `train`)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pippin.core.files import atomic_write, disk_errors
from pippin.train.result import TrainingResult, TrainingStep, finite, parse_floats

NAME = "log.jsonl"


class RunLog:
    """The log of one run.

    Args:
        path: the folder, the same as for the checkpoints; None disables the log.
        step: number of completed steps. Later lines are deleted; earlier ones are read into ``result``.
        result: the history of the run.
    """

    def __init__(self, path: Path | None, step: int, result: TrainingResult) -> None:
        self._path = None if path is None else path / NAME
        self._events: Any = None
        if path is None or self._path is None:
            return
        retained = [line for line in _lines(self._path) if line["step"] <= step]
        with atomic_write(self._path, mode="w") as file:
            file.writelines(json.dumps(line) + "\n" for line in retained)
        for line in retained:
            if "evaluation" in line:
                result.evaluations.append((line["step"], parse_floats(line["evaluation"])))
            else:
                result.steps.append(TrainingStep.from_json(line))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._events = SummaryWriter(str(path / "tensorboard"), purge_step=step + 1 if step else None)

    def step(self, step: TrainingStep) -> None:
        """Log one step."""
        self._write(step.to_json())
        if self._events is not None:
            for name in ("loss", "lr", "grad_norm"):
                self._events.add_scalar(f"train/{name}", getattr(step, name), step.step)
            self._events.add_scalar("train/units_per_second", step.units / step.seconds, step.step)
            for name, value in step.metrics.items():
                self._events.add_scalar(f"train/{name}", value, step.step)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics measured after ``step``."""
        self._write(json.dumps({"step": step, "evaluation": finite(metrics)}))
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(f"evaluation/{name}", value, step)

    def sync(self) -> None:
        """Sync the log to disk, so that it is never behind a checkpoint."""
        if self._path is not None:
            with disk_errors(self._path), self._path.open("a") as file:
                os.fsync(file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Sync and close the log; a later step reopens the TensorBoard events automatically."""
        self.sync()
        if self._events is not None:
            self._events.close()

    def _write(self, line: str) -> None:
        """Append a line. The file is opened each time, so that an abandoned run leaves no open file."""
        if self._path is not None:
            with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a log; a line that was truncated by a kill is ignored."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines
