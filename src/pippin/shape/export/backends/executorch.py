"""ExecuTorch: a `.pte` file for phones and small devices, run here by the same runtime.

Notable here:
- operators that XNNPACK has go to it, the rest to the portable kernels; `provider_map` tells which
- before a convolution, lowering narrows a dynamic batch to 15 rows without a word, because torch asks whether the batch
  is below 16 to choose a layout; so it is not asked
- memory is planned for the largest sizes when the file is written, so ranges of dynamic sizes cost memory
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pippin.core.errors import UnsupportedOperator
from pippin.core.files import atomic_write
from pippin.shape.export import serialization
from pippin.shape.export.compiled_model import (
    CompiledModel,
    operator_at_fault,
    quiet,
    refuse_options,
    require,
    require_device,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from pippin.shape.export.exported_model import ExportedModel, Program


def compile(asset: ExportedModel, *, xnnpack: bool = True, strict: bool = False, **options: Any) -> ExecuTorchModel:
    """Lower and load.

    Args:
        asset: the model.
        xnnpack: whether operators go to XNNPACK where it has them.
        strict: refuse a model of which any operator is left to the portable kernels.
        options: none.

    Raises:
        BackendUnavailable: executorch is not installed.
        UnsupportedOperator: it does not support an operator.
        SilentFallback: ``strict``, and an operator is left to the portable kernels.
        InvalidArgument: an unknown option.
    """
    refuse_options("executorch", options)
    model = ExecuTorchModel(asset, xnnpack)
    if strict:
        require_device("executorch", "xnnpack", model.fallbacks("xnnpack"))
    return model


def write(asset: ExportedModel, path: Path, *, xnnpack: bool = True, **options: Any) -> None:
    """Write all functions into one `.pte` file; "main" is called "forward" there, as its runtime expects.

    Raises:
        BackendUnavailable: executorch is not installed.
        UnsupportedOperator: it does not support an operator.
    """
    refuse_options("executorch", options)
    with atomic_write(path) as file:
        file.write(lower(asset, xnnpack).buffer)


def lower(asset: ExportedModel, xnnpack: bool) -> Any:
    """The lowered program manager, with all functions."""
    with quiet():
        exir = require("executorch.exir", backend="executorch", wheel="executorch", extra="export-extra")
        partitioners = []
        if xnnpack:
            module = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
            found = require(module, backend="executorch", wheel="executorch", extra="export-extra")
            partitioners = [found.XnnpackPartitioner()]
        try:
            with _any_layout():
                return _edge(exir, asset, partitioners).to_executorch()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            faults = "; ".join(operator_at_fault(asset, name, str(error)) for name in asset.functions)
            raise UnsupportedOperator(f"ExecuTorch has no form of {faults}: {str(error)[:200]}") from error


class ExecuTorchModel(CompiledModel):
    """Loaded methods, one for each function."""

    backend = "executorch"

    def __init__(self, asset: ExportedModel, xnnpack: bool) -> None:
        super().__init__(asset)
        lowered = lower(asset, xnnpack)
        self.buffer = bytes(lowered.buffer)
        self.nbytes = len(self.buffer)
        self.graphs = {name: lowered.exported_program(_method(name)).graph for name in asset.functions}
        with quiet():
            runtime = require("executorch.runtime", backend="executorch", wheel="executorch", extra="export-extra")
            self.program = runtime.Runtime.get().load_program(self.buffer)
            self.methods = {name: self.program.load_method(_method(name)) for name in asset.functions}

    def execute(self, function: str, tensors: list[Tensor]) -> list[Tensor]:
        """See `CompiledModel.execute`."""
        return [tensor.clone() for tensor in self.methods[function].execute(tuple(t.contiguous() for t in tensors))]

    def provider_map(self, function: str = "main") -> dict[str, str]:
        """See `CompiledModel.provider_map`: "xnnpack" or "portable"."""
        found = {}
        for node in self.graphs[function].nodes:
            if node.op == "call_function" and "getitem" not in node.name and "sym_size" not in node.name:
                found[node.name] = "xnnpack" if "delegate" in node.name else "portable"
        return found

    def close(self) -> None:
        """Unload the program."""
        self.methods, self.program = {}, None


def _copy(program: Program) -> ExportedProgram:
    return serialization.from_bytes(
        serialization.to_bytes(program.exported), program.tensors(), "the copy of a program"
    )


def _edge(exir: Any, asset: ExportedModel, partitioners: list[Any]) -> Any:
    """All functions in ExecuTorch's dialect; lowering writes into a program's table of sizes, so it gets a copy."""
    programs = {_method(name): _copy(asset.program(name)) for name in asset.functions}
    parts = {name: partitioners for name in programs} if partitioners else None
    return exir.to_edge_transform_and_lower(programs, partitioner=parts)


@contextlib.contextmanager
def _any_layout() -> Iterator[None]:
    """While a graph is lowered, let torch not choose the layout of a convolution by the size of the batch."""
    choose = torch._C._select_conv_backend
    torch._C._select_conv_backend = lambda *_, **__: torch._C._ConvBackend.Overrideable  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._select_conv_backend = choose


def _method(function: str) -> str:
    return "forward" if function == "main" else function
