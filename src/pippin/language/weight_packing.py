"""The format of a model's weights in memory: which are ordinary tensors, which are packed, and in which format.

Notable here:
- it depends on names, shapes and types alone, so that the memory is known before a weight is read
- a weight that is stored in a format of the native kernels stays in it, unless a precision was requested
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import nn

from pippin.core import device as devices, native
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.core.files import format_bytes
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.linear import Linear
from pippin.nn.packed_layers import OneDNNWeight
from pippin.nn.quantization.packed import Bits, packed_size
from pippin.nn.triton.triton_matvec import TritonWeight

# Small matrices that are not quantized: routers of experts, and what decides how much a recurrence forgets and writes.
_EXACT: Final = (".mlp.gate.weight", ".recurrent.a_proj.weight", ".recurrent.b_proj.weight")
# Minimum bits of the embedding and the output matrix, which every token uses.
_EMBEDDING_BITS: Final = 4
_WITH_GROUPS: Final = (*native.GROUP_FORMATS.values(), *native.AFFINE_FORMATS.values())
DType = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Packing:
    """The format of one model's weights; created by `choose_packing`.

    Args:
        device: the device of the weights.
        dtype: precision of ordinary tensors, and so of activations.
        native: whether matrices are packed for the native kernels.
        dense: the default format of packed matrices, "F32" or "BF16".
        keep: whether weights that are stored in a format of the kernels (ggml's or Pippin's) stay in it.
        bits: bits to which matrices are quantized, for the native kernels or those of the GPU; None for no
            quantization.
        fused: whether matrices are packed for oneDNN.
    """

    device: torch.device
    dtype: torch.dtype
    native: bool = False
    dense: str = "BF16"
    keep: bool = False
    bits: Bits | None = None
    fused: bool = False

    @property
    def cache_dtype(self) -> torch.dtype:
        """Default precision of keys and values."""
        if not self.native:
            return self.dtype
        return torch.float32 if self.dense == "F32" and self.bits is None else torch.bfloat16

    def format(self, owner: nn.Module, name: str, kind: str | None) -> int | None:
        """The number of the format that a tensor is packed in; None for an ordinary tensor.

        Args:
            owner: the module that it belongs to.
            name: Pippin's name of the tensor.
            kind: the stored type: ggml's name, or Pippin's ("INT2/64", "AFFINE4/64"); None in other files.
        """
        if (
            not (self.native or self.bits)
            or not isinstance(owner, Linear | TokenEmbedding)
            or not name.endswith(".weight")
        ):
            return None
        if name.endswith(_EXACT):
            return None
        if self.bits is not None:
            outer = name.partition(".")[0] in ("embed_tokens", "lm_head", "per_layer")
            return native.GROUP_FORMATS[max(self.bits, _EMBEDDING_BITS) if outer else self.bits]
        if self.keep and kind in native.GGML_FORMATS:
            return native.GGML_FORMATS[kind]
        if self.keep and (stored := stored_kind(kind)) is not None:
            return stored[0]
        return native.GGML_FORMATS[self.dense]

    def nbytes(self, module: Decoder, kinds: Mapping[str, str]) -> int:
        """Bytes of a decoder (on the meta device) after loading with this packing.

        Raises:
            InvalidArgument: matrices to be quantized whose rows are not divisible by groups of 32.
        """
        return sum(self.sizes(module, kinds).values()) + self._second_copy(module)

    def sizes(self, module: Decoder, kinds: Mapping[str, str]) -> dict[str, int]:
        """Bytes of each weight of a decoder (on the meta device) after loading; errors as of `nbytes`."""
        found = {}
        for name, parameter in module.named_parameters():
            owner = module.get_submodule(name.rpartition(".")[0])
            form = self.format(owner, name, kinds.get(name))
            if form is None:
                found[name] = parameter.numel() * self.dtype.itemsize
                continue
            rows, columns = parameter.shape
            group = group_of(name, columns) if self.bits else (stored_kind(kinds.get(name)) or (0, 0))[1]
            size = packed_size if self.native else _triton_size
            found[name] = size(form, rows, columns, group if form in _WITH_GROUPS else 0)
        return found

    def cache_bytes(self, config: DecoderConfig, tokens: int = 1) -> int:
        """Bytes of the keys and values of some tokens, in the default precision."""
        elements = 2 * len(config.cached_layers) * config.num_key_value_heads * config.head_dim
        return elements * self.cache_dtype.itemsize * tokens

    def _second_copy(self, module: Decoder) -> int:
        """Bytes of a tied output matrix, of which oneDNN needs a copy in its own layout."""
        head = module.lm_head.weight
        tied = head is not None and head is module.embed_tokens.weight
        packed = self.fused and OneDNNWeight.supports(torch.empty(0, dtype=self.dtype))
        return head.numel() * self.dtype.itemsize if head is not None and tied and packed else 0


@checked
def choose_packing(dtype: DType, device: torch.device, *, bits: Bits | None = None, pack: bool = True) -> Packing:
    """The packing that `load` uses for its arguments.

    Raises:
        InvalidArgument: bits without kernels for them.

    >>> choose_packing("bfloat16", torch.device("cpu"), pack=False).dtype
    torch.bfloat16
    """
    if bits is not None:
        _check_bits(bits, dtype, device, pack)
    on_cpu = device.type == "cpu"
    if on_cpu and pack and dtype != "float16" and native.library() is not None:
        dense = "F32" if dtype == "float32" else "BF16"
        return Packing(device, torch.float32, native=True, dense=dense, keep=dtype == "auto", bits=bits)
    if dtype == "auto":
        fast = not on_cpu or devices.has_fast_bf16()
        return Packing(device, torch.bfloat16 if pack and fast else torch.float32, bits=bits, fused=pack and on_cpu)
    return Packing(device, DTYPES[dtype], bits=bits, fused=pack and on_cpu)


def _check_bits(bits: Bits, dtype: str, device: torch.device, pack: bool) -> None:
    if not pack:
        raise InvalidArgument(f"bits={bits} packs the weights, which pack=False forbids; leave one of them out")
    if device.type == "cpu" and dtype == "float16":
        raise InvalidArgument(f"bits={bits} computes in float32 on a CPU; leave dtype={dtype!r} out")
    if device.type == "cpu" and native.library() is None:
        raise InvalidArgument(f"bits={bits} needs the native kernels: {native.unavailable_reason()}")
    if device.type == "cuda" and (missing := TritonWeight.missing()) is not None:
        raise InvalidArgument(f"bits={bits} cannot be computed on {device}: {missing}")
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"bits={bits} has kernels for the CPU and for CUDA, not for {device}")


def quantization_notes(
    method: str, module: Decoder, kinds: Mapping[str, str], reasons: Mapping[str, str], packing: Packing
) -> tuple[str, ...]:
    """What becomes of the matrices that another library quantized, for a person to read.

    Args:
        method: what it is called; empty for other models, which have no notes.
        module: the decoder, on the meta device.
        kinds: stored types of tensors by name.
        reasons: for each quantized matrix, why the kernels have no form for it.
        packing: of the model.
    """
    if not method:
        return ()
    sizes: dict[tuple[str, str], list[int]] = {}
    names = {number: name for name, number in native.GGML_FORMATS.items()}
    for name, reason in reasons.items():
        owner, shape = module.get_submodule(name.rpartition(".")[0]), module.get_parameter(name).shape
        rows, columns = shape[0], math.prod(shape[1:])  # of convolutions all but the channels
        kind, form = kinds.get(name, ""), packing.format(owner, name, kinds.get(name))
        if kind and form is not None and packing.keep and packing.bits is None:
            group = (stored_kind(kind) or (0, 0))[1]
            sizes.setdefault(("", kind), []).append(packed_size(form, rows, columns, group))
        elif packing.bits is None:
            target = names[form] if form is not None else str(packing.dtype).removeprefix("torch.")
            nbytes = rows * columns * (packing.dtype.itemsize if form is None else 4 if target == "F32" else 2)
            why = "torch computes with them" if form is None else reason or "another precision was asked for"
            sizes.setdefault((why, target), []).append(nbytes)
    lines = []
    for (reason, kind), found in sizes.items():
        one, total = len(found) == 1, format_bytes(sum(found))
        what, takes = "1 matrix" if one else f"{len(found)} matrices", "takes" if one else "take"
        if reason:
            lines.append(f"{method}: {what} {'is' if one else 'are'} widened to {kind} and {takes} {total}: {reason}")
        else:
            lines.append(
                f"{method}: {what} {'stays as it is' if one else 'stay as they are'} ({kind}) and {takes} {total}"
            )
    return tuple(lines)


def stored_kind(kind: str | None) -> tuple[int, int] | None:
    """Format number and group size of a matrix that is stored in one of Pippin's formats; None for all others.

    >>> stored_kind("INT2/64"), stored_kind("AFFINE4/32"), stored_kind("Q4_0")
    ((102, 64), (204, 32), None)
    """
    for name, numbers in (("INT", native.GROUP_FORMATS), ("AFFINE", native.AFFINE_FORMATS)):
        if kind and kind.startswith(name):
            bits, _, group = kind.removeprefix(name).partition("/")
            return numbers[int(bits)], int(group)
    return None


def group_of(name: str, columns: int) -> int:
    """Group size (inputs that share a scale) of a weight in Pippin's formats: 64, or 32 if 64 does not divide it.

    Raises:
        InvalidArgument: 32 does not divide it either.
    """
    for group in (64, 32):
        if columns % group == 0:
            return group
    raise InvalidArgument(
        f"{name} has rows of {columns} weights, which groups of 32 do not divide; load the model without bits"
    )


def _triton_size(form: int, rows: int, columns: int, group: int) -> int:
    """Bytes of a weight in Pippin's formats on a GPU, where 3 bits take as much memory as 4."""
    bits = next(bits for bits, number in native.GROUP_FORMATS.items() if number == form)
    return rows * (columns * (4 if bits == 3 else bits) // 8 + columns // group * 2)
