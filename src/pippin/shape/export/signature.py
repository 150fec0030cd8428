"""Signatures of exported functions: names, dtypes and shapes of inputs and outputs, with named ranges of dynamic sizes.

Notable here:
- every call is checked here before a backend runs: unknown and missing names, dtype, rank, fixed sizes, ranges of
  dynamic sizes, and equality of sizes with the same name
- all mismatches of a call are reported in one error
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, InvalidArgument, SignatureMismatch

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
}
"""Precisions that inputs may have, by name."""


@dataclass(frozen=True)
class SizeRange:
    """A dynamic size.

    Args:
        name: its name; sizes with the same name are equal within a call.
        min: smallest size, at least 1.
        max: largest size.

    Raises:
        InvalidArgument: an empty range, or a name that is no identifier.
    """

    name: str
    min: int
    max: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise InvalidArgument(f"a dynamic size needs a name that is an identifier, got {self.name!r}")
        if not 1 <= self.min < self.max:
            raise InvalidArgument(f"the range of {self.name!r} must hold two sizes from 1 on: {self.min}..{self.max}")

    def __str__(self) -> str:
        return f"{self.name}={self.min}..{self.max}"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output."""

    name: str
    dtype: str
    """Such as "float32"."""
    shape: tuple[int | SizeRange, ...]
    """Fixed and dynamic sizes; a dynamic size of an output that is no plain input size has rank only: -1."""

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one function, in order.

    >>> batch = SizeRange("batch", 1, 8)
    >>> signature = Signature((TensorSpec("x", "float32", (batch, 3)),), (TensorSpec("y", "float32", (batch,)),))
    >>> signature.check({"x": torch.zeros(9, 3)})
    Traceback (most recent call last):
        ...
    pippin.core.errors.SignatureMismatch: x: size 9 of dimension 0 is outside batch=1..8
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    def check(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors in the order of the inputs.

        Raises:
            SignatureMismatch: the message lists everything that does not fit.
        """
        problems: list[str] = []
        known = [port.name for port in self.inputs]
        problems += [f"there is no input {name!r}; inputs: {', '.join(known)}" for name in tensors if name not in known]
        problems += [f"the input {name!r} is missing" for name in known if name not in tensors]
        sizes: dict[str, tuple[int, str]] = {}
        for port in self.inputs:
            if port.name in tensors:
                problems += _problems(port, tensors[port.name], sizes)
        if problems:
            raise SignatureMismatch("; ".join(problems))
        return [tensors[name] for name in known]

    @property
    def ranges(self) -> dict[str, SizeRange]:
        """The dynamic sizes of the inputs, by name."""
        return {size.name: size for port in self.inputs for size in port.shape if isinstance(size, SizeRange)}

    def to_json(self) -> dict[str, Any]:
        """The signature as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> Signature:
        """The inverse of `to_json`.

        Raises:
            CorruptedFile: the record is not one of a signature.
        """
        try:
            return cls(
                tuple(_port(port) for port in record["inputs"]), tuple(_port(port) for port in record["outputs"])
            )
        except (TypeError, KeyError, ValueError) as error:
            raise CorruptedFile(f"this is no signature of an exported function: {error}") from error


def _port(record: Any) -> TensorSpec:
    if record["dtype"] not in DTYPES or not isinstance(record["name"], str):
        raise ValueError(f"a port {record!r}")
    return TensorSpec(
        record["name"],
        record["dtype"],
        tuple(SizeRange(**size) if isinstance(size, dict) else int(size) for size in record["shape"]),
    )


def _problems(port: TensorSpec, tensor: Any, sizes: dict[str, tuple[int, str]]) -> list[str]:
    """All mismatches of one tensor; ``sizes`` collects the dynamic sizes of the call."""
    if not isinstance(tensor, Tensor):
        return [f"{port.name}: a torch tensor is needed, got {type(tensor).__name__}"]
    problems = []
    if tensor.dtype != DTYPES[port.dtype]:
        problems.append(f"{port.name}: precision {str(tensor.dtype).removeprefix('torch.')}, not {port.dtype}")
    if tensor.ndim != len(port.shape):
        return [*problems, f"{port.name}: {tensor.ndim} dimensions, not {len(port.shape)}"]
    for index, (size, wanted) in enumerate(zip(tensor.shape, port.shape, strict=True)):
        if isinstance(wanted, int):
            if size != wanted:
                problems.append(f"{port.name}: size {size} of dimension {index} must be {wanted}")
        elif not wanted.min <= size <= wanted.max:
            problems.append(f"{port.name}: size {size} of dimension {index} is outside {wanted}")
        elif sizes.setdefault(wanted.name, (size, port.name))[0] != size:
            other, where = sizes[wanted.name]
            problems.append(f"{port.name}: {wanted.name} is {size} here and {other} in {where}")
    return problems


def symbols_of(exported: Any, inputs: tuple[TensorSpec, ...]) -> dict[str, int | SizeRange]:
    """The sizes of the inputs by the symbols that torch has for them."""
    nodes = {node.name: node for node in exported.graph.nodes}
    return {
        str(symbol): size
        for port, given in zip(inputs, exported.graph_signature.user_inputs, strict=True)
        for size, symbol in zip(port.shape, nodes[str(given)].meta["val"].shape, strict=True)
    }


def size_names(program: Any) -> dict[str, str]:
    """The names of dynamic sizes by the symbols that torch has for them, such as {"s27": "batch"}."""
    symbols = symbols_of(program.exported, program.signature.inputs)
    return {symbol: size.name for symbol, size in symbols.items() if isinstance(size, SizeRange)}
