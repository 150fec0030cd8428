"""`pippin evaluate panel`: how many independent votes a panel of judges is worth."""

from __future__ import annotations

import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pippin.cli.common import documents, terminal
from pippin.core.errors import InvalidArgument
from pippin.recipes.evaluate.annotators import names_of
from pippin.recipes.options import refuse_existing

if TYPE_CHECKING:
    from rich.table import Table

    from pippin.evaluate.judges.report import PanelReport


class Missing(StrEnum):
    """Choices of --missing."""

    error = "error"
    pairwise = "pairwise"
    fill = "fill"


def panel(
    votes: Annotated[Path, typer.Argument(help="A CSV file in UTF-8: a row per item, a column per judge.")],
    gold: Annotated[
        str | None,
        typer.Option(help="Column of true labels; default: gold. A file without it is measured by agreement."),
    ] = None,
    judges: Annotated[
        str | None,
        typer.Option(help="Comma-separated vote columns; default: all but gold, difficulty, id and item."),
    ] = None,
    difficulty: Annotated[
        str | None,
        typer.Option(help="Column of item difficulty, larger is harder; bins of it are compared separately."),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="Comma-separated labels that may occur; by default, those of the gold column.")
    ] = None,
    missing: Annotated[
        Missing,
        typer.Option(help="Empty cells: refuse them, compare judges on common items, or fill them pseudorandomly."),
    ] = Missing.error,
    bins: Annotated[int, typer.Option(min=1, help="Number of difficulty bins.")] = 3,
    samples: Annotated[
        int, typer.Option(min=100, help="Bootstrap samples of the items for the intervals, and permutations.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Without true labels: write label and confidence of each item, as CSV.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the error correlations and the curve over panel sizes (.png, .svg).")
    ] = None,
) -> None:
    """Measure how many independent votes a panel of judges is worth, and which judge to drop.

    Correlated errors make a panel worth fewer votes. Use at least 200 items with known labels. Without true labels:
    agreement (Krippendorff's alpha), and by Dawid and Skene's model a label for each item and each judge's accuracy.

    pippin evaluate panel votes.csv --difficulty entropy --plot panel.png
    pippin evaluate panel votes.csv --out labels.csv
    """
    from pippin.evaluate.judges.panel import JudgePanel
    from pippin.evaluate.judges.votes import read_csv

    if gold is None and "gold" not in read_csv(votes).columns:
        if plot is not None or difficulty is not None:
            raise InvalidArgument("--plot and --difficulty need true labels; name their column with --gold")
        _consensus(votes, judges, labels, out, as_json=as_json)
        return
    if out is not None:
        raise InvalidArgument("--out writes labels where none are known; this file has true labels")
    gold = gold or "gold"
    documents.check_plot(plot)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = JudgePanel.from_csv(
            votes,
            gold=gold,
            difficulty=difficulty,
            judges=None if judges is None else list(names_of(judges, option="--judges")),
            classes=None if labels is None else list(names_of(labels, option="--labels")),
            missing=missing.value,
        ).report(num_bootstrap=samples, num_permutations=samples, num_bins=bins, seed=seed)
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        terminal.note(message)
    if plot is not None:
        with documents.writing(plot):
            measured.plot(plot)
    if as_json:
        terminal.write(measured.to_json() + "\n")
        return
    _show(measured)


def _consensus(votes: Path, judges: str | None, labels: str | None, out: Path | None, *, as_json: bool) -> None:
    """Agreement and labels from votes alone."""
    from pippin.evaluate.judges.unlabeled_panel import consensus_of_csv

    if out is not None:
        refuse_existing(out)
    found = consensus_of_csv(
        votes,
        judges=None if judges is None else names_of(judges, option="--judges"),
        classes=None if labels is None else names_of(labels, option="--labels"),
    )
    if out is not None:
        with documents.writing(out):
            found.save(out)
    if as_json:
        terminal.write(found.to_json() + "\n")
        return
    found.report().print()
    terminal.write(found.advice + "\n")
    terminal.note(
        f"labels in {out}" if out else "a label and its confidence for each item: --out labels.csv, or --json"
    )


def _show(measured: PanelReport) -> None:
    from rich.console import Console

    measured.report().print()
    console = Console()
    if console.is_terminal:
        console.print(_judges(measured))
        console.print(terminal.plain(measured.advice), markup=False)
        return
    lines = [("judge", "accuracy %", "votes without", "points without")]
    lines += [(row[0], *row[1:]) for row in _cells(measured)]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells))
    print(measured.advice)


def _cells(measured: PanelReport) -> list[tuple[str, str, str, str]]:
    """Rows of the table of judges as text."""
    found = []
    for name, accuracy, votes, change, (low, high) in measured.judge_table():
        interval = f"{100 * change:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        found.append(
            (terminal.plain(name), f"{100 * accuracy:.1f}", "" if votes != votes else f"{votes:+.2f}", interval)
        )
    return found


def _judges(measured: PanelReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Without each judge", title_justify="left")
    for heading in ("judge", "accuracy %", "votes without", "points without"):
        table.add_column(heading, justify="left" if heading == "judge" else "right")
    for row in _cells(measured):
        table.add_row(*map(Text, row))
    return table
