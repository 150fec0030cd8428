"""`pippin evaluate calibration`: whether stated probabilities come true, from a file of predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import documents, terminal


def calibration(
    predictions: Annotated[
        Path,
        typer.Argument(help="CSV: a column for each class with its probability, or 'mean' and 'sd'; and the truth."),
    ],
    label: Annotated[str, typer.Option(help="The column that says what came true.")] = "label",
    bins: Annotated[int, typer.Option(min=1, help="Bins of confidence.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw reliability into this file (.png, .svg, .pdf).")] = None,
) -> None:
    """Calibration error, proper scores and selective risk of predictions that any program made.

    pippin evaluate calibration predictions.csv --plot reliability.png
    """
    from pippin.evaluate.calibration import ClassificationPredictions, read_predictions

    documents.check_plot(plot)
    found = read_predictions(predictions, label=label)
    report = found.report(bins) if isinstance(found, ClassificationPredictions) else found.report()
    if plot is not None:
        with documents.writing(plot):
            found.plot(plot, bins) if isinstance(found, ClassificationPredictions) else found.plot(plot)
    if as_json:
        terminal.write(report.to_json() + "\n")
    else:
        report.print()
