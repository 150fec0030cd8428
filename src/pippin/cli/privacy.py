"""`pippin privacy`: the status of each privacy requirement on this machine, with its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pippin.cli.common import terminal

if TYPE_CHECKING:
    from pippin.core.trust.privacy import PrivacyReport

_STYLES = {"kept": "green", "best effort": "yellow", "not kept": "red"}


def privacy(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: findings and lines.")] = False,
) -> None:
    """Show which privacy guarantees hold on this machine, with the evidence for each.

    Nothing is sent over the network, and no model is loaded. docs/privacy.md explains each guarantee.
    """
    from pippin.core.trust.privacy import privacy_report

    report = privacy_report()
    if as_json:
        terminal.write(terminal.to_json(report.to_dict()) + "\n")
    else:
        _print(report)


def _print(report: PrivacyReport) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for line in report.lines:
        table.add_row(
            f"[{_STYLES[line.status]}]{line.status}[/]", f"[bold]{escape(line.promise)}[/]\n{escape(line.because)}"
        )
    Console(highlight=False).print(table)
