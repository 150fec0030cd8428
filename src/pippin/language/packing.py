"""How the weights of a model are kept in memory: which stay ordinary tensors, which are packed, and in what format.

Notable here:
- decided from names, shapes and types alone, so that the bytes are known before a weight is touched
- a weight that a file holds in a format that the native kernels read stays as it is stored, unless a precision was
  asked for
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from pippin.core import device as devices, native
from pippin.core.errors import InvalidArgument
from pippin.language.transformer import Decoder
from pippin.nn.embedding import Embedding
from pippin.nn.linear import Linear, OneDNNWeight
from pippin.nn.packed import BITS, packed_size
from pippin.nn.triton_matvec import TritonWeight

# The embedding, and the output matrix with it, is never cut below this many bits: every token passes through both.
_EMBEDDING_BITS: Final = 4
PRECISIONS: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Packing:
    """What becomes of the weights of one model; made by `choose_packing`.

    Args:
        device: where they go.
        precision: of ordinary tensors, and so of activations.
        native: whether matrices are packed for the native kernels.
        dense: the format of matrices that have no other, "F32" or "BF16".
        keep: whether what a file stores in a format of the kernels (ggml's or ours) stays as it is.
        bits: the width of our own formats, where matrices are quantised to them (for the native kernels, or for those
            of the GPU); else None.
        fused: whether matrices are packed by other means (oneDNN).
    """

    device: torch.device
    precision: torch.dtype
    native: bool = False
    dense: str = "BF16"
    keep: bool = False
    bits: int | None = None
    fused: bool = False

    @property
    def cache_precision(self) -> torch.dtype:
        """Precision of keys and values, where nothing else is asked for."""
        if not self.native:
            return self.precision
        return torch.float32 if self.dense == "F32" and self.bits is None else torch.bfloat16

    def format(self, owner: nn.Module, name: str, kind: str | None) -> int | None:
        """The number of the format that a tensor is packed in; None for an ordinary tensor.

        Args:
            owner: the module that it belongs to.
            name: by us.
            kind: the type that it is stored in: ggml's name, or ours ("INT2/64"); None in other files.
        """
        if not (self.native or self.bits) or not isinstance(owner, Linear | Embedding) or not name.endswith(".weight"):
            return None
        if name.endswith(".mlp.gate.weight"):  # a router, which chooses between experts: small, and kept exact
            return None
        if self.bits is not None:
            outer = name.partition(".")[0] in ("embed_tokens", "lm_head")
            return native.GROUP_FORMATS[max(self.bits, _EMBEDDING_BITS) if outer else self.bits]
        if self.keep and kind in native.GGML_FORMATS:
            return native.GGML_FORMATS[kind]
        if self.keep and (stored := stored_kind(kind)) is not None:
            return native.GROUP_FORMATS[stored[0]]
        return native.GGML_FORMATS[self.dense]

    def nbytes(self, module: Decoder, kinds: Mapping[str, str]) -> int:
        """Bytes of a decoder (without memory, with all its parameters) once it is loaded in this way.

        Raises:
            InvalidArgument: matrices that groups of 32 do not divide, where they were to be quantised.
        """
        total = 0
        for name, parameter in module.named_parameters():
            owner = module.get_submodule(name.rpartition(".")[0])
            form = self.format(owner, name, kinds.get(name))
            if form is None:
                total += parameter.numel() * self.precision.itemsize
            else:
                rows, columns = parameter.shape
                group = group_of(name, columns) if self.bits else (stored_kind(kinds.get(name)) or (0, 0))[1]
                group = group if form in native.GROUP_FORMATS.values() else 0
                size = packed_size if self.native else _triton_size
                total += size(form, rows, columns, group)
        return total + self._second_copy(module)

    def _second_copy(self, module: Decoder) -> int:
        """Bytes of a tied output matrix, which oneDNN wants in a layout of its own."""
        head = module.lm_head.weight
        tied = head is not None and head is module.embed_tokens.weight
        packed = self.fused and OneDNNWeight.supports(torch.empty(0, dtype=self.precision))
        return head.numel() * self.precision.itemsize if head is not None and tied and packed else 0


def choose_packing(dtype: str, device: torch.device, *, bits: int | None = None, pack: bool = True) -> Packing:
    """How `load` keeps weights, for its arguments.

    Raises:
        InvalidArgument: an unknown precision or number of bits, or bits where nothing computes with them.

    >>> choose_packing("bfloat16", torch.device("cpu"), pack=False).precision
    torch.bfloat16
    """
    if dtype != "auto" and dtype not in PRECISIONS:
        raise InvalidArgument(f"dtype is {dtype!r}; choose auto, {', '.join(PRECISIONS)}")
    if bits is not None:
        _check_bits(bits, dtype, device, pack)
    on_cpu = device.type == "cpu"
    if on_cpu and pack and dtype != "float16" and native.library() is not None:
        dense = "F32" if dtype == "float32" else "BF16"
        return Packing(device, torch.float32, native=True, dense=dense, keep=dtype == "auto", bits=bits)
    if dtype == "auto":
        fast = not on_cpu or devices.has_fast_bf16()
        return Packing(device, torch.bfloat16 if pack and fast else torch.float32, bits=bits, fused=pack and on_cpu)
    return Packing(device, PRECISIONS[dtype], bits=bits, fused=pack and on_cpu)


def _check_bits(bits: int, dtype: str, device: torch.device, pack: bool) -> None:
    if bits not in BITS:
        raise InvalidArgument(f"bits is {bits!r}; choose one of {', '.join(map(str, BITS))}, or None")
    if not pack:
        raise InvalidArgument(f"bits={bits} packs the weights, which pack=False forbids; leave one of them out")
    if device.type == "cpu" and dtype == "float16":
        raise InvalidArgument(f"bits={bits} computes in float32 on a CPU; leave dtype={dtype!r} out")
    if device.type == "cpu" and native.library() is None:
        raise InvalidArgument(f"bits={bits} needs the native kernels: {native.why_not()}")
    if device.type == "cuda" and (missing := TritonWeight.missing()) is not None:
        raise InvalidArgument(f"bits={bits} cannot be computed on {device}: {missing}")
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"bits={bits} has kernels for the CPU and for CUDA, not for {device}")


def stored_kind(kind: str | None) -> tuple[int, int] | None:
    """Bits and group of a matrix that a file holds in one of our own formats; None for all else.

    >>> stored_kind("INT2/64"), stored_kind("Q4_0")
    ((2, 64), None)
    """
    if not kind or not kind.startswith("INT"):
        return None
    bits, _, group = kind.removeprefix("INT").partition("/")
    return int(bits), int(group)


def group_of(name: str, columns: int) -> int:
    """How many inputs share a scale in a weight of our own formats: 64, or 32 where those do not divide it.

    Raises:
        InvalidArgument: 32 do not divide it either.
    """
    for group in (64, 32):
        if columns % group == 0:
            return group
    raise InvalidArgument(
        f"{name} has rows of {columns} weights, which groups of 32 do not divide; load the model without bits"
    )


def _triton_size(form: int, rows: int, columns: int, group: int) -> int:
    """Bytes of a weight of our own formats on a GPU, where 3 bits take the room of 4."""
    bits = next(bits for bits, number in native.GROUP_FORMATS.items() if number == form)
    return rows * (columns * (4 if bits == 3 else bits) // 8 + columns // group * 2)
