"""ExecuTorch: a `.pte` file for phones and embedded devices, run here by the same runtime.

Notable here:
- operators that XNNPACK supports are delegated to it, the others run in portable kernels; `provider_map` says which
- lowering a convolution silently limits a dynamic batch to 15, because torch selects the layout by whether the batch is
  below 16; so the selection is disabled during lowering
- memory is planned for the largest sizes when the file is written, so large ranges of dynamic sizes use memory
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
    """Lower and load an exported model.

    Args:
        asset: the exported model.
        xnnpack: whether to delegate operators to XNNPACK where it supports them.
        strict: whether an operator in portable kernels raises an error.
        options: there are no others.

    Raises:
        BackendUnavailable: executorch is not installed.
        UnsupportedOperator: ExecuTorch does not support an operator.
        SilentFallback: ``strict``, and an operator runs in portable kernels.
        InvalidArgument: an unknown option.
    """
    refuse_options("executorch", options)
    model = ExecuTorchModel(asset, xnnpack)
    if strict:
        require_device("executorch", "xnnpack", model.fallbacks("xnnpack"))
    return model


def write(asset: ExportedModel, path: Path, *, xnnpack: bool = True, **options: Any) -> None:
    """Write all functions into one `.pte` file; "main" is renamed to "forward", as the runtime expects.

    Raises:
        BackendUnavailable: executorch is not installed.
        UnsupportedOperator: ExecuTorch does not support an operator.
    """
    refuse_options("executorch", options)
    with atomic_write(path) as file:
        file.write(lower(asset, xnnpack).buffer)


def lower(asset: ExportedModel, xnnpack: bool) -> Any:
    """Lower all functions; returns ExecuTorch's program manager."""
    with quiet():
        exir = require("executorch.exir", backend="executorch", wheel="executorch", extra="export-extra")
        partitioners = []
        if xnnpack:
            module = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
            xnnpack_module = require(module, backend="executorch", wheel="executorch", extra="export-extra")
            partitioners = [xnnpack_module.XnnpackPartitioner()]
        try:
            with _no_layout_selection():
                return _edge(exir, asset, partitioners).to_executorch()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            faults = "; ".join(operator_at_fault(asset, name, str(error)) for name in asset.functions)
            raise UnsupportedOperator(f"ExecuTorch does not support {faults}: {str(error)[:200]}") from error


class ExecuTorchModel(CompiledModel):
    """A loaded `.pte` program, with a method for each function."""

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
        return {
            node.name: "xnnpack" if "delegate" in node.name else "portable"
            for node in self.graphs[function].nodes
            if node.op == "call_function" and "getitem" not in node.name and "sym_size" not in node.name
        }

    def close(self) -> None:
        """Unload the program."""
        self.methods, self.program = {}, None


def _copy(program: Program) -> ExportedProgram:
    return serialization.from_bytes(
        serialization.to_bytes(program.exported), program.tensors(), "the copy of a program"
    )


def _edge(exir: Any, asset: ExportedModel, partitioners: list[Any]) -> Any:
    """All functions in ExecuTorch's Edge dialect; lowering modifies a program's size table, so it gets copies."""
    programs = {_method(name): _copy(asset.program(name)) for name in asset.functions}
    by_method = {name: partitioners for name in programs} if partitioners else None
    return exir.to_edge_transform_and_lower(programs, partitioner=by_method)


@contextlib.contextmanager
def _no_layout_selection() -> Iterator[None]:
    """Prevent torch from selecting the layout of a convolution by the batch size while a graph is lowered."""
    original = torch._C._select_conv_backend
    torch._C._select_conv_backend = lambda *_, **__: torch._C._ConvBackend.Overrideable  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._select_conv_backend = original


def _method(function: str) -> str:
    return "forward" if function == "main" else function
