"""Memory-mapped GGUF files: metadata as a dictionary, tensors as views or dequantized.

Notable here:
- the file is mapped, never copied; `raw` returns bytes of a tensor, `dequantize` its values
- a model in several parts is opened by any of them; each part is a file of its own, whose header is checked alike
- nothing in the file is trusted: every count, length and offset is checked against the file size before it is used,
  so a damaged or hostile file uses no more memory than its own size and raises `CorruptedFile`
- parsing a vocabulary of 49,000 tokens and as many merges takes 0.1 seconds

Source: the GGUF specification, ggml-org/ggml docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core import memory
from pippin.core.errors import CheckpointError, CorruptedFile, ModelNotFound, UnsupportedModel
from pippin.core.formats.ggml_quants import FORMATS, BlockFormat, dequantize_blocks
from pippin.core.formats.gguf_parts import part_names

T = TypeVar("T")

# Ten times the header of the largest vocabularies in use; bounds the work that a hostile file can cause.
_MAX_HEADER = 128 << 20
_MAX_ELEMENTS = 1 << 23
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
_LISTED = 5  # files that a message names

_STRING, _ARRAY = 8, 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRUCTS: Final = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """Location and type of one tensor.

    ``shape`` is in torch's order (the last dimension is contiguous), ``type`` is ggml's name such as "Q4_1",
    ``offset`` is in bytes from the start of the file, ``part`` is the index of the file among those of the model.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    part: int = 0


class GGUFFile:
    """An open GGUF model; `open_gguf` creates it. It is unmapped when the last tensor that views it is freed.

    Args:
        path: its file, the first of several.
        parts: the bytes of each file.
        metadata: those of the first file.
        tensors: by name, of all files.
    """

    def __init__(
        self, path: Path, parts: list[Tensor], metadata: dict[str, Any], tensors: dict[str, GGUFTensor]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._parts = parts

    def __repr__(self) -> str:
        return f"GGUFFile({self.path.name!r}, {len(self.tensors)} tensors)"

    @property
    def architecture(self) -> str:
        """The model family by ggml's name, e.g. "llama".

        Raises:
            CorruptedFile: the metadata lacks it.
        """
        return self.get("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The metadata value of ``key``, checked to be of type ``kind`` (int is accepted for float).

        Raises:
            CorruptedFile: the key is missing and there is no default, or its value has another type.
        """
        return metadata_value(self.metadata, key, kind, default, str(self.path))

    def raw(self, name: str) -> UInt8[Tensor, "*rows row_bytes"]:
        """The bytes of a tensor as stored in the file, in rows of the last dimension; a view, not a copy.

        Raises:
            CorruptedFile: the file has no tensor of this name.
        """
        tensor = self._find(name)
        data = self._parts[tensor.part]
        return data[tensor.offset : tensor.offset + tensor.nbytes].view(*tensor.shape[:-1], -1)

    def dequantize(self, name: str, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*shape"]:
        """The values of a tensor in torch's order of dimensions, as a new tensor.

        They are computed in float32 exactly as in ggml and rounded once to ``dtype``.

        Raises:
            CorruptedFile: the file has no tensor of this name.
            UnsupportedModel: the tensor's type cannot be dequantized here.
        """
        return self.decode(name, self.raw(name), dtype)

    def decode(self, name: str, rows: UInt8[Tensor, "*rows row_bytes"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
        """The values of some rows of a tensor, as `dequantize`.

        Args:
            name: the tensor.
            rows: some of its `raw` rows.
            dtype: precision of the values.
        """
        tensor = self._find(name)
        block = next(each for each in FORMATS.values() if each.name == tensor.type)
        values = dequantize_blocks(rows.reshape(-1, block.nbytes), tensor.type, dtype)
        return values.view(*rows.shape[:-1], tensor.shape[-1])

    def begin(self, name: str) -> tuple[Path, int]:
        """The file that holds a tensor, and the offset at which it begins.

        Raises:
            CorruptedFile: the file has no tensor of this name.
        """
        tensor = self._find(name)
        path = self.path if len(self._parts) == 1 else self.path.with_name(part_names(self.path.name)[tensor.part])
        return path, tensor.offset

    def release(self) -> None:
        """Drop the pages of the files from this process's memory; they are read again on access."""
        for data in self._parts:
            memory.forget(data.data_ptr(), data.nbytes)

    def _find(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise CorruptedFile(f"{self.path}: no tensor named {name!r} among its {len(self.tensors)}")
        return self.tensors[name]


def metadata_value(metadata: Mapping[str, Any], key: str, kind: type[T], default: T | None, where: str) -> T:
    """A metadata value, checked to be of type ``kind`` (int is accepted for float).

    Args:
        metadata: all pairs.
        key: the key.
        kind: the type.
        default: what is returned where the key is missing; None if it must be there.
        where: the file, for messages.

    Raises:
        CorruptedFile: the key is missing and there is no default, or its value has another type.
    """
    if key not in metadata:
        if default is None:
            raise CorruptedFile(f"{where}: the metadata lacks {key!r}, which this model needs")
        return default
    value = metadata[key]
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CorruptedFile(f"{where}: metadata {key!r} is {value!r:.80}, expected {kind.__name__}")
    return value


def open_gguf(path: str | Path) -> GGUFFile:
    """Map a GGUF model and parse its header; weights are not read.

    Args:
        path: a file in GGUF version 2 or 3, little endian; of a model in several parts any of them.

    Raises:
        ModelNotFound: there is no such file, or parts of the model are missing; the message names them.
        CorruptedFile: a file is not GGUF, truncated, or contradicts itself or the other parts; the message says where.
        UnsupportedModel: another version, big endian, an unknown tensor type, or parts under names of their own.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}; give the path of a .gguf file")
    data, metadata, tensors = _map(path)
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return GGUFFile(path, [data], metadata, tensors)
    names = part_names(path.name)
    if len(names) != count:
        raise UnsupportedModel(
            f"{path}: one of {count!r:.20} parts of a model, but its name is not NAME-00001-of-N.gguf with the number "
            "of parts; give the parts the names that llama-gguf-split gives them"
        )
    paths = [path.with_name(name) for name in names]
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise ModelNotFound(f"{path}: of {count} parts of the model are missing: {', '.join(missing[:_LISTED])}{more}")
    return _join(paths)


def _map(path: Path) -> tuple[Tensor, dict[str, Any], dict[str, GGUFTensor]]:
    """The bytes, the metadata and the tensors of one file."""
    size = path.stat().st_size
    if size < 24:
        raise CorruptedFile(f"{path}: {size} bytes is too short for a GGUF file; download it again")
    try:
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be mapped into memory: {error}") from error
    metadata, tensors = _Header(path, data.numpy().data).read()
    return data, metadata, tensors


def _join(paths: list[Path]) -> GGUFFile:
    """A model of several parts, whose headers are compared."""
    joined = GGUFFile(paths[0], [], {}, {})
    for index, path in enumerate(paths):
        data, metadata, tensors = _map(path)
        joined.metadata = joined.metadata or metadata
        told = [metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count")]
        wanted = [index, len(paths), joined.metadata.get("split.tensors.count")]
        kind = metadata.get("general.architecture", joined.metadata.get("general.architecture"))
        if told != wanted or kind != joined.metadata.get("general.architecture"):
            raise CorruptedFile(
                f"{path}: not of the model of {paths[0].name}: number, parts and tensors are {told!r:.60}, expected "
                f"{wanted!r:.60}; its architecture is {kind!r:.40}; download the parts of one model"
            )
        if twice := tensors.keys() & joined.tensors.keys():
            raise CorruptedFile(f"{path}: tensor {min(twice)!r} lies in an earlier part too; download the parts again")
        joined.tensors |= {name: replace(tensor, part=index) for name, tensor in tensors.items()}
        joined._parts.append(data)
    if len(joined.tensors) != wanted[2]:
        raise CorruptedFile(
            f"{paths[0]}: the parts hold {len(joined.tensors)} tensors, but the model has {wanted[2]!r:.20}; "
            "download them again"
        )
    return joined


class _Header:
    """A parser of the header that checks every length before it reads."""

    def __init__(self, path: Path, buffer: memoryview) -> None:
        self.path = path
        self.buffer = buffer
        self.end = min(len(buffer), _MAX_HEADER)
        self.at = 0  # byte offset of the next read
        self.elements = 0  # array elements parsed so far

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        tensor_count, pair_count = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._corrupted(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number(4), key)
        infos: dict[str, tuple[tuple[int, ...], BlockFormat, int]] = {}
        for _ in range(tensor_count):
            name, info = self._tensor()
            if name in infos:
                raise self._corrupted(f"tensor {name!r} appears twice")
            infos[name] = info
        return metadata, self._place(infos, metadata.get("general.alignment", 32))

    def _preamble(self) -> tuple[int, int]:
        if bytes(self.buffer[:4]) != b"GGUF":
            raise CorruptedFile(f"{self.path}: not a GGUF file: it begins with {bytes(self.buffer[:4])!r}")
        self.at = 4
        version = self._number(4)
        if version & 0xFFFF == 0:
            raise UnsupportedModel(f"{self.path}: a big-endian GGUF file; convert it with gguf_convert_endian.py")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path}: GGUF version {version}; versions 2 and 3 are supported")
        tensor_count, pair_count = self._number(10), self._number(10)
        # The minimum sizes of a tensor entry (24 bytes) and a metadata pair (13 bytes).
        if 24 * tensor_count + 13 * pair_count > self.end - self.at:
            raise self._corrupted(f"{tensor_count} tensors and {pair_count} metadata pairs cannot fit")
        return tensor_count, pair_count

    def _tensor(self) -> tuple[str, tuple[tuple[int, ...], BlockFormat, int]]:
        name = self._string("a tensor name")
        dimensions = self._number(4)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._corrupted(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number(10) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise self._corrupted(f"tensor {name!r} of shape {shape} is empty")
        number, offset = self._number(4), self._number(10)
        if number not in FORMATS:
            raise UnsupportedModel(f"{self.path}: tensor {name!r} is of ggml type {number}, which is unknown here")
        return name, (shape, FORMATS[number], offset)

    def _place(
        self, infos: dict[str, tuple[tuple[int, ...], BlockFormat, int]], alignment: Any
    ) -> dict[str, GGUFTensor]:
        """Compute the file offsets of all tensors; the data start at the next multiple of the alignment."""
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise self._corrupted(f"general.alignment is {alignment!r}, expected a power of two from 8")
        start = -(-self.at // alignment) * alignment
        tensors = {}
        for name, (shape, block, offset) in infos.items():
            if shape[-1] % block.size:
                raise self._corrupted(f"tensor {name!r}: rows of {shape[-1]} weights are not whole {block.name} blocks")
            nbytes = prod(shape) // block.size * block.nbytes
            if offset % alignment:
                raise self._corrupted(f"tensor {name!r}: offset {offset} is not a multiple of {alignment}")
            if start + offset + nbytes > len(self.buffer):
                raise CorruptedFile(
                    f"{self.path}: truncated: tensor {name!r} ends at byte {start + offset + nbytes}, "
                    f"the file at {len(self.buffer)}; download it again"
                )
            tensors[name] = GGUFTensor(name, shape, block.name, start + offset, nbytes)
        return tensors

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _STRUCTS:
            return self._number(kind)
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind != _ARRAY or depth == _MAX_NESTING:
            raise self._corrupted(f"metadata {key!r} has a value of unknown type {kind}")
        kind, count = self._number(4), self._number(10)
        self.elements += count
        if self.elements > _MAX_ELEMENTS:
            raise self._corrupted(f"metadata {key!r} brings the arrays to {self.elements} elements")
        if kind in _STRUCTS:
            self._require(count * _STRUCTS[kind].size, f"the {count} numbers of {key!r}")
            values = list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.buffer, self.at))
            self.at += count * _STRUCTS[kind].size
            return values
        if kind == _STRING:
            return self._strings(count, key)
        return [self._value(kind, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[str]:
        """Parse an array of strings in a single loop, since it takes most of the time of a header."""
        self._require(8 * count, f"the {count} strings of {key!r}")
        length_at: Callable[[memoryview, int], tuple[int]] = _LENGTH.unpack_from
        values, at, end, buffer = [], self.at, self.end, self.buffer
        for _ in range(count):
            if at + 8 > end:
                raise self._corrupted(f"the strings of {key!r} run past the end")
            start = at + 8
            at = start + length_at(buffer, at)[0]
            if at > end:
                raise self._corrupted(f"the strings of {key!r} run past the end")
            values.append(bytes(buffer[start:at]))
        self.at = at
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError as error:
            raise self._corrupted(f"a string of {key!r} is not UTF-8: {error.object!r:.60}") from error

    def _string(self, what: str) -> str:
        length = self._number(10)
        self._require(length, what)
        value = bytes(self.buffer[self.at : self.at + length])
        self.at += length
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise self._corrupted(f"{what} is not UTF-8: {value!r:.60}") from error

    def _number(self, kind: int) -> Any:
        """Read one number of GGUF's value type ``kind`` (4: uint32, 10: uint64)."""
        layout = _STRUCTS[kind]
        self._require(layout.size, "a number")
        self.at += layout.size
        return layout.unpack_from(self.buffer, self.at - layout.size)[0]

    def _require(self, nbytes: int, what: str) -> None:
        if nbytes > self.end - self.at:
            raise self._corrupted(f"{what} of {nbytes} bytes runs past the end")

    def _corrupted(self, what: str) -> CorruptedFile:
        limit = "" if self.end == len(self.buffer) else f" (headers are limited to {_MAX_HEADER >> 20} MiB)"
        return CorruptedFile(f"{self.path}: damaged header at byte {self.at}: {what}{limit}; download the file again")
