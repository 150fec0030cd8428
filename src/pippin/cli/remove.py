"""`pippin remove`: delete a model or a dataset from the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from pippin.cli.common import terminal


def _complete(incomplete: str) -> list[str]:
    from pippin.core.store import store

    return [entry.name for entry in store.installed() if entry.name.startswith(incomplete)]


def remove(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that `pippin models` lists.", autocompletion=_complete)
    ],
) -> None:
    """Delete an installed model or dataset from the cache."""
    from pippin.core import files
    from pippin.core.store import store

    freed = store.remove(name)
    terminal.note(f"removed {name}; {files.format_bytes(freed)} freed")
