"""Rotary positions with several axes: row and column of a patch, or frame, row and column.

Notable here:
- each axis turns its own share of the pairs of dimensions, so what attention sees is the difference on every axis
- positions may be fractions: coordinates stretched to another size are positions in between
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument


def grid(*sizes: int) -> Float[Tensor, "tokens axes"]:
    """The place of every token of a grid, the last axis counting fastest.

    >>> grid(2, 2).tolist()
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
    """Cosine and signed sine for `pippin.nn.rotary.rotate`.

    Args:
        positions: of each token on each axis.
        head_dim: width of a head, even.
        theta: base of the wavelengths of each axis; small, since a picture has few rows.
        shares: pairs of dimensions that each axis turns, half of ``head_dim`` in all; None divides them evenly, the
            first axes getting what is left over.

    Raises:
        InvalidArgument: an odd width, shares that do not add up, or fewer pairs than axes.
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
    turned = torch.cat(angles, -1)
    cos, sin = turned.cos(), turned.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
