"""`pippin evaluate safety`: violations and over-refusals of a model, of guardrails, or of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import documents, terminal
from pippin.cli.common.declared_options import with_options
from pippin.recipes.evaluate import safety as recipe

Plot = Annotated[Path | None, typer.Option(help="Plot the figures to this file (.png, .svg).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, without answers.")]


@with_options
def safety(config: recipe.Config, as_json: AsJson = False, plot: Plot = None) -> None:
    """Measure violations and over-refusals on harmful, look-alike and neutral prompts, per locale.

    Guardrails alone take seconds:  pippin evaluate safety --guardrails-only --locale en --locale ja
    """
    from pippin.evaluate.safety.evaluation import ENOUGH

    documents.check_plot(plot)
    report = recipe.run(config, show_progress=not as_json)
    if plot is not None:
        with documents.writing(plot):
            report.plot(plot)
    if as_json:
        terminal.write(report.to_json() + "\n")
        return
    report.report().print()
    if not all(result.sufficient for result in report.locales) and terminal.watched(sys.stderr):
        terminal.note(f"fewer than {ENOUGH} prompts of a kind, so the intervals are wide (see --num-prompts)")
