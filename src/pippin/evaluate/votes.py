"""Votes as numbers: labels of many judges on many items, from arrays, data frames or CSV files.

Notable here:
- a label is a whole number below the number of classes, and -1 where a judge gave none
- a vote that is no known label is an error that names judge, label and place: a typing error would count as a mistake
- a CSV file is read once, row by row, and kept as one small number a cell, so that a million rows fit into memory
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

Codes = NDArray[np.int64]
Floats = NDArray[np.float64]

_NOTHING = frozenset({"", "na", "n/a", "nan"})
_SEPARATORS = (",", ";", "\t")
_SHOWN = 12


@dataclass(frozen=True)
class Sheet:
    """A table of text, as one number a cell.

    Attributes:
        name: of the file.
        columns: names of the columns.
        cells: indices into ``words``, [rows, columns].
        words: the distinct texts, without blanks around them, in Unicode's composed form (NFC).
        lines: the line of the file on which each row ends, from 1.
    """

    name: str
    columns: tuple[str, ...]
    cells: NDArray[np.int32]
    words: tuple[str, ...]
    lines: NDArray[np.int64]

    def texts(self, columns: Sequence[str]) -> NDArray[np.object_]:
        """The texts of these columns, [rows, columns]; None where a cell is empty or says NA.

        Raises:
            InvalidInput: there is no such column.
        """
        words = np.array([None if word.lower() in _NOTHING else word for word in self.words], dtype=object)
        found: NDArray[np.object_] = words[self.cells[:, [self.place(column) for column in columns]]]
        return found

    def numbers(self, columns: Sequence[str]) -> Floats:
        """The numbers in these columns, [rows, columns].

        Raises:
            InvalidInput: there is no such column, or a cell holds no finite number.
        """
        values = np.array([_number(word) for word in self.words])
        found: Floats = values[self.cells[:, [self.place(column) for column in columns]]]
        if not np.isfinite(found).all():
            row, at = np.argwhere(~np.isfinite(found))[0]
            text = self.words[self.cells[row, self.place(columns[at])]]
            raise InvalidInput(
                f"{self.name}, line {self.lines[row]}, column {columns[at]!r}: {text!r} is no finite number"
            )
        return found

    def place(self, column: str) -> int:
        """The index of a column.

        Raises:
            InvalidInput: there is none of that name.
        """
        try:
            return self.columns.index(_tidy(column))
        except ValueError:
            known = listed(self.columns)
            raise InvalidInput(f"{self.name} has no column {column!r}; its columns: {known}") from None


def read_csv(path: str | Path) -> Sheet:
    """Read a CSV file in UTF-8, with or without a byte-order mark, separated by commas, semicolons or tabs.

    The first line names the columns. Empty lines are left out.

    Raises:
        InvalidInput: the file cannot be read, is not UTF-8, is empty, has no rows, names a column twice or not at
            all, or a row has another number of cells than the first line.
    """
    file = Path(path)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            separator = max(_SEPARATORS, key=first.count)
            stream.seek(0)
            return _sheet(str(path), csv.reader(stream, delimiter=separator, strict=True))
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{str(path)!r} is not UTF-8 (byte {error.start}); save it as CSV in UTF-8") from None
    except csv.Error as error:
        raise InvalidInput(f"{str(path)!r} is no CSV file: {error}") from None


def _sheet(name: str, rows: Any) -> Sheet:
    """Number the cells while they are read."""
    header = next(rows, None)
    if header is None or not any(cell.strip() for cell in header):
        raise InvalidInput(f"{name} is empty; its first line must name the columns")
    columns = tuple(_tidy(cell) for cell in header)
    for column in columns:
        if not column:
            raise InvalidInput(f"{name}: column {columns.index(column) + 1} has no name on the first line")
        if columns.count(column) > 1:
            raise InvalidInput(f"{name} has {columns.count(column)} columns called {column!r}; give each its own name")
    numbers: dict[str, int] = {}
    raw: dict[str, int] = {}
    cells, lines = array("i"), array("q")
    for row in rows:
        if not row or (len(row) == 1 and not row[0].strip()):
            continue
        if len(row) != len(columns):
            raise InvalidInput(f"{name}, line {rows.line_num}: {len(row)} cells, but the first line has {len(columns)}")
        for cell in row:
            number = raw.get(cell)
            if number is None:
                number = raw[cell] = numbers.setdefault(_tidy(cell), len(numbers))
            cells.append(number)
        lines.append(rows.line_num)
    if not lines:
        raise InvalidInput(f"{name} has a line of column names and no rows")
    table = np.frombuffer(cells, dtype=np.int32).reshape(len(lines), len(columns))
    return Sheet(name, columns, table, tuple(numbers), np.frombuffer(lines, dtype=np.int64))


def _tidy(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


def _number(text: str) -> float:
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
    """Labels as numbers.

    Args:
        labels: [n, k], one row per item and one column per judge: an array, a tensor, a data frame or nested lists,
            of words or numbers; None and NaN where there is no label.
        gold: [n] right labels; None where nobody knows them.
        classes: every label that may occur, in the order of their numbers. None takes those of ``gold``, or of the
            votes where there is no gold.
        judges: names, for messages.
        where: names an item in messages.

    Returns:
        Numbers [n, k] with -1 for a missing vote, numbers of the gold labels or None, and the classes.

    Raises:
        InvalidInput: labels without two dimensions, another number of gold labels than of items, a missing gold
            label, a label that is none of the classes, or fewer than two classes.

    >>> encode([["a", "b"], ["b", None]], ["a", "b"])[0].tolist()
    [[0, 1], [1, -1]]
    """
    table = plain(labels)
    if table.ndim != 2 or not table.size:
        raise InvalidInput(f"labels must be [items, judges], both at least 1; got shape {table.shape}")
    right = None if gold is None else plain(gold)
    if right is not None and right.shape != (len(table),):
        raise InvalidInput(f"gold must hold one label for each of {len(table)} items; got shape {right.shape}")
    if right is not None and missing(right).any():
        raise InvalidInput(f"{where(int(missing(right).argmax()))} has no gold label; give one or leave the item out")
    known = _classes(classes, table if right is None else right)
    codes = _numbered(table, known)
    if (codes == -2).any():
        item, judge = np.argwhere(codes == -2)[0]
        name = judges[judge] if judges else str(judge)
        raise InvalidInput(
            f"judge {name!r} gives the unknown label {_shown(table[item, judge])} on {where(int(item))}; known: "
            f"{listed(known)}. Correct it, declare all labels, or leave the column out"
        )
    coded = None if right is None else _numbered(right[:, None], known)[:, 0]
    if coded is not None and (coded == -2).any():
        item = int((coded == -2).argmax())
        raise InvalidInput(
            f"the gold label {_shown(right[item])} of {where(item)} is none of the declared labels: {listed(known)}"  # type: ignore[index]
        )
    return codes, coded, known


def plain(values: Any) -> NDArray[Any]:
    """An array of anything that holds labels: tensors and data frames too."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    try:
        array_ = np.asarray(values)
    except ValueError as error:
        raise InvalidInput(f"labels must be a table whose rows have the same length: {error}") from None
    if array_.dtype.kind in "OUS" and array_.dtype.kind != "O":
        # nested lists of words and numbers would all become words
        array_ = np.asarray(values, dtype=object)
    return array_


def missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Where there is no label: None or NaN."""
    if values.dtype.kind == "f":
        gone: NDArray[np.bool_] = np.isnan(values)
        return gone
    if values.dtype.kind != "O":
        return np.zeros(values.shape, dtype=bool)
    return np.array([_is_nothing(value) for value in values.ravel()], dtype=bool).reshape(values.shape)


def listed(names: Sequence[Any]) -> str:
    """Names for a message, the first dozen of them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(_shown, names[:_SHOWN])) + more


def patterns(rows: NDArray[Any]) -> tuple[Codes, Codes, Codes]:
    """Distinct rows: an index of each, the number of each row's pattern, and how often each occurs.

    What depends on a row alone (a vote, an error) need be computed once for each pattern, and drawing items is drawing
    numbers of patterns.
    """
    low = rows.min(0)
    sizes = (rows.max(0) - low + 1).astype(object)
    if math.prod(sizes) < 2**62:
        key = np.zeros(len(rows), dtype=np.int64)
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
    return (value for value in values.ravel() if not _is_nothing(value))


def _numbered(values: NDArray[Any], classes: tuple[Any, ...]) -> Codes:
    """Numbers of labels, -1 for none and -2 for an unknown one."""
    number = {value: index for index, value in enumerate(classes)}
    if values.dtype.kind in "iufb":
        nothing = missing(values)
        distinct, inverse = np.unique(np.where(nothing, 0, values), return_inverse=True)
        codes = np.array([number.get(_value(value), -2) for value in distinct.tolist()], dtype=np.int64)
        found: Codes = np.where(nothing, -1, codes[inverse.reshape(values.shape)])
        return found
    known: dict[Any, int] = {}

    def look(value: Any) -> int:
        found = known.get(value)
        if found is None:
            found = known[value] = -1 if _is_nothing(value) else number.get(_value(value), -2)
        return found

    try:
        return np.fromiter(map(look, values.ravel()), dtype=np.int64, count=values.size).reshape(values.shape)
    except TypeError as error:
        raise InvalidInput(f"labels must be words or numbers: {error}") from None


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _value(value: Any) -> Any:
    """A label as itself: words tidied, whole floats as integers, numpy's scalars as Python's."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str):
        return _tidy(value)
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
