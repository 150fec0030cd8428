"""The Haar transform against the matrix of means and differences, and as a rotation."""

from __future__ import annotations

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.generate.flows.haar import haar, unhaar


def test_one_level_is_the_kronecker_product_of_two_rotations():
    x = torch.randn(3, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    turn = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    squares = x.unfold(2, 2, 2).unfold(3, 2, 2)  # n, c, rows, columns, 2, 2
    bands = torch.einsum("ai,bj,ncrsij->nabcrs", turn, turn, squares)
    expected = torch.cat([bands[:, 0, 0], bands[:, 0, 1], bands[:, 1, 0], bands[:, 1, 1]], 1)
    torch.testing.assert_close(haar(x), expected)


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_levels_keep_lengths_and_are_undone(levels):
    x = torch.randn(2, 5, 3, 16, 8, generator=torch.Generator().manual_seed(levels))
    bands = haar(x, levels)
    assert bands.shape == (2, 5, 3 * 4**levels, 16 // 2**levels, 8 // 2**levels)
    torch.testing.assert_close(bands.square().sum(), x.square().sum())
    torch.testing.assert_close(unhaar(bands, levels), x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: haar(torch.zeros(1, 6, 4), 2), "6 by 4 cannot be halved 2 times"),
        (lambda: haar(torch.zeros(1, 4, 4), -1), "levels must be at least 0"),
        (lambda: unhaar(torch.zeros(6, 4, 4)), "6 bands are not those of 1"),
    ],
)
def test_bad_sizes_are_named(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
