"""`pippin pull`: download a model or a dataset into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import terminal
from pippin.core.store import catalog


def _complete(incomplete: str) -> list[tuple[str, str]]:
    return [(e.name, e.title) for e in catalog.entries().values() if e.name.startswith(incomplete)]


def pull(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Catalog name or hub repository.", autocompletion=_complete)
    ] = catalog.DEFAULT_MODEL,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Use this file, if its hash matches, and download nothing."),
    ] = None,
) -> None:
    """Download a model or a dataset into the cache, and print its path.

    What is installed is not downloaded again.
    """
    from pippin.core.store import store

    terminal.write(f"{store.pull(name, from_file=source)}\n")
