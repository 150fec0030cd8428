"""`pippin evaluate calibration`: calibration of the predictions in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import documents, terminal


def calibration(
    predictions: Annotated[
        Path,
        typer.Argument(help="CSV with a probability column for each class, or 'mean' and 'sd'; and a label column."),
    ],
    label: Annotated[str, typer.Option(help="Name of the label column.")] = "label",
    bins: Annotated[int, typer.Option(min=1, help="Number of confidence bins.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Plot reliability to this file (.png, .svg, .pdf).")] = None,
) -> None:
    """Measure calibration error, proper scores and selective risk of predictions, from any program.

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
