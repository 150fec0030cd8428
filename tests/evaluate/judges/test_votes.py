"""CSV files and labels: what a careful reader sees in them, and every way in which they can be wrong."""

import csv
import io
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.evaluate.judges.votes import encode, patterns, read_csv


def written(tmp_path, data: bytes):
    path = tmp_path / "votes.csv"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_cells_are_those_of_the_csv_module(tmp_path, separator, mark):
    rows = [
        ["gold", "Jürgen", "判事"],
        ["ja", "nein", "いいえ"],
        ['a "b"', f"x{separator}y", "two\nlines"],
        ["", "NA", "z"],
    ]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=separator).writerows(rows)
    sheet = read_csv(written(tmp_path, mark + text.getvalue().encode()))
    assert sheet.columns == ("gold", "Jürgen", "判事")
    assert sheet.texts(sheet.columns).tolist() == [*rows[1:3], [None, None, "z"]]
    assert sheet.lines.tolist() == [2, 4, 5]


def test_the_same_letters_in_another_form_are_the_same_label(tmp_path):
    path = written(tmp_path, "gold,a\n  caf\u00e9,cafe\u0301\n".encode())
    assert len({*read_csv(path).texts(["gold", "a"])[0]}) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"a,b\n", "no rows"),
        (b"a,b\n\n \n", "no rows"),
        (b"a,,c\n1,2,3\n", "column 2 has no name"),
        (b"a,b,a\n1,2,3\n", "2 columns called 'a'"),
        (b"a,b\n1,2\n1,2,3\n", "line 3: 3 cells, but the first line has 2"),
        (b"a,b\n1,\xff\0\n", r"not UTF-8 text \(byte"),
        (b'a,b\n1,"2\n', "not a CSV file"),
        (b"a,b\n1," + b"x" * 200_000 + b"\n", "not a CSV file"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path, data, message):
    with pytest.raises(InvalidInput, match=message):
        read_csv(written(tmp_path, data))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "windows-1252"])
def test_tables_of_spreadsheets_are_read_in_their_encoding(tmp_path, encoding):
    text = "item;Müller;Größe\r\n1;süß;2\r\n"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sheet = read_csv(written(tmp_path, text.encode(encoding)))
    assert sheet.columns == ("item", "Müller", "Größe")
    assert sheet.texts(["Müller"])[0][0] == "süß"
    assert len(said) == (encoding != "utf-8-sig")


def test_no_file_and_no_column(tmp_path):
    with pytest.raises(InvalidInput, match="there is no table"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(InvalidInput, match="is a folder"):
        read_csv(tmp_path)
    sheet = read_csv(written(tmp_path, b"a,b\n1,2\n3,x\n4,inf\n"))
    with pytest.raises(InvalidInput, match="no column 'gold'; its columns: 'a', 'b'"):
        sheet.texts(["gold"])
    with pytest.raises(InvalidInput, match="line 3, column 'b': 'x' is not a finite number"):
        sheet.floats(["a", "b"])
    assert sheet.floats(["a"]).ravel().tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    "labels",
    [
        [[0, 1], [1, 2], [2, 0]],
        np.array([[0, 1], [1, 2], [2, 0]], dtype=np.int16),
        np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 0.0]]),
        torch.tensor([[0, 1], [1, 2], [2, 0]]),
        [["0", "1"], ["1", "2"], ["2", "0"]],
        np.array([["0", "1"], ["1", "2"], ["2", "0"]]),
        np.array([[0, 1], [1, 2], [2, 0]], dtype=object),
    ],
)
def test_labels_of_any_kind_get_the_same_numbers(labels):
    codes, gold, classes = encode(labels)
    assert codes.tolist() == [[0, 1], [1, 2], [2, 0]]
    assert gold is None
    assert [*map(int, classes)] == [0, 1, 2]


def test_missing_labels_are_minus_one_whatever_they_are_written_as():
    wanted = [[0, -1], [-1, 1]]
    assert encode([["a", None], [float("nan"), "b"]])[0].tolist() == wanted
    assert encode(np.array([[3.0, np.nan], [np.nan, 4.0]]))[0].tolist() == wanted


@pytest.mark.parametrize(
    ("labels", "gold", "classes", "message"),
    [
        ([], None, None, "items, judges"),
        (["a", "b"], None, None, "items, judges"),
        ([["a"], ["a", "b"]], None, None, "same length"),
        ([["a", "b"]], ["a", "b"], None, "one label for each of 1 items"),
        ([["a", "b"], ["a", "b"]], ["a", None], None, "item 1 has no gold label"),
        (
            [["a", "yess"], ["a", "b"]],
            ["a", "b"],
            None,
            "judge '1' gives the unknown label 'yess' on item 0; known: 'a'",
        ),
        ([["a", "a"]], ["a"], None, "single class"),
        ([["a", "b"], ["a", "b"]], ["a", "c"], ["a", "b"], "gold label 'c' of item 1"),
        (np.array([[1.5, 1]]), np.array([1]), [1, 2], "unknown label 1.5"),
        (np.array([[{}, 1]], dtype=object), np.array([1]), [1, 2], "words or numbers"),
    ],
)
def test_labels_that_cannot_be_used(labels, gold, classes, message):
    with pytest.raises(InvalidInput, match=message):
        encode(labels, gold, classes=classes)


def test_a_label_declared_twice():
    with pytest.raises(InvalidArgument, match="'a' is declared twice"):
        encode([["a", "b"]], classes=["a", "b", " a"])


@given(st.lists(st.lists(st.integers(-1, 3), min_size=3, max_size=3), min_size=1, max_size=40), st.booleans())
def test_patterns_rebuild_the_rows(rows, huge):
    table = np.array(rows, dtype=np.int64)
    if huge:  # too many combinations for one number
        table = np.repeat(table * 10**6, 4, axis=1)
    first, inverse, counts = patterns(table)
    assert (table[first][inverse] == table).all()
    assert counts.tolist() == np.bincount(inverse).tolist()
    assert len({*map(tuple, table.tolist())}) == len(first)
