"""The result of a training run: losses, evaluations and speed; as a report, a JSON file and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pippin.core import plotting
from pippin.core.errors import InvalidArgument
from pippin.core.files import atomic_write
from pippin.core.report import Report, Row


@dataclass(frozen=True)
class TrainingStep:
    """One training step, as logged in `log.jsonl`.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss per unit; NaN for a step without units.
        lr: learning rate of the first parameter group.
        grad_norm: 2-norm of the gradient of the mean loss, before clipping.
        units: number of units (tokens, images, ...) in the step.
        seconds: duration, from reading the first batch to updating the parameters.
        metrics: the objective's metrics, per unit.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    units: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON, with null for values that are not finite."""
        return json.dumps({key: finite(value) for key, value in asdict(self).items()})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainingStep:
        """The step from the values of such a line."""
        return cls(**{**parse_floats(values), "metrics": parse_floats(values["metrics"])})


@dataclass(repr=False)
class TrainingResult:
    """The history of a run up to now, over all restarts.

    Attributes:
        title: title of the run, for plots and reports.
        unit: the counted unit, such as "tokens".
        steps: all steps, in order.
        evaluations: pairs of a step and the metrics measured after it.
        stopped: None if all steps were completed; "interrupted" after a signal, "exhausted" if the data ended early.
    """

    title: str = "training"
    unit: str = "units"
    steps: list[TrainingStep] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    stopped: Literal["interrupted", "exhausted"] | None = None

    def __repr__(self) -> str:
        loss = f", last loss {self.losses[-1]:.4g}" if self.steps else ""
        stopped = "" if self.stopped is None else f", {self.stopped}"
        return f"<TrainingResult {self.title!r}: {len(self.steps)} steps{loss}, {self.seconds:.1f} s{stopped}>"

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step.loss for step in self.steps]

    @property
    def seconds(self) -> float:
        """Time spent in training steps, without evaluations, checkpoints and pauses between restarts."""
        return sum(step.seconds for step in self.steps)

    @property
    def units_per_second(self) -> float:
        """Units per second of training steps; 0 before the first step."""
        return sum(step.units for step in self.steps) / self.seconds if self.steps else 0.0

    def report(self) -> Report:
        """Report steps, losses, the last evaluation and speed; values that are not finite are left out."""
        rows = [Row("steps", len(self.steps))]
        losses = [loss for loss in self.losses if math.isfinite(loss)]
        if losses:
            rows += [Row("first loss", losses[0]), Row("last loss", losses[-1])]
        if self.evaluations:
            step, metrics = self.evaluations[-1]
            rows += [Row(f"{name} after step {step}", value) for name, value in metrics.items()]
        rows += [Row("time", self.seconds, "s"), Row("speed", self.units_per_second, f"{self.unit}/s")]
        return Report(self.title, [row for row in rows if math.isfinite(row.value)])

    def save(self, path: str | Path) -> None:
        """Write the history as JSON, atomically."""
        text = json.dumps(
            {
                "title": self.title,
                "unit": self.unit,
                "stopped": self.stopped,
                "steps": [json.loads(step.to_json()) for step in self.steps],
                "evaluations": [[step, finite(metrics)] for step, metrics in self.evaluations],
            }
        )
        with atomic_write(Path(path), mode="w") as file:
            file.write(f"{text}\n")

    def plot(self, path: Path) -> None:
        """Plot the training loss and the evaluations over the steps.

        Args:
            path: the file; its suffix determines the format (.png, .svg, .pdf).

        Raises:
            InvalidArgument: there is no completed step.
            MissingDependency: matplotlib is not installed.
        """
        if not self.steps:
            raise InvalidArgument(f"{self.title}: no step was completed, so there is nothing to plot")
        figure = plotting.new(7, 4)
        panel = figure.subplots()
        steps = [step.step for step in self.steps]
        panel.plot(steps, self.losses, color="0.75", linewidth=0.8, label="training loss")
        panel.plot(steps, _smooth(self.losses), color="tab:green", label="training loss, smoothed")
        if any("loss" in metrics for _, metrics in self.evaluations):
            points = [(step, metrics["loss"]) for step, metrics in self.evaluations if "loss" in metrics]
            panel.plot(*zip(*points, strict=True), "o-", color="tab:red", markersize=4, label="evaluation")
        panel.set_xlabel("step")
        panel.set_ylabel("loss")
        panel.set_title(self.title)
        panel.legend()
        plotting.save(figure, path)


def parse_floats(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `finite`, with NaN for every null."""
    return {key: math.nan if value is None else value for key, value in values.items()}


def _smooth(losses: list[float]) -> list[float]:
    """Exponential moving average over about a twentieth of the run, ignoring values that are not finite."""
    momentum = 1.0 - 1.0 / max(len(losses) / 20, 1.0)
    smooth, total, weight = [], 0.0, 0.0
    for loss in losses:
        if math.isfinite(loss):
            total, weight = momentum * total + loss, momentum * weight + 1.0
        smooth.append(total / weight if weight else math.nan)
    return smooth


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
