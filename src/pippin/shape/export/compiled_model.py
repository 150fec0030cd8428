"""The interface of compiled models: execution, devices, precision and times per node.

Notable here:
- every call is checked against the signature before the backend runs
- the precision is requested and then queried; a backend that computes in another one is an error
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor
from torch.fx import Node

from pippin.core.errors import BackendUnavailable, InvalidArgument, PrecisionMismatch, SilentFallback

if TYPE_CHECKING:
    from pippin.shape.export.exported_model import ExportedModel


@dataclass(frozen=True)
class ComputeUnit:
    """The origin of an operator: path of its module and line of its source code."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'} ({self.source or 'source line unknown'})"


@dataclass(frozen=True)
class NodeTime:
    """The time of one node of a backend's graph."""

    name: str
    kind: str
    """The backend's name of the operator."""
    milliseconds: tuple[float, ...]
    """Milliseconds of each run."""
    module: str | None = None
    """Path of its module; None if the backend does not report it."""
    device: str = "cpu"
    sources: tuple[str, ...] = field(default=(), compare=False)
    """Names of the operators of the exported program that the node computes, if known."""


class CompiledModel(ABC):
    """An exported model compiled for one backend; not thread-safe."""

    backend: str = ""
    """Its name, as for `ExportedModel.to`."""
    precision: str = "float32"
    """The precision of its computation, as reported by the backend."""
    nbytes: int = 0
    """Size of the artifact, in bytes."""

    def __init__(self, asset: ExportedModel) -> None:
        self.asset = asset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.backend}, {self.precision}, {', '.join(self.asset.functions)}"

    def __call__(self, **tensors: Tensor) -> Tensor | dict[str, Tensor]:
        """Run "main": its output, or its outputs by name if there are several.

        Raises:
            SignatureMismatch: before anything is computed; the message lists all mismatches.
        """
        outputs = self.run("main", **tensors)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def run(self, function: str, **tensors: Tensor) -> dict[str, Tensor]:
        """Run a function: its outputs by name.

        Raises:
            SignatureMismatch: before anything is computed.
            InvalidArgument: there is no such function.
        """
        signature = self.asset.signature(function)
        outputs = self.execute(function, signature.check(tensors))
        return {port.name: tensor for port, tensor in zip(signature.outputs, outputs, strict=True)}

    @abstractmethod
    def execute(self, function: str, tensors: list[Tensor]) -> list[Tensor]:
        """Run a function on tensors that were checked."""

    @abstractmethod
    def provider_map(self, function: str = "main") -> dict[str, str]:
        """The device of every node."""

    def fallbacks(self, wanted: str = "cpu") -> list[str]:
        """Nodes that are not on the requested device."""
        return [f"{node} ({where})" for node, where in self.provider_map().items() if where != wanted]

    def times(self, function: str, tensors: Mapping[str, Tensor], runs: int) -> list[NodeTime]:
        """The time of every node in instrumented runs; empty if the backend does not report it."""
        return []

    def state(self) -> dict[str, Tensor]:
        """State between calls: empty, as the states of an exported function are inputs and outputs."""
        return {}

    def close(self) -> None:  # noqa: B027 - most backends hold no resources
        """Release the resources of the backend."""


@contextlib.contextmanager
def quiet(logger: str = "") -> Iterator[None]:
    """Suppress warnings of libraries about versions, optional libraries and missing GPUs."""
    log = logging.getLogger(logger or None)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def require(module: str, *, backend: str, wheel: str, extra: str) -> Any:
    """Import a library of a backend.

    Raises:
        BackendUnavailable: it is not installed; the message names the wheel and the extra.
    """
    try:
        with quiet():
            return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailable(
            f"the backend {backend!r} needs {wheel}: pip install 'pippin[{extra}]' ({error})"
        ) from error


def refuse_options(backend: str, options: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for options that a backend does not have."""
    if options:
        raise InvalidArgument(f"the backend {backend!r} has no option {', '.join(map(repr, options))}")


def require_precision(backend: str, wanted: str, got: str) -> None:
    """Raise `PrecisionMismatch` if a backend computes in another precision than requested."""
    if wanted != got:
        raise PrecisionMismatch(f"{backend} was asked to compute in {wanted} and computes in {got}")


def require_device(backend: str, wanted: str, elsewhere: list[str]) -> None:
    """Raise `SilentFallback` if nodes are not on the requested device."""
    if elsewhere:
        shown = ", ".join(elsewhere[:5]) + (f" and {len(elsewhere) - 5} more" if len(elsewhere) > 5 else "")
        raise SilentFallback(f"{backend} was asked for {wanted} only, but put elsewhere: {shown}")


def compute_unit(node: Node) -> ComputeUnit:
    """Module path and source line of an operator of an exported program."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    if path.startswith("_empty_nn_module_stack"):  # what torch calls an operator that belongs to no module
        path = ""
    source = re.sub(r'File "([^"]*)", line (\d+).*', r"\1:\2", (node.meta.get("stack_trace") or "").strip(), flags=re.S)
    return ComputeUnit(re.sub(r"^L\['self'\]\.?|^self\.?", "", path), source)


def compute_units(asset: ExportedModel, function: str) -> dict[str, ComputeUnit]:
    """The origin of every operator of a function, by its name in the exported program."""
    nodes = asset.program(function).exported.graph.nodes
    return {node.name: compute_unit(node) for node in nodes if node.op == "call_function"}


def operator_at_fault(asset: ExportedModel, function: str, message: str) -> str:
    """The operators of a function that an error message of a backend names, each with its origin."""
    # a backend may have decomposed an operator: "prims.bessel_j0" comes from "aten.special_bessel_j0"
    named = re.findall(r"(?:torch\.ops\.|op='|aten[.:]+|prims[.:]+)(?:\w+[.:]+)?(\w{4,})", message)
    found: dict[str, str] = {}
    for node in asset.program(function).exported.graph.nodes:
        target = str(node.target)
        short = target.split(".")[1] if target.count(".") else target
        fits = re.search(rf"\b{re.escape(short)}\b", message) or any(name in short for name in named)
        if node.op == "call_function" and (target in message or fits):
            found.setdefault(target, f"{target} in {compute_unit(node)}")
    return "; ".join(found.values()) or f"an operator of {function!r}"
