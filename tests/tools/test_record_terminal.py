"""The recorded picture shows what a terminal would show at the end."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest
import record_terminal

LIVE = """
from rich.console import Console
from rich.live import Live
console = Console()
console.print("[bold red]hello[/]")
with Live("", console=console) as live:
    for i in range(3):
        live.update(f"line {i}\\nof two")
print("caf\u00e9", console.is_terminal, console.width)
"""


def test_redrawn_lines_are_shown_once_and_in_color():
    output = record_terminal.record([sys.executable, "-c", LIVE], width=60)
    lines = record_terminal.settle(output, width=60)
    assert [line.plain for line in lines] == ["hello", "line 2", "of two", "café True 60"]
    styles = [span.style for span in lines[0].spans]
    assert [(style.bold, style.color.name) for style in styles if style.color] == [(True, "red")]


def test_the_picture_is_svg_that_fetches_nothing():
    lines = record_terminal.settle(b"one \x1b[38;2;1;2;3mtwo\x1b[0m\r\n", width=40)
    svg = record_terminal.picture(lines, title="a title", width=40)
    root = ElementTree.fromstring(svg)
    assert "one" in "".join(root.itertext())
    assert "#010203" in svg
    assert "@font-face" not in svg
    assert "url(http" not in svg


def test_a_command_that_fails_is_not_recorded(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "x.svg"
    monkeypatch.setattr(
        sys, "argv", ["record", str(picture), "--", sys.executable, "-c", "print('why'); raise SystemExit(3)"]
    )
    with pytest.raises(SystemExit, match=r"(?s)why.*ended with code 3"):
        record_terminal.main()
    assert not picture.exists()
