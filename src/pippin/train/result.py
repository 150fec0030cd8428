"""What a run was: its losses, its evaluations, its speed; as figures, a file and a plot."""

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
    """One update, as a line of `log.jsonl` has it.

    Attributes:
        step: its number, from 1.
        loss: sum of the loss over the units of the step, divided by their number; NaN where there were none.
        lr: rate of the first group of parameters.
        grad_norm: 2-norm of the gradient of that loss, before clipping.
        units: how many units it learned from.
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
    def from_json(cls, values: Mapping[str, Any]) -> TrainingStep:
        """The step that a line described."""
        return cls(**{**parse_floats(values), "metrics": parse_floats(values["metrics"])})


@dataclass(repr=False)
class TrainingResult:
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
    steps: list[TrainingStep] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    stopped: Literal["interrupted", "exhausted"] | None = None

    def __repr__(self) -> str:
        last = f", last loss {self.losses[-1]:.4g}" if self.steps else ""
        ended = "" if self.stopped is None else f", {self.stopped}"
        return f"<TrainingResult {self.title!r}: {len(self.steps)} steps{last}, {self.seconds:.1f} s{ended}>"

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
        """Units learned from per second spent in steps; 0 before the first."""
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

    def save(self, path: str | Path) -> None:
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
            path: of the plot; its suffix chooses the format (.png, .svg, .pdf).

        Raises:
            InvalidArgument: no step has been made.
            MissingDependency: matplotlib is not installed.
        """
        if not self.steps:
            raise InvalidArgument(f"{self.title}: no step has been made, there is nothing to plot")
        figure = plotting.new(7, 4)
        panel = figure.subplots()
        steps = [step.step for step in self.steps]
        panel.plot(steps, self.losses, color="0.75", linewidth=0.8, label="loss of a step")
        panel.plot(steps, _smooth(self.losses), color="tab:green", label="running mean")
        if any("loss" in measures for _, measures in self.evaluations):
            points = [(step, measures["loss"]) for step, measures in self.evaluations if "loss" in measures]
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
    """An exponential moving average over about a twentieth of the run, without values that are not finite."""
    momentum = 1.0 - 1.0 / max(len(losses) / 20, 1.0)
    smooth, total, weight = [], 0.0, 0.0
    for loss in losses:
        if math.isfinite(loss):
            total, weight = momentum * total + loss, momentum * weight + 1.0
        smooth.append(total / weight if weight else math.nan)
    return smooth


def finite(value: Any) -> Any:
    """The JSON value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
