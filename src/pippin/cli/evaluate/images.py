"""`pippin evaluate images`: distance of a set of images to real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import documents, terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson
from pippin.recipes.evaluate import images as recipe

Plot = Annotated[Path | None, typer.Option(help="Plot the figures to this file (.png, .svg).")]


@with_options
def images(config: recipe.Config, as_json: AsJson = False, plot: Plot = None) -> None:
    """Measure Fréchet and kernel distance, precision, recall and fine detail of images against real ones.

    Distances depend on the features and on the number of images: compare only figures with equal ones.

    pippin evaluate images samples fashion-mnist --limit 1000
    """
    documents.check_plot(plot)
    report = recipe.run(config, show_progress=not as_json)
    if plot is not None:
        with documents.writing(plot):
            report.plot(plot)
    if as_json:
        terminal.write(report.to_json() + "\n")
    else:
        report.print()
