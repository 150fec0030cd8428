r"""Blocks of 6 x 6 weights in 128 bits: a portable approximation of texture compression in hardware.

Notable here:
- 3.56 bits per weight, as for the hardware format with this block size: two 10-bit endpoints on a uniform grid over the
  matrix, and a 3-bit index per weight, of 8 evenly spaced values between the endpoints
- it is not the hardware format, and no hardware decodes it; it measures the error of a code of this rate and block size
- endpoints and indices are optimized alternately: for fixed indices, the endpoints are a linear least-squares solution

Source: the 6 x 6 compression of server weights in arXiv:2507.13575; the code itself is this project's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument

SIDE: Final = 6
_TOP: Final = 1023  # endpoints have 10 bits
_STEPS: Final = 7  # indices have 3
_MAX_BLOCKS: Final = 1 << 15  # per step, which bounds the memory


@dataclass(frozen=True, eq=False)
class Block36:
    """A matrix in blocks; made by `Block36.encode`.

    Args:
        shape: rows and columns of the matrix.
        endpoints: two endpoints per block, 0 to 1023.
        indices: indices of each block's weights, row by row, 0 to 7.
        low: the value of endpoint 0.
        step: distance between neighboring endpoints.

    >>> weight = torch.randn(48, 60, generator=torch.Generator().manual_seed(0))
    >>> coded = Block36.encode(weight)
    >>> round(coded.bits_per_weight, 2), bool((coded.decode() - weight).square().mean() < 0.04)
    (3.58, True)
    """

    shape: tuple[int, int]
    endpoints: Int32[Tensor, "blocks 2"]
    indices: UInt8[Tensor, "blocks 36"]
    low: float
    step: float

    @classmethod
    @checked
    def encode(cls, weight: Float[Tensor, "rows columns"], *, max_iterations: PositiveInt = 5) -> Block36:
        """Fit the blocks; incomplete blocks at the edges are padded with the last row and column.

        Args:
            weight: a matrix of finite values.
            max_iterations: maximum number of alternating updates of indices and endpoints.

        Raises:
            InvalidArgument: values that are not finite, or an empty matrix.
        """
        if weight.numel() == 0 or not weight.isfinite().all():
            raise InvalidArgument("a weight to be put into blocks must hold values, all of them finite")
        blocks = _to_blocks(weight.detach().float())
        low, high = float(blocks.min()), float(blocks.max())
        step = (high - low) / _TOP or 1.0
        fitted = [_fit(piece, low, step, max_iterations) for piece in blocks.split(_MAX_BLOCKS)]
        endpoints, indices = (torch.cat(part) for part in zip(*fitted, strict=True))
        return cls((weight.shape[0], weight.shape[1]), endpoints, indices, low, step)

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The weights, float32."""
        ends = self.endpoints.float() * self.step + self.low
        share = self.indices.float() / _STEPS
        blocks = ends[:, :1] + share * (ends[:, 1:] - ends[:, :1])
        rows, columns = (-(-size // SIDE) for size in self.shape)
        whole = blocks.view(rows, columns, SIDE, SIDE).transpose(1, 2).reshape(rows * SIDE, columns * SIDE)
        return whole[: self.shape[0], : self.shape[1]].contiguous()

    @property
    def bits(self) -> int:
        """Size in bits: 128 for each block, and 64 for the grid."""
        return 128 * len(self.indices) + 64

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight: 3.556 plus the padding of the edges and the grid."""
        return self.bits / (self.shape[0] * self.shape[1])

    def pack(self) -> UInt8[Tensor, "blocks 16"]:
        """The stored bytes of each block: both endpoints, then the indices, in little-endian bit order."""
        ends = np.unpackbits(self.endpoints.numpy().astype("<i4").view(np.uint8), axis=1, bitorder="little")
        ends = ends.reshape(-1, 2, 32)[:, :, :10].reshape(len(ends), 20)
        indices = np.unpackbits(self.indices.numpy()[:, :, None], axis=2, count=3, bitorder="little")
        bits = np.concatenate([ends, indices.reshape(len(ends), 108)], axis=1)
        return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))

    @classmethod
    def unpack(cls, blocks: UInt8[Tensor, "blocks 16"], shape: tuple[int, int], low: float, step: float) -> Block36:
        """The inverse of `pack`.

        Raises:
            InvalidArgument: another number of blocks than the shape needs.
        """
        needed = -(-shape[0] // SIDE) * -(-shape[1] // SIDE)
        if len(blocks) != needed:
            raise InvalidArgument(f"a matrix of {shape[0]} x {shape[1]} has {needed} blocks, not {len(blocks)}")
        bits = np.unpackbits(blocks.numpy(), axis=1, bitorder="little")
        bit_values = (1 << np.arange(10)).astype(np.int32)
        endpoints = bits[:, :20].reshape(-1, 2, 10).astype(np.int32) @ bit_values
        indices = np.packbits(bits[:, 20:].reshape(-1, 36, 3), axis=2, bitorder="little")[:, :, 0]
        return cls(shape, torch.from_numpy(endpoints), torch.from_numpy(indices), low, step)


def _to_blocks(weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "blocks 36"]:
    rows, columns = (-(-size // SIDE) * SIDE for size in weight.shape)
    index = [torch.arange(full).clamp(max=size - 1) for full, size in zip((rows, columns), weight.shape, strict=True)]
    whole = weight[index[0]][:, index[1]]
    return whole.view(rows // SIDE, SIDE, columns // SIDE, SIDE).transpose(1, 2).reshape(-1, SIDE * SIDE)


def _fit(
    blocks: Float[Tensor, "blocks 36"], low: float, step: float, max_iterations: int
) -> tuple[Int32[Tensor, "blocks 2"], UInt8[Tensor, "blocks 36"]]:
    """Endpoints on the grid and indices of the iteration with the least error, for each block separately."""
    ends = torch.stack([blocks.amin(1), blocks.amax(1)], 1)
    best = torch.full((len(blocks),), torch.inf)
    endpoints, indices = torch.zeros(len(blocks), 2, dtype=torch.int32), torch.zeros(blocks.shape, dtype=torch.uint8)
    for iteration in range(max_iterations + 1):
        grid = ((ends - low) / step).round_().clamp_(0, _TOP)
        exact = grid * step + low
        span = exact[:, 1:] - exact[:, :1]
        index = ((blocks - exact[:, :1]) / torch.where(span == 0, 1.0, span) * _STEPS).round_().clamp_(0, _STEPS)
        share = index / _STEPS
        error = (exact[:, :1] + share * span - blocks).square().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        endpoints[better] = grid[better].int()
        indices[better] = index[better].to(torch.uint8)
        if iteration < max_iterations:
            ends = _solve(blocks, share, exact)
    return endpoints, indices


def _solve(blocks: Tensor, share: Tensor, before: Tensor) -> Float[Tensor, "blocks 2"]:
    """The endpoints of least squared error for given shares; unchanged if all weights have the same share."""
    rest = 1 - share
    aa, ab, bb = (rest * rest).sum(1), (rest * share).sum(1), (share * share).sum(1)
    xa, xb = (rest * blocks).sum(1), (share * blocks).sum(1)
    determinant = aa * bb - ab * ab
    solvable = determinant > 1e-6
    safe = torch.where(solvable, determinant, 1.0)
    solved = torch.stack([(bb * xa - ab * xb) / safe, (aa * xb - ab * xa) / safe], 1)
    return torch.where(solvable[:, None], solved, before)
