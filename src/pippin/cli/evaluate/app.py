"""`pippin evaluate`: evaluate models, guardrails, predictions, judges and images."""

from __future__ import annotations

import typer

from pippin.cli.evaluate.annotators import annotators
from pippin.cli.evaluate.calibration import calibration
from pippin.cli.evaluate.classification import classification
from pippin.cli.evaluate.composition import composition
from pippin.cli.evaluate.experts import experts
from pippin.cli.evaluate.extraction import extraction
from pippin.cli.evaluate.images import images
from pippin.cli.evaluate.panel import panel
from pippin.cli.evaluate.perplexity import perplexity
from pippin.cli.evaluate.safety import safety
from pippin.cli.evaluate.summaries import summaries
from pippin.cli.evaluate.tools import tools

app = typer.Typer(no_args_is_help=True, help="Evaluate models, guardrails, predictions, judges and images.")

app.command()(annotators)
app.command()(calibration)
app.command()(classification)
app.command()(composition)
app.command()(experts)
app.command()(extraction)
app.command()(images)
app.command()(panel)
app.command()(perplexity)
app.command()(safety)
app.command()(summaries)
app.command()(tools)
