"""The backends, one file each: compiling an exported model, and writing it in the backend's file format.

Notable here:
- a backend is a module with `compile(asset, **options)` and `write(asset, path, **options)`
- its library is imported when it is used; if it is missing, `BackendUnavailable` names the wheel
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

from pippin.core.checks import checked

if TYPE_CHECKING:
    from pippin.shape.export.compiled_model import CompiledModel
    from pippin.shape.export.exported_model import ExportedModel

BackendName = Literal["torch", "onnxruntime", "openvino", "coreai", "coreml", "executorch"]
NAMES: tuple[BackendName, ...] = get_args(BackendName)
"""The backends; "torch" is the reference of comparisons, "onnxruntime" the default."""


class ExportBackend(Protocol):
    """The interface of a backend's module."""

    def compile(self, asset: ExportedModel, **options: Any) -> CompiledModel:
        """Compile the model."""

    def write(self, asset: ExportedModel, path: Path, **options: Any) -> None:
        """Write it in the format of the backend."""


@checked
def find(backend: BackendName) -> ExportBackend:
    """The module of a backend.

    Raises:
        InvalidArgument: an unknown backend.
    """
    return cast(ExportBackend, importlib.import_module(f"{__name__}.{backend}"))
