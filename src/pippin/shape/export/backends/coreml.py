"""Core ML: an `.mlpackage`, converted and checked anywhere, run on macOS.

Notable here:
- coremltools does not take what `torch.export` gives since torch 2.9 (its training dialect); decomposing it, be
  it by nothing, brings it into the dialect that it takes
- its default precision is float16; here it is float32 unless you ask otherwise
"""

from __future__ import annotations

import contextlib
import io
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from pippin.core.errors import BackendUnavailable, InvalidArgument, UnsupportedOperator
from pippin.shape.export.compiled import CompiledModel, operator_at_fault, quiet, refuse_options, require

if TYPE_CHECKING:
    from pippin.shape.export.asset import ModelAsset

_PRECISIONS = ("float32", "float16")


def compile(asset: ModelAsset, *, precision: str = "float32", **options: Any) -> CoreMLModel:
    """Convert and load.

    Args:
        asset: the model.
        precision: "float32" or "float16".
        options: none.

    Raises:
        BackendUnavailable: this is not macOS, or coremltools is not installed; `write` works on any system.
        UnsupportedOperator: Core ML has no form of an operator.
        InvalidArgument: an unknown precision or option.
    """
    refuse_options("coreml", options)
    if platform.system() != "Darwin":
        raise BackendUnavailable(
            f"Core ML runs on macOS only and this is {platform.system()}; the artifact can be written here "
            "(--to coreml), not executed"
        )
    return CoreMLModel(asset, precision)


def write(asset: ModelAsset, path: Path, *, precision: str = "float32", **options: Any) -> None:
    """Write "main" as `.mlpackage`; further functions beside it as NAME.FUNCTION.mlpackage.

    Raises:
        BackendUnavailable: coremltools is not installed.
        UnsupportedOperator: Core ML has no form of an operator.
        InvalidArgument: an unknown precision or option.
    """
    refuse_options("coreml", options)
    for name in asset.functions:
        target = path if name == "main" else path.with_suffix(f".{name}.mlpackage")
        model = convert(asset, name, precision)
        if target.exists():
            shutil.rmtree(target)
        model.save(str(target))


def convert(asset: ModelAsset, function: str = "main", precision: str = "float32") -> Any:
    """One function as a coremltools model; its specification can be read on every system."""
    if precision not in _PRECISIONS:
        raise InvalidArgument(f"Core ML computes in {' or '.join(_PRECISIONS)}, not in {precision!r}")
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
            raise UnsupportedOperator(f"Core ML has no form of {fault}: {str(error)[:200]}") from error


def output_names(asset: ModelAsset, function: str) -> list[str]:
    """What Core ML calls the outputs: an output may not have an input's name there, so it is NAME_out."""
    signature = asset.signature(function)
    taken = {port.name for port in signature.inputs}
    return [f"{port.name}_out" if port.name in taken else port.name for port in signature.outputs]


class CoreMLModel(CompiledModel):
    """Loaded packages, one for each function; macOS only."""

    backend = "coreml"

    def __init__(self, asset: ModelAsset, precision: str) -> None:
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
        """See `CompiledModel.provider_map`; Core ML chooses when it runs, and tells in Xcode only."""
        return {}
