"""`pippin shape`: make a model smaller or faster, profile it, and export it."""

from __future__ import annotations

import typer

from pippin.cli.shape.export import export
from pippin.cli.shape.merge import merge
from pippin.cli.shape.palettize import palettize
from pippin.cli.shape.quantize import quantize
from pippin.cli.shape.report import report
from pippin.cli.shape.share import share
from pippin.cli.shape.specialize import specialize

app = typer.Typer(no_args_is_help=True, help="Make a model smaller or faster, profile it, and export it.")

app.command()(merge)
app.command()(quantize)
app.command()(palettize)
app.command()(share)
app.command()(specialize)
app.command()(export)
app.command()(report)
