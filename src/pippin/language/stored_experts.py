"""Experts that stay in storage: where each one lies in the files of its model, or in a file that is written for them.

Notable here:
- a matrix that lies in one piece, in a form that the kernels pack, is read from where it is: no second copy on disk
- experts in other layouts (transposed, interleaved, to be quantized) are packed once into one file of the cache; beside
  it is written last what is where, with a checksum for each expert
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from pippin.core import native
from pippin.core.direct_file import BLOCK
from pippin.core.errors import CorruptedFile
from pippin.core.files import atomic_write, format_bytes, make_folder, require_free_space
from pippin.core.formats.checkpoint import read_json
from pippin.core.progress import bar
from pippin.language.decoder import Decoder
from pippin.nn.feedforward.feedforward import FeedForward, MixtureOfExperts
from pippin.nn.quantization.packed import NativeWeight, packed_size

PARTS: Final = ("gate", "up", "down")
"""The matrices of an expert, in the order in which they lie in memory."""
_ALIGNMENT: Final = 64
_CONTENTS: Final = "experts.json"


@dataclass(frozen=True)
class FileMatrix:
    """A matrix in a file, packed for the kernels or in a form that they pack.

    Attributes:
        path: the file.
        offset: where it begins.
        nbytes: its size there.
        rows: number of outputs.
        columns: number of inputs.
        form: number of the packed format in the C interface.
        kind: ggml's name of its type in the file ("F32" and "BF16" for matrices that are not in blocks); None if it is
            packed already.
        group: inputs that share a scale, in Pippin's formats; 0 for other formats.
        zero: the code that represents 0, in Pippin's formats.
    """

    path: Path
    offset: int
    nbytes: int
    rows: int
    columns: int
    form: int
    kind: str | None = None
    group: int = 0
    zero: float = 0.0

    @property
    def packed_bytes(self) -> int:
        """Bytes in memory, rounded up to where the next matrix may begin."""
        return _rounded(packed_size(self.form, self.rows, self.columns, self.group))

    def described(self, address: int | None) -> native.NativeMatrix:
        """The matrix for the library, at an address or nowhere."""
        return native.NativeMatrix(self.form, self.group, self.rows, self.columns, self.zero, 0, address)

    def pack(self, stored: memoryview, address: int) -> None:
        """Pack the bytes of the file to an address."""
        found = native.library()
        assert found is not None
        source = np.frombuffer(stored, dtype=np.uint8)
        if self.kind is None:
            ctypes.memmove(address, source.ctypes.data, self.nbytes)
        elif self.kind in ("F32", "BF16"):
            found.pack_dense(self.form, source.ctypes.data, self.columns, self.rows, self.columns, address)
        else:
            found.pack_ggml(self.form, source.ctypes.data, self.rows, self.columns, address)


@dataclass(frozen=True)
class FileExpert:
    """An expert in a file.

    Attributes:
        parts: its matrices by `PARTS`; without a gate where it has none.
        checksum: CRC-32 of all its bytes in the file; None if there is none to compare with.
    """

    parts: Mapping[str, FileMatrix]
    checksum: int | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes in memory."""
        return sum(part.packed_bytes for part in self.parts.values())


FileExperts = Sequence[Sequence[FileExpert]]
"""Of each mixture of a model, in the order of the layers, all experts."""


ExpertNames = Sequence[Sequence[Mapping[str, str]]]
"""Of each mixture and each expert the names of its matrices, by `PARTS`."""


def expert_names(module: Decoder) -> ExpertNames:
    """The names of all experts of a decoder."""

    def parts(prefix: str, expert: FeedForward) -> dict[str, str]:
        found = {part: getattr(expert, f"{part}_proj") for part in PARTS}
        return {part: f"{prefix}.{part}_proj.weight" for part, linear in found.items() if linear is not None}

    return [
        [parts(f"{name}.experts.{index}", expert) for index, expert in enumerate(mixture.experts)]  # type: ignore[arg-type]
        for name, mixture in module.named_modules()
        if isinstance(mixture, MixtureOfExperts)
    ]


def in_place(names: ExpertNames, find: Callable[[str], FileMatrix | None]) -> FileExperts | None:
    """The experts where they lie in the files of their model; None if one of them does not lie there in one piece.

    Args:
        names: of all experts.
        find: where a matrix lies.
    """
    found = []
    for layer in names:
        experts = []
        for expert in layer:
            places = {part: find(name) for part, name in expert.items()}
            there = {part: place for part, place in places.items() if place is not None}
            if len(there) < len(places):
                return None
            experts.append(FileExpert(there))
        found.append(experts)
    return found


def write(folder: Path, names: ExpertNames, packed: Callable[[str], NativeWeight], total: int) -> FileExperts:
    """Write a folder with all experts, packed; one that is there is read instead.

    Args:
        folder: its name tells it from that of any other model or packing.
        names: of all experts.
        packed: reads and packs a matrix.
        total: bytes of all experts.

    Raises:
        DiskFull: there is no room for them; nothing is left behind.
        InvalidInput: the folder cannot be written to.
        CorruptedFile: what is there is damaged.
    """
    if not (folder / _CONTENTS).exists():
        require_free_space(folder, total)
        path = make_folder(folder) / "experts.bin"
        what = f"packing {format_bytes(total)} of experts into {path}, once"
        with bar(sum(map(len, names)), what, unit="experts") as shown, atomic_write(path) as file:
            written = []
            for layer in names:
                written.append([_append(file, path, expert, packed) for expert in layer])
                shown.advance(len(layer))
        with atomic_write(folder / _CONTENTS, mode="w") as file:
            json.dump({"bytes": path.stat().st_size, "experts": written}, file)
    return _read(folder)


def _append(
    file: IO[bytes], path: Path, expert: Mapping[str, str], packed: Callable[[str], NativeWeight]
) -> dict[str, Any]:
    """Write an expert at the end of a file; return what `_read` needs of it."""
    file.write(bytes(-file.tell() % BLOCK))
    parts: dict[str, Any] = {}
    checksum = 0
    for part, name in expert.items():
        weight = packed(name)
        shape, data = (weight.rows, weight.columns, weight.format), weight.data.numpy().data
        place = FileMatrix(path, file.tell(), len(data), *shape, None, weight.group, weight.matrix.zero)
        parts[part] = asdict(place) | {"path": path.name}
        checksum = zlib.crc32(data, checksum)
        file.write(data)
    return {"parts": parts, "checksum": checksum}


def _read(folder: Path) -> FileExperts:
    """The experts of a folder that `write` wrote."""
    contents = read_json(folder / _CONTENTS)

    def matrix(entry: dict[str, Any]) -> FileMatrix:
        return FileMatrix(**(entry | {"path": folder / entry["path"]}))

    def expert(entry: dict[str, Any]) -> FileExpert:
        return FileExpert({part: matrix(each) for part, each in entry["parts"].items()}, entry["checksum"])

    try:
        if (folder / "experts.bin").stat().st_size != contents["bytes"]:
            raise ValueError(f"experts.bin does not have {contents['bytes']:,} bytes")
        return [[expert(each) for each in layer] for layer in contents["experts"]]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CorruptedFile(f"{folder} is damaged ({error}); delete it, and it is written anew") from error


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
