"""Shared by the benchmarks: options, interleaved measurements, and rows printed as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import psutil
from rich.console import Console
from rich.table import Table

T = TypeVar("T")

SETTLE = 0.1
"""Seconds between two measurements: idle threads of the last one have stopped spinning by then."""


@dataclass(frozen=True)
class Row:
    """One comparison; ``ratio`` above 1 means that we are better, ``goal`` is the ratio we want.

    ``peer_value`` is None where the peer is not installed. ``note`` holds further context, such as the load.
    """

    what: str
    unit: str
    ours: float
    peer: str
    peer_value: float | None
    goal: float
    higher_is_better: bool = field(default=True, repr=False)
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ratio to the peer, above 1 where Pippin is better; None without a peer, and beside zero."""
        above, below = self._parts
        return above / below if above is not None and below else None

    @property
    def met(self) -> bool | None:
        """Whether the goal was met, as more than zero does beside zero; None without a peer, and if both are zero."""
        above, below = self._parts
        if above is None or not (above or below):
            return None
        return bool(above >= self.goal * below)

    @property
    def _parts(self) -> tuple[float | None, float]:
        if self.peer_value is None:
            return None, 1.0
        return (self.ours, self.peer_value) if self.higher_is_better else (self.peer_value, self.ours)

    def to_dict(self) -> dict[str, object]:
        """The row as recorded."""
        row = asdict(self)
        del row["higher_is_better"]
        return row | {"ratio": self.ratio, "met": self.met}


def compared(
    what: str,
    unit: str,
    ours: Sequence[float],
    peer: str,
    theirs: Sequence[float] | None,
    goal: float,
    *,
    higher_is_better: bool = True,
    note: object = "",
) -> Row:
    """A row of medians, its note with the range of both; ``theirs`` is None where the peer is not installed."""
    spans = [f"ours {_span(ours)}", *([] if theirs is None else [f"theirs {_span(theirs)}"])]
    value = None if theirs is None else statistics.median(theirs)
    said = "; ".join(part for part in (", ".join(spans), str(note)) if part)
    return Row(what, unit, statistics.median(ours), peer, value, goal, higher_is_better, said)


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.4g}" if len(values) == 1 else f"{min(values):.4g} to {max(values):.4g}"


def thread_counts() -> list[int]:
    """One thread, and every core that this process may use."""
    from pippin.core.device import threads

    return sorted({1, threads()})


def interleaved(ours: Callable[[], float], peer: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Medians of two alternating measurements, so that other load affects both."""
    pairs = [(ours(), peer()) for _ in range(repeats)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def in_turn(measures: dict[str, Callable[[], T]], repeats: int, what: str) -> dict[str, list[T]]:
    """Alternating measurements in rounds of changing order, after a warm-up round.

    Returns all values of each, and says on stderr how far it is.
    """
    names = list(measures)
    found: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            time.sleep(SETTLE)
            value = measures[name]()
            if turn:
                found[name].append(value)
        say(f"{what}: {'warm' if not turn else f'{turn} of {repeats}'}")
    return found


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


class Watch:
    """Load of the machine by other processes while the block runs, for the notes of rows."""

    def __enter__(self) -> Watch:
        self.load = os.getloadavg()[0]
        self._began, self._own, self._all, self._stolen = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        ended, own, everything, stolen = self._now()
        total = max(ended - self._began, 1e-9) * (os.cpu_count() or 1)
        self.others = max(0.0, (everything - self._all) - (own - self._own)) / total
        self.stolen = max(0.0, stolen - self._stolen) / total
        self.load_after = os.getloadavg()[0]

    def _now(self) -> tuple[float, float, float, float]:
        """Clock; seconds of cores used by this process and those it started, by all, and stolen by the host."""
        here = psutil.Process()
        times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
        ended = here.cpu_times()
        own = sum(t.user + t.system for t in times) + ended.children_user + ended.children_system
        machine = psutil.cpu_times()
        busy = machine.user + machine.system + machine.nice
        return time.monotonic(), own, busy, getattr(machine, "steal", 0.0)

    def __str__(self) -> str:
        host = f", {100 * self.stolen:.0f} % stolen by the host" if self.stolen >= 0.005 else ""
        return (
            f"load {self.load:.1f} before, {self.load_after:.1f} after; other processes used "
            f"{100 * self.others:.0f} % of the cores{host}"
        )


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    words = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--json", action="store_true", help="print the rows as JSON")
    words.add_argument("--quick", action="store_true", help="fewer repeats, under a minute")
    return words


def main(measure: Callable[[bool], list[Row]], description: str | None) -> None:
    """Run a benchmark from the command line."""
    options = parser(description).parse_args()
    show(measure(options.quick), as_json=options.json)


def show(rows: list[Row], *, as_json: bool) -> None:
    """Print rows."""
    kept = [row.to_dict() for row in rows]
    if as_json:
        print(json.dumps(kept, indent=2))
        return
    table = Table("what", "unit", "ours", "peer", "theirs", "ratio", "goal", "met")
    for row in kept:
        ours, theirs, ratio, goal = (
            "" if row[name] is None else f"{row[name]:.3g}" for name in ("ours", "peer_value", "ratio", "goal")
        )
        met = {True: "yes", False: "no", None: ""}[row["met"]]
        table.add_row(str(row["what"]), str(row["unit"]), ours, str(row["peer"]), theirs, ratio, goal, met)
    console = Console()
    console.print(table)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        console.print(note, style="dim")
