"""A report in print, as JSON and as a picture, each read back by something that we did not write."""

import io
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from pippin.core.errors import InvalidArgument, MissingDependency
from pippin.core.report import Report, Row

REPORT = Report(
    "Speed", [Row("prompt", 812.4567, "tokens/s", 3.21), Row("answer", 41.0, "tokens/s"), Row("load", 0.5, "s")]
)


def test_plain_text_lines_up_and_holds_every_figure():
    lines = str(REPORT).splitlines()
    assert lines[0] == "Speed"
    assert [line.split() for line in lines[1:]] == [
        ["what", "value", "spread", "unit"],
        ["prompt", "812.5", "3.21", "tokens/s"],
        ["answer", "41", "tokens/s"],
        ["load", "0.5", "s"],
    ]
    assert lines[2].index("tokens/s") == lines[3].index("tokens/s") == lines[1].index("unit")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_printed_figures_keep_four_significant_digits(value):
    printed = str(Report("r", [Row("x", value)])).splitlines()[2].split()[1]
    assert float(printed) == pytest.approx(value, rel=5.1e-4)


@given(
    st.lists(
        st.builds(
            Row,
            st.text(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(),
            st.none() | st.floats(0, 1e300),
        )
    )
)
def test_json_keeps_every_bit(rows):
    read = json.loads(Report("título", rows).to_json())
    assert read["title"] == "título"
    assert [Row(**row) for row in read["rows"]] == rows


def test_save_writes_the_json(tmp_path):
    REPORT.save(tmp_path / "speed.json")
    assert json.loads((tmp_path / "speed.json").read_text()) == json.loads(REPORT.to_json())
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


@pytest.mark.parametrize("row", [Row("loss", math.nan), Row("loss", math.inf), Row("loss", 1.0, "", math.inf)])
def test_a_figure_that_json_cannot_say_is_refused_by_name(row, tmp_path):
    with pytest.raises(InvalidArgument, match="'loss' is"):
        Report("r", [row]).save(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_rich_shows_names_as_they_are_and_not_as_markup():
    console = Console(width=100, file=io.StringIO())
    console.print(Report("[bold]r", [Row("[red]x[/red]", 1.0)]))
    text = console.file.getvalue()
    assert "[red]x[/red]" in text
    assert "[bold]r" in text


def test_print_is_plain_in_a_pipe(capsys):
    REPORT.print()
    assert capsys.readouterr().out == f"{REPORT}\n"


def test_plot_draws_every_name_and_unit(tmp_path):
    REPORT.plot(tmp_path / "speed.svg")
    root = ElementTree.parse(tmp_path / "speed.svg").getroot()
    comments = (tmp_path / "speed.svg").read_text()
    assert root.tag.endswith("svg")
    for text in ("Speed", "prompt", "answer", "load", "tokens/s"):
        assert f"<!-- {text} -->" in comments


def test_a_plot_needs_rows(tmp_path):
    with pytest.raises(InvalidArgument, match="'empty' has no rows"):
        Report("empty").plot(tmp_path / "x.png")


def test_a_plot_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pip install 'pippin\[plot\]'"):
        REPORT.plot(tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_loaded_by_plot_alone():
    code = (
        "import sys, pippin.core.report as r; str(r.Report('t', [r.Row('a', 1.0)])); print('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
