"""Neurons of feed-forward layers that stay in storage: which layers have them, and the file that is written for them.

Notable here:
- what ReLU sets to zero needs no weights. The matrix whose sign decides it is resident, or predicted; of the others the
  row (or the column of the down matrix) of each neuron lies in one bundle, which one read brings
- a checksum for each block of the file, which is what reads consist of: a block is compared when it is read first
- a column of a matrix lies nowhere in one piece, so the file is written once, and beside it last what is where

Source: Alizadeh et al. 2024, arXiv:2312.11514, section 3.2 (row-column bundling).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal

import numpy as np
import torch
from jaxtyping import UInt32
from torch import Tensor

from pippin.core.direct_file import BLOCK
from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.core.files import atomic_write, format_bytes, make_folder, require_free_space
from pippin.core.formats.checkpoint import read_json
from pippin.core.progress import bar
from pippin.language.decoder import Decoder
from pippin.nn.feedforward.feedforward import FeedForward

RECTIFIERS: Final = ("relu", "relu2")
"""Activations that are exactly zero for half of their inputs."""
LEAST_NEURONS: Final = 128
"""Neurons of a layer whose room is always kept."""
PIECE: Final = 2_000_000
"""Bytes of bundles that are computed with at a time."""
NeuronDType = Literal["float32", "bfloat16"]
NUMBER_BYTES: Final[dict[NeuronDType, int]] = {"float32": 4, "bfloat16": 2}
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CONTENTS: Final = "neurons.json"
_FILE: Final = "neurons.bin"
_WRITTEN_AT_ONCE: Final = 8_000_000


@dataclass(frozen=True)
class NeuronLayer:
    """The neurons of one feed-forward layer in a file.

    Attributes:
        name: of the layer in its decoder.
        parts: the matrices of which a bundle has a row each ("gate", "up"; of "down" a column), in their order there.
        neurons: how many there are.
        width: numbers in each row.
        offset: where the first bundle begins in the file; 0 before it is written.
    """

    name: str
    parts: tuple[str, ...]
    neurons: int
    width: int
    offset: int = 0

    @property
    def numbers(self) -> int:
        """Elements of a bundle."""
        return len(self.parts) * self.width

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the matrices."""
        return tuple(f"{self.name}.{part}_proj.weight" for part in self.parts)


@dataclass(frozen=True)
class StoredNeurons:
    """A file of neurons.

    Attributes:
        path: the file.
        dtype: precision of its numbers.
        layers: in the order of the decoder.
        checksums: CRC-32 of each block of the file.
    """

    path: Path
    dtype: NeuronDType
    layers: tuple[NeuronLayer, ...]
    checksums: UInt32[np.ndarray, blocks] = field(compare=False, repr=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The precision in torch."""
        return _DTYPES[self.dtype]

    def bundle_bytes(self, layer: int) -> int:
        """Bytes of the bundle of a neuron."""
        return self.layers[layer].numbers * self.torch_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all bundles."""
        return sum(each.neurons * self.bundle_bytes(index) for index, each in enumerate(self.layers))


def is_sparse(layer: FeedForward) -> bool:
    """Whether a layer has neurons that ReLU sets to zero, and that no other layer was fused with."""
    spec = layer.spec
    unfused = layer.up_proj is not None
    return unfused and spec.activation in RECTIFIERS and spec.limit is None and not spec.activation_sparsity


def neuron_layers(module: Decoder, *, predicted: bool = False) -> tuple[NeuronLayer, ...]:
    """The layers of a decoder whose neurons can stay in storage; none where no layer has ReLU.

    Args:
        module: the decoder.
        predicted: whether a predictor tells which neurons fire, so that no matrix is resident; otherwise the gate of a
            gated layer is, and the up matrix of a plain one.
    """
    found = []
    for index, layer in enumerate(module.layers):
        part = getattr(layer, "mlp", None)
        if not isinstance(part, FeedForward) or not is_sparse(part):
            continue
        assert part.up_proj is not None
        parts = ("gate", "up", "down") if part.spec.gated else ("up", "down")
        stored = parts if predicted else parts[1:]
        found.append(NeuronLayer(f"layers.{index}.mlp", stored, part.spec.intermediate_size, part.up_proj.inputs))
    return tuple(found)


def stored_bytes(layers: Sequence[NeuronLayer], dtype: NeuronDType) -> int:
    """Bytes of the file of some layers, without its checksums."""
    return sum(_whole_blocks(layer.neurons * layer.numbers * _DTYPES[dtype].itemsize) for layer in layers)


def write_neurons(
    folder: Path,
    layers: Sequence[NeuronLayer],
    read: Callable[[str], Tensor],
    dtype: NeuronDType,
    *,
    release: Callable[[Sequence[str]], None] = lambda names: None,
) -> StoredNeurons:
    """Write a folder with the neurons of all layers; one that is there is read instead.

    Args:
        folder: its name tells it from that of any other model or precision.
        layers: from `neuron_layers`.
        read: reads a matrix by its name; called for one layer after the other.
        dtype: precision of the file.
        release: called with the names of matrices that are not needed any more.

    Raises:
        InvalidArgument: no layers.
        DiskFull: there is no room for them; nothing is left behind.
        InvalidInput: the folder cannot be written to.
        CorruptedFile: what is there is damaged.
    """
    if not layers:
        raise InvalidArgument(
            f"no layer has one of the activations {', '.join(RECTIFIERS)}, so none has sparse neurons"
        )
    if not (folder / _CONTENTS).exists():
        total = stored_bytes(layers, dtype)
        require_free_space(folder, total + total // BLOCK * 4)
        path = make_folder(folder) / _FILE
        what = f"packing {format_bytes(total)} of neurons into {path}, once"
        entries, checksums = [], []
        with bar(len(layers), what, unit="layers") as shown, atomic_write(path) as file:
            for layer in layers:
                offset = file.tell()
                checksums.append(_append(file, layer, read, _DTYPES[dtype]))
                entries.append({"name": layer.name, "parts": layer.parts, "neurons": layer.neurons})
                entries[-1] |= {"width": layer.width, "offset": offset}
                release(layer.names)
                shown.advance(1)
            table = np.concatenate(checksums).astype("<u4").tobytes()
            file.write(table)
        contents = {"bytes": path.stat().st_size, "dtype": dtype, "layers": entries}
        with atomic_write(folder / _CONTENTS, mode="w") as file:
            json.dump(contents | {"table": len(table), "checksum": zlib.crc32(table)}, file)
    return _read(folder)


def _append(
    file: IO[bytes], layer: NeuronLayer, read: Callable[[str], Tensor], dtype: torch.dtype
) -> UInt32[np.ndarray, blocks]:
    """Write the bundles of a layer, in whole blocks; return their checksums."""
    matrices = [read(name) for name in layer.names]
    rows = [each.T if part == "down" else each for part, each in zip(layer.parts, matrices, strict=True)]
    step, rest, found = max(1, _WRITTEN_AT_ONCE // (layer.numbers * 4)), b"", []
    for begin in range(0, layer.neurons, step):
        bundles = torch.stack([each[begin : begin + step].to(dtype) for each in rows], 1).contiguous()
        data = rest + bundles.view(torch.uint8).numpy().tobytes()
        if begin + step >= layer.neurons:
            data += bytes(-len(data) % BLOCK)
        whole = len(data) // BLOCK * BLOCK
        found += [zlib.crc32(data[at : at + BLOCK]) for at in range(0, whole, BLOCK)]
        file.write(data[:whole])
        rest = data[whole:]
    return np.array(found, dtype=np.uint32)


def _read(folder: Path) -> StoredNeurons:
    """The neurons of a folder that `write_neurons` wrote."""
    contents, path = read_json(folder / _CONTENTS), folder / _FILE

    def layer(entry: dict[str, Any]) -> NeuronLayer:
        return NeuronLayer(**(entry | {"parts": tuple(entry["parts"])}))

    try:
        if (size := path.stat().st_size) != contents["bytes"]:
            raise ValueError(f"{_FILE} has {size:,} bytes, not {contents['bytes']:,}")
        with path.open("rb") as file:
            file.seek(size - contents["table"])
            table = file.read()
        if zlib.crc32(table) != contents["checksum"]:
            raise ValueError("its table of checksums is damaged")
        layers = tuple(map(layer, contents["layers"]))
        return StoredNeurons(path, contents["dtype"], layers, np.frombuffer(table, dtype="<u4"))
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CorruptedFile(f"{folder} is damaged ({error}); delete it, and it is written anew") from error


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
