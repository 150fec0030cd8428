"""Progress bars with rate and remaining time, for terminals and logs.

Notable here:
- they are written to stderr, so that a command's output on stdout can be piped
- where stderr is not a terminal, a line is printed every few seconds instead; shorter tasks print nothing
- a task that will take minutes says so as soon as its rate is known, so that it can be stopped and made smaller
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


SECONDS_BETWEEN_LINES = 5.0
LONG = 60.0
"""Seconds that a task takes at least for its duration to be announced."""


@dataclass(frozen=True)
class Bar:
    """The functions that update a progress bar."""

    advance: Callable[[int], None]
    """Add this many completed units; a negative number subtracts, and 0 only shows what was said."""
    say: Callable[[str], None]
    """Set the text behind the bar, such as the loss of a training run."""


@contextmanager
def bar(
    total: int | None,
    description: str,
    *,
    unit: str = "B",
    done: int = 0,
    advice: str = "",
    show_progress: bool = True,
) -> Iterator[Bar]:
    """Show progress towards ``total`` while the block runs.

    Args:
        total: the number of units; None where unknown, which shows an indeterminate bar.
        description: a short description of the task.
        unit: "B" prints bytes as MB and MB/s; any other unit is printed unchanged ("tokens", "steps").
        done: units completed earlier (a resumed download); they do not count towards the rate.
        advice: what to do about a long duration, such as how to stop; where it is given, a task of more than `LONG`
            seconds announces its duration after its first units.
        show_progress: False shows nothing.

    >>> with bar(3, "counting", unit="steps") as progress:
    ...     progress.advance(3)
    """
    if not show_progress or sys.stderr is None:
        yield Bar(lambda n: None, lambda text: None)
        return
    if not sys.stderr.isatty():
        lines = _Lines(total, description, unit, done)
        yield Bar(_announcing(lines.advance, total, unit, done, advice), lines.say)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*_columns(unit), console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total, completed=done, words="")
        advance = _announcing(lambda n: progress.advance(task, n), total, unit, done, advice)
        yield Bar(advance, lambda text: progress.update(task, words=text))


@contextmanager
def counted(description: str, *, unit: str, show_progress: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A `bar` for a task that says itself how far it is.

    Args:
        description: a short description of the task.
        unit: as for `bar`.
        show_progress: False shows nothing.

    Yields:
        A function of the number of completed units and of all units; the bar begins at its first call.

    >>> with counted("scoring", unit="sentences") as on_progress:
    ...     on_progress(1, 3)
    """
    with ExitStack() as stack:
        shown: Bar | None = None
        before = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal shown, before
            if shown is None:
                shown = stack.enter_context(bar(total, description, unit=unit, show_progress=show_progress))
            shown.advance(done - before)
            before = done

        yield on_progress


@contextmanager
def busy(description: str, *, show_progress: bool = True) -> Iterator[None]:
    """Show that something runs whose end cannot be foreseen: a spinner, or lines further and further apart.

    Args:
        description: what runs.
        show_progress: False shows nothing.

    >>> with busy("counting"):
    ...     3
    3
    """
    if not show_progress or sys.stderr is None:
        yield
        return
    if sys.stderr.isatty():
        from rich import progress
        from rich.console import Console

        columns = (
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.TimeElapsedColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            shown.add_task(description, total=None)
            yield
        return
    ended = threading.Event()
    lines = threading.Thread(target=_say_still, args=(description, ended), daemon=True)
    lines.start()
    try:
        yield
    finally:
        ended.set()
        lines.join()


def _say_still(description: str, ended: threading.Event) -> None:
    began, wait = time.monotonic(), SECONDS_BETWEEN_LINES
    while not ended.wait(wait):
        note(f"{description}: {_duration(time.monotonic() - began)}")
        wait = min(2 * wait, 60.0)


def note(text: str, *, show_progress: bool = True) -> None:
    """Write one line to stderr."""
    if show_progress and sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def _announcing(
    advance: Callable[[int], None], total: int | None, unit: str, done: int, advice: str
) -> Callable[[int], None]:
    """``advance`` that notes once how long all will take, if that is long.

    The first call is not measured, since it often includes what happens only once; the next ones are, for a second.
    """
    if total is None or not advice:
        return advance
    began: float | None = None
    measured, left, announced = 0, total - done, False

    def announce(n: int) -> None:
        nonlocal began, measured, left, announced
        advance(n)
        if not n:
            return
        left -= n
        if began is None:
            began = time.monotonic()
            return
        measured += n
        seconds = time.monotonic() - began
        if announced or measured <= 0 or seconds < 1.0:
            return
        announced = True
        if left * seconds / measured >= LONG:
            note(
                f"{_pace(seconds / measured, unit)}: the {left:,} {unit} that are left take about "
                f"{_duration(left * seconds / measured)}; {advice}"
            )

    return announce


def _pace(seconds: float, unit: str) -> str:
    """
    >>> _pace(1.234, "steps"), _pace(0.02, "steps")
    ('1.2 s per step', '50 steps/s')
    """
    if seconds >= 1.0:
        return f"{seconds:.1f} s per {unit.removesuffix('s')}"
    return f"{1 / seconds:,.{int(seconds > 0.1)}f} {unit}/s"


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
