"""The log of a run on disk: one line of JSON a step, and TensorBoard's events beside it.

Notable here:
- a run that goes on from a checkpoint cuts off what was logged after it, so every step stands in the log once
- TensorBoard's events are written where that library is installed (extra `train`), under `tensorboard/`
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
    """An open log; made with the step from which the run goes on.

    Args:
        path: where it stands, beside the checkpoints; None logs nowhere.
        step: the updates made so far. Later lines are removed; earlier ones go back into ``training``.
        training: the run that is logged.
    """

    def __init__(self, path: Path | None, step: int, training: TrainingResult) -> None:
        self._path = None if path is None else path / NAME
        self._events: Any = None
        if path is None or self._path is None:
            return
        retained = [line for line in _lines(self._path) if line["step"] <= step]
        with atomic_write(self._path, mode="w") as file:
            file.writelines(json.dumps(line) + "\n" for line in retained)
        for line in retained:
            if "evaluation" in line:
                training.evaluations.append((line["step"], parse_floats(line["evaluation"])))
            else:
                training.steps.append(TrainingStep.from_json(line))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._events = SummaryWriter(str(path / "tensorboard"), purge_step=step + 1 if step else None)

    def step(self, step: TrainingStep) -> None:
        """Log one update."""
        self._write(step.to_json())
        if self._events is not None:
            for name in ("loss", "lr", "grad_norm"):
                self._events.add_scalar(f"train/{name}", getattr(step, name), step.step)
            self._events.add_scalar("train/units_per_second", step.units / step.seconds, step.step)
            for name, value in step.metrics.items():
                self._events.add_scalar(f"train/{name}", value, step.step)

    def evaluation(self, step: int, measures: dict[str, float]) -> None:
        """Log what was measured after ``step``."""
        self._write(json.dumps({"step": step, "evaluation": finite(measures)}))
        if self._events is not None:
            for name, value in measures.items():
                self._events.add_scalar(f"evaluation/{name}", value, step)

    def sync(self) -> None:
        """Make sure of what was logged, before a checkpoint says that it happened."""
        if self._path is not None:
            with disk_errors(self._path), self._path.open("a") as file:
                os.fsync(file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Write out everything; a later step opens TensorBoard's events again by itself."""
        self.sync()
        if self._events is not None:
            self._events.close()

    def _write(self, line: str) -> None:
        """Opened for each line, so that a run that is dropped half-way leaves no open file."""
        if self._path is not None:
            with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; one that a kill cut short is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines
