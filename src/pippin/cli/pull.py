"""`pippin pull`: fetch a model or a data set into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli import terminal
from pippin.core import catalogue


def _complete(incomplete: str) -> list[tuple[str, str]]:
    return [(e.name, e.title) for e in catalogue.entries().values() if e.name.startswith(incomplete)]


def pull(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Catalogue name or hub repository.", autocompletion=_complete)
    ] = catalogue.DEFAULT_MODEL,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Take it from this file, if its hash is right.")
    ] = None,
) -> None:
    """Fetch a model or a data set into the cache.

    Prints where it lies. What is there already is not fetched again.
    """
    from pippin.core import store

    terminal.write(f"{store.pull(name, from_file=source)}\n")
