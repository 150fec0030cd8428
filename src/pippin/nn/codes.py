"""Quantised matrices as they travel between methods, files and the engine: codes, scales and a zero point.

Notable here:
- one form for every method that quantises, $w = s\\,(c - z)$, so that a file, a kernel and a test agree on a weight
- on disk the codes of a row are one stream of bits, little end first, in 32-bit words: 16 two-bit codes a word
- a scale may belong to a group of inputs, to a row, or to the whole matrix; the kernels want groups of 32, 64 or 128,
  and a scale of more inputs is repeated for them when the weight is packed

Source: the layout on disk is that of the card's packing rule for arXiv:2507.13575 (two bits a code, K contiguous).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float16, Int32, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.nn.packed import BITS, GROUPS, NativeWeight

_PIECE = 1 << 20  # codes turned into bits at a time, where a byte holds no whole number of them


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantised matrix: ``scale * (code - zero)``.

    Args:
        codes: below ``2 ** bits``.
        scales: one for each row and group of neighbouring inputs; a single row of them serves all rows.
        bits: 2, 3, 4 or 8.
        zero: the code that stands for 0; 1.5 for the balanced set of 2 bits, 2 for the unbalanced one.

    Raises:
        InvalidArgument: other bits, codes that are too large, scales that do not fit the codes or are not finite.

    >>> weight = Codes(torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8), torch.tensor([[2.0]]).half(), bits=2, zero=1.5)
    >>> weight.dense().tolist(), weight.words().tolist(), weight.nbytes
    ([[-3.0, -1.0, 1.0, 3.0]], [[228]], 6)
    """

    codes: UInt8[Tensor, "rows columns"]
    scales: Float16[Tensor, "scale_rows groups"]
    bits: int
    zero: float

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise InvalidArgument(f"bits is {self.bits!r}; choose one of {', '.join(map(str, BITS))}")
        (rows, columns), (scale_rows, groups) = self.codes.shape, self.scales.shape
        if scale_rows not in (1, rows) or groups < 1 or columns % groups:
            raise InvalidArgument(
                f"scales of {scale_rows} x {groups} do not fit codes of {rows} x {columns}: one for each row and group "
                "of neighbouring inputs, or one row of them for all"
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
    def group(self) -> int:
        """Neighbouring inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes on disk: the words of the codes, and two for each scale."""
        rows, columns = self.shape
        return rows * words_of(columns, self.bits) * 4 + self.scales.nbytes

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The weights that are meant, float32."""
        (rows, _), (scale_rows, groups) = self.shape, self.scales.shape
        weight = self.codes.float().sub_(self.zero).view(rows, groups, self.group)
        return weight.mul_(self.scales.float().view(scale_rows, groups, 1)).view(self.codes.shape)

    def words(self) -> Int32[Tensor, "rows words"]:
        """The codes as they are stored: a row is one stream of bits, little end first, filled up with zeros."""
        codes, per_row = self.codes.cpu(), words_of(self.codes.shape[1], self.bits)
        if self.bits == 3:
            return _stream(codes, self.bits, per_row)
        per_byte = 8 // self.bits
        padded = torch.zeros(len(codes), per_row * 4 * per_byte, dtype=torch.uint8)
        padded[:, : codes.shape[1]] = codes
        parts = padded.view(len(codes), per_row * 4, per_byte)
        bytes_ = parts[:, :, 0].clone()
        for place in range(1, per_byte):
            bytes_ |= parts[:, :, place] << place * self.bits
        return _as_words(bytes_)

    @classmethod
    def from_words(
        cls,
        words: Int32[Tensor, "rows words"],
        scales: Float16[Tensor, "scale_rows groups"],
        bits: int,
        columns: int,
        zero: float,
    ) -> Codes:
        """The inverse of `words`.

        Args:
            words: as `words` gives them.
            scales: as in the constructor.
            bits: 2, 3, 4 or 8.
            columns: codes in a row.
            zero: as in the constructor.

        Raises:
            InvalidArgument: other bits, rows of words that do not hold so many codes, scales that do not fit.
        """
        if bits not in BITS:
            raise InvalidArgument(f"bits is {bits!r}; choose one of {', '.join(map(str, BITS))}")
        if words.shape[1] != words_of(columns, bits):
            raise InvalidArgument(
                f"{columns} codes of {bits} bits take {words_of(columns, bits)} words a row, not {words.shape[1]}"
            )
        bytes_ = torch.from_numpy(words.cpu().contiguous().numpy().astype("<i4", copy=False).view(np.uint8))
        if bits == 3:
            return cls(_unstream(bytes_, bits, columns), scales, bits, zero)
        places = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = (bytes_[:, :, None] >> places).bitwise_and_((1 << bits) - 1).view(len(words), -1)[:, :columns]
        return cls(codes.contiguous(), scales, bits, zero)

    @property
    def native_group(self) -> int | None:
        """The group that the kernels would compute it in; None where they have none for it.

        >>> codes = torch.zeros(3, 96, dtype=torch.uint8)
        >>> Codes(codes, torch.ones(1, 1).half(), bits=2, zero=1.5).native_group
        32
        """
        return native_group(self.group)

    def pack(self) -> NativeWeight:
        """The weight for the native kernels, the same to the bit.

        Raises:
            InvalidArgument: groups that 32 does not divide, or no kernels here.
        """
        group = self.native_group
        if group is None:
            raise InvalidArgument(f"groups of {self.group} inputs have no kernels: 32, 64 or 128 must divide them")
        scales = self.scales.repeat_interleave(self.group // group, dim=1).expand(len(self.codes), -1)
        return NativeWeight.from_codes(self.codes, scales, self.bits, group, self.zero)


def words_of(columns: int, bits: int) -> int:
    """32-bit words that a row of so many codes takes.

    >>> words_of(16, 2), words_of(17, 2), words_of(32, 3)
    (1, 2, 3)
    """
    return -(-columns * bits // 32)


def native_group(group: int) -> int | None:
    """The largest group of the kernels that divides ``group``; None where none does."""
    return next((size for size in sorted(GROUPS, reverse=True) if group % size == 0), None)


def _as_words(bytes_: UInt8[Tensor, "rows bytes"]) -> Int32[Tensor, "rows words"]:
    return torch.from_numpy(bytes_.contiguous().numpy().view("<i4").astype(np.int32, copy=False))


def _stream(codes: UInt8[Tensor, "rows columns"], bits: int, per_row: int) -> Int32[Tensor, "rows words"]:
    """Any number of bits: each code is spread over its bits, and eight of those make a byte."""
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
