"""ONNX Runtime: the default backend on any processor.

Notable here:
- the model is converted from the exported program and never quantized by the runtime
- the device of each node is queried with `session.record_ep_graph_assignment_info`
- times per node are those of its profiler; the conversion preserves the operator name of each node
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, UnsupportedOperator
from pippin.shape.export.compiled_model import (
    CompiledModel,
    NodeTime,
    operator_at_fault,
    quiet,
    refuse_options,
    require,
    require_device,
)
from pippin.shape.export.signature import DTYPES, SizeRange, size_names

if TYPE_CHECKING:
    from pippin.shape.export.exported_model import ExportedModel

_DEVICES = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_FOLDED = 256  # bytes
_INLINE = 1 << 30  # larger models have their weights in a separate file, as protobuf is limited to 2 GiB


@checked
def compile(
    asset: ExportedModel,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    strict: bool = False,
    **options: Any,
) -> OnnxModel:
    """Convert and load.

    Args:
        asset: the model.
        device: the device, "cpu" or "cuda".
        threads: number of CPU threads; None for as many as torch uses.
        strict: refuse a model with nodes on another device.
        options: none.

    Raises:
        BackendUnavailable: onnx, onnxscript or onnxruntime is not installed.
        UnsupportedOperator: ONNX does not support an operator.
        SilentFallback: ``strict``, and a node is on another device.
        InvalidArgument: an unknown device or option.
    """
    refuse_options("onnxruntime", options)
    model = OnnxModel(asset, device, threads or torch.get_num_threads())
    elsewhere = model.fallbacks(device) if strict else []
    if elsewhere:
        model.close()
    require_device("onnxruntime", device, elsewhere)
    return model


def write(asset: ExportedModel, path: Path, **options: Any) -> None:
    """Write "main" as one `.onnx` file, further functions beside it as NAME.FUNCTION.onnx."""
    refuse_options("onnxruntime", options)
    for name in asset.functions:
        convert(asset, name, path if name == "main" else path.with_suffix(f".{name}.onnx"))


def convert(asset: ExportedModel, function: str, path: Path) -> None:
    """Write one function in ONNX.

    Raises:
        BackendUnavailable: onnx or onnxscript is not installed.
        UnsupportedOperator: ONNX does not support an operator.
    """
    for wheel in ("onnx", "onnxscript"):
        require(wheel, backend="onnxruntime", wheel=wheel, extra="export")
    signature = asset.signature(function)
    try:
        with quiet("torch.onnx"):
            program = torch.onnx.export(
                asset.program(function).exported,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=[port.name for port in signature.inputs],
                output_names=[port.name for port in signature.outputs],
            )
    except torch.onnx.errors.OnnxExporterError as error:
        cause = str(error.__cause__ or error)
        raise UnsupportedOperator(f"ONNX does not support {operator_at_fault(asset, function, cause)}") from error
    assert program is not None
    _name_axes(program.model, size_names(asset.program(function)))
    # small constants only: folding a compressed weight would store it dense again
    require("onnxscript.optimizer", backend="onnxruntime", wheel="onnxscript", extra="export").optimize_ir(
        program.model, input_size_limit=_FOLDED, output_size_limit=_FOLDED
    )
    temporary = path.with_name(f".{path.name}.partial")
    if asset.nbytes > _INLINE:
        program.save(str(path), external_data=True)
        return
    program.save(str(temporary))
    temporary.replace(path)


def _name_axes(model: Any, names: Mapping[str, str]) -> None:
    """Give symbolic sizes their names in the signature, in place of those that torch invented ("s27 + 1")."""
    symbol = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names) or r"(?!)")
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
        for value in values:
            if value.shape is None:
                continue
            for axis, size in enumerate(value.shape):
                if isinstance(name := getattr(size, "value", None), str):  # a symbol, and no number
                    value.shape[axis] = symbol.sub(lambda found: names[found[0]], name)


class OnnxModel(CompiledModel):
    """Sessions of the runtime, one for each function."""

    backend = "onnxruntime"

    def __init__(self, asset: ExportedModel, device: str, threads: int) -> None:
        super().__init__(asset)
        self.runtime = require("onnxruntime", backend="onnxruntime", wheel="onnxruntime", extra="export")
        self.device, self.threads = device, threads
        self.folder = tempfile.TemporaryDirectory(prefix="pippin-onnx-")
        self.files = {name: Path(self.folder.name) / f"{name}.onnx" for name in asset.functions}
        try:
            for name, file in self.files.items():
                convert(asset, name, file)
            self.nbytes = sum(file.stat().st_size for file in Path(self.folder.name).iterdir())
            self.sessions = {name: self._session(name) for name in asset.functions}
        except BaseException:
            self.folder.cleanup()
            raise

    def _session(self, function: str, profile: bool = False) -> Any:
        settings = self.runtime.SessionOptions()
        settings.intra_op_num_threads = self.threads
        settings.log_severity_level = 3
        settings.enable_profiling = profile
        settings.profile_file_prefix = str(Path(self.folder.name) / "profile")
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        wanted = _DEVICES[self.device]
        available = self.runtime.get_available_providers()
        providers = [wanted] if wanted in available else []
        return self.runtime.InferenceSession(
            str(self.files[function]), settings, providers=list(dict.fromkeys([*providers, _DEVICES["cpu"]]))
        )

    def execute(self, function: str, tensors: list[Tensor]) -> list[Tensor]:
        """See `CompiledModel.execute`."""
        signature = self.asset.signature(function)
        given = {
            port.name: tensor.contiguous().numpy(force=True)
            for port, tensor in zip(signature.inputs, tensors, strict=True)
        }
        return [torch.from_numpy(array) for array in self.sessions[function].run(None, given)]

    def provider_map(self, function: str = "main") -> dict[str, str]:
        """See `CompiledModel.provider_map`."""
        names = {provider: device for device, provider in _DEVICES.items()}
        return {
            node.name: names.get(part.ep_name, part.ep_name)
            for part in self.sessions[function].get_provider_graph_assignment_info()
            for node in part.get_nodes()
        }

    def times(self, function: str, tensors: Mapping[str, Tensor], runs: int) -> list[NodeTime]:
        """See `CompiledModel.times`."""
        session = self._session(function, profile=True)
        given = {name: tensor.contiguous().numpy(force=True) for name, tensor in tensors.items()}
        for _ in range(runs + 1):
            session.run(None, given)
        events = json.loads(Path(session.end_profiling()).read_text())
        spent: dict[str, list[float]] = {}
        kinds: dict[str, str] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                name = event["name"].removesuffix("_kernel_time")
                spent.setdefault(name, []).append(event["dur"] / 1e3)
                kinds[name] = event["args"]["op_name"]
        origin, devices = self._origins(function), self.provider_map(function)
        found = []
        for name, each in spent.items():
            module, source = origin.get(name.removeprefix("fused ").removesuffix("_nchwc"), (None, ""))
            device = devices.get(name, self.device)
            sources = (source,) if source else ()
            found.append(NodeTime(name, kinds[name], tuple(each[-runs:]), module, device, sources))
        return found

    def _origins(self, function: str) -> dict[str, tuple[str, str]]:
        """Module and operator that each node of the graph comes from, by the name of the node and of its output."""
        onnx = require("onnx", backend="onnxruntime", wheel="onnx", extra="export")
        graph = onnx.load(str(self.files[function]), load_external_data=False).graph
        found = {}
        for node in graph.node:
            notes = {note.key: note.value for note in node.metadata_props}
            if "pkg.torch.onnx.name_scopes" in notes:
                *scopes, operator = ast.literal_eval(notes["pkg.torch.onnx.name_scopes"])
                for name in (node.name, *node.output):
                    found[name] = (scopes[-1] if scopes else "", operator)
        return found

    def close(self) -> None:
        """Release sessions and files."""
        self.sessions = {}
        self.folder.cleanup()


class StaticCall:
    """One function with fixed sizes and preallocated input and output tensors, for real-time use.

    Calls allocate no tensors; the runtime reuses the memory of its first runs.

    Args:
        model: the compiled model.
        sizes: sizes of all dynamic dimensions, by name.
        function: name of the function.

    Raises:
        InvalidArgument: a size is missing, or an output has a size that is no input's.
    """

    def __init__(self, model: OnnxModel, sizes: Mapping[str, int] | None = None, function: str = "main") -> None:
        signature = model.asset.signature(function)
        self.session = model.sessions[function]
        self.binding = self.session.io_binding()
        self.inputs, self.outputs = (
            {
                port.name: torch.zeros(
                    [_size(size, sizes or {}, port.name) for size in port.shape], dtype=DTYPES[port.dtype]
                )
                for port in ports
            }
            for ports in (signature.inputs, signature.outputs)
        )
        for bind, tensors in ((self.binding.bind_input, self.inputs), (self.binding.bind_output, self.outputs)):
            for name, tensor in tensors.items():
                bind(name, "cpu", 0, tensor.numpy().dtype, list(tensor.shape), tensor.data_ptr())

    def __call__(self) -> None:
        """Compute ``outputs`` from ``inputs``, overwriting them."""
        self.session.run_with_iobinding(self.binding)


def _size(size: int | SizeRange, sizes: Mapping[str, int], port: str) -> int:
    if isinstance(size, SizeRange):
        if size.name not in sizes or not size.min <= sizes[size.name] <= size.max:
            raise InvalidArgument(f"{port} needs one size within {size}, got {sizes.get(size.name)}")
        return sizes[size.name]
    if size < 0:
        raise InvalidArgument(f"{port} has a size that follows from no single input size, so it cannot be fixed")
    return size
