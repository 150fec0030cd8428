"""`pippin models`: the catalog, what its models cost on this machine, and what is installed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli.common import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from pippin.engine.measure.machine_speed import MachineSpeed


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the models and datasets of the catalog, what the models cost on this machine, and which are installed."""
    rows = _rows(_speed())
    if as_json:
        terminal.write(terminal.to_json(rows) + "\n")
    else:
        _print_tables(rows)


def _speed() -> MachineSpeed | None:
    """The speed of this machine; None where torch cannot be loaded, since the list does not need it."""
    from pippin.engine.measure.machine_speed import machine_speed

    with suppress(ImportError, OSError):
        return machine_speed()
    return None


def _rows(speed: MachineSpeed | None) -> list[dict[str, Any]]:
    """One row for each entry of the catalog, then one for each installed hub repository."""
    from pippin.core.store import catalog, store
    from pippin.engine.measure.model_costs import model_cost

    here = {found.name: found for found in store.installed()}
    rows: list[dict[str, Any]] = []
    for entry in catalog.entries().values():
        cost = None if speed is None else model_cost(entry, speed)
        rows.append(
            {
                "name": entry.name,
                "kind": entry.role or entry.kind,
                "size": entry.size,
                "license": entry.license,
                "installed": entry.name in here,
                "default": entry.default,
                "title": entry.title,
                "parameters": entry.network.parameters if entry.network else None,
                "memory": cost.memory if cost else None,
                "tokens_per_second": cost.tokens_per_second if cost else None,
                "estimated": cost.estimated if cost else None,
                "task_adapters": _task_adapters(entry.name),
            }
        )
    unknown = dict.fromkeys(("parameters", "memory", "tokens_per_second", "estimated"))
    for name in here.keys() - catalog.entries().keys():
        found = {"kind": here[name].kind, "size": here[name].size, "license": "see the hub", "installed": True}
        rows.append(
            {"name": name, **found, "default": False, "title": "from the hub"} | unknown | {"task_adapters": []}
        )
    return rows


def _task_adapters(model: str) -> list[dict[str, Any]]:
    """The task adapters that come with Pippin for a model."""
    from pippin.language.task_adapters import task_adapters

    return [
        {"name": each.name, "task": each.task, "size": each.size} for each in task_adapters() if each.model == model
    ]


def _print_tables(rows: list[dict[str, Any]]) -> None:
    """The models with their costs, then the data sets."""
    from rich.console import Console
    from rich.text import Text

    from pippin.core.files import format_bytes

    models = _table([row for row in rows if row["kind"] != "data"], "memory", "tokens/s")
    data = _table([row for row in rows if row["kind"] == "data"])
    for row in rows:
        name = Text(row["name"] + (" *" if row["default"] else ""))
        size, installed = format_bytes(row["size"]), Text("yes", "green") if row["installed"] else Text("no", "dim")
        if row["kind"] == "data":
            data.add_row(name, row["kind"], size, installed, row["license"])
            continue
        memory = format_bytes(row["memory"]) if row["memory"] else ""
        models.add_row(name, row["kind"], size, memory, _speed_text(row), installed, row["license"])
        for each in row["task_adapters"]:
            adapter = Text("  + adapter", "dim")  # its name is that of the model and its kind
            models.add_row(adapter, each["task"], format_bytes(each["size"]), "", "", Text("yes", "green"), "")
    console = Console(highlight=False)
    console.print(models)
    console.print()
    console.print(data)
    console.print("[dim]* the default. Get another with: pippin pull NAME[/]")
    console.print("[dim]~ estimated for this machine. Measure what is installed with: pippin bench NAME[/]")


def _table(rows: list[dict[str, Any]], *costs: str) -> Table:
    """An empty table for these rows; where the terminal is narrow, licenses are cut off and names of the hub wrap."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    names = [len(row["name"]) + 2 * row["default"] for row in rows if "/" not in row["name"]]
    table.add_column("name", overflow="fold", min_width=max(names, default=0))
    table.add_column("kind", no_wrap=True)
    for name in ("disk", *costs):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("license", no_wrap=True, overflow="ellipsis")
    return table


def _speed_text(row: dict[str, Any]) -> str:
    """Tokens per second with two digits where they are estimated.

    >>> _speed_text({"tokens_per_second": 372.4, "estimated": True})
    '~370'
    >>> _speed_text({"tokens_per_second": 7.42, "estimated": True})
    '~7.4'
    >>> _speed_text({"tokens_per_second": 372.4, "estimated": False})
    '372'
    """
    speed = row["tokens_per_second"]
    if speed is None:
        return ""
    if not row["estimated"]:
        return f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"
    digits = float(f"{speed:.2g}")
    return f"~{digits:.0f}" if digits >= 10 else f"~{digits:.1f}"
