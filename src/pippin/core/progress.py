"""One progress bar for everything slow: rate, time left, and silence when nobody watches.

Notable here:
- it draws on stderr, so that a command's answer on stdout can be piped
- it draws nothing when stderr is not a terminal, so logs and tests stay clean
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


@dataclass(frozen=True)
class Bar:
    """A bar that is drawn, or one that only pretends."""

    advance: Callable[[int], None]
    """Add this many units to what is done; a negative number takes some back."""
    say: Callable[[str], None]
    """Show a few words behind the bar (the loss of a training run), in place of those before."""


@contextmanager
def bar(total: int | None, description: str, *, unit: str = "B", done: int = 0, show: bool = True) -> Iterator[Bar]:
    """Show progress towards ``total`` while the block runs.

    Args:
        total: units to do; None when unknown, which draws a moving bar.
        description: what is being done, in a few words.
        unit: "B" prints bytes as MB and MB/s; any other word is printed as it is ("tokens", "steps").
        done: units that were done before (a resumed download); they don't count towards the rate.
        show: False never draws.

    >>> with bar(3, "counting", unit="steps") as progress:
    ...     progress.advance(3)
    """
    if not (show and sys.stderr.isatty()):
        yield Bar(lambda n: None, lambda text: None)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*_columns(unit), console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total, completed=done, words="")
        yield Bar(lambda n: progress.advance(task, n), lambda text: progress.update(task, words=text))


def note(text: str, *, show: bool = True) -> None:
    """Say one line on stderr, under the same rule of silence as the bar."""
    if show and sys.stderr.isatty():
        print(text, file=sys.stderr)


def _columns(unit: str) -> list[ProgressColumn]:
    from rich import progress
    from rich.text import Text

    class RateColumn(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.1f} {unit}/s")

    amount = (
        [progress.DownloadColumn(), progress.TransferSpeedColumn()]
        if unit == "B"
        else [progress.MofNCompleteColumn(), RateColumn()]
    )
    return [
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *amount,
        progress.TimeRemainingColumn(elapsed_when_finished=True),
        progress.TextColumn("{task.fields[words]}"),
    ]
