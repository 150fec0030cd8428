"""What a run was: its losses, its evaluations, its speed; as figures, a file and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pippin.core import figures
from pippin.core.errors import InvalidArgument
from pippin.core.files import atomic_write
from pippin.core.report import Report, Row


@dataclass(frozen=True)
class Step:
    """One update, as a line of `log.jsonl` has it.

    Attributes:
        step: its number, from 1.
        loss: sum of the loss over the units of the step, divided by their number; NaN where there were none.
        lr: rate of the first group of parameters.
        grad_norm: 2-norm of the gradient of that loss, before clipping.
        units: how many units it learnt from.
        seconds: from the first batch read to the last parameter written.
        metrics: what the objective measured, per unit.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    units: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON; what is not finite becomes null."""
        return json.dumps({key: finite(value) for key, value in asdict(self).items()})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Step:
        """The step that a line described."""
        return cls(**{**numbers(values), "metrics": numbers(values["metrics"])})


@dataclass
class Training:
    """A run so far, over all its restarts.

    Attributes:
        title: what was trained.
        unit: what is counted ("tokens").
        steps: every update, in order.
        evaluations: the step after which each was made, and what it measured.
        stopped: None where all steps were made; "interrupted" after a signal, "exhausted" where the data ended first.
    """

    title: str = "training"
    unit: str = "units"
    steps: list[Step] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    stopped: Literal["interrupted", "exhausted"] | None = None

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step.loss for step in self.steps]

    @property
    def seconds(self) -> float:
        """Time spent in steps; not in evaluations, checkpoints and pauses between restarts."""
        return sum(step.seconds for step in self.steps)

    @property
    def units_per_second(self) -> float:
        """Units learnt from per second spent in steps; 0 before the first."""
        return sum(step.units for step in self.steps) / self.seconds if self.steps else 0.0

    def report(self) -> Report:
        """Steps, losses, last evaluation and speed; figures that are not finite are left out."""
        rows = [Row("steps", len(self.steps))]
        losses = [loss for loss in self.losses if math.isfinite(loss)]
        if losses:
            rows += [Row("first loss", losses[0]), Row("last loss", losses[-1])]
        if self.evaluations:
            step, measures = self.evaluations[-1]
            rows += [Row(f"{name} after step {step}", value) for name, value in measures.items()]
        rows += [Row("time", self.seconds, "s"), Row("speed", self.units_per_second, f"{self.unit}/s")]
        return Report(self.title, [row for row in rows if math.isfinite(row.value)])

    def save(self, path: Path) -> None:
        """Write the whole run as JSON, whole or not at all."""
        text = json.dumps(
            {
                "title": self.title,
                "unit": self.unit,
                "stopped": self.stopped,
                "steps": [json.loads(step.to_json()) for step in self.steps],
                "evaluations": [[step, finite(measures)] for step, measures in self.evaluations],
            }
        )
        with atomic_write(Path(path), mode="w") as file:
            file.write(f"{text}\n")

    def plot(self, path: Path) -> None:
        """Draw loss and evaluations over steps.

        Args:
            path: the picture; its suffix chooses the format (.png, .svg, .pdf).

        Raises:
            InvalidArgument: no step has been made.
            MissingDependency: matplotlib is not installed.
        """
        if not self.steps:
            raise InvalidArgument(f"{self.title}: no step has been made, there is nothing to plot")
        figure = figures.new(7, 4)
        panel = figure.subplots()
        numbers = [step.step for step in self.steps]
        panel.plot(numbers, self.losses, color="0.75", linewidth=0.8, label="loss of a step")
        panel.plot(numbers, _smooth(self.losses), color="tab:green", label="running mean")
        if any("loss" in measures for _, measures in self.evaluations):
            points = [(step, measures["loss"]) for step, measures in self.evaluations if "loss" in measures]
            panel.plot(*zip(*points, strict=True), "o-", color="tab:red", markersize=4, label="evaluation")
        panel.set_xlabel("step")
        panel.set_ylabel("loss")
        panel.set_title(self.title)
        panel.legend()
        figures.save(figure, path)


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that `finite` was given, as far as they can be known: NaN where it wrote null."""
    return {key: math.nan if value is None else value for key, value in values.items()}


def _smooth(losses: list[float]) -> list[float]:
    """A running mean over about a twentieth of the run; what is not finite counts for nothing."""
    keep = 1.0 - 1.0 / max(len(losses) / 20, 1.0)
    smooth, total, weight = [], 0.0, 0.0
    for loss in losses:
        if math.isfinite(loss):
            total, weight = keep * total + loss, keep * weight + 1.0
        smooth.append(total / weight if weight else math.nan)
    return smooth


def finite(value: Any) -> Any:
    """The same JSON value with null in place of what JSON cannot say: NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
