"""The back ends, one file each: what compiles an asset, and what writes it as a file of theirs.

Notable here:
- a back end is a module with `compile(asset, **options)` and `write(asset, path, **options)`; no more is asked of it
- its library is imported when it is used; without it, `BackendUnavailable` names the wheel
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.shape.export.asset import ModelAsset
    from pippin.shape.export.compiled import CompiledModel

NAMES = ("torch", "onnxruntime", "openvino", "coreai", "coreml", "executorch")
"""The back ends; "torch" is the reference that the others are compared with, "onnxruntime" the usual choice."""


class Backend(Protocol):
    """What a module of this folder offers."""

    def compile(self, asset: ModelAsset, **options: Any) -> CompiledModel:
        """Make it ready to run."""

    def write(self, asset: ModelAsset, path: Path, **options: Any) -> None:
        """Write it in the format of the back end."""


def find(name: str) -> Backend:
    """The back end of this name.

    Raises:
        InvalidArgument: there is none.
    """
    if name not in NAMES:
        raise InvalidArgument(f"there is no back end {name!r}; there are: {', '.join(NAMES)}")
    return cast(Backend, importlib.import_module(f"{__name__}.{name}"))
