"""The torch backend: runs the exported program in torch, as the reference for the other backends.

Notable here:
- constants are folded at compilation: operators that depend on weights only (such as dequantization) run once
- operators can be timed in the same graph, so a report has torch's operator names
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

from pippin.shape.export.compiled_model import CompiledModel, NodeTime, compute_unit, refuse_options

if TYPE_CHECKING:
    from pippin.shape.export.exported_model import ExportedModel


def compile(asset: ExportedModel, **options: Any) -> CompiledModel:
    """Prepare the programs for running; there are no options."""
    refuse_options("torch", options)
    return TorchModel(asset)


def write(asset: ExportedModel, path: Path, **options: Any) -> None:
    """Save the exported model's folder; there are no options."""
    refuse_options("torch", options)
    asset.save(path)


class TorchModel(CompiledModel):
    """Runs the program's graph module."""

    backend = "torch"

    def __init__(self, asset: ExportedModel) -> None:
        super().__init__(asset)
        self.modules = {name: fold_constants(program.exported) for name, program in asset.programs.items()}
        self.nbytes = asset.nbytes

    def execute(self, function: str, tensors: list[Tensor]) -> list[Tensor]:
        """See `CompiledModel.execute`."""
        with torch.inference_mode():
            outputs = self.modules[function](*tensors)
        return list(outputs) if isinstance(outputs, tuple | list) else [outputs]

    def provider_map(self, function: str = "main") -> dict[str, str]:
        """See `CompiledModel.provider_map`."""
        return {node.name: "cpu" for node in self.modules[function].graph.nodes if node.op == "call_function"}

    def times(self, function: str, tensors: Mapping[str, Tensor], runs: int) -> list[NodeTime]:
        """See `CompiledModel.times`."""
        timer = _Timer(self.modules[function])
        ordered = self.asset.signature(function).check(tensors)
        with torch.inference_mode():
            for _ in range(runs + 1):
                timer.run(*ordered)
        return [
            # without the first run, which warms up
            NodeTime(node.name, str(node.target), tuple(times[1:]), compute_unit(node).module, sources=(node.name,))
            for node, times in timer.milliseconds.items()
        ]


class _Timer(Interpreter):
    """Runs a graph and records the time of each operator."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.milliseconds: dict[Node, list[float]] = {}

    def run_node(self, n: Node) -> Any:
        """Run and time one node."""
        if n.op != "call_function":
            return super().run_node(n)
        start = time.perf_counter()
        result = super().run_node(n)
        self.milliseconds.setdefault(n, []).append(1e3 * (time.perf_counter() - start))
        return result


def fold_constants(exported: ExportedProgram) -> GraphModule:
    """The program as a module in which operators that depend on weights only are replaced by their results."""
    module = exported.module(check_guards=False)
    assert isinstance(module, GraphModule)
    constants: dict[Node, Tensor] = {}
    with torch.inference_mode():
        for node in list(module.graph.nodes):
            if node.op == "get_attr":
                constants[node] = _attribute(module, str(node.target))
            elif node.op == "call_function" and node.all_input_nodes and set(node.all_input_nodes) <= set(constants):
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), constants.__getitem__)
                constants[node] = node.target(*args, **kwargs)
    for node in list(module.graph.nodes):
        users = [user for user in node.users if user not in constants]
        if node in constants and node.op == "call_function" and users:
            name = f"folded_{node.name}"
            module.register_buffer(name, constants[node].clone(), persistent=False)
            with module.graph.inserting_before(node):
                folded = module.graph.get_attr(name)
            for user in users:
                user.replace_input_with(node, folded)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _attribute(module: GraphModule, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), name)
    return tensor.detach()
