"""The numbers in a file that torch.save wrote, read without unpickling anything.

Notable here:
- the pickle inside is read as a list of instructions for a stack; classes and functions stay names, nothing is imported
  and nothing is called, so that a whole pickled module gives its weights without its code
- what comes out is what `state_dict()` of that module would be: dotted names, tensors of their own memory
- only tensors of plain numbers are made; whatever else a file holds is left out
"""

from __future__ import annotations

import pickletools
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel

_MOST_INSTRUCTIONS: Final = 64 * 2**20
"""Bytes of the pickle; the weights themselves lie outside it."""
_TYPES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES: Final = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES"}
    | {"SHORT_BINBYTES", "UNICODE", "INT", "LONG"}
)
_MARK: Final = object()


@dataclass(frozen=True)
class _Name:
    """A class or function that the file names; it is never looked up."""

    path: str


@dataclass(eq=False)
class _Thing:
    """What a name would have been called with, and the state that would have been given to the result."""

    name: _Name
    arguments: Any
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


def read_numbers(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a pickled module or state dict, by dotted name.

    Args:
        path: a file in torch's zip format (torch 1.6 and newer).

    Raises:
        CorruptedFile: no zip file, no pickle in it, weights that are missing or shorter than the file says.
        UnsupportedModel: instructions that torch.save does not write, or no tensors at all.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            roots = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(roots) != 1:
                raise CorruptedFile(f"{path}: no file that torch.save wrote in zip format ({len(roots)} of data.pkl)")
            if archive.getinfo(roots[0]).file_size > _MOST_INSTRUCTIONS:
                raise UnsupportedModel(f"{path}: its pickle is larger than {_MOST_INSTRUCTIONS} bytes")
            value = _run(archive.read(roots[0]), path)
            tensors = dict(_tensors(value, "", archive, roots[0].removesuffix("data.pkl"), path))
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise CorruptedFile(f"{path}: not a whole file that torch.save wrote in zip format: {error}") from error
    if not tensors:
        raise UnsupportedModel(f"{path} holds no tensors by name")
    return tensors


def _run(instructions: bytes, path: Path) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for code, argument, _ in pickletools.genops(instructions):
            if code.name == "STOP":
                return stack.pop()
            _step(code.name, argument, stack, memo, path)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CorruptedFile(f"{path}: its pickle makes no sense: {error}") from error
    raise CorruptedFile(f"{path}: its pickle has no end")


def _step(code: str, argument: Any, stack: list[Any], memo: dict[int, Any], path: Path) -> None:
    if code in ("PROTO", "FRAME"):
        return
    if code in _CONSTANTS:
        stack.append(_CONSTANTS[code])
    elif code in _VALUES:
        stack.append(argument)
    elif code == "MARK":
        stack.append(_MARK)
    elif code in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"):
        stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}[code]())
    elif code in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif code in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
        memo[len(memo) if argument is None else argument] = stack[-1]
    elif code in ("TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(tuple(_taken(stack, int(code[-1]))))
    elif code == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif code in ("GLOBAL", "STACK_GLOBAL"):
        stack.append(_Name(".".join(_taken(stack, 2)) if argument is None else argument.replace(" ", ".")))
    elif code == "BINPERSID":
        stack.append(_Thing(_Name("storage"), stack.pop()))
    elif code in ("REDUCE", "NEWOBJ"):
        name, arguments = _taken(stack, 2)
        stack.append(_Thing(name, arguments))
    elif code == "BUILD":
        state = stack.pop()
        stack[-1].state = state
    elif code in ("SETITEM", "SETITEMS"):
        pairs = _taken(stack, 2) if code == "SETITEM" else _since_mark(stack)
        target = stack[-1].items if isinstance(stack[-1], _Thing) else stack[-1]
        target.update(zip(pairs[::2], pairs[1::2], strict=True))
    elif code in ("APPEND", "APPENDS", "ADDITEMS"):
        values = _taken(stack, 1) if code == "APPEND" else _since_mark(stack)
        if isinstance(stack[-1], list):
            stack[-1].extend(values)
    else:
        raise UnsupportedModel(f"{path}: its pickle uses {code}, which torch.save does not write for weights")


def _taken(stack: list[Any], n: int) -> list[Any]:
    values = [stack.pop() for _ in range(n)]
    return values[::-1]


def _since_mark(stack: list[Any]) -> list[Any]:
    values = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]


def _tensors(value: Any, name: str, archive: zipfile.ZipFile, root: str, path: Path, depth: int = 0) -> Any:
    """Pairs of name and tensor below a value: of a dictionary, of a module's parameters, buffers and children."""
    if depth > 100:
        raise UnsupportedModel(f"{path}: modules nest deeper than 100 at {name[:80]!r}")
    if isinstance(value, _Thing) and value.name.path.startswith("torch._utils._rebuild_parameter"):
        value = value.arguments[0]
    if isinstance(value, _Thing) and value.name.path == "torch._utils._rebuild_tensor_v2":
        yield name, _tensor(value.arguments, name, archive, root, path)
        return
    children: dict[Any, Any] = {}
    if isinstance(value, dict):
        children = value
    elif isinstance(value, _Thing) and value.name.path == "collections.OrderedDict":
        children = value.items
    elif isinstance(value, _Thing) and isinstance(value.state, dict):
        for kind in ("_parameters", "_buffers", "_modules"):
            inner = value.state.get(kind)
            children = {**children, **(inner.items if isinstance(inner, _Thing) else inner or {})}
    for key, child in children.items():
        if isinstance(key, str):
            yield from _tensors(child, f"{name}.{key}" if name else key, archive, root, path, depth + 1)


def _tensor(arguments: Any, name: str, archive: zipfile.ZipFile, root: str, path: Path) -> Tensor:
    try:
        storage, offset, size, stride = arguments[:4]
        _, kind, key, _, count = storage.arguments
        dtype = _TYPES[kind.path.removeprefix("torch.")]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UnsupportedModel(f"{path}: {name} is no tensor of plain numbers: {error}") from error
    try:
        data = archive.read(f"{root}data/{key}")
    except (KeyError, RuntimeError, zipfile.BadZipFile) as error:
        raise CorruptedFile(f"{path}: the numbers of {name} are missing: {error}") from error
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else -1
    if len(data) != count * dtype.itemsize or min(0, offset, *size, *stride) < 0 or last >= count:
        raise CorruptedFile(f"{path}: {name} wants {count} numbers of {dtype}, the file has {len(data)} bytes")
    if not count:
        return torch.zeros(size, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).as_strided(size, stride, offset).contiguous().clone()
