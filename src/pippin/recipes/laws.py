"""Fit a scaling law or a forgetting law to a table of training runs.

Notable here:
- columns are recognized by their usual names, or named by the config
- ``hold_out`` fits a second law without the largest model size, and measures how well it predicts that size
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
from pippin.recipes.options import StrPath, refuse_existing

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
"""Accepted names of each column."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "chinchilla": ("N", "D", "loss"),
    "sparse": ("N", "D", "loss", "S"),
    "forgetting": ("N", "D", "p", "before", "after"),
    "finetuning": ("N", "D", "loss"),
}
"""The columns that each law needs; "finetuning" also uses p where the table has it."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a fit."""

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
    """The result of a fit.

    Attributes:
        law: the fitted law.
        held_out: the largest size ("N"), its number of "runs", and the relative "mean_absolute_error" of a law fitted
            without it; None without ``hold_out``.
        warnings: messages of the warnings during the fit.
    """

    law: Law
    held_out: Mapping[str, float] | None
    warnings: tuple[str, ...]

    @property
    def exponents(self) -> dict[str, Any] | None:
        """Exponents of the compute-optimal size and data, with an interval; None where the law has no optimum."""
        from pippin.train.laws.scaling import ScalingLaw

        law = self.law
        if not isinstance(law, ScalingLaw) or law.form != "chinchilla":
            return None
        if law.coefficients["alpha"] <= 0 or law.coefficients["beta"] <= 0:
            return None
        return {"a": law.exponents.a, "b": law.exponents.b, "a_interval": list(law.exponents_interval)}

    def summary(self) -> dict[str, Any]:
        """The result as JSON values, without resamples and runs."""
        law, values = self.law, self.law.to_json()
        summary = {name: values[name] for name in ("form", "coefficients", "goodness")}
        summary |= {"se": law.se, "intervals": law.intervals, "runs": len(law.runs["N"])}
        return summary | {"held_out": self.held_out, "exponents": self.exponents, "warnings": list(self.warnings)}

    def report(self) -> Report:
        """Report the coefficients with their standard errors, and the goodness of fit."""
        return self.law.report()


def run(config: Config, *, show_progress: bool = True) -> LawFit:
    """Fit a law to a table of runs; save and plot it if the config says so.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: incompatible settings, runs that cannot determine the law, or a file for it that exists.
        InvalidInput: the table cannot be read, or lacks a column.
        MissingDependency: a plot is requested and matplotlib is not installed.
    """
    if config.offset and config.form != "forgetting":
        raise InvalidArgument(f"offset (--offset) belongs to form 'forgetting', not to {config.form!r}")
    if config.out is not None:
        refuse_existing(config.out)
    runs = read_runs(Path(config.runs), config.form, config.columns)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PippinWarning)
        law = _fit(config, runs, config.num_resamples)
        held_out = _predict_largest(config, runs) if config.hold_out else None
    if config.out is not None:
        law.save(Path(config.out))
    if config.plot is not None:
        law.plot(Path(config.plot))
    return LawFit(law, held_out, tuple(str(warning.message) for warning in caught))


def read_runs(path: Path, form: Form, columns: Mapping[str, str] | None = None) -> dict[str, list[float]]:
    """Read the columns that a law needs from a table of runs.

    Args:
        path: the table, .csv or .jsonl.
        form: the form of the law.
        columns: the table's name of a column, by its key in `COLUMN_NAMES`, where it is not one of the names there.

    Raises:
        InvalidArgument: an unknown column key, or a file of another type.
        InvalidInput: the table is empty, lacks a column, or has a value that is not a number.
    """
    accepted: dict[str, tuple[str, ...]] = dict(COLUMN_NAMES)
    for key, name in (columns or {}).items():
        if key not in COLUMN_NAMES or not name:
            raise InvalidArgument(
                f"column (--column) {key}={name}: write it as loss=val_loss, with one of {', '.join(COLUMN_NAMES)}"
            )
        accepted[key] = (name,)
    rows = list(_rows(path))
    if not rows:
        raise InvalidInput(f"{path} holds no runs")
    values: dict[str, list[float]] = {}
    optional = ("p",) if form == "finetuning" else ()
    for key in (*COLUMNS[form], *optional):
        column = next((name for name in accepted[key] if name in rows[0][1]), None)
        if column is None and key in optional:
            continue
        if column is None:
            raise InvalidInput(
                f"{path} has no column for {key} (one of {', '.join(accepted[key])}); it has {', '.join(rows[0][1])}; "
                f"name it with --column {key}=NAME"
            )
        values[key] = [_number(path, line, row, column) for line, row in rows]
    return values


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over the runs, each with its line number."""
    text = read_text(path)
    if path.suffix == ".csv":
        reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
        for row in reader:
            yield reader.line_num, {str(name).strip(): value for name, value in row.items()}
        return
    if path.suffix not in (".jsonl", ".json"):
        raise InvalidArgument(f"{path} is neither .csv nor .jsonl")
    for line, content in enumerate(text.splitlines(), 1):
        if content.strip():
            try:
                row = json.loads(content)
            except ValueError as error:
                raise InvalidInput(f"{path}, line {line}: {error}") from error
            if not isinstance(row, dict):
                raise InvalidInput(f"{path}, line {line}: a run must be a JSON object, got {type(row).__name__}")
            yield line, row


def _number(path: Path, line: int, row: dict[str, Any], name: str) -> float:
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        raise InvalidInput(f"{path}, line {line}: {name} is {row.get(name)!r}, which is not a number") from None


def _fit(config: Config, runs: Mapping[str, Any], num_resamples: int) -> Law:
    from pippin.train.laws.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.laws.scaling import ScalingLaw

    settings: dict[str, Any] = {"delta": config.delta, "seed": config.seed, "num_resamples": num_resamples}
    if config.form == "forgetting":
        variables = (runs[name] for name in ("N", "D", "p", "before", "after"))
        return ForgettingLaw(with_offset=config.offset).fit(*variables, **settings)
    if config.form == "finetuning":
        shares = runs.get("p")
        with_share = shares is not None and len(set(shares)) > 1
        return FinetuningLaw(with_share).fit(runs["N"], runs["D"], runs["loss"], shares, **settings)
    return ScalingLaw(config.form).fit(runs["N"], runs["D"], runs["loss"], sparsity=runs.get("S"), **settings)


def _predict_largest(config: Config, runs: Mapping[str, list[float]]) -> dict[str, float]:
    """The error of a law fitted to all other sizes, on the runs of the largest size."""
    import numpy as np

    from pippin.train.laws import fitting
    from pippin.train.laws.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.laws.scaling import ScalingLaw

    arrays = {name: np.asarray(values) for name, values in runs.items()}
    largest = arrays["N"] == arrays["N"].max()
    law = _fit(config, {name: values[~largest].tolist() for name, values in arrays.items()}, 0)
    test = {name: values[largest] for name, values in arrays.items()}
    if isinstance(law, ForgettingLaw):
        measured, predicted = test["after"], law.predict(test["N"], test["D"], test["p"], test["before"])
    elif isinstance(law, FinetuningLaw):
        measured, predicted = test["loss"], law.predict(test["N"], test["D"], test.get("p", 0.0))
    else:
        assert isinstance(law, ScalingLaw)
        measured, predicted = test["loss"], law.predict(test["N"], test["D"], sparsity=test.get("S"))
    error = fitting.goodness(predicted, measured).mae
    return {"N": float(arrays["N"].max()), "runs": int(largest.sum()), "mean_absolute_error": error}


def number(text: str) -> float:
    """Parse a number with an optional suffix K, M, B or T, for powers of 1000.

    Raises:
        InvalidArgument: the text is not a number, or not above 0.

    >>> number("1.7B"), number("2e9"), number("300k")
    (1700000000.0, 2000000000.0, 300000.0)
    """
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        value = float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidArgument(f"{text!r} is not a number above 0; write 135M, 1.7B or 2e9")
    return value
