"""Pictures of results: matplotlib is loaded when one is drawn, and a place that cannot be written is refused in words.

Notable here:
- figures are made without pyplot, so no window and no global state
- a picture appears whole or not at all
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency
from pippin.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
"""Of the files that pictures are drawn into."""


def check_path(path: str | Path) -> Path:
    """The place of a picture, if one can be written there.

    Raises:
        InvalidArgument: another suffix than .png, .svg and .pdf.
        InvalidInput: the folder does not exist.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"{str(path)!r} is no place for a picture: it must end in {', '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
    return path


def new(width: float, height: float, **options: Any) -> Figure:
    """An empty figure, whose layout finds itself.

    Args:
        width: in inches.
        height: likewise.
        options: of matplotlib's `Figure`.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("plots need matplotlib: pip install 'pippin[plot]'") from error
    return Figure(figsize=(width, height), **{"layout": "constrained", **options})


def save(figure: Figure, path: str | Path, **options: Any) -> None:
    """Write a figure; the suffix chooses the format.

    Args:
        figure: what was drawn.
        path: ends in .png, .svg or .pdf.
        options: of matplotlib's `savefig`.

    Raises:
        InvalidArgument: another suffix. InvalidInput: no such folder. DiskFull: no room.
    """
    path = check_path(path)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:], **options)
