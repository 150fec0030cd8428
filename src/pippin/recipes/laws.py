"""Law fitting: a scaling law, or a law of forgetting, from a table of training runs.

Notable here:
- columns are found by the names that people give them, or as the config says
- ``hold_out`` fits a second law without the largest size, and measures how well it predicts that size
"""

from __future__ import annotations

import csv
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from pippin.core.checks import NonNegativeInt, PositiveFloat, checked
from pippin.core.errors import InvalidArgument, InvalidInput, PippinWarning
from pippin.core.options import Option
from pippin.core.text_files import read_text
from pippin.recipes.options import StrPath

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.train.laws.law import Law

Form = Literal["chinchilla", "sparse", "forgetting", "finetuning"]

COLUMN_NAMES = {
    "N": ("N", "parameters", "params", "size"),
    "D": ("D", "tokens", "data"),
    "loss": ("loss", "target_loss"),
    "S": ("S", "sparsity"),
    "p": ("p", "share", "inject"),
    "before": ("loss_before", "before", "loss_pt_before"),
    "after": ("loss_after", "after", "loss_pt"),
}
"""What the columns of a table may be called."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "chinchilla": ("N", "D", "loss"),
    "sparse": ("N", "D", "loss", "S"),
    "forgetting": ("N", "D", "p", "before", "after"),
    "finetuning": ("N", "D", "loss"),
}
"""The columns that each law takes; "finetuning" takes p, too, where there is one."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a fit."""

    runs: Annotated[
        StrPath, Option("A table of runs: .csv with a heading, or .jsonl; one run a line.", positional=True)
    ]
    form: Annotated[Form, Option("Which law.")] = "chinchilla"
    columns: Annotated[
        Mapping[str, str],
        Option(
            "What the table calls N, D, loss, p, before, after, S: loss=val_loss; may be repeated.",
            metavar="OURS=THEIRS",
            flag="--column",
        ),
    ] = field(default_factory=dict)
    out: Annotated[StrPath | None, Option("Save the law here, for the other verbs.", metavar="PATH")] = None
    plot: Annotated[StrPath | None, Option("Draw runs and law (.png, .svg, .pdf).", metavar="PATH")] = None
    offset: Annotated[bool, Option("Forgetting: fit a part E that nothing takes away.")] = False
    hold_out: Annotated[bool, Option("Fit once more without the largest size, and predict it.")] = False
    delta: Annotated[PositiveFloat, Option("Huber's delta, on differences of log losses.")] = 1e-3
    num_resamples: Annotated[int, Ge(0), Option("Bootstrap resamples of the runs, for the intervals; 0 for none.")] = (
        200
    )
    seed: Annotated[NonNegativeInt, Option("Of the resamples.")] = 0


@dataclass(frozen=True)
class LawFit:
    """A fitted law.

    Attributes:
        law: with its coefficients, their intervals and the runs of the fit.
        held_out: the largest size ("N"), its number of "runs", and the "mean_absolute_error" (a share of the loss) of
            a law that was fitted without it; None where nothing was held out.
        warnings: what the fit warned about.
    """

    law: Law
    held_out: Mapping[str, float] | None
    warnings: tuple[str, ...]

    @property
    def exponents(self) -> dict[str, Any] | None:
        """How the best size and data grow with compute; None where the law has no optimum."""
        from pippin.train.laws.scaling import ScalingLaw

        law = self.law
        if not isinstance(law, ScalingLaw) or law.form != "chinchilla":
            return None
        if law.coefficients["alpha"] <= 0 or law.coefficients["beta"] <= 0:
            return None
        return {"a": law.exponents.a, "b": law.exponents.b, "a_interval": list(law.exponents_interval)}

    def summary(self) -> dict[str, Any]:
        """The fit as JSON values, without resamples and runs."""
        law, made = self.law, self.law.to_json()
        kept = {name: made[name] for name in ("form", "coefficients", "goodness")}
        kept |= {"se": law.se, "intervals": law.intervals, "runs": len(law.runs["N"])}
        return kept | {"held_out": self.held_out, "exponents": self.exponents, "warnings": list(self.warnings)}

    def report(self) -> Report:
        """Coefficients with their spread, and how well they fit the runs."""
        return self.law.report()


def run(config: Config, *, show_progress: bool = True) -> LawFit:
    """Fit a law to a table of runs; save and draw it where the config says so.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that do not fit together, or runs that cannot determine the law.
        InvalidInput: the table cannot be read, or lacks a column.
        MissingDependency: a plot without matplotlib.
    """
    if config.offset and config.form != "forgetting":
        raise InvalidArgument(f"offset (--offset) belongs to form 'forgetting', not to {config.form!r}")
    runs = read_runs(Path(config.runs), config.form, config.columns)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PippinWarning)
        law = _fitted(config, runs, config.num_resamples)
        held_out = _predict_largest(config, runs) if config.hold_out else None
    if config.out is not None:
        law.save(Path(config.out))
    if config.plot is not None:
        law.plot(Path(config.plot))
    return LawFit(law, held_out, tuple(str(warning.message) for warning in caught))


def read_runs(path: Path, form: Form, columns: Mapping[str, str] | None = None) -> dict[str, list[float]]:
    """The columns of a table that a law takes, by our names for them.

    Args:
        path: of the table.
        form: the law.
        columns: what the table calls a column, by our name, where it is none of `COLUMN_NAMES`.

    Raises:
        InvalidArgument: a column that there is not, or a file of another kind.
        InvalidInput: the table is empty, lacks a column, or holds something that is no number.
    """
    known: dict[str, tuple[str, ...]] = dict(COLUMN_NAMES)
    for ours, theirs in (columns or {}).items():
        if ours not in COLUMN_NAMES or not theirs:
            raise InvalidArgument(
                f"column (--column) {ours}={theirs}: write it as loss=val_loss, with one of {', '.join(COLUMN_NAMES)}"
            )
        known[ours] = (theirs,)
    rows = list(_rows(path))
    if not rows:
        raise InvalidInput(f"{path} holds no runs")
    found: dict[str, list[float]] = {}
    optional = ("p",) if form == "finetuning" else ()
    for ours in (*COLUMNS[form], *optional):
        name = next((name for name in known[ours] if name in rows[0][1]), None)
        if name is None and ours in optional:
            continue
        if name is None:
            raise InvalidInput(
                f"{path} has no column for {ours} (one of {', '.join(known[ours])}); it has {', '.join(rows[0][1])}; "
                f"name it with --column {ours}=NAME"
            )
        found[ours] = [_number(path, line, row, name) for line, row in rows]
    return found


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each run with the number of its line."""
    text = read_text(path)
    if path.suffix == ".csv":
        reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
        for row in reader:
            yield reader.line_num, {str(name).strip(): value for name, value in row.items()}
        return
    if path.suffix not in (".jsonl", ".json"):
        raise InvalidArgument(f"{path} is neither .csv nor .jsonl")
    for line, words in enumerate(text.splitlines(), 1):
        if words.strip():
            try:
                row = json.loads(words)
            except ValueError as error:
                raise InvalidInput(f"{path}, line {line}: {error}") from error
            if not isinstance(row, dict):
                raise InvalidInput(f"{path}, line {line}: a run is an object, got {type(row).__name__}")
            yield line, row


def _number(path: Path, line: int, row: dict[str, Any], name: str) -> float:
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        raise InvalidInput(f"{path}, line {line}: {name} is {row.get(name)!r}, which is no number") from None


def _fitted(config: Config, runs: Mapping[str, Any], num_resamples: int) -> Law:
    from pippin.train.laws.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.laws.scaling import ScalingLaw

    settings: dict[str, Any] = {"delta": config.delta, "seed": config.seed, "num_resamples": num_resamples}
    if config.form == "forgetting":
        given = (runs[name] for name in ("N", "D", "p", "before", "after"))
        return ForgettingLaw(with_offset=config.offset).fit(*given, **settings)
    if config.form == "finetuning":
        shares = runs.get("p")
        with_share = shares is not None and len(set(shares)) > 1
        return FinetuningLaw(with_share).fit(runs["N"], runs["D"], runs["loss"], shares, **settings)
    return ScalingLaw(config.form).fit(runs["N"], runs["D"], runs["loss"], sparsity=runs.get("S"), **settings)


def _predict_largest(config: Config, runs: Mapping[str, list[float]]) -> dict[str, float]:
    """How well the largest size is predicted by a law of the others."""
    import numpy as np

    from pippin.train.laws import fitting
    from pippin.train.laws.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.laws.scaling import ScalingLaw

    arrays = {name: np.asarray(values) for name, values in runs.items()}
    largest = arrays["N"] == arrays["N"].max()
    law = _fitted(config, {name: values[~largest].tolist() for name, values in arrays.items()}, 0)
    held = {name: values[largest] for name, values in arrays.items()}
    if isinstance(law, ForgettingLaw):
        measured, predicted = held["after"], law.predict(held["N"], held["D"], held["p"], held["before"])
    elif isinstance(law, FinetuningLaw):
        measured, predicted = held["loss"], law.predict(held["N"], held["D"], held.get("p", 0.0))
    else:
        assert isinstance(law, ScalingLaw)
        measured, predicted = held["loss"], law.predict(held["N"], held["D"], sparsity=held.get("S"))
    error = fitting.goodness(predicted, measured).mae
    return {"N": float(arrays["N"].max()), "runs": int(largest.sum()), "mean_absolute_error": error}


def number(text: str) -> float:
    """A number with a letter for thousands, millions, (American) billions or trillions, or without.

    Raises:
        InvalidArgument: it is none, or not above 0.

    >>> number("1.7B"), number("2e9"), number("300k")
    (1700000000.0, 2000000000.0, 300000.0)
    """
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        value = float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidArgument(f"{text!r} is no number above 0; write 135M, 1.7B or 2e9")
    return value
