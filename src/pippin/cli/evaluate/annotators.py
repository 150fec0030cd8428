"""`pippin evaluate annotators`: how many annotations each item needs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import documents, terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson
from pippin.recipes.evaluate import annotators as recipe

Plot = Annotated[Path | None, typer.Option(help="Plot the curves to this file (.png, .svg).")]


@with_options
def annotators(config: recipe.Config, as_json: AsJson = False, plot: Plot = None) -> None:
    """Measure divergence, entropy correlation and accuracy by number of annotations, and where each saturates.

    With --features, a small network is trained on subsets of the annotations, on majority labels and on smoothed
    ones; without, subsets of the annotations of each item are compared with the others.

    pippin evaluate annotators labels.csv --counts yes,no,unsure --features length,year --plot annotations.png
    """
    documents.check_plot(plot)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = recipe.run(config, show_progress=not as_json)
        sentences = recipe.saturation(report, config.saturation)
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        terminal.note(message)
    if plot is not None:
        with documents.writing(plot):
            report.plot(plot)
    if as_json:
        terminal.write(report.to_json() + "\n")
        return
    report.report(recipe.METRICS).print()
    for sentence in sentences:
        terminal.write(sentence + "\n")
