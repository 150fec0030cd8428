"""`pippin privacy`: what is kept of each promise on this machine, and the facts behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pippin.cli import terminal

if TYPE_CHECKING:
    from pippin.core.privacy import PrivacyReport

_STYLES = {"kept": "green", "best effort": "yellow", "not kept": "red"}


def privacy(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the facts and the lines.")] = False,
) -> None:
    """Say which promises about privacy are kept here, from what is found on this machine.

    Nothing is sent anywhere, and no model is loaded. docs/privacy.md says what each promise means.
    """
    from pippin.core.privacy import privacy_report

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
            f"[{_STYLES[line.kept]}]{line.kept}[/]", f"[bold]{escape(line.promise)}[/]\n{escape(line.because)}"
        )
    Console(highlight=False).print(table)
