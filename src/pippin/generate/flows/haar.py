"""The orthonormal Haar wavelet transform of images.

Notable here:
- it is orthogonal, so white noise stays white noise, and densities do not change
- it decorrelates neighboring pixels, so the elements of a token hardly depend on each other
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
    """The Haar transform: scaled mean and differences (by column, by row, by both) of 2 by 2 pixels of each channel.

    Args:
        x: images.
        levels: number of levels; each halves height and width and multiplies the channels by 4, and all bands are
            transformed again.

    Raises:
        InvalidArgument: a height or width that is not a multiple of ``2**levels``.

    >>> haar(torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])).flatten().tolist()
    [8.0, -2.0, -4.0, 0.0]
    """
    height, width = x.shape[-2:]
    if height % 2**levels or width % 2**levels:
        raise InvalidArgument(
            f"images of {height} by {width} cannot be halved {levels} times; height and width must be multiples of "
            f"{2**levels}"
        )
    for _ in range(levels):
        a, b = x[..., 0::2, 0::2], x[..., 0::2, 1::2]  # upper left and right of each square
        c, d = x[..., 1::2, 0::2], x[..., 1::2, 1::2]  # lower left and right
        x = torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], -3) / 2
    return x


def unhaar(bands: Float[Tensor, "*batch bands rows columns"], levels: int = 1) -> Float[Tensor, "*batch channels h w"]:
    """The inverse of `haar`.

    Raises:
        InvalidArgument: a number of bands that is not a multiple of ``4**levels``.

    >>> unhaar(haar(torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])))[0].tolist()
    [[1.0, 3.0], [5.0, 7.0]]
    """
    if levels < 0 or bands.shape[-3] % 4**levels:
        raise InvalidArgument(
            f"{bands.shape[-3]} bands are not those of {levels} levels; give a multiple of 4**levels, and levels >= 0"
        )
    for _ in range(levels):
        mean, across, down, both = bands.chunk(4, -3)
        out = mean.new_empty(*mean.shape[:-2], 2 * mean.shape[-2], 2 * mean.shape[-1])
        out[..., 0::2, 0::2] = mean + across + down + both
        out[..., 0::2, 1::2] = mean - across + down - both
        out[..., 1::2, 0::2] = mean + across - down - both
        out[..., 1::2, 1::2] = mean - across - down + both
        bands = out / 2
    return bands
