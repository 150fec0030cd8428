"""Plots with matplotlib, which is imported only when a figure is created.

Notable here:
- figures are created without pyplot, so there is no window and no global state
- files are written atomically
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency
from pippin.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
"""The file formats that plots can be saved in."""


def check_path(path: str | Path) -> Path:
    """Check that a plot can be saved under this path, and return it as a `Path`.

    Raises:
        InvalidArgument: the suffix is not .png, .svg or .pdf.
        InvalidInput: the folder does not exist.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"a plot cannot be saved as {str(path)!r}: the name must end in {', '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
    return path


def new(width: float, height: float, **options: Any) -> Figure:
    """An empty figure with constrained layout.

    Args:
        width: in inches.
        height: in inches.
        options: further arguments of matplotlib's `Figure`.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("plots need matplotlib: pip install 'pippin[plot]'") from error
    return Figure(figsize=(width, height), **{"layout": "constrained", **options})


def save(figure: Figure, path: str | Path, **options: Any) -> None:
    """Save a figure in the format of the path's suffix.

    Args:
        figure: the figure to save.
        path: ends in .png, .svg or .pdf.
        options: further arguments of matplotlib's `savefig`.

    Raises:
        InvalidArgument: another suffix.
        InvalidInput: the folder does not exist.
        DiskFull: the disk filled up while writing.
    """
    path = check_path(path)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:], **options)
