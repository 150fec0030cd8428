"""`pippin claims`: the ledger of published claims, to list, to run again and to report."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="List, run and report published claims.")


class ScaleChoice(StrEnum):
    """The scales, as words of the command line."""

    smoke = "smoke"
    laptop = "laptop"
    gpu = "gpu"


Results = Annotated[
    Path | None,
    typer.Option("--results", help="Folder of the evidence. Default: results/ of the clone, or of the current folder."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON list with one object per claim.")]


@app.command("list")
def list_claims(as_json: AsJson = False) -> None:
    """Every claim: what was published, and the rule for accepting it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pippin.claims import runner

    claims = runner.find().values()
    if as_json:
        fields = ("id", "source", "paper", "setting", "accept")
        typer.echo(_json([{name: getattr(claim, name) for name in fields} for claim in claims]))
        return
    table = Table()
    for name in ("claim", "source", "published", "accepted if"):
        table.add_column(name, overflow="fold")
    for claim in claims:
        table.add_row(*map(Text, (claim.id, claim.source, claim.paper, claim.accept)))
    Console().print(table if claims else "no claims yet")


@app.command("run")
def run_claims(
    ids: Annotated[list[str] | None, typer.Argument(help="Which claims.", metavar="ID...", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Run every claim.")] = False,
    scale: Annotated[ScaleChoice, typer.Option(help="How large a run.")] = ScaleChoice.laptop,
    results: Results = None,
) -> None:
    """Measure claims and record the evidence. A claim that does not hold is a result; only a crash fails."""
    from pippin.claims import ledger, runner
    from pippin.core.errors import InvalidArgument

    if bool(ids) == every:
        raise InvalidArgument("name the claims to run, or use --all; `pippin claims list` shows them")
    size = ledger.Scale(scale.value)
    claims = list(runner.find().values()) if every else [runner.get(id) for id in ids or ()]
    crashed = []
    for claim in claims:
        typer.echo(f"{claim.id}: running at {size.name} scale", err=True)
        done = runner.run(claim, size, results=results)
        if done.error is not None:
            crashed.append(claim.id)
            typer.echo(f"{claim.id}: crashed after {done.seconds:.1f} s: {done.error}", err=True)
            continue
        done.evidence.report(f"{claim.id} ({size.name}): {done.verdict} in {done.seconds:.1f} s").print()
    if crashed:
        typer.echo(f"{len(crashed)} of {len(claims)} crashed: {', '.join(crashed)}", err=True)
        raise typer.Exit(1)


@app.command("report")
def report_claims(
    as_json: AsJson = False,
    scale: Annotated[ScaleChoice | None, typer.Option(help="Show the runs of this scale only.")] = None,
    results: Results = None,
) -> None:
    """The verdict on every claim, computed from the recorded evidence."""
    from rich.console import Console

    from pippin.claims import report, runner

    rows = report.summaries(runner.find().values(), results=results, scale=scale.value if scale else None)
    if as_json:
        typer.echo(_json(rows))
    else:
        Console().print(report.table(rows))


def _json(rows: list[dict[str, object]]) -> str:
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False)
