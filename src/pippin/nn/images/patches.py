"""Pictures as rows of tokens, one for each square patch, and back.

Notable here:
- tokens go row by row; the elements of a patch are channel by channel, each row by row
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument


def patchify(x: Float[Tensor, "*batch channels height width"], patch: int) -> Float[Tensor, "*batch tokens inner"]:
    """The patches of pictures: ``channels * patch**2`` numbers each.

    Raises:
        InvalidArgument: height or width is not a multiple of the patch.

    >>> import torch
    >>> patchify(torch.arange(16.0).view(1, 4, 4), 2)[0]
    tensor([0., 1., 4., 5.])
    """
    *batch, channels, height, width = x.shape
    if patch < 1 or height % patch or width % patch:
        raise InvalidArgument(f"pictures of {height} by {width} cannot be cut into patches of {patch} by {patch}")
    rows, columns = height // patch, width // patch
    x = x.reshape(*batch, channels, rows, patch, columns, patch)
    d = len(batch)
    x = x.permute(*range(d), d + 1, d + 3, d, d + 2, d + 4)
    return x.reshape(*batch, rows * columns, channels * patch * patch)


def unpatchify(
    tokens: Float[Tensor, "*batch tokens inner"], patch: int, size: tuple[int, int]
) -> Float[Tensor, "*batch channels height width"]:
    """Pictures of ``size`` (height, width) of their patches; undoes `patchify`.

    >>> import torch
    >>> x = torch.randn(2, 3, 4, 6)
    >>> torch.equal(unpatchify(patchify(x, 2), 2, (4, 6)), x)
    True
    """
    *batch, count, inner = tokens.shape
    height, width = size
    rows, columns = height // patch, width // patch
    if count != rows * columns or inner % (patch * patch):
        raise InvalidArgument(
            f"{count} tokens of {inner} numbers do not make pictures of {size} from patches of {patch}"
        )
    d = len(batch)
    x = tokens.reshape(*batch, rows, columns, inner // patch**2, patch, patch)
    x = x.permute(*range(d), d + 2, d, d + 3, d + 1, d + 4)
    return x.reshape(*batch, -1, height, width)
