"""`pippin evaluate calibration` as a user types it."""

import json

import pytest

from pippin.cli import main

ROWS = "rain,dry,label\n0.9,0.1,rain\n0.8,0.2,dry\n0.3,0.7,dry\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weather ü.csv"
    path.write_text(ROWS, encoding="utf-8")
    return path


def test_table_json_and_plot(file, tmp_path, capsys):
    assert main(["evaluate", "calibration", str(file), "--plot", str(tmp_path / "r.svg")]) == 0
    assert "expected calibration error" in capsys.readouterr().out
    assert b"<svg" in (tmp_path / "r.svg").read_bytes()
    assert main(["evaluate", "calibration", str(file), "--json"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bins", "0"], "'--bins': Input should be greater than or equal to 1 "),
        (["--label", "sky"], "no column 'sky'"),
        (["--plot", "r.txt"], "must end in"),
        (["--plot", "missing/r.png"], "no folder"),
    ],
)
def test_bad_input_is_one_line(file, words, said, capsys):
    assert main(["evaluate", "calibration", str(file), *words]) == 2
    assert said in capsys.readouterr().err
