"""`pippin evaluate annotators`: how many people must label each item."""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pippin.cli import documents, terminal
from pippin.cli.evaluate_panel import words
from pippin.core.errors import InvalidArgument, InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.evaluate.annotation_budget import BudgetReport
    from pippin.evaluate.votes import Sheet

_SHOWN = ("kl", "entropy_r", "accuracy")


def annotators(
    labels: Annotated[Path, typer.Argument(help="A CSV file in UTF-8: a row per item, its votes in columns.")],
    counts: Annotated[
        str | None, typer.Option(help="Columns that count the votes for each label, by commas: yes,no,unsure.")
    ] = None,
    people: Annotated[
        str | None,
        typer.Option(help="Columns of people's labels, by commas; without it all but id, item and features."),
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="Columns of numbers to learn from, by commas; without it no model is trained.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option("--labels", help="All labels that people may give, by commas; without it all that occur."),
    ] = None,
    sizes: Annotated[str, typer.Option(help="Votes per item to try, by commas.")] = "1,2,3,5,10,20,50,100",
    seeds: Annotated[int, typer.Option(help="Models of each kind, or divisions of the votes.")] = 3,
    steps: Annotated[int, typer.Option(help="Updates of each model.")] = 250,
    test: Annotated[float, typer.Option(help="Share of the items that is kept for the test.")] = 0.2,
    share: Annotated[float, typer.Option(help="Share of the gain at which a metric counts as settled.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Of the division of the items.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this file (.png, .svg).")] = None,
) -> None:
    """Divergence, correlation of entropies and accuracy over the number of votes, and where each settles.

    With --features a small network learns from fewer and more votes, from winners and from smoothed winners; without,
    some votes of each item are compared with others of it.

    pippin evaluate annotators labels.csv --counts yes,no,unsure --features length,year --plot votes.png
    """
    from pippin.evaluate.votes import read_csv

    documents.check_plot(plot)
    tried = _sizes(sizes)
    for name, value, least in (("--seeds", seeds, 1), ("--steps", steps, 1), ("--seed", seed, 0)):
        if value < least:
            raise InvalidArgument(f"{name} is {value}; give {least} or more")
    for name, part in (("--share", share), ("--test", test)):
        if not 0 < part < 1:
            raise InvalidArgument(f"{name} is {part}; give a share between 0 and 1")
    sheet = read_csv(labels)
    columns = words(features, "--features")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        votes = _votes(sheet, words(counts, "--counts"), words(people, "--people"), words(classes, "--labels"), columns)
        if columns is None:
            report = _alone(votes, tried, seeds, seed)
        else:
            report = _learnt(sheet, columns, votes, tried, seeds, steps, test, seed, show=not as_json)
        settled = _settled(report, share)
    for message in dict.fromkeys(str(warning.message) for warning in said):
        terminal.note(message)
    if plot is not None:
        with documents.writing(plot):
            report.plot(plot)
    if as_json:
        terminal.write(report.to_json() + "\n")
        return
    report.report(_SHOWN).print()
    for line in settled:
        print(line)


def _sizes(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InvalidArgument(f"--sizes is {text!r}; give whole numbers between commas") from None
    if found[0] < 1:
        raise InvalidArgument(f"--sizes is {text!r}; give 1 or more")
    return found


def _votes(
    sheet: Sheet,
    counts: list[str] | None,
    people: list[str] | None,
    classes: list[str] | None,
    features: list[str] | None,
) -> Tensor:
    """Counts of labels from columns that count, or from columns of labels."""
    import torch

    from pippin.evaluate.annotators import check_counts
    from pippin.evaluate.votes import encode

    if counts is not None:
        if people is not None or classes is not None:
            raise InvalidArgument("give --counts, or --people and --labels; not both")
        return check_counts(torch.from_numpy(sheet.numbers(counts)))
    taken = {"id", "item", *(features or ())}
    chosen = people or [name for name in sheet.columns if name not in taken and name.lower() not in taken]
    if len(chosen) < 2:
        raise InvalidInput(f"{sheet.name} has {len(chosen)} columns of people's labels; give 2 or more, or --counts")
    codes, _, known = encode(
        sheet.texts(chosen),
        classes=classes,
        judges=chosen,
        where=lambda row: f"line {sheet.lines[row]} of {sheet.name}",
    )
    if classes is None and len(known) > max(20, len(codes) // 10):
        raise InvalidInput(
            f"{sheet.name} holds {len(known)} different labels in {', '.join(chosen[:6])}; name the columns of "
            "people's labels by --people, or those that count votes by --counts"
        )
    found = torch.from_numpy((codes[..., None] == range(len(known))).sum(1))
    silent = (found.sum(1) == 0).nonzero()[:, 0]
    if len(silent):
        raise InvalidInput(f"line {sheet.lines[int(silent[0])]} of {sheet.name} has no label at all; leave it out")
    return found


def _alone(votes: Tensor, sizes: list[int], seeds: int, seed: int) -> BudgetReport:
    from pippin.evaluate.annotation_budget import vote_curve

    return vote_curve(votes, sizes, draws=max(2, seeds), seed=seed)


def _learnt(
    sheet: Sheet,
    columns: list[str],
    votes: Tensor,
    sizes: list[int],
    seeds: int,
    steps: int,
    test: float,
    seed: int,
    *,
    show: bool,
) -> BudgetReport:
    """Train on standardised features; nothing of the test items is known before."""
    import torch
    from torch import nn

    from pippin.core.progress import bar
    from pippin.evaluate.annotation_budget import AnnotationBudget, split_items
    from pippin.evaluate.annotators import SoftFit

    x = torch.from_numpy(sheet.numbers(columns))
    train, held = split_items(votes, test, seed)
    centre, spread = x[train].mean(0), x[train].std(0)
    x = ((x - centre) / torch.where(spread > 0, spread, 1.0)).float()

    def network(which: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(which)
            return nn.Sequential(nn.Linear(x.shape[1], 48), nn.ReLU(), nn.Linear(48, votes.shape[1]))

    budget = AnnotationBudget(network, SoftFit(steps=steps), sizes=sizes, seeds=seeds)
    with bar(budget.trainings(votes[train]), "training", unit="models", show=show) as progress:
        return budget.run(
            (x[train], votes[train]),
            (x[held], votes[held]),
            title=f"{len(train)} items to learn from, {len(held)} for the test",
            on_progress=progress.advance,
        )


def _settled(report: BudgetReport, share: float) -> list[str]:
    """Where each metric settles, in words."""
    found = []
    for metric in _SHOWN:
        try:
            settled = report.saturation(metric, share)
        except InvalidArgument as error:
            found.append(str(error))
            continue
        gained = {size: statistics.fmean(shares) for size, shares in settled.shares.items()}
        if settled.size is None:
            last = list(gained)[-2]
            found.append(f"{metric}: {100 * gained[last]:.0f} % of the gain at {last} votes; more still help")
        elif gained[settled.size] > 1:
            found.append(f"{metric}: all of the gain at {settled.size} votes; more did not help")
        else:
            found.append(f"{metric}: {100 * gained[settled.size]:.0f} % of the gain at {settled.size} votes")
    return found
