r"""Matrices of codes with a scale and a minimum for each group, in float32: the lossless form of asymmetric grids.

Notable here:
- $w = s\,c + m$: an integer zero point, a bias or a minimum all become $m$, and nothing is rounded on the way: a scale
  of half precision or bfloat16 times an integer zero point is exact in float32
- the kernels compute with it for 2 to 6 and 8 bits and groups of 32, 64 or 128; larger groups repeat their scales
- where the minima are one zero point times the scales, and the scales are exact in half precision, `Codes` is the same
  matrix with a quarter of the bytes for each group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from pippin.core import native
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.nn.quantization.codes import native_group
from pippin.nn.quantization.packed import NativeWeight

AFFINE_BITS: Final = tuple(native.AFFINE_FORMATS)


@checked
@dataclass(frozen=True, eq=False)
class AffineCodes:
    """A quantized matrix: ``scale * code + minimum``.

    Args:
        codes: integers below ``2 ** bits``.
        scales: one for each row and group of consecutive inputs.
        minima: likewise.
        bits: 1 to 8.

    Raises:
        InvalidArgument: codes that are too large, scales or minima that do not fit the codes or are not finite.

    >>> codes = torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8)
    >>> AffineCodes(codes, torch.tensor([[2.0]]), torch.tensor([[-3.0]]), bits=2).dense().tolist()
    [[-3.0, -1.0, 1.0, 3.0]]
    """

    codes: UInt8[Tensor, "rows columns"]
    scales: Float32[Tensor, "rows groups"]
    minima: Float32[Tensor, "rows groups"]
    bits: int

    def __post_init__(self) -> None:
        (rows, columns), shape = self.codes.shape, tuple(self.scales.shape)
        if shape[0] != rows or not shape[1] or columns % shape[1] or tuple(self.minima.shape) != shape:
            raise InvalidArgument(
                f"scales of {shape} and minima of {tuple(self.minima.shape)} do not fit codes of {rows} x {columns}"
            )
        if not 1 <= self.bits <= 8 or (self.codes.numel() and int(self.codes.max()) >= 1 << self.bits):
            raise InvalidArgument(f"a code is {int(self.codes.max())}, which {self.bits} bits do not hold")
        if not (self.scales.isfinite().all() and self.minima.isfinite().all()):
            raise InvalidArgument("a scale or a minimum is not finite")

    @property
    def group_size(self) -> int:
        """Number of consecutive inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The dequantized matrix, float32."""
        grouped = self.codes.float().view(*self.scales.shape, -1)
        return grouped.mul_(self.scales[..., None]).add_(self.minima[..., None]).view(self.codes.shape)

    def pack(self) -> NativeWeight:
        """Pack the weight for the native kernels; the dequantized values are bit-identical.

        Raises:
            InvalidArgument: a group size or bits without kernels, or no kernels on this machine.
        """
        group = native_group(self.group_size)
        if group is None or self.bits not in AFFINE_BITS:
            raise InvalidArgument(
                f"{self.bits} bits in groups of {self.group_size} inputs have no kernels: bits may be "
                f"{', '.join(map(str, AFFINE_BITS))}, and 32, 64 or 128 must divide the groups"
            )
        repeats = self.group_size // group
        scales, minima = (values.repeat_interleave(repeats, dim=1) for values in (self.scales, self.minima))
        return NativeWeight.from_affine(self.codes, scales, minima, self.bits, group)


def affine_kind(
    bits: int, group_size: int, scales: Float[Tensor, "rows groups"], zeros: Int64[Tensor, "rows groups"] | None
) -> str:
    """How a matrix may be kept in memory without loss; empty where the kernels have no form.

    Args:
        bits: of its codes.
        group_size: inputs that share a scale.
        scales: of the matrix.
        zeros: its zero points; None for minima of any value.

    Returns:
        "INT4/64": codes of 4 bits in groups of 64 with one zero point (`Codes`). "AFFINE4/64": an `AffineCodes`.

    >>> affine_kind(4, 256, torch.ones(2, 1), torch.full((2, 1), 8))
    'INT4/128'
    >>> affine_kind(4, 64, torch.ones(2, 1) / 3, torch.full((2, 1), 8))
    'AFFINE4/64'
    """
    group = native_group(group_size)
    if group is None or bits not in AFFINE_BITS:
        return ""
    one_zero = zeros is not None and bool((zeros == zeros.flatten()[0]).all())
    if one_zero and bits in native.GROUP_FORMATS and torch.equal(scales.half().float(), scales.float()):
        return f"INT{bits}/{group}"
    return f"AFFINE{bits}/{group}"
