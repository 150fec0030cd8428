"""Reports of measurements: named rows with a value, a unit and a standard deviation.

Notable here:
- `print(report)` writes plain text; `report.print()` and rich show a table in a terminal
- numbers have four significant digits in text and full precision in JSON
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pippin.core import plotting
from pippin.core.errors import InvalidArgument
from pippin.core.files import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

_HEADINGS = ("what", "value", "spread", "unit")


@dataclass(frozen=True)
class Row:
    """One measured quantity.

    Attributes:
        name: the quantity.
        value: its value, or the mean over repetitions.
        unit: "s", "tokens/s", "GiB"...; empty for a dimensionless number.
        spread: standard deviation over the repetitions, in the same unit; None for a single measurement.
    """

    name: str
    value: float
    unit: str = ""
    spread: float | None = None

    @classmethod
    def of_runs(cls, name: str, values: Sequence[float], unit: str = "") -> Row:
        """The median of several measurements, with their standard deviation.

        >>> Row.of_runs("answer", [40.0, 42.0, 41.0], "tokens/s")
        Row(name='answer', value=41.0, unit='tokens/s', spread=1.0)
        """
        return cls(name, statistics.median(values), unit, statistics.stdev(values) if len(values) > 1 else None)


class Report:
    """A title and rows, in the order given.

    >>> print(Report("Speed", [Row("prompt", 812.4567, "tokens/s", 3.21), Row("answer", 41.0, "tokens/s")]))
    Speed
    what    value  spread  unit
    prompt  812.5  3.21    tokens/s
    answer     41          tokens/s
    """

    def __init__(self, title: str, rows: Iterable[Row] = ()) -> None:
        self.title = title
        self.rows = tuple(rows)

    def __str__(self) -> str:
        cells = [_HEADINGS, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADINGS))]
        lines = [
            "  ".join([name.ljust(widths[0]), value.rjust(widths[1]), spread.ljust(widths[2]), unit]).rstrip()
            for name, value, spread, unit in cells
        ]
        return "\n".join([self.title, *lines])

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.title), title_justify="left")
        for heading in _HEADINGS:
            table.add_column(heading, justify="right" if heading == "value" else "left")
        for row in self.rows:
            table.add_row(*map(Text, _cells(row)))
        return table

    def print(self) -> None:
        """Write the report to standard output: a table in a terminal, plain text in a file or a pipe."""
        from rich.console import Console

        console = Console()
        if console.is_terminal:
            console.print(self)
        else:
            print(self)

    def to_json(self) -> str:
        """The report as JSON: `{"title", "rows": [{"name", "value", "unit", "spread"}]}`.

        Raises:
            InvalidArgument: a value is not finite, which JSON cannot represent.
        """
        for row in self.rows:
            if not (math.isfinite(row.value) and math.isfinite(row.spread or 0.0)):
                raise InvalidArgument(
                    f"report {self.title!r}: {row.name!r} is {row.value}, spread {row.spread}; JSON needs finite values"
                )
        return json.dumps({"title": self.title, "rows": [asdict(row) for row in self.rows]}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file, atomically."""
        text = self.to_json()
        with atomic_write(Path(path)) as file:
            file.write(f"{text}\n".encode())

    def plot(self, path: Path) -> None:
        """Plot the rows as bars, one panel per unit, with the standard deviations as error bars.

        Args:
            path: the file; its suffix determines the format (.png, .svg, .pdf).

        Raises:
            InvalidArgument: the report has no rows, or the path has another suffix.
            MissingDependency: matplotlib is not installed.
        """
        if not self.rows:
            raise InvalidArgument(f"report {self.title!r} has no rows to plot")
        units = list(dict.fromkeys(row.unit for row in self.rows))
        figure = plotting.new(7, 1 + 0.4 * len(self.rows) + 0.5 * len(units))
        figure.suptitle(self.title)
        counts = [sum(row.unit == unit for row in self.rows) for unit in units]
        panels = figure.subplots(len(units), squeeze=False, height_ratios=counts)[:, 0]
        for panel, unit in zip(panels, units, strict=True):
            rows = [row for row in self.rows if row.unit == unit]
            positions = range(len(rows))
            panel.barh(positions, [row.value for row in rows], xerr=[row.spread or 0.0 for row in rows])
            panel.set_yticks(positions, [row.name for row in rows])
            panel.invert_yaxis()
            panel.set_xlabel(unit)
        plotting.save(figure, path)


def _cells(row: Row) -> tuple[str, str, str, str]:
    return row.name, _figure(row.value), "" if row.spread is None else _figure(row.spread), row.unit


def _figure(value: float) -> str:
    """Format a number with four significant digits; integers are written in full.

    >>> _figure(0.000123456), _figure(1234567.0), _figure(98765.43)
    ('0.0001235', '1234567', '98765')
    """
    if math.isfinite(value) and value == round(value):
        return str(round(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
