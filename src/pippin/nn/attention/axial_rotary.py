"""Rotary positions with several axes: row and column of a patch, or frame, row and column.

Notable here:
- each axis rotates its own share of the pairs of dimensions, so that attention depends on differences along each axis
- positions may be fractional, such as coordinates interpolated to another resolution
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument


def grid_positions(*sizes: int) -> Float[Tensor, "tokens axes"]:
    """The coordinates of every token of a grid, in row-major order.

    >>> grid_positions(2, 2).tolist()
    [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    """
    return torch.cartesian_prod(*(torch.arange(size, dtype=torch.float32) for size in sizes)).view(-1, len(sizes))


def axial_tables(
    positions: Float[Tensor, "*batch tokens axes"],
    head_dim: int,
    *,
    theta: float = 100.0,
    shares: Sequence[int] | None = None,
) -> tuple[Float[Tensor, "*batch tokens head_dim"], Float[Tensor, "*batch tokens head_dim"]]:
    """Cosine and signed sine for `pippin.nn.attention.rotary.apply_rotary`.

    Args:
        positions: position of each token on each axis.
        head_dim: size of a head, even.
        theta: base of the wavelengths of each axis; small, as an image has few rows.
        shares: number of pairs of dimensions that each axis rotates, ``head_dim / 2`` in sum; None divides them evenly,
            with the remainder on the first axes.

    Raises:
        InvalidArgument: an odd head size, shares with another sum, or fewer pairs than axes.
    """
    axes, pairs = positions.shape[-1], head_dim // 2
    if shares is None:
        shares = [pairs // axes + (axis < pairs % axes) for axis in range(axes)]
    if head_dim % 2 or len(shares) != axes or sum(shares) != pairs or min(shares) < 1:
        raise InvalidArgument(f"{axes} axes cannot share the {pairs} pairs of a head of {head_dim} as {list(shares)}")
    angles = []
    for axis, share in enumerate(shares):
        rates = theta ** -(torch.arange(share, device=positions.device, dtype=torch.float32) / share)
        angles.append(positions[..., axis, None].float() * rates)
    angle = torch.cat(angles, -1)  # [..., head_dim / 2]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
