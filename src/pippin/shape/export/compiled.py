"""What every back end gives: functions that run, what they run on and how precisely, and where their time goes.

Notable here:
- a call is compared with the signature before the back end sees it
- precision is asked for and then asked back: a back end that computes in another one is refused, not believed
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
    from pippin.shape.export.asset import ModelAsset


@dataclass(frozen=True)
class Place:
    """Where an operator comes from: path of its module, line of its source."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'} ({self.source or 'source line unknown'})"


@dataclass(frozen=True)
class NodeTime:
    """The time of one node of a back end's graph."""

    name: str
    kind: str
    """The back end's name of the operator."""
    milliseconds: tuple[float, ...]
    """One figure per run."""
    module: str | None = None
    """Path of the module that it comes from; None where the back end does not tell."""
    device: str = "cpu"
    sources: tuple[str, ...] = field(default=(), compare=False)
    """Names of the operators of the exported program that it computes, as far as known."""


class CompiledModel(ABC):
    """An asset in the form of one back end. Calls are not safe from several threads at once."""

    backend: str = ""
    """The name that `ModelAsset.to` knows it by."""
    precision: str = "float32"
    """In what it computes, as the back end itself says."""
    nbytes: int = 0
    """Size of the artifact, in bytes."""

    def __init__(self, asset: ModelAsset) -> None:
        self.asset = asset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.backend}, {self.precision}, {', '.join(self.asset.functions)}"

    def __call__(self, **tensors: Tensor) -> Tensor | dict[str, Tensor]:
        """Run "main": its output, or its outputs by name where there are several.

        Raises:
            SignatureMismatch: before anything is computed; the message lists all that does not fit.
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
        """Nodes that are not on the device that was asked for."""
        return [f"{node} ({where})" for node, where in self.provider_map().items() if where != wanted]

    def times(self, function: str, tensors: Mapping[str, Tensor], runs: int) -> list[NodeTime]:
        """Time every node, in instrumented runs; nothing where the back end cannot tell."""
        return []

    def state(self) -> dict[str, Tensor]:
        """What the model keeps between calls: nothing, as states of an exported function are inputs and outputs."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what the back end holds."""


@contextlib.contextmanager
def quiet(logger: str = "") -> Iterator[None]:
    """Without the remarks of libraries about versions, other libraries and graphics cards that are not here."""
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
    """Import a library of a back end.

    Raises:
        BackendUnavailable: it is not installed; the message names the wheel and the extra.
    """
    try:
        with quiet():
            return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailable(
            f"the back end {backend!r} needs {wheel}: pip install 'pippin[{extra}]' ({error})"
        ) from error


def refuse_options(backend: str, options: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for options that a back end does not have."""
    if options:
        raise InvalidArgument(f"the back end {backend!r} has no option {', '.join(map(repr, options))}")


def require_precision(backend: str, wanted: str, got: str) -> None:
    """Raise `PrecisionMismatch` where a back end computes in another precision than it was asked for."""
    if wanted != got:
        raise PrecisionMismatch(f"{backend} was asked to compute in {wanted} and computes in {got}")


def require_device(backend: str, wanted: str, elsewhere: list[str]) -> None:
    """Raise `SilentFallback` where nodes are not on the device that was asked for."""
    if elsewhere:
        shown = ", ".join(elsewhere[:5]) + (f" and {len(elsewhere) - 5} more" if len(elsewhere) > 5 else "")
        raise SilentFallback(f"{backend} was asked for {wanted} only, but put elsewhere: {shown}")


def place(node: Node) -> Place:
    """Module path and source line of an operator of an exported program."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    if path.startswith("_empty_nn_module_stack"):  # what torch calls an operator that belongs to no module
        path = ""
    source = re.sub(r'File "([^"]*)", line (\d+).*', r"\1:\2", (node.meta.get("stack_trace") or "").strip(), flags=re.S)
    return Place(re.sub(r"^L\['self'\]\.?|^self\.?", "", path), source)


def places(asset: ModelAsset, function: str) -> dict[str, Place]:
    """Where every operator of a function comes from, by its name in the exported program."""
    nodes = asset.program(function).exported.graph.nodes
    return {node.name: place(node) for node in nodes if node.op == "call_function"}


def operator_at_fault(asset: ModelAsset, function: str, message: str) -> str:
    """The operators of a function that an error message of a back end speaks of, each with its place."""
    # a back end may have decomposed an operator: "prims.bessel_j0" comes from "aten.special_bessel_j0"
    named = re.findall(r"(?:torch\.ops\.|op='|aten[.:]+|prims[.:]+)(?:\w+[.:]+)?(\w{4,})", message)
    found: dict[str, str] = {}
    for node in asset.program(function).exported.graph.nodes:
        target = str(node.target)
        short = target.split(".")[1] if target.count(".") else target
        fits = re.search(rf"\b{re.escape(short)}\b", message) or any(name in short for name in named)
        if node.op == "call_function" and (target in message or fits):
            found.setdefault(target, f"{target} in {place(node)}")
    return "; ".join(found.values()) or f"an operator of {function!r}"
