"""Votes as class indices: labels of many judges on many items, from arrays, data frames or CSV files.

Notable here:
- a label is encoded as a class index from 0, and a missing vote as -1
- an unknown label raises an error that names judge, label and row, as a typo would otherwise count as a wrong vote
- a CSV file is read once, row by row, and stored as one 32-bit index per cell, so that a million rows fit into memory
"""

from __future__ import annotations

import csv
import math
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.text_files import open_text

Codes = NDArray[np.int64]
Floats = NDArray[np.float64]

_MISSING = frozenset({"", "na", "n/a", "nan"})
_SEPARATORS = (",", ";", "\t")
_SHOWN = 12


@dataclass(frozen=True)
class Sheet:
    """A table of text in dictionary encoding.

    Attributes:
        name: name of the file.
        columns: names of the columns.
        cells: indices into ``words``, [rows, columns].
        words: the distinct texts, stripped of surrounding blanks, in Unicode's composed form (NFC).
        lines: the line of the file on which each row ends, counted from 1.
    """

    name: str
    columns: tuple[str, ...]
    cells: NDArray[np.int32]
    words: tuple[str, ...]
    lines: NDArray[np.int64]

    def texts(self, columns: Sequence[str]) -> NDArray[np.object_]:
        """The texts of these columns, [rows, columns]; None where a cell is empty, NA or NaN.

        Raises:
            InvalidInput: there is no such column.
        """
        words = np.array([None if word.lower() in _MISSING else word for word in self.words], dtype=object)
        found: NDArray[np.object_] = words[self.cells[:, [self.column_index(column) for column in columns]]]
        return found

    def floats(self, columns: Sequence[str]) -> Floats:
        """The values of numeric columns, [rows, columns].

        Raises:
            InvalidInput: there is no such column, or a cell holds no finite number.
        """
        values = np.array([_to_float(word) for word in self.words])
        found: Floats = values[self.cells[:, [self.column_index(column) for column in columns]]]
        if not np.isfinite(found).all():
            row, at = np.argwhere(~np.isfinite(found))[0]
            text = self.words[self.cells[row, self.column_index(columns[at])]]
            raise InvalidInput(
                f"{self.name}, line {self.lines[row]}, column {columns[at]!r}: {text!r} is not a finite number"
            )
        return found

    def column_index(self, column: str) -> int:
        """The index of a column by its name.

        Raises:
            InvalidInput: there is no column of that name.
        """
        try:
            return self.columns.index(_normalized(column))
        except ValueError:
            known = listed(self.columns)
            raise InvalidInput(f"{self.name} has no column {column!r}; its columns: {known}") from None


def read_csv(path: str | Path) -> Sheet:
    """Read a CSV file, separated by commas, semicolons or tabs, in any encoding of `pippin.core.text_files`.

    The first line names the columns. Empty lines are skipped.

    Raises:
        InvalidInput: the file cannot be read, is not text, is empty, has no rows, names a column twice or not at
            all, or a row has another number of cells than the first line.
    """
    try:
        with open_text(path, "table") as stream:
            begin = stream.tell()
            first = stream.readline()
            separator = max(_SEPARATORS, key=first.count)
            stream.seek(begin)
            return _sheet(str(path), csv.reader(stream, delimiter=separator, strict=True))
    except csv.Error as error:
        raise InvalidInput(f"{str(path)!r} is not a CSV file: {error}") from None


def _sheet(name: str, rows: Any) -> Sheet:
    """Encode the cells while they are read."""
    header = next(rows, None)
    if header is None or not any(cell.strip() for cell in header):
        raise InvalidInput(f"{name} is empty; its first line must name the columns")
    columns = tuple(_normalized(cell) for cell in header)
    for column in columns:
        if not column:
            raise InvalidInput(f"{name}: column {columns.index(column) + 1} has no name on the first line")
        if columns.count(column) > 1:
            raise InvalidInput(f"{name} has {columns.count(column)} columns called {column!r}; give each its own name")
    index_of: dict[str, int] = {}  # from distinct stripped texts
    raw: dict[str, int] = {}  # from texts as they stand in the file, which saves normalizing each cell
    cells, lines = array("i"), array("q")
    for row in rows:
        if not row or (len(row) == 1 and not row[0].strip()):
            continue
        if len(row) != len(columns):
            raise InvalidInput(f"{name}, line {rows.line_num}: {len(row)} cells, but the first line has {len(columns)}")
        for cell in row:
            index = raw.get(cell)
            if index is None:
                index = raw[cell] = index_of.setdefault(_normalized(cell), len(index_of))
            cells.append(index)
        lines.append(rows.line_num)
    if not lines:
        raise InvalidInput(f"{name} has a line of column names and no rows")
    table = np.frombuffer(cells, dtype=np.int32).reshape(len(lines), len(columns))
    return Sheet(name, columns, table, tuple(index_of), np.frombuffer(lines, dtype=np.int64))


def _normalized(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


# --- labels -----------------------------------------------------------------------------------------------------------


def encode(
    labels: Any,
    gold: Any = None,
    *,
    classes: Sequence[Any] | None = None,
    judges: Sequence[str] | None = None,
    where: Callable[[int], str] = lambda item: f"item {item}",
) -> tuple[Codes, Codes | None, tuple[Any, ...]]:
    """Encode labels as class indices.

    Args:
        labels: [n, k], one row per item and one column per judge: an array, a tensor, a data frame or nested lists,
            of words or numbers; None and NaN where there is no label.
        gold: [n] right labels; None where they are unknown.
        classes: every label that may occur, in the order of the class indices. None takes those of ``gold``, or of the
            votes where there is no gold.
        judges: names of the judges, for messages.
        where: gives the name of an item in messages.

    Returns:
        Class indices [n, k] with -1 for a missing vote, class indices [n] of the gold labels or None, and the classes.

    Raises:
        InvalidArgument: a class is declared twice.
        InvalidInput: labels without two dimensions, another number of gold labels than of items, a missing gold
            label, a label that is none of the classes, or fewer than two classes.

    >>> encode([["a", "b"], ["b", None]], ["a", "b"])[0].tolist()
    [[0, 1], [1, -1]]
    """
    table = as_array(labels)
    if table.ndim != 2 or not table.size:
        raise InvalidInput(f"labels must be [items, judges], both at least 1; got shape {table.shape}")
    right = None if gold is None else as_array(gold)
    if right is not None and right.shape != (len(table),):
        raise InvalidInput(f"gold must hold one label for each of {len(table)} items; got shape {right.shape}")
    if right is not None and missing(right).any():
        raise InvalidInput(f"{where(int(missing(right).argmax()))} has no gold label; give one or leave the item out")
    known = _classes(classes, table if right is None else right)
    codes = _encoded(table, known)
    if (codes == -2).any():
        item, judge = np.argwhere(codes == -2)[0]
        name = judges[judge] if judges else str(judge)
        raise InvalidInput(
            f"judge {name!r} gives the unknown label {_shown(table[item, judge])} on {where(int(item))}; known: "
            f"{listed(known)}. Correct it, declare all labels, or leave the column out"
        )
    gold_codes = None if right is None else _encoded(right[:, None], known)[:, 0]
    if gold_codes is not None and (gold_codes == -2).any():
        item = int((gold_codes == -2).argmax())
        raise InvalidInput(
            f"the gold label {_shown(right[item])} of {where(item)} is none of the declared labels: {listed(known)}"  # type: ignore[index]
        )
    return codes, gold_codes, known


def as_array(values: Any) -> NDArray[Any]:
    """Convert anything that holds labels (nested lists, a tensor, a data frame) to a NumPy array.

    Raises:
        InvalidInput: rows of different lengths.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    try:
        array_ = np.asarray(values)
    except ValueError as error:
        raise InvalidInput(f"labels must be a table whose rows have the same length: {error}") from None
    if array_.dtype.kind in "OUS" and array_.dtype.kind != "O":
        # NumPy would turn a mixture of words and numbers into words
        array_ = np.asarray(values, dtype=object)
    return array_


def missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """A mask, of the same shape, of the elements without a label: None or NaN."""
    if values.dtype.kind == "f":
        gone: NDArray[np.bool_] = np.isnan(values)
        return gone
    if values.dtype.kind != "O":
        return np.zeros(values.shape, dtype=bool)
    return np.array([_is_missing(value) for value in values.ravel()], dtype=bool).reshape(values.shape)


def listed(names: Sequence[Any]) -> str:
    """The first twelve names as text for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(_shown, names[:_SHOWN])) + more


def patterns(rows: NDArray[Any]) -> tuple[Codes, Codes, Codes]:
    """The distinct rows of an integer table [n, columns], as `numpy.unique` with axis 0 but faster.

    Whatever depends on a row alone (a vote, an error) need only be computed once for each distinct row, and a bootstrap
    sample of items is a sample of counts.

    Returns:
        The index of an example of each distinct row [m], the distinct row of each row [n], and its counts [m].
    """
    low = rows.min(0)
    sizes = (rows.max(0) - low + 1).astype(object)
    if math.prod(sizes) < 2**62:
        key = np.zeros(len(rows), dtype=np.int64)  # each row as one integer in mixed radix
        for column, size in zip((rows - low).T, sizes, strict=True):
            key = key * int(size) + column.astype(np.int64)
        _, first, inverse, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    else:
        _, first, inverse, counts = np.unique(rows, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return first, inverse.reshape(-1), counts


def _classes(classes: Sequence[Any] | None, values: NDArray[Any]) -> tuple[Any, ...]:
    if classes is not None:
        found = [_value(value) for value in classes]
        twice = [value for value in found if found.count(value) > 1]
        if twice:
            raise InvalidArgument(f"the label {_shown(twice[0])} is declared twice")
    else:
        found = _sorted({_value(value) for value in _present(values)})
    if len(found) < 2:
        raise InvalidInput(
            f"there is a single class ({listed(found)}); a vote needs two. Declare all labels that could occur"
        )
    return tuple(found)


def _present(values: NDArray[Any]) -> Iterator[Any]:
    if values.dtype.kind in "iufb":
        return iter(np.unique(values[~missing(values)]).tolist())
    return (value for value in values.ravel() if not _is_missing(value))


def _encoded(values: NDArray[Any], classes: tuple[Any, ...]) -> Codes:
    """Class indices of labels; -1 for a missing label and -2 for an unknown one."""
    index_of = {value: index for index, value in enumerate(classes)}
    if values.dtype.kind in "iufb":
        absent = missing(values)
        distinct, inverse = np.unique(np.where(absent, 0, values), return_inverse=True)
        codes = np.array([index_of.get(_value(value), -2) for value in distinct.tolist()], dtype=np.int64)
        found: Codes = np.where(absent, -1, codes[inverse.reshape(values.shape)])
        return found
    known: dict[Any, int] = {}

    def look_up(value: Any) -> int:
        found = known.get(value)
        if found is None:
            found = known[value] = -1 if _is_missing(value) else index_of.get(_value(value), -2)
        return found

    try:
        return np.fromiter(map(look_up, values.ravel()), dtype=np.int64, count=values.size).reshape(values.shape)
    except TypeError as error:
        raise InvalidInput(f"labels must be words or numbers: {error}") from None


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _value(value: Any) -> Any:
    """A label in canonical form: text normalized, integral floats as integers, NumPy scalars as Python's."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str):
        return _normalized(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _sorted(values: set[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=lambda value: (type(value).__name__, str(value)))


def _shown(value: Any) -> str:
    text = repr(value.item() if hasattr(value, "item") else value)
    return text if len(text) <= 60 else text[:57] + "..."
