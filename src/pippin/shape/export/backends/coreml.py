"""Core ML: an `.mlpackage`, converted and checked anywhere, run on macOS.

Notable here:
- coremltools does not accept the training dialect that `torch.export` returns since torch 2.9; running decompositions,
  even none, converts it to an accepted dialect
- the default precision is float32 here, not coremltools' float16
"""

from __future__ import annotations

import contextlib
import io
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from pippin.core.checks import checked
from pippin.core.errors import BackendUnavailable, UnsupportedOperator
from pippin.shape.export.compiled_model import CompiledModel, operator_at_fault, quiet, refuse_options, require

if TYPE_CHECKING:
    from pippin.shape.export.exported_model import ExportedModel

Precision = Literal["float32", "float16"]


@checked
def compile(asset: ExportedModel, *, precision: Precision = "float32", **options: Any) -> CoreMLModel:
    """Convert and load.

    Args:
        asset: the model.
        precision: "float32" or "float16".
        options: none.

    Raises:
        BackendUnavailable: this is not macOS, or coremltools is not installed; `write` works on any system.
        UnsupportedOperator: Core ML does not support an operator.
        InvalidArgument: an unknown precision or option.
    """
    refuse_options("coreml", options)
    if platform.system() != "Darwin":
        raise BackendUnavailable(
            f"Core ML runs on macOS only and this is {platform.system()}; the artifact can be written here "
            "(--to coreml), not executed"
        )
    return CoreMLModel(asset, precision)


@checked
def write(asset: ExportedModel, path: Path, *, precision: Precision = "float32", **options: Any) -> None:
    """Write "main" as `.mlpackage`; further functions beside it as NAME.FUNCTION.mlpackage.

    Raises:
        BackendUnavailable: coremltools is not installed.
        UnsupportedOperator: Core ML does not support an operator.
        InvalidArgument: an unknown precision or option.
    """
    refuse_options("coreml", options)
    for name in asset.functions:
        target = path if name == "main" else path.with_suffix(f".{name}.mlpackage")
        model = convert(asset, name, precision)
        if target.exists():
            shutil.rmtree(target)
        model.save(str(target))


@checked
def convert(asset: ExportedModel, function: str = "main", precision: Precision = "float32") -> Any:
    """One function as a coremltools model; its specification can be read on every system.

    Raises:
        BackendUnavailable: coremltools is not installed.
        UnsupportedOperator: Core ML does not support an operator.
        InvalidArgument: an unknown precision.
    """
    with quiet("coremltools"):
        library = require("coremltools", backend="coreml", wheel="coremltools", extra="export-apple")
        # addcmul has no form there; torch knows what it is made of
        program = asset.program(function).exported.run_decompositions(get_decompositions([torch.ops.aten.addcmul]))
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
                return library.convert(
                    program,
                    outputs=[library.TensorType(name=name) for name in output_names(asset, function)],
                    minimum_deployment_target=library.target.iOS18,
                    compute_precision=library.precision[precision.upper()],
                )
        except (NotImplementedError, ValueError, RuntimeError, TypeError) as error:
            fault = operator_at_fault(asset, function, str(error))
            raise UnsupportedOperator(f"Core ML does not support {fault}: {str(error)[:200]}") from error


def output_names(asset: ExportedModel, function: str) -> list[str]:
    """Core ML's names of the outputs: NAME_out for an output with an input's name, which Core ML does not allow."""
    signature = asset.signature(function)
    taken = {port.name for port in signature.inputs}
    return [f"{port.name}_out" if port.name in taken else port.name for port in signature.outputs]


class CoreMLModel(CompiledModel):
    """Loaded packages, one for each function; macOS only."""

    backend = "coreml"

    def __init__(self, asset: ExportedModel, precision: Precision) -> None:
        super().__init__(asset)
        self.precision = precision
        self.models = {name: convert(asset, name, precision) for name in asset.functions}
        with tempfile.TemporaryDirectory() as folder:
            write(asset, Path(folder) / "main.mlpackage", precision=precision)
            self.nbytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())

    def execute(self, function: str, tensors: list[Tensor]) -> list[Tensor]:
        """See `CompiledModel.execute`."""
        signature = self.asset.signature(function)
        given = {port.name: tensor.numpy(force=True) for port, tensor in zip(signature.inputs, tensors, strict=True)}
        found = self.models[function].predict(given)
        return [torch.as_tensor(found[name]) for name in output_names(self.asset, function)]

    def provider_map(self, function: str = "main") -> dict[str, str]:
        """See `CompiledModel.provider_map`; empty, as Core ML reports devices in Xcode only."""
        return {}
