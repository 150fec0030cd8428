"""The reference: the exported program, run by torch itself.

Notable here:
- what depends on weights only (the decoding of a compressed weight) is computed once, when it is compiled
- the same walk over the graph that runs it can time it, so that a report names operators as torch does
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
    """Make the programs ready to run; there are no options."""
    refuse_options("torch", options)
    return TorchModel(asset)


def write(asset: ExportedModel, path: Path, **options: Any) -> None:
    """Write the asset's own folder; there are no options."""
    refuse_options("torch", options)
    asset.save(path)


class TorchModel(CompiledModel):
    """Runs the operators of the program one after another."""

    backend = "torch"

    def __init__(self, asset: ExportedModel) -> None:
        super().__init__(asset)
        self.modules = {name: folded(program.exported) for name, program in asset.programs.items()}
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
        clock = _Clock(self.modules[function])
        ordered = self.asset.signature(function).check(tensors)
        with torch.inference_mode():
            for _ in range(runs + 1):
                clock.run(*ordered)
        return [
            NodeTime(node.name, str(node.target), tuple(spent[1:]), compute_unit(node).module, sources=(node.name,))
            for node, spent in clock.spent.items()
        ]


class _Clock(Interpreter):
    """Runs a graph and keeps the time of each operator."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.spent: dict[Node, list[float]] = {}

    def run_node(self, n: Node) -> Any:
        """Time one node."""
        if n.op != "call_function":
            return super().run_node(n)
        start = time.perf_counter()
        result = super().run_node(n)
        self.spent.setdefault(n, []).append(1e3 * (time.perf_counter() - start))
        return result


def folded(exported: ExportedProgram) -> GraphModule:
    """The program as a module, with all that depends on weights only computed once and kept."""
    module = exported.module(check_guards=False)
    assert isinstance(module, GraphModule)
    known: dict[Node, Tensor] = {}
    with torch.inference_mode():
        for node in list(module.graph.nodes):
            if node.op == "get_attr":
                known[node] = _attribute(module, str(node.target))
            elif node.op == "call_function" and node.all_input_nodes and set(node.all_input_nodes) <= set(known):
                arguments, settings = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*arguments, **settings)
    for node in list(module.graph.nodes):
        outside = [user for user in node.users if user not in known]
        if node in known and node.op == "call_function" and outside:
            name = f"folded_{node.name}"
            module.register_buffer(name, known[node].clone(), persistent=False)
            with module.graph.inserting_before(node):
                kept = module.graph.get_attr(name)
            for user in outside:
                user.replace_input_with(node, kept)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _attribute(module: GraphModule, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    found: Tensor = getattr(module.get_submodule(owner), name)
    return found.detach()
