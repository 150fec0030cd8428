"""Progress bars with rate and remaining time, for terminals and logs.

Notable here:
- they are written to stderr, so that a command's output on stdout can be piped
- where stderr is not a terminal, a line is printed every few seconds instead; shorter tasks print nothing
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Bar:
    """The functions that update a progress bar."""

    advance: Callable[[int], None]
    """Add this many completed units; a negative number subtracts."""
    say: Callable[[str], None]
    """Set the text behind the bar, such as the loss of a training run."""


@contextmanager
def bar(
    total: int | None, description: str, *, unit: str = "B", done: int = 0, show_progress: bool = True
) -> Iterator[Bar]:
    """Show progress towards ``total`` while the block runs.

    Args:
        total: the number of units; None where unknown, which shows an indeterminate bar.
        description: a short description of the task.
        unit: "B" prints bytes as MB and MB/s; any other unit is printed unchanged ("tokens", "steps").
        done: units completed earlier (a resumed download); they do not count towards the rate.
        show_progress: False shows nothing.

    >>> with bar(3, "counting", unit="steps") as progress:
    ...     progress.advance(3)
    """
    if not show_progress or sys.stderr is None:
        yield Bar(lambda n: None, lambda text: None)
        return
    if not sys.stderr.isatty():
        lines = _Lines(total, description, unit, done)
        yield Bar(lines.advance, lines.say)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*_columns(unit), console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total, completed=done, words="")
        yield Bar(lambda n: progress.advance(task, n), lambda text: progress.update(task, words=text))


def note(text: str, *, show_progress: bool = True) -> None:
    """Write one line to stderr."""
    if show_progress and sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


class _Lines:
    """Progress for logs: at most one line of text every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, total: int | None, description: str, unit: str, done: int) -> None:
        self.total, self.description, self.unit, self.done = total, description, unit, done
        self.before = done
        self.words = ""
        self.began = self.written = time.monotonic()

    def advance(self, n: int) -> None:
        """Add completed units, and print a line if one is due."""
        self.done += n
        now = time.monotonic()
        if now - self.written >= SECONDS_BETWEEN_LINES:
            self.written = now
            print(self._line(now - self.began), file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Set the text at the end of the next line."""
        self.words = text

    def _line(self, seconds: float) -> str:
        rate = (self.done - self.before) / seconds
        if self.unit == "B":
            parts = [f"{self.done / 1e6:.1f}" + (f" of {self.total / 1e6:.1f} MB" if self.total else " MB")]
            parts.append(f"{rate / 1e6:.1f} MB/s")
        else:
            parts = [f"{self.done:,}" + (f" of {self.total:,} {self.unit}" if self.total else f" {self.unit}")]
            parts.append(f"{rate:.3g} {self.unit}/s")
        if self.total and rate > 0:
            parts.append(f"{_duration((self.total - self.done) / rate)} left")
        return f"{self.description}: {', '.join([*parts, *filter(None, [self.words])])}"


def _duration(seconds: float) -> str:
    """
    >>> _duration(7.2), _duration(75.0), _duration(7260.0)
    ('7 s', '1:15', '2:01:00')
    """
    total = max(0, round(seconds))
    h, m, s = total // 3600, total // 60 % 60, total % 60
    if h:
        return f"{h}:{m:02d}:{s:02d}"
    return f"{m}:{s:02d}" if m else f"{s} s"


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
