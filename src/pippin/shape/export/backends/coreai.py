"""Core AI: Apple's `.aimodel` format, converted and run on macOS and Linux.

Notable here:
- conversion uses Apple's decomposition table, which preserves the composite operators that its runtime has kernels for
- outside macOS the runtime cannot read an `.aimodel`: it is compiled to a folder in another format first
- the runtime is asynchronous; each model has one event loop, and a call blocks until it has finished
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pippin.core.errors import UnsupportedOperator
from pippin.shape.export.compiled_model import CompiledModel, operator_at_fault, quiet, refuse_options, require
from pippin.shape.export.signature import DTYPES

if TYPE_CHECKING:
    from pippin.shape.export.exported_model import ExportedModel


def compile(asset: ExportedModel, **options: Any) -> CoreAIModel:
    """Convert, compile and load an exported model; there are no options.

    Raises:
        BackendUnavailable: coreai-core or coreai-torch is not installed.
        UnsupportedOperator: Core AI does not support an operator.
    """
    refuse_options("coreai", options)
    return CoreAIModel(asset)


def write(asset: ExportedModel, path: Path, **options: Any) -> None:
    """Write all functions into one `.aimodel` folder.

    Raises:
        BackendUnavailable: coreai-core or coreai-torch is not installed.
        UnsupportedOperator: Core AI does not support an operator.
    """
    refuse_options("coreai", options)
    convert(asset, path)


def convert(asset: ExportedModel, path: Path) -> Any:
    """Convert all functions, write the `.aimodel` folder, and return Core AI's handle of it."""
    library = require("coreai_torch", backend="coreai", wheel="coreai-torch", extra="export-apple")
    converter = library.TorchConverter(mode=library.TorchConverter.Mode.RELEASE)
    for name in asset.functions:
        signature = asset.signature(name)
        with quiet():
            program = asset.program(name).exported.run_decompositions(library.get_decomp_table())
        try:
            with quiet(), contextlib.redirect_stdout(io.StringIO()):
                converter.add_exported_program(
                    program,
                    input_names=[port.name for port in signature.inputs],
                    output_names=[port.name for port in signature.outputs],
                    entrypoint_name=name,
                )
        except (ValueError, NotImplementedError, KeyError) as error:
            raise UnsupportedOperator(
                f"Core AI does not support {operator_at_fault(asset, name, str(error))}"
            ) from error
    with quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return converter.to_coreai().save_asset(path)


def _to_int32(tensor: Tensor) -> Tensor:
    """Convert int64, which Core AI does not support, to int32."""
    return tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor


class CoreAIModel(CompiledModel):
    """A loaded model with the event loop of its runtime."""

    backend = "coreai"

    def __init__(self, asset: ExportedModel) -> None:
        super().__init__(asset)
        self.folder = tempfile.TemporaryDirectory(prefix="pippin-coreai-")
        path = Path(self.folder.name) / "model.aimodel"
        try:
            handle = convert(asset, path)
        except BaseException:
            self.folder.cleanup()
            raise
        self.nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self.runtime = require("coreai.runtime", backend="coreai", wheel="coreai-core", extra="export-apple")
        self.loop = asyncio.new_event_loop()
        self.scope = contextlib.AsyncExitStack()
        model = self.loop.run_until_complete(self.scope.enter_async_context(handle.executable()))
        self.functions = {name: model.load_function(name) for name in asset.functions}

    def execute(self, function: str, tensors: list[Tensor]) -> list[Tensor]:
        """See `CompiledModel.execute`."""
        signature = self.asset.signature(function)
        inputs = {
            port.name: self.runtime.NDArray(_to_int32(tensor).contiguous().numpy(force=True))
            for port, tensor in zip(signature.inputs, tensors, strict=True)
        }
        outputs = self.loop.run_until_complete(self.functions[function](inputs))
        return [
            torch.from_numpy(outputs[port.name].numpy().copy()).to(DTYPES[port.dtype]) for port in signature.outputs
        ]

    def provider_map(self, function: str = "main") -> dict[str, str]:
        """See `CompiledModel.provider_map`; outside macOS, Core AI uses the CPU only."""
        return {
            node.name: "cpu" for node in self.asset.program(function).exported.graph.nodes if node.op == "call_function"
        }

    def close(self) -> None:
        """Unload the model, close the event loop, and delete the temporary files."""
        if not self.loop.is_closed():
            self.functions = {}
            self.loop.run_until_complete(self.scope.aclose())
            self.loop.close()
            self.folder.cleanup()
