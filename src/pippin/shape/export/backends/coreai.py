"""Core AI: Apple's `.aimodel`, converted and run on Linux as well.

Notable here:
- conversion decomposes with Apple's own table, which keeps the composite operators that its runtime has kernels for
- off macOS the runtime does not read an `.aimodel`: it is compiled into a folder of another form first, and that is run
- the runtime is asynchronous; each model keeps one event loop, and a call waits for it
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
    """Convert, compile and load; there are no options.

    Raises:
        BackendUnavailable: coreai-core or coreai-torch is not installed.
        UnsupportedOperator: Core AI has no form of an operator.
    """
    refuse_options("coreai", options)
    return CoreAIModel(asset)


def write(asset: ExportedModel, path: Path, **options: Any) -> None:
    """Write all functions into one `.aimodel` folder.

    Raises:
        BackendUnavailable: coreai-core or coreai-torch is not installed.
        UnsupportedOperator: Core AI has no form of an operator.
    """
    refuse_options("coreai", options)
    convert(asset, path)


def convert(asset: ExportedModel, path: Path) -> Any:
    """Write the asset and give Core AI's handle of it."""
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
            raise UnsupportedOperator(f"Core AI has no form of {operator_at_fault(asset, name, str(error))}") from error
    with quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return converter.to_coreai().save_asset(path)


def _narrow(tensor: Tensor) -> Tensor:
    """Core AI takes whole numbers of 32 bits at most."""
    return tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor


class CoreAIModel(CompiledModel):
    """A loaded model, and the event loop that its runtime lives in."""

    backend = "coreai"

    def __init__(self, asset: ExportedModel) -> None:
        super().__init__(asset)
        self.folder = tempfile.TemporaryDirectory(prefix="pippin-coreai-")
        path = Path(self.folder.name) / "model.aimodel"
        try:
            written = convert(asset, path)
        except BaseException:
            self.folder.cleanup()
            raise
        self.nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self.runtime = require("coreai.runtime", backend="coreai", wheel="coreai-core", extra="export-apple")
        self.loop = asyncio.new_event_loop()
        self.scope = contextlib.AsyncExitStack()
        model = self.loop.run_until_complete(self.scope.enter_async_context(written.executable()))
        self.functions = {name: model.load_function(name) for name in asset.functions}

    def execute(self, function: str, tensors: list[Tensor]) -> list[Tensor]:
        """See `CompiledModel.execute`."""
        signature = self.asset.signature(function)
        given = {
            port.name: self.runtime.NDArray(_narrow(tensor).contiguous().numpy(force=True))
            for port, tensor in zip(signature.inputs, tensors, strict=True)
        }
        found = self.loop.run_until_complete(self.functions[function](given))
        return [torch.from_numpy(found[port.name].numpy().copy()).to(DTYPES[port.dtype]) for port in signature.outputs]

    def provider_map(self, function: str = "main") -> dict[str, str]:
        """See `CompiledModel.provider_map`; off macOS, Core AI has the processor only."""
        return {
            node.name: "cpu" for node in self.asset.program(function).exported.graph.nodes if node.op == "call_function"
        }

    def close(self) -> None:
        """Unload the model, end the loop, remove the files."""
        if not self.loop.is_closed():
            self.functions = {}
            self.loop.run_until_complete(self.scope.aclose())
            self.loop.close()
            self.folder.cleanup()
