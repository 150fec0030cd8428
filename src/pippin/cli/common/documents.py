"""Input documents of the text verbs, from a file or standard input, and checks of output files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import inputs
from pippin.core import plotting
from pippin.core.errors import DiskFull, InvalidInput, MissingDependency
from pippin.core.text_files import read_text

File = Annotated[Path | None, typer.Argument(help="The text file; by default, or for -, standard input.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def read(file: Path | None) -> tuple[str, str]:
    """Read the name and the text of a document.

    Raises:
        InvalidInput: there is no document, it is empty, or it cannot be read.
    """
    if file is None or str(file) == "-":
        name, text = "standard input", inputs.read_stdin()
        if text is None:
            raise InvalidInput("there is no text; name a file or pipe one in")
    else:
        name, text = str(file), read_text(file)
    if not text.strip():
        raise InvalidInput(f"{name} is empty")
    return name, text


def check_plot(path: Path | None) -> None:
    """Refuse a plot that could not be saved, before anything is computed; None means no plot.

    Raises:
        InvalidArgument: another suffix than .png, .svg and .pdf.
        InvalidInput: the file's folder does not exist.
        MissingDependency: matplotlib is not installed.
    """
    if path is None:
        return
    plotting.check_path(path)
    if find_spec("matplotlib") is None:
        raise MissingDependency("plots need matplotlib: pip install 'pippin[plot]'")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this context, turn an OSError from writing a file into InvalidInput.

    Raises:
        InvalidInput: the file cannot be written. DiskFull: the disk is full.
    """
    try:
        yield
    except DiskFull:
        raise
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be written: {error.strerror}") from None
