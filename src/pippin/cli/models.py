"""`pippin models`: the catalog, and what is installed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pippin.cli.common import terminal


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the models and datasets of the catalog, and which are installed."""
    rows = _rows()
    if as_json:
        terminal.write(terminal.to_json(rows) + "\n")
    else:
        _print_table(rows)


def _rows() -> list[dict[str, Any]]:
    """One row for each entry of the catalog, then one for each installed hub repository."""
    from pippin.core.store import catalog, store

    here = {found.name: found for found in store.installed()}
    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "kind": entry.role or entry.kind,
            "size": entry.size,
            "license": entry.license,
            "installed": entry.name in here,
            "default": entry.default,
            "title": entry.title,
        }
        for entry in catalog.entries().values()
    ]
    for name in here.keys() - catalog.entries().keys():
        found = {"kind": here[name].kind, "size": here[name].size, "license": "see the hub", "installed": True}
        rows.append({"name": name, **found, "default": False, "title": "from the hub"})
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pippin.core.files import format_bytes

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "kind", "size", "license", "installed"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for row in rows:
        shown = Text(row["name"] + (" *" if row["default"] else ""))
        installed = Text("yes", "green") if row["installed"] else Text("no", "dim")
        table.add_row(shown, row["kind"], format_bytes(row["size"]), row["license"], installed)
    console = Console(highlight=False)
    console.print(table)
    console.print("[dim]* the default. Get another with: pippin pull NAME[/]")
