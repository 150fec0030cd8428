"""Printing the result of a recipe: a table with hints, or one JSON object."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from pippin.cli.common import terminal
from pippin.cli.common.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from pippin.core.report import Report

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Result(Protocol):
    """The result of a recipe."""

    def summary(self) -> dict[str, Any]:
        """The result as JSON-serializable values."""

    def report(self) -> Report:
        """A report of its figures."""


def print_result(result: Result, *, as_json: bool, hints: tuple[str, ...] = ()) -> None:
    """Print a result as a table, with hints on stderr, or as JSON.

    Raises:
        typer.Exit: the run was interrupted with Ctrl-C; with exit code 130.
    """
    made = result.summary()
    if as_json:
        terminal.write(terminal.to_json(finite(made)) + "\n")
    else:
        result.report().print()
        if made.get("best_step") is not None:
            terminal.note(f"the weights are those of step {made['best_step']}, the best on the held-out data")
        for hint in hints:
            terminal.note(hint)
    if made.get("stopped") == "interrupted":
        terminal.note("interrupted; the same command with --resume continues")
        raise typer.Exit(INTERRUPTED)


def saved(out: object) -> str:
    """A hint at the files of a training recipe."""
    return f"saved in {out}; log, checkpoints and loss curve in {Path(str(out)) / 'run'}"


def finite(value: Any) -> Any:
    """The JSON value with non-finite numbers replaced by null."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
