"""Tables: the catalog's, files of every shape, splits and their units."""

import pytest
import torch

from pippin.core.errors import InvalidArgument, InvalidInput, InvalidRecord
from pippin.core.store import store
from pippin.data import tables


@pytest.fixture(scope="module")
def yacht():
    if store.find("uci") is None:
        pytest.skip("uci is not here: pippin pull uci")
    return tables.load("uci-yacht")


def test_the_sets_of_the_catalog_have_the_published_sizes(yacht):
    assert yacht.x.shape == (308, 6)
    sizes = {name: tuple(tables.load(name).x.shape) for name in tables.names()}
    assert sizes == {
        "uci-airfoil": (1503, 5),
        "uci-fish-toxicity": (908, 6),
        "uci-mpg": (392, 5),
        "uci-protein": (45730, 9),
        "uci-robot-arm": (8192, 32),
        "uci-weather": (1461, 9),
        "uci-wine-red": (1599, 11),
        "uci-yacht": (308, 6),
    }
    assert set(tables.load("uci-wine-red").y.tolist()) == {3, 4, 5, 6, 7, 8}


def test_a_split_is_standardized_by_its_training_part(yacht):
    parts = tables.split(yacht, 0.8, seed=1)
    assert len(parts.train) == 246
    assert len(parts.train) + len(parts.test) == len(yacht)
    assert torch.allclose(parts.train.x.mean(0), torch.zeros(6, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(parts.train.x.var(0, correction=0), torch.ones(6, dtype=torch.float64))
    back = torch.cat([parts.train.y, parts.test.y]) * parts.y_sd + parts.y_mean
    assert torch.allclose(back.sort().values, yacht.y.sort().values)
    again, other = tables.split(yacht, 0.8, seed=1), tables.split(yacht, 0.8, seed=2)
    assert torch.equal(again.test.x, parts.test.x)
    assert not torch.equal(other.test.y, parts.test.y)


def test_a_gap_split_asks_about_the_middle(yacht):
    parts = tables.gap_split(yacht, 5)
    test, train = parts.test.x[:, 5], parts.train.x[:, 5]
    assert ((train <= test.min()) | (train >= test.max())).all()
    assert abs(len(test) - len(yacht) / 3) <= 1


GUESSED = pytest.mark.filterwarnings("ignore::pippin.core.errors.GuessedEncoding")


@pytest.mark.parametrize(
    ("text", "target", "x", "y"),
    [
        ("a,b,y\n1,2,3\n4,5,6\n", "b", [[1, 3], [4, 6]], [2, 5]),
        ("\ufeffä;y\r\n1;2\r\n\r\n3;4e1\r\n", -1, [[1], [3]], [2, 40]),
        ("1 2  3\n4 5 6\n", 0, [[2, 3], [5, 6]], [1, 4]),
        ('"a b"\ty\n"1"\t2\n', "y", [[1]], [2]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", pytest.param("utf-16", marks=GUESSED)])
def test_files_of_many_shapes(tmp_path, text, target, x, y, encoding):
    (tmp_path / "mine.csv").write_bytes(text.removeprefix("\ufeff" * (encoding == "utf-16")).encode(encoding))
    table = tables.load(tmp_path / "mine.csv", target=target)
    assert (table.x.tolist(), table.y.tolist(), table.name) == (x, y, "mine")


def test_what_is_no_table_is_refused_by_its_line(tmp_path):
    path = tmp_path / "mine.csv"
    for content, words in (
        (b"", "no rows"),
        (b"a,b\n", "line of names"),
        (b"\xff\xfe\x00", "text"),
        (b"1\n2\n", "columns"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidInput, match=words):
            tables.load(path)
    path.write_text("1,2\n3\n")
    with pytest.raises(InvalidRecord, match="line 2: 1 values"):
        tables.load(path)
    path.write_text("a,b\n1,2\n3,none\n")
    with pytest.raises(InvalidRecord, match="line 3: 'none'") as caught:
        tables.load(path)
    assert caught.value.line == 3
    path.write_text("a,b\n1,2\n3,nan\n")
    with pytest.raises(InvalidInput, match=r"rows \[1\] hold NaN"):
        tables.load(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInput, match="no column 'c'"):
        tables.load(path, target="c")
    with pytest.raises(InvalidInput, match="uci-yacht"):
        tables.load("uci-boat")


def test_splits_that_leave_nothing_are_refused(yacht):
    with pytest.raises(InvalidArgument, match="fraction 1"):
        tables.split(yacht, 1.0, seed=0)
    with pytest.raises(InvalidArgument, match="dimension 6"):
        tables.gap_split(yacht, 6)
