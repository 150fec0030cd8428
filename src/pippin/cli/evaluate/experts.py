"""`pippin evaluate experts`: what a cache of experts would cost under each policy."""

from __future__ import annotations

from pathlib import Path

from pippin.cli.common import documents, terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, finite
from pippin.recipes.evaluate import experts as recipe

_WIDTH = 120


@with_options
def experts(config: recipe.Config, as_json: AsJson = False) -> None:
    """Replay a trace of the experts that a mixture needed, under every eviction policy.

    A trace comes from `pippin.engine.record_expert_trace`.

    pippin evaluate experts trace.npz --capacities 5%,20% --plot policies.png
    """
    with documents.writing(Path(config.plot or "the plot")):
        found = recipe.run(config)
    if as_json:
        terminal.write(terminal.to_json(finite(found.summary())) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    headings, cells = found.table()
    table = Table(title=f"{found.trace}: {found.passes} passes", title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    # a narrow terminal wraps lines; no column is cut
    Console(width=max(Console().width, _WIDTH), soft_wrap=True).print(table)
