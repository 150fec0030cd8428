"""One quantized matrix of another library's folder: its parts, its shape, and how the kernels may keep it.

Notable here:
- scales and zero points are read and checked with the headers, the codes later: a scale of zero or NaN is found before
  memory is taken, and the format in memory is known
- the rules of a family move whole rows of a matrix, so they are applied to row numbers, and codes and scales follow
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Final

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.core.formats.checkpoint import Checkpoint
from pippin.core.formats.ggml_quants import dequantize_blocks
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.tensor_names import TensorSource
from pippin.nn.quantization.affine import AffineCodes
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import NativeWeight

Rows = Int64[Tensor, "rows"]
WORDS: Final = ("I32", "U32")
BYTES: Final = ("U8",)
WHOLE: Final = ("I64", "I32")
FLOATS: Final = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0")
"""Types of tensors, as safetensors names them: packed codes, bytes, numbers of groups, scales."""
# Tensors that say how activations or the cache are quantized, which Pippin does not do.
_SETTINGS: Final = (
    *("input_scale", "activation_scale", "output_scale", "input_global_scale", "input_zero_point", "prob_scale"),
    *("k_scale", "v_scale", "q_scale", "weight_format"),
)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A quantized matrix in one of ggml's formats.

    Args:
        blocks: the bytes of each row.
        kind: ggml's name of the format.
    """

    blocks: UInt8[Tensor, "rows row_bytes"]
    kind: str

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The dequantized matrix, float32."""
        nbytes = {"Q5_0": 22}[self.kind]
        return dequantize_blocks(self.blocks.reshape(-1, nbytes), self.kind, torch.float32).view(len(self.blocks), -1)

    def pack(self) -> NativeWeight:
        """Pack the weight for the native kernels; the dequantized values are bit-identical."""
        return NativeWeight.from_ggml(self.blocks, self.kind)


Packable = Codes | AffineCodes | Blocks


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix, or the matrices of all experts in one tensor, not read yet.

    Args:
        checkpoint: where it is.
        name: name of the tensor that it stands for ("model.layers.0.mlp.up_proj.weight").
        parts: names of the tensors that it is stored in.
        shape: of the tensor that it stands for.
        kind: how it may be kept in memory: "INT4/128", "AFFINE4/64", "Q5_0"; empty if the kernels have no form for it.
        load: reads rows of it (None: all), counted through all experts: what `kind` names, or float32 values.
        reason: why the kernels have no form for it.
        rows: the rows that are meant, in their order; None for all.
    """

    checkpoint: Checkpoint
    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    load: Callable[[Rows | None], Packable | Tensor]
    reason: str = ""
    rows: Rows | None = None

    def taken(self, source: TensorSource, config: DecoderConfig) -> QuantizedMatrix:
        """The part of it that is one of a decoder's matrices.

        Raises:
            UnsupportedModel: the family's rule does not keep rows together.
        """
        if source.rule is not None and source.rule.across:
            return replace(
                self,
                shape=source.shape(self.shape, config),
                kind="",
                load=lambda _: source.take(self.dense().view(self.shape), config),
                reason="they are stored transposed",
            )
        rows = stored_rows(source, self.shape, config)
        if rows is None and len(self.shape) == 2:
            return self
        if rows is None:
            raise UnsupportedModel(f"{self.checkpoint.folder}: {self.name} holds several matrices, which have no names")
        return replace(self, rows=rows, shape=(len(rows), self.shape[-1]))

    def read(self) -> Packable | Tensor:
        """The matrix in the form that `kind` names, or its float32 values.

        Raises:
            CorruptedFile: tensors that contradict each other.
        """
        try:
            return self.load(self.rows)
        except InvalidArgument as error:
            raise CorruptedFile(f"{self.checkpoint.folder}: {self.name} cannot be read: {error}") from error

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The dequantized matrix, float32."""
        values = self.read()
        return values if isinstance(values, Tensor) else values.dense()


def is_setting(name: str) -> bool:
    """Whether a tensor says how activations or the cache are quantized.

    >>> is_setting("model.layers.0.mlp.up_proj.input_scale"), is_setting("model.layers.0.mlp.up_proj.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in _SETTINGS


@lru_cache(maxsize=8)
def _numbers(shape: tuple[int, ...]) -> Tensor:
    """The number of each row, through all experts, in a tensor of one column: (experts, rows, 1) or (rows, 1)."""
    return torch.arange(prod(shape[:-1])).view(*shape[:-1], 1)


def stored_rows(source: TensorSource, shape: tuple[int, ...], config: DecoderConfig) -> Rows | None:
    """The rows of a stored matrix that one of a decoder's matrices is made of; None for all, in their order.

    A family that stores inputs as rows (GPT-2) transposes; quantizers store outputs as rows, whatever the family, so
    the transposition is undone.

    Raises:
        UnsupportedModel: the family's rule does not keep rows together.
        CorruptedFile: it has not as many rows as the family's rule takes.
    """
    if source.rule is None:
        return None
    numbers, problem = _numbers(shape), None
    for candidate in (numbers, numbers.transpose(-1, -2)):
        try:
            taken = source.take(candidate, config)
        except (RuntimeError, ValueError, IndexError) as error:
            problem = error
            continue
        if taken.ndim == 2 and taken.shape[1] == 1 and not taken.is_floating_point():
            return taken[:, 0].contiguous()
    if problem is not None:
        raise CorruptedFile(f"{source.stored} has shape {shape}, which its configuration does not split") from problem
    raise UnsupportedModel(f"{source.stored} is quantized, and its family lays it out in a way that moves its columns")


# --- checks -----------------------------------------------------------------------------------------------------------


def require_parts(checkpoint: Checkpoint, parts: Mapping[str, tuple[str, ...]]) -> None:
    """Raise where a folder lacks one of the parts of a matrix, or holds values of another type in it.

    Args:
        checkpoint: where it is.
        parts: the types that each may have (`WORDS`, `BYTES`, `WHOLE` or `FLOATS`), by name.

    Raises:
        CorruptedFile: it does.
    """
    held = set(checkpoint.names())
    for name, types in parts.items():
        if name not in held:
            raise CorruptedFile(f"{checkpoint.folder} lacks {name!r}, a part of a quantized matrix; download it again")
        if checkpoint.dtype(name) not in types:
            raise CorruptedFile(
                f"{checkpoint.folder}: {name} holds {checkpoint.dtype(name)} values; {types[0]} are needed"
            )


def require_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Raise where a tensor has another shape.

    Raises:
        CorruptedFile: it has.
    """
    if (found := checkpoint.shape(name)) != shape:
        raise CorruptedFile(f"{checkpoint.folder}: {name} has shape {found}, the quantized matrix needs {shape}")


def require_choice(checkpoint: Checkpoint, setting: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise where a setting of the quantization is one that is not known.

    Raises:
        UnsupportedModel: it is.
    """
    if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
        known = ", ".join(map(repr, choices))
        raise UnsupportedModel(
            f"{checkpoint.folder}: quantized weights with {setting}={value!r:.80} are not supported (known: {known}); "
            "take the unquantized folder or a GGUF file"
        )


def read_scales(checkpoint: Checkpoint, name: str, *, zeros: bool = False) -> Tensor:
    """The scales in a tensor, float32, once they are known to be usable.

    Args:
        checkpoint: where it is.
        name: of the tensor.
        zeros: whether its method writes a scale of zero, for weights that are all zero.

    Raises:
        CorruptedFile: one is not finite, or zero.
    """
    scales = checkpoint.tensor(name).float()
    if not scales.isfinite().all():
        raise CorruptedFile(f"{checkpoint.folder}: {name} has a scale that is not finite; download it again")
    if not zeros and not scales.all():
        raise CorruptedFile(f"{checkpoint.folder}: {name} has a scale of zero; download or quantize it again")
    return scales


def group_size_of(checkpoint: Checkpoint, name: str, columns: int, groups: int, stated: Any) -> int:
    """Inputs that share a scale, once the number of scales is known to be what the configuration says.

    Args:
        checkpoint: where it is.
        name: of the tensor of scales.
        columns: inputs of the matrix.
        groups: scales of each row.
        stated: group size in the configuration; -1 or None for one scale a row; 0 if it says nothing.

    Raises:
        UnsupportedModel: a group that does not divide the inputs.
        CorruptedFile: another number of scales.
    """
    if isinstance(stated, bool) or not isinstance(stated, int | None) or (stated is not None and stated < -1):
        raise CorruptedFile(f"{checkpoint.folder}: group_size is {stated!r:.40}; download config.json again")
    size = columns if stated in (-1, None) else stated or columns // max(groups, 1)
    if size < 1 or columns % size:
        raise UnsupportedModel(
            f"{checkpoint.folder}: {name} has groups of {size}, which do not divide the {columns} inputs of the matrix"
        )
    if columns // size != groups:
        raise CorruptedFile(
            f"{checkpoint.folder}: {name} has {groups} scales a row, groups of {size} need {columns // size}"
        )
    return size


def grid(
    kind: str, codes: UInt8[Tensor, "rows columns"], bits: int, scales: Tensor, zeros: Tensor
) -> Codes | AffineCodes:
    """Codes with scales and zero points (rows, groups), in the form that a kind names."""
    if kind.startswith("INT"):
        return Codes(codes, scales.half(), bits, float(zeros.flatten()[0]))  # type: ignore[arg-type]
    return AffineCodes(codes, scales.float(), -scales.float() * zeros.float(), bits)


def some(tensor: Tensor, rows: Rows | None, dim: int = 0) -> Tensor:
    """The rows of a tensor that are meant."""
    return tensor if rows is None else tensor.index_select(dim, rows)
