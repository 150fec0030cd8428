"""Run a command in a terminal of its own and save what it shows as an SVG picture.

    python tools/record_terminal.py docs/demo.svg -- .venv/bin/python examples/demo.py

Notable here:
- the command sees a real terminal, so it prints in color and may redraw its lines
- what is saved is the screen as it stands at the end, up to 300 lines; pyte plays the terminal
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import struct
import sys
import termios
from fcntl import ioctl
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

from pippin.core.files import atomic_write

_LINES = 300


def record(command: list[str], *, width: int) -> bytes:
    """Everything the command writes to a terminal of that width.

    Raises:
        SystemExit: the command failed; its output is shown.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(width), "COLORTERM": "truecolor"}
        os.execvp(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, width, 0, 0))
    output = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux reports the end of a terminal's output like this
            break
        if not chunk:
            break
        output += chunk
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0:
        raise SystemExit(f"{output.decode(errors='replace')}\n{' '.join(command)} ended with code {code}")
    return output


def settle(output: bytes, *, width: int) -> list[Text]:
    """The lines of the screen at the end, with their colors; trailing empty lines are dropped.

    >>> [line.plain for line in settle(b"one\\r\\ntwo\\r\\n\\x1b[2A\\x1b[2K1", width=20)]
    ['1', 'two']
    """
    screen = pyte.Screen(width, _LINES)
    pyte.ByteStream(screen).feed(output)
    lines = []
    for row in range(_LINES):
        cells = [screen.buffer[row][column] for column in range(width)]
        runs = groupby(cells, key=_style)
        line = Text.assemble(*(("".join(cell.data for cell in run), style) for style, run in runs))
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _style(cell: pyte.screens.Char) -> Style:
    """A cell's look; pyte calls dark yellow brown and writes other colors as six hexadecimal digits."""

    def color(name: str) -> str | None:
        if name == "default":
            return None
        if re.fullmatch("[0-9a-f]{6}", name):
            return f"#{name}"
        plain = name.removeprefix("bright").replace("brown", "yellow")
        return f"bright_{plain}" if name.startswith("bright") else plain

    return Style(
        color=color(cell.fg),
        bgcolor=color(cell.bg),
        bold=cell.bold or None,
        italic=cell.italics or None,
        underline=cell.underscore or None,
        reverse=cell.reverse or None,
    )


def picture(lines: list[Text], *, title: str, width: int) -> str:
    """The lines as an SVG of a terminal window."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title=title)
    # Rich's style sheet names web fonts; a picture must not fetch anything.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> int:
    """Record, settle, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path, help="the picture to write")
    parser.add_argument("--title", default="pippin", help="in the window's bar")
    parser.add_argument("--width", type=int, default=100, help="columns")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    lines = settle(record(options.command, width=options.width), width=options.width)
    with atomic_write(options.svg) as file:
        file.write(picture(lines, title=options.title, width=options.width).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
