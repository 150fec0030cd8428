"""OpenVINO: fast on Intel processors, converted from the exported program.

Notable here:
- by default it computes in bfloat16 on processors that support it, with three digits less precision; so the precision
  is always set and verified
- by default it also quantizes the inputs of 8-bit weights (errors of 1e-3), even in "float32"; this is disabled
- it treats all sizes of a converted program as dynamic; the signature checks their ranges
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import UnsupportedOperator
from pippin.shape.export.compiled_model import (
    CompiledModel,
    ComputeUnit,
    NodeTime,
    compute_units,
    operator_at_fault,
    quiet,
    refuse_options,
    require,
    require_precision,
)

if TYPE_CHECKING:
    from pippin.shape.export.exported_model import ExportedModel

Precision = Literal["float32", "bfloat16", "float16"]
_PRECISIONS: dict[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@checked
def compile(
    asset: ExportedModel, *, precision: Precision = "float32", threads: int | None = None, **options: Any
) -> OpenVINOModel:
    """Convert and compile for the processor.

    Args:
        asset: the model.
        precision: "float32", or "bfloat16" or "float16" if the processor supports it.
        threads: number of threads; None for as many as torch uses.
        options: none.

    Raises:
        BackendUnavailable: openvino is not installed.
        UnsupportedOperator: OpenVINO does not support an operator.
        PrecisionMismatch: it would compute in another precision.
        InvalidArgument: an unknown precision or option.
    """
    refuse_options("openvino", options)

    return OpenVINOModel(asset, precision, threads or torch.get_num_threads())


def write(asset: ExportedModel, path: Path, **options: Any) -> None:
    """Write "main" as `.xml`, its float32 weights in `.bin` beside it; further functions as NAME.FUNCTION.xml."""
    refuse_options("openvino", options)
    openvino = _library()
    for name in asset.functions:
        target = path if name == "main" else path.with_suffix(f".{name}.xml")
        openvino.save_model(convert(asset, name), str(target), compress_to_fp16=False)


def convert(asset: ExportedModel, function: str) -> Any:
    """One function as an `openvino.Model`.

    Raises:
        BackendUnavailable: openvino is not installed.
        UnsupportedOperator: it does not support an operator.
    """
    openvino = _library()
    program, signature = asset.program(function), asset.signature(function)
    try:
        with quiet():
            model = openvino.convert_model(program.exported)
    except (openvino.frontend.OpConversionFailure, RuntimeError) as error:
        raise UnsupportedOperator(
            f"OpenVINO does not support {operator_at_fault(asset, function, str(error))}"
        ) from error
    for ports, nodes in ((signature.inputs, model.inputs), (signature.outputs, model.outputs)):
        for port, node in zip(ports, nodes, strict=True):
            node.get_tensor().set_names({port.name})
    return model


class OpenVINOModel(CompiledModel):
    """Compiled models, one for each function."""

    backend = "openvino"

    def __init__(self, asset: ExportedModel, precision: str, threads: int) -> None:
        super().__init__(asset)
        openvino = _library()
        self.settings = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[precision],
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            # without this, activations before 8-bit weights are quantized too, on the quiet
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
        self.core = openvino.Core()
        self.models = {name: convert(asset, name) for name in asset.functions}
        self.compiled = {
            name: self.core.compile_model(model, "CPU", self.settings) for name, model in self.models.items()
        }
        types = {model.get_property("INFERENCE_PRECISION_HINT").get_type_name() for model in self.compiled.values()}
        names = {short: name for name, short in _PRECISIONS.items()}
        self.precision = ", ".join(sorted(names.get(kind, kind) for kind in types))
        require_precision("openvino", precision, self.precision)
        self.requests = {name: model.create_infer_request() for name, model in self.compiled.items()}
        self.nbytes = sum(
            node.get_byte_size()
            for model in self.models.values()
            for node in model.get_ordered_ops()
            if node.get_type_name() == "Constant"
        )

    def execute(self, function: str, tensors: list[Tensor]) -> list[Tensor]:
        """See `CompiledModel.execute`."""
        request = self.requests[function]
        request.infer([tensor.contiguous().numpy(force=True) for tensor in tensors])
        return [
            torch.from_numpy(request.get_output_tensor(index).data.copy())
            for index in range(len(self.asset.signature(function).outputs))
        ]

    def provider_map(self, function: str = "main") -> dict[str, str]:
        """See `CompiledModel.provider_map`; this backend compiles for the processor only."""
        return {
            node.get_friendly_name(): "cpu" for node in self.compiled[function].get_runtime_model().get_ordered_ops()
        }

    def times(self, function: str, tensors: Mapping[str, Tensor], runs: int) -> list[NodeTime]:
        """See `CompiledModel.times`."""
        compiled = self.core.compile_model(self.models[function], "CPU", {**self.settings, "PERF_COUNT": True})
        request = compiled.create_infer_request()
        given = [tensor.contiguous().numpy(force=True) for tensor in self.asset.signature(function).check(tensors)]
        known = compute_units(self.asset, function)
        spent: dict[str, list[float]] = {}
        kinds: dict[str, str] = {}
        for _ in range(runs + 1):
            request.infer(given)
            for node in request.profiling_info:
                if node.real_time.total_seconds():
                    spent.setdefault(node.node_name, []).append(1e3 * node.real_time.total_seconds())
                    kinds[node.node_name] = node.node_type
        found = []
        for name, each in spent.items():
            source = _source(name, known)
            module = known[source].module if source else None
            sources = (source,) if source else ()
            found.append(NodeTime(name, kinds[name], tuple(each[-runs:]), module, sources=sources))
        return found

    def close(self) -> None:
        """Give back the compiled models."""
        self.requests, self.compiled = {}, {}


def _source(name: str, known: Mapping[str, ComputeUnit]) -> str:
    """The operator that a node comes from; its own decomposition renames some: ``convolution`` is ``conv2d``."""
    first = name.split("/")[0]
    return next((each for each in (first, first.replace("convolution", "conv2d")) if each in known), "")


def _library() -> Any:
    return require("openvino", backend="openvino", wheel="openvino", extra="export-extra")
