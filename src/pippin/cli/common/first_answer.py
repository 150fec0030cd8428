"""What the default model is good for, said once after its first answer on a terminal.

Notable here:
- a file in the cache folder says that it was said; it is created before the note is printed, so that of several
  processes one prints it, and without a folder that can be written nobody does
- only `pippin ask` and `pippin chat` say it: a library or a server has nobody who reads it
"""

from __future__ import annotations

import sys
from typing import Final

from pippin.cli.common import terminal
from pippin.core.store.catalog import DEFAULT_MODEL, find

MARKER: Final = "default_model_explained"
"""Name of the file in the cache folder."""

_NOTES: Final = (
    f"{DEFAULT_MODEL} is small: it extracts, classifies, calls tools and rewrites short texts; do not ask it for facts",
    "pippin doctor names the largest model for this machine, pippin models lists all; get one with: pippin pull NAME",
)


def explain_default_model(model: str, url: str | None) -> None:
    """Print the note, if the default model of this machine has answered and stderr is a terminal.

    Args:
        model: as it was given on the command line.
        url: the endpoint that was asked instead of this machine.
    """
    entry = find(model)
    if url is not None or entry is None or not entry.default or not terminal.watched(sys.stderr):
        return
    from pippin.core.store import store

    try:
        (store.home() / MARKER).touch(exist_ok=False)
    except OSError:  # FileExistsError: it was said before
        return
    for note in _NOTES:
        terminal.note(note)
