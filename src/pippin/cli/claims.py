"""`pippin claims`: list, show, run and report published claims."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="List, show, run and report published claims.")


class ClaimScale(StrEnum):
    """Choices of --scale."""

    smoke = "smoke"
    laptop = "laptop"
    long = "long"
    gpu = "gpu"


class VerdictChoice(StrEnum):
    """Choices of --verdict."""

    reproduced = "reproduced"
    partly = "partly"
    not_reproduced = "not reproduced"
    not_run = "not run"


Results = Annotated[
    Path | None,
    typer.Option(
        "--results",
        help="Folder of the evidence; by default, results/ of the clone; for your own claims, of the current folder.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON list with one object per claim.")]
Area = Annotated[str | None, typer.Option(help="Only claims about this part, such as bayes or generate.")]
Verdicts = Annotated[
    list[VerdictChoice] | None, typer.Option("--verdict", help="Only claims with this verdict; may be repeated.")
]
Ids = Annotated[
    list[str] | None,
    typer.Argument(help="Ids of claims, or paths of claim files.", metavar="ID...", show_default=False),
]


@app.command("list")
def list_claims(verdict: Verdicts = None, area: Area = None, results: Results = None, as_json: AsJson = False) -> None:
    """List the claims with what was published."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pippin.claims import catalog, report

    claims = [stated for stated in catalog.find().values() if area in (None, stated.area)]
    if verdict:
        found = {row["id"] for row in report.summaries(claims, results=results, verdicts=verdict)}
        claims = [stated for stated in claims if stated.id in found]
    if as_json:
        typer.echo(
            _json(
                [
                    {
                        "id": stated.id,
                        "area": stated.area,
                        "source": stated.source,
                        "paper": stated.headline,
                        "setting": stated.setting,
                        "accept": report.accept(stated.rule),
                        "method": stated.rule.method,
                        "negative_controls": list(stated.rule.negative_controls),
                        "positive_control": stated.rule.positive_control,
                    }
                    for stated in claims
                ]
            )
        )
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("claim", no_wrap=True, min_width=max((len(stated.id) for stated in claims), default=0))
    table.add_column("published", overflow="fold")
    for stated in claims:
        table.add_row(Text(stated.id), Text(stated.headline))
    Console().print(table if claims else "no claims")


@app.command("show")
def show_claims(ids: Ids = None, results: Results = None, as_json: AsJson = False) -> None:
    """Show the rule of a claim, the outcome of each condition for each arm, and the figures."""
    from rich.console import Console

    from pippin.claims import catalog, records, report, runner
    from pippin.core.errors import InvalidArgument

    if not ids:
        raise InvalidArgument("name the claims to show; `pippin claims list` lists them")
    claims = [catalog.get(id) for id in ids]
    if as_json:
        typer.echo(_json(report.summaries(claims, results=results)))
        return
    for stated in claims:
        record = records.read(stated.id, results or runner.results_folder(stated.file))
        Console().print(report.view(stated, record))


@app.command("run")
def run_claims(
    ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="Run every claim.")] = False,
    scale: Annotated[ClaimScale, typer.Option(help="Size of the run.")] = ClaimScale.laptop,
    results: Results = None,
) -> None:
    """Measure claims and record the evidence.

    The exit code is 0 unless a run crashes: a claim that is not reproduced is a result. A killed run resumes from its
    checkpoints. Uncommitted code runs only at smoke scale, or with --results.
    """
    from pippin.claims import catalog, ledger, runner
    from pippin.core.errors import InvalidArgument

    if bool(ids) == every:
        raise InvalidArgument("name the claims to run, or use --all; `pippin claims list` lists them")
    size = ledger.Scale(scale.value)
    claims = list(catalog.find().values()) if every else [catalog.get(id) for id in ids or ()]
    crashed = []
    for stated in claims:
        typer.echo(f"{stated.id}: running at {size.name} scale", err=True)
        done, evidence = runner.run(stated, size, results=results)
        if done.error is not None:
            crashed.append(stated.id)
            typer.echo(f"{stated.id}: crashed after {done.seconds:.1f} s: {done.error}", err=True)
            continue
        said = "no verdict at this scale, ran" if size.is_smoke else evidence.verdict
        evidence.report(f"{stated.id} ({size.name}): {said} in {done.seconds:.1f} s").print()
        for reason in evidence.reasons:
            typer.echo(f"  {reason}")
    if crashed:
        typer.echo(f"{len(crashed)} of {len(claims)} crashed: {', '.join(crashed)}", err=True)
        raise typer.Exit(1)


@app.command("report")
def report_claims(
    as_json: AsJson = False,
    verdict: Verdicts = None,
    area: Area = None,
    scale: Annotated[ClaimScale | None, typer.Option(help="Show the runs of this scale only.")] = None,
    results: Results = None,
) -> None:
    """Print the verdict on every claim, computed from the recorded evidence."""
    from rich.console import Console

    from pippin.claims import catalog, report

    rows = report.summaries(
        catalog.find().values(),
        results=results,
        scale=scale.value if scale else None,
        verdicts=verdict or tuple(VerdictChoice),
        area=area,
    )
    if as_json:
        typer.echo(_json(rows))
    else:
        console = Console()
        console.print(report.table(rows, console.width))


def _json(rows: list[dict[str, object]]) -> str:
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False)
