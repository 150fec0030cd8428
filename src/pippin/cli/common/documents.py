"""The document that a text verb works on: a file, or what is piped in; and files that a verb writes."""

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

File = Annotated[Path | None, typer.Argument(help="The text; without it, or with -, what is piped in.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def read(file: Path | None) -> tuple[str, str]:
    """The name of a document and its text.

    Raises:
        InvalidInput: there is none, it is empty, or it cannot be used.
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
    """Refuse a picture that could not be drawn, before anything is computed; None is no picture.

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
    """While this lasts, what the system says against writing a file is an error of the user's.

    Raises:
        InvalidInput: the file cannot be written. DiskFull: there is no room for it.
    """
    try:
        yield
    except DiskFull:
        raise
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be written: {error.strerror}") from None
