"""Quantised matrices in a folder: found by their headers, read one by one.

Notable here:
- `config.json` says in its "quantization_config" how each matrix is stored; the weights hold `NAME.codes` (32-bit
  words) and `NAME.scales` of a matrix on a grid, `NAME.indices` and `NAME.tables` of one that points into tables
- shapes are known from the headers, so that a folder is compared with its configuration before a weight is touched

Written by `pippin.language.quantised.save_quantised`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core.checkpoint import Checkpoint
from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.nn.codes import Codes, native_group, words_of
from pippin.nn.packed import BITS
from pippin.nn.palette import Palette

METHOD: Final = "pippin"
PARTS: Final = {"codes": ("codes", "scales"), "palette": ("indices", "tables")}


@dataclass(frozen=True)
class StoredMatrix:
    """One quantised matrix of a folder, not read yet.

    Args:
        folder: where it is.
        stem: its name in the file, without ".weight".
        entry: what `config.json` says about it, checked by `stored_matrices`.
    """

    folder: Checkpoint
    stem: str
    entry: dict[str, Any]

    @property
    def parts(self) -> tuple[str, str]:
        """Names of its tensors: words, then scales or tables."""
        words, values = PARTS[self.entry["form"]]
        return f"{self.stem}.{words}", f"{self.stem}.{values}"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.folder.shape(self.parts[0])[0], self.entry["columns"]

    @property
    def kind(self) -> str:
        """How it may be kept in memory: "INT2/64" for two bits in groups of 64; empty where the kernels have no form.

        The group is the kernels': a scale of more inputs is repeated.
        """
        if self.entry["form"] != "codes":
            return ""
        group = native_group(self.entry["columns"] // self.folder.shape(self.parts[1])[1])
        return f"INT{self.entry['bits']}/{group}" if group else ""

    def read(self) -> Codes | Palette:
        """The matrix as it is stored.

        Raises:
            CorruptedFile: tensors that contradict each other.
        """
        words, values = (self.folder.tensor(name) for name in self.parts)
        bits, columns = self.entry["bits"], self.entry["columns"]
        try:
            if self.entry["form"] == "codes":
                return Codes.from_words(words, values.clone(), bits, columns, float(self.entry["zero"]))
            indices = Codes.from_words(words, torch.ones(1, 1).half(), bits, columns, 0.0).codes
            return Palette(indices, values.clone(), bits, self.entry["axis"], self.entry["group"])
        except InvalidArgument as error:
            raise CorruptedFile(f"{self.folder.folder}: {self.stem} cannot be read: {error}") from error

    def dense(self) -> Tensor:
        """The weights that are meant, float32."""
        return self.read().dense()


def stored_matrices(folder: Checkpoint) -> dict[str, StoredMatrix]:
    """The quantised matrices of a folder, by their names in the file without ".weight"; none of an ordinary one.

    Raises:
        UnsupportedModel: weights quantised by another method, or in a form that this version does not know.
        CorruptedFile: the configuration contradicts itself or the tensors.
    """
    if "quantization_config" not in folder.config:
        return {}
    described = folder.config["quantization_config"]
    method = described.get("quant_method", "unknown") if isinstance(described, dict) else "unknown"
    if method != METHOD:
        raise UnsupportedModel(
            f"{folder.folder} holds weights quantised by {method}; take the unquantised folder or a GGUF file"
        )
    weights = described.get("weights")
    if not isinstance(weights, dict):
        raise CorruptedFile(f"{folder.folder}: quantization_config has no 'weights'; save the model again")
    held = set(folder.names())
    found = {}
    for stem, entry in weights.items():
        _check_entry(folder, stem, entry)
        found[stem] = StoredMatrix(folder, stem, entry)
        if missing := [name for name in found[stem].parts if name not in held]:
            raise CorruptedFile(f"{folder.folder} lacks {missing[0]!r}, which its quantization_config names")
        words, values = (folder.shape(name) for name in found[stem].parts)
        per_row = words_of(entry["columns"], entry["bits"])
        whole = entry["form"] != "codes" or (len(values) == 2 and values[1] and entry["columns"] % values[1] == 0)
        if len(words) != 2 or words[1] != per_row or not whole:
            raise CorruptedFile(
                f"{folder.folder}: {stem} has words of shape {words} and values of shape {values}, which are no matrix "
                f"of {entry['columns']} columns at {entry['bits']} bits"
            )
    return found


def _check_entry(folder: Checkpoint, stem: str, entry: object) -> None:
    if not isinstance(entry, dict) or entry.get("form") not in PARTS:
        form = entry.get("form") if isinstance(entry, dict) else entry
        raise UnsupportedModel(f"{folder.folder}: {stem} is stored in the form {form!r}; known: {', '.join(PARTS)}")
    bits, columns = entry.get("bits"), entry.get("columns")
    sound = bits in BITS and isinstance(columns, int) and columns > 0
    if entry["form"] == "codes":
        sound = sound and isinstance(entry.get("zero"), int | float)
    else:
        sound = sound and entry.get("axis") in ("rows", "columns") and isinstance(entry.get("group"), int)
    if not sound:
        raise CorruptedFile(f"{folder.folder}: what quantization_config says of {stem} is no such matrix: {entry}")
