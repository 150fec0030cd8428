"""Quantized matrices as codes, scales and a zero point: the format shared by methods, files and the engine.

Notable here:
- every quantization method uses $w = s\\,(c - z)$, so that files, kernels and tests agree on a weight
- on disk the codes of a row are one little-endian bit stream in 32-bit words: 16 two-bit codes per word
- a scale may belong to a group of inputs, to a row, or to the whole matrix; the kernels support groups of 32, 64 or
  128, and scales of larger groups are repeated when the weight is packed

Source: the layout on disk follows arXiv:2507.13575 (two bits per code, inputs contiguous).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float16, Int32, UInt8
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.nn.quantization.packed import GROUPS, Bits, NativeWeight

_PIECE = 1 << 20  # codes converted to bits at a time, if their width does not divide 8


@checked
@dataclass(frozen=True, eq=False)
class Codes:
    """A quantized matrix: ``scale * (code - zero)``.

    Args:
        codes: integers below ``2 ** bits``.
        scales: one for each row and group of consecutive inputs; a single row of scales applies to all rows.
        bits: 2, 3, 4 or 8.
        zero_point: the code, possibly fractional, that represents 0; 1.5 for the balanced levels of 2 bits, 2 for the
            unbalanced ones.

    Raises:
        InvalidArgument: codes that are too large, scales that do not fit the codes or are not finite.

    >>> codes, scales = torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8), torch.tensor([[2.0]]).half()
    >>> weight = Codes(codes, scales, bits=2, zero_point=1.5)
    >>> weight.dense().tolist(), weight.words().tolist(), weight.nbytes
    ([[-3.0, -1.0, 1.0, 3.0]], [[228]], 6)
    """

    codes: UInt8[Tensor, "rows columns"]
    scales: Float16[Tensor, "scale_rows groups"]
    bits: Bits
    zero_point: float

    def __post_init__(self) -> None:
        (rows, columns), (scale_rows, groups) = self.codes.shape, self.scales.shape
        if scale_rows not in (1, rows) or groups < 1 or columns % groups:
            raise InvalidArgument(
                f"scales of {scale_rows} x {groups} do not fit codes of {rows} x {columns}: one for each row and group "
                "of consecutive inputs, or one row of them for all"
            )
        if self.bits < 8 and self.codes.numel() and int(self.codes.max()) >= 1 << self.bits:
            raise InvalidArgument(f"a code is {int(self.codes.max())}; {self.bits} bits hold up to {2**self.bits - 1}")
        if not self.scales.isfinite().all():
            raise InvalidArgument("a scale is not finite; half precision holds scales up to 65504")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        """Number of consecutive inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes on disk: the words of the codes, and two for each scale."""
        rows, columns = self.shape
        return rows * words_of(columns, self.bits) * 4 + self.scales.nbytes

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The dequantized matrix, float32."""
        (rows, _), (scale_rows, groups) = self.shape, self.scales.shape
        weight = self.codes.float().sub_(self.zero_point).view(rows, groups, self.group_size)
        return weight.mul_(self.scales.float().view(scale_rows, groups, 1)).view(self.codes.shape)

    def words(self) -> Int32[Tensor, "rows words"]:
        """The codes as they are stored: each row is a little-endian bit stream, padded with zeros."""
        codes, per_row = self.codes.cpu(), words_of(self.codes.shape[1], self.bits)
        if self.bits == 3:
            return _stream(codes, self.bits, per_row)
        per_byte = 8 // self.bits
        padded = torch.zeros(len(codes), per_row * 4 * per_byte, dtype=torch.uint8)
        padded[:, : codes.shape[1]] = codes
        parts = padded.view(len(codes), per_row * 4, per_byte)
        bytes_ = parts[:, :, 0].clone()
        for index in range(1, per_byte):
            bytes_ |= parts[:, :, index] << index * self.bits
        return _as_words(bytes_)

    @classmethod
    @checked
    def from_words(
        cls,
        words: Int32[Tensor, "rows words"],
        scales: Float16[Tensor, "scale_rows groups"],
        bits: Bits,
        columns: int,
        zero_point: float,
    ) -> Codes:
        """The inverse of `words`.

        Args:
            words: the result of `words`.
            scales: see the constructor.
            bits: 2, 3, 4 or 8.
            columns: number of codes in a row.
            zero_point: see the constructor.

        Raises:
            InvalidArgument: rows of words that do not match the number of codes, or scales that do not fit.
        """
        if words.shape[1] != words_of(columns, bits):
            raise InvalidArgument(
                f"{columns} codes of {bits} bits take {words_of(columns, bits)} words a row, not {words.shape[1]}"
            )
        return cls(unpack_words(words, bits, columns), scales, bits, zero_point)

    @property
    def native_group(self) -> int | None:
        """The group size that the kernels would use for this matrix; None if they do not support it.

        >>> codes = torch.zeros(3, 96, dtype=torch.uint8)
        >>> Codes(codes, torch.ones(1, 1).half(), bits=2, zero_point=1.5).native_group
        32
        """
        return native_group(self.group_size)

    def pack(self) -> NativeWeight:
        """Pack the weight for the native kernels; the dequantized values are bit-identical.

        Raises:
            InvalidArgument: a group size that is not a multiple of 32, or no kernels on this machine.
        """
        group = self.native_group
        if group is None:
            raise InvalidArgument(f"groups of {self.group_size} inputs have no kernels: 32, 64 or 128 must divide them")
        scales = self.scales.repeat_interleave(self.group_size // group, dim=1).expand(len(self.codes), -1)
        return NativeWeight.from_codes(self.codes, scales, self.bits, group, self.zero_point)


def unpack_words(words: Int32[Tensor, "rows words"], bits: int, columns: int) -> UInt8[Tensor, "rows columns"]:
    """The codes of rows that are little-endian bit streams in 32-bit words.

    Args:
        words: at least `words_of` a row.
        bits: of each code, 1 to 8.
        columns: number of codes in a row.

    >>> unpack_words(torch.tensor([[228]], dtype=torch.int32), 2, 4).tolist()
    [[0, 1, 2, 3]]
    """
    bytes_ = torch.from_numpy(words.cpu().contiguous().numpy().astype("<i4", copy=False).view(np.uint8))
    if 8 % bits:
        return _unstream(bytes_, bits, columns)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes = (bytes_[:, :, None] >> shifts).bitwise_and_((1 << bits) - 1).view(len(words), -1)[:, :columns]
    return codes.contiguous()


def words_of(columns: int, bits: int) -> int:
    """The number of 32-bit words for a row of ``columns`` codes.

    >>> words_of(16, 2), words_of(17, 2), words_of(32, 3)
    (1, 2, 3)
    """
    return -(-columns * bits // 32)


def native_group(group: int) -> int | None:
    """The largest group size of the kernels that divides ``group``; None if there is none."""
    return next((size for size in sorted(GROUPS, reverse=True) if group % size == 0), None)


def _as_words(bytes_: UInt8[Tensor, "rows bytes"]) -> Int32[Tensor, "rows words"]:
    return torch.from_numpy(bytes_.contiguous().numpy().view("<i4").astype(np.int32, copy=False))


def _stream(codes: UInt8[Tensor, "rows columns"], bits: int, per_row: int) -> Int32[Tensor, "rows words"]:
    """Pack codes of any width: expand each code into its bits, and pack eight bits into a byte."""
    stored = torch.zeros(len(codes), per_row * 4, dtype=torch.uint8)
    step = max(1, _PIECE // max(1, codes.shape[1]))
    for start in range(0, len(codes), step):
        piece = codes[start : start + step].numpy()
        spread = np.unpackbits(piece[:, :, None], axis=2, count=bits, bitorder="little").reshape(len(piece), -1)
        packed = np.packbits(spread, axis=1, bitorder="little")
        stored[start : start + step, : packed.shape[1]] = torch.from_numpy(packed)
    return _as_words(stored)


def _unstream(bytes_: UInt8[Tensor, "rows bytes"], bits: int, columns: int) -> UInt8[Tensor, "rows columns"]:
    codes = torch.empty(len(bytes_), columns, dtype=torch.uint8)
    step = max(1, _PIECE // max(1, columns))
    for start in range(0, len(bytes_), step):
        piece = bytes_[start : start + step].numpy()
        spread = np.unpackbits(piece, axis=1, count=columns * bits, bitorder="little").reshape(-1, columns, bits)
        packed = np.packbits(spread, axis=2, bitorder="little")[:, :, 0]
        codes[start : start + step] = torch.from_numpy(packed)
    return codes
