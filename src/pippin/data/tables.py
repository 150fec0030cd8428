"""Tabular regression data: the UCI data sets of the catalog, and CSV files.

Notable here:
- a split is a function of its seed; a gap split holds out the middle of one column, so that a model can be tested on
  inputs between those of training
- columns are standardized by the training part alone, and the statistics are stored, so that figures can be reported in
  the units of the table
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument, InvalidInput, InvalidRecord
from pippin.core.store import store
from pippin.core.text_files import open_text

_SETS: Final = {
    "uci-airfoil": ("airfoil.txt", -1),
    "uci-fish-toxicity": ("fish-toxicity.csv", -1),
    "uci-mpg": ("mpg.dat", -1),
    "uci-protein": ("protein.csv", 0),
    "uci-robot-arm": ("robot-arm.dat", -1),
    "uci-weather": ("weather.dat", -1),
    "uci-wine-red": ("wine-red.csv", -1),
    "uci-yacht": ("yacht.txt", -1),
}
"""File in the data set "uci", and the target column."""


@dataclass(frozen=True)
class Table:
    """Rows of numbers with one target each, in the units of their source.

    Attributes:
        x: inputs.
        y: target.
        name: for reports.
    """

    x: Float[Tensor, "n d"]
    y: Float[Tensor, " n"]
    name: str = "table"

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != self.x.shape[:1] or not len(self.x):
            raise InvalidInput(f"{self.name}: inputs {tuple(self.x.shape)} and targets {tuple(self.y.shape)}")
        bad = ~(self.x.isfinite().all(-1) & self.y.isfinite())
        if bad.any():
            rows = bad.nonzero()[:5, 0].tolist()
            raise InvalidInput(f"{self.name}: rows {rows} hold NaN or infinity; leave them out or fill them in")

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: Tensor) -> Table:
        """A subset of the rows."""
        return Table(self.x[index], self.y[index], self.name)


@dataclass(frozen=True)
class Split:
    """Two parts of a table, standardized by the first.

    Attributes:
        train: mean 0 and standard deviation 1 in every column that is not constant.
        test: the other rows, with the same transformation.
        y_mean: mean of the training targets, in the units of the table.
        y_sd: their standard deviation; a log density in the units of the table is that of the standardized target minus
            log(y_sd).
    """

    train: Table
    test: Table
    y_mean: float
    y_sd: float


def names() -> list[str]:
    """The data sets that `load` knows by name."""
    return sorted(_SETS)


def load(source: str | Path, *, target: int | str = -1) -> Table:
    """A table of the catalog, or a CSV file.

    Args:
        source: one of `names()` (downloaded with "uci"), or a file: values separated by commas, semicolons, tabs or
            blanks, with or without a header.
        target: for a file: the column to predict, by index or name. A data set of the catalog has its own.

    Raises:
        AssetError: a data set of the catalog that cannot be downloaded.
        InvalidInput: no such file, no rows, or a missing column.
        InvalidRecord: a line with another number of values, or with a value that is not a number.
    """
    if str(source) in _SETS:
        file, column = _SETS[str(source)]
        return _read(store.pull("uci", show_progress=False) / file, column, str(source))
    path = Path(source).expanduser()
    if not path.is_file():
        raise InvalidInput(f"no file {source}, and no set of that name; the sets are {', '.join(names())}")
    return _read(path, target, path.stem)


def split(table: Table, fraction: float = 0.9, *, seed: int) -> Split:
    """Random split into a training part of this fraction and a test part.

    Raises:
        InvalidArgument: a fraction that leaves fewer than two rows in training or none for the test.
    """
    kept = round(fraction * len(table))
    if not 2 <= kept < len(table):
        raise InvalidArgument(f"fraction {fraction} of {len(table)} rows leaves {kept} for training")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    return _standardized(table.rows(order[:kept]), table.rows(order[kept:]))


def gap_split(table: Table, dimension: int) -> Split:
    """Split with the middle third of the rows, by one column, as the test part: inputs between those of training.

    Raises:
        InvalidArgument: no such column, or fewer than six rows.

    Source: Foong et al. 2019, arXiv:1906.11537, section 5.
    """
    if not 0 <= dimension < table.x.shape[1] or len(table) < 6:
        raise InvalidArgument(f"dimension {dimension} of a table of {len(table)} rows and {table.x.shape[1]} columns")
    order = table.x[:, dimension].argsort(stable=True)
    low, high = math.ceil(len(order) / 3), len(order) - math.ceil(len(order) / 3)
    return _standardized(table.rows(torch.cat([order[:low], order[high:]])), table.rows(order[low:high]))


def _standardized(train: Table, test: Table) -> Split:
    mean, sd = train.x.mean(0), train.x.std(0, correction=0)
    sd = torch.where(sd > 0, sd, 1.0)
    y_mean, y_sd = float(train.y.mean()), float(train.y.std(correction=0)) or 1.0
    first, second = (Table((part.x - mean) / sd, (part.y - y_mean) / y_sd, part.name) for part in (train, test))
    return Split(first, second, y_mean, y_sd)


def _read(path: Path, target: int | str, name: str) -> Table:
    with open_text(path, "table") as file:
        text = file.read()
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("@")]
    if not lines:
        raise InvalidInput(f"{path} holds no rows")
    mark = next((mark for mark in ",;\t" if mark in lines[0][1]), None)
    cells = [(i, _cells(line, mark)) for i, line in lines]
    heading = [cell.strip() for cell in cells[0][1]]
    named = not all(_number(cell) for cell in heading)
    rows = [_row(path, i, row, len(heading)) for i, row in cells[named:]]
    if not rows:
        raise InvalidInput(f"{path} holds a line of names and no rows")
    values = torch.tensor(rows, dtype=torch.float64)
    column = _column(path, target, heading if named else [], values.shape[1])
    kept = [i for i in range(values.shape[1]) if i != column]
    return Table(values[:, kept], values[:, column], name)


def _cells(line: str, mark: str | None) -> list[str]:
    return line.split() if mark is None else next(csv.reader([line], delimiter=mark))


def _number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _row(path: Path, line: int, cells: list[str], columns: int) -> list[float]:
    if len(cells) != columns:
        raise InvalidRecord(f"{path}, line {line}: {len(cells)} values, {columns} before", path=str(path), line=line)
    for cell in cells:
        if not _number(cell):
            raise InvalidRecord(f"{path}, line {line}: {cell[:40]!r} is no number", path=str(path), line=line)
    return [float(cell) for cell in cells]


def _column(path: Path, target: int | str, heading: list[str], columns: int) -> int:
    if isinstance(target, str):
        if target not in heading:
            raise InvalidInput(f"{path} has no column {target!r}; it has {heading or f'{columns} without names'}")
        return heading.index(target)
    if columns < 2 or not -columns <= target < columns:
        raise InvalidInput(f"{path} has {columns} columns: no inputs and column {target} to predict from them")
    return target % columns
