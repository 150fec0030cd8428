"""What every benchmark shares: its options, and rows that print as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One comparison; ``ratio`` above 1 means that we are better, ``goal`` is the ratio we want."""

    what: str
    unit: str
    ours: float
    peer: str
    peer_value: float
    goal: float
    higher_is_better: bool = field(default=True, repr=False)

    @property
    def ratio(self) -> float:
        """How many times better we are."""
        return self.ours / self.peer_value if self.higher_is_better else self.peer_value / self.ours

    def to_dict(self) -> dict[str, object]:
        """The row as it is kept."""
        row = asdict(self)
        del row["higher_is_better"]
        return row | {"ratio": self.ratio, "met": bool(self.ratio >= self.goal)}


def interleaved(ours: Callable[[], float], peer: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Medians of two measurements taken in turn, so that a busy moment of the machine hits both."""
    pairs = [(ours(), peer()) for _ in range(repeats)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def main(measure: Callable[[bool], list[Row]], description: str | None) -> None:
    """Run a benchmark from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, under a minute")
    options = parser.parse_args()
    rows = [row.to_dict() for row in measure(options.quick)]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("what", "unit", "ours", "peer", "theirs", "ratio", "goal", "met")
    for row in rows:
        numbers = (f"{row[name]:.3g}" for name in ("ours", "peer_value", "ratio", "goal"))
        ours, theirs, ratio, goal = numbers
        table.add_row(
            str(row["what"]),
            str(row["unit"]),
            ours,
            str(row["peer"]),
            theirs,
            ratio,
            goal,
            "yes" if row["met"] else "no",
        )
    Console().print(table)
