"""The Haar transform of images: means and differences of neighbors, with nothing gained and nothing lost.

Notable here:
- it is a rotation of each 2 by 2 square: noise stays as it is, and so does every likelihood
- neighbors are alike, so most differences are small: the elements of a token hardly depend on each other
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import NonNegativeInt, checked
from pippin.core.errors import InvalidArgument


@checked
def haar(
    x: Float[Tensor, "*batch channels h w"], levels: NonNegativeInt = 1
) -> Float[Tensor, "*batch bands rows columns"]:
    """Means and differences (in columns, in rows, in both) of 2 by 2 squares, for every channel; then of those.

    Args:
        x: images.
        levels: how often; each halves height and width, and makes four channels of each.

    Raises:
        InvalidArgument: a height or width that is no multiple of ``2**levels``.

    >>> haar(torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])).flatten().tolist()
    [8.0, -2.0, -4.0, 0.0]
    """
    height, width = x.shape[-2:]
    if height % 2**levels or width % 2**levels:
        raise InvalidArgument(f"images of {height} by {width} cannot be halved {levels} times")
    for _ in range(levels):
        a, b = x[..., 0::2, 0::2], x[..., 0::2, 1::2]
        c, d = x[..., 1::2, 0::2], x[..., 1::2, 1::2]
        x = torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], -3) / 2
    return x


def unhaar(bands: Float[Tensor, "*batch bands rows columns"], levels: int = 1) -> Float[Tensor, "*batch channels h w"]:
    """Undo `haar`.

    Raises:
        InvalidArgument: a number of channels that is no multiple of ``4**levels``.

    >>> unhaar(haar(torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])))[0].tolist()
    [[1.0, 3.0], [5.0, 7.0]]
    """
    if levels < 0 or bands.shape[-3] % 4**levels:
        raise InvalidArgument(f"{bands.shape[-3]} bands are none of {levels} halvings")
    for _ in range(levels):
        mean, across, down, both = bands.chunk(4, -3)
        out = mean.new_empty(*mean.shape[:-2], 2 * mean.shape[-2], 2 * mean.shape[-1])
        out[..., 0::2, 0::2] = mean + across + down + both
        out[..., 0::2, 1::2] = mean - across + down - both
        out[..., 1::2, 0::2] = mean + across - down - both
        out[..., 1::2, 1::2] = mean - across - down + both
        bands = out / 2
    return bands
