"""Oracles: torch's own unfolding of pictures, and differences of places."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.nn.attention.axial_rotary import axial_tables, grid_positions
from pippin.nn.attention.rotary import apply_rotary
from pippin.nn.images.patches import patchify, unpatchify


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_patches_are_those_of_unfold_and_come_back(channels, patch, rows, columns):
    x = torch.randn(2, channels, rows * patch, columns * patch, generator=torch.Generator().manual_seed(0))
    tokens = patchify(x, patch)
    assert torch.equal(tokens, F.unfold(x, patch, stride=patch).transpose(1, 2))
    assert torch.equal(unpatchify(tokens, patch, x.shape[2:]), x)
    clip = x[None]
    assert torch.equal(unpatchify(patchify(clip, patch), patch, x.shape[2:]), clip)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(InvalidArgument, match="5 by 4 cannot be cut into patches of 2 by 2"):
        patchify(torch.zeros(1, 5, 4), 2)
    with pytest.raises(InvalidArgument, match="cannot be cut"):
        patchify(torch.zeros(1, 4, 4), 0)
    with pytest.raises(InvalidArgument, match="do not make pictures"):
        unpatchify(torch.zeros(3, 4), 2, (4, 4))


def test_attention_sees_differences_of_places_on_every_axis():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(16, generator=g), torch.randn(16, generator=g)

    def score(a, b):
        cos, sin = axial_tables(torch.tensor([a, b]), 16, theta=50.0)
        return float(apply_rotary(q[None], cos[:1], sin[:1])[0] @ apply_rotary(k[None], cos[1:], sin[1:])[0])

    assert score([1.0, 2.0, 3.0], [2.0, 4.0, 3.5]) == pytest.approx(score([0.0, 0.0, 0.0], [1.0, 2.0, 0.5]), abs=1e-5)
    assert score([0.0, 0.0, 0.0], [1.0, 0.0, 0.0]) != pytest.approx(score([0.0, 0.0, 0.0], [0.0, 1.0, 0.0]), abs=1e-3)
    cos, _ = axial_tables(grid_positions(2, 3), 8)
    assert torch.allclose(
        cos[1, 2], grid_positions(2, 3)[1, 1].cos()
    )  # the second axis has the second half of the pairs


def test_shares_must_add_up():
    assert axial_tables(grid_positions(2, 2, 2), 16, shares=(4, 2, 2))[0].shape == (8, 16)
    for dim, shares in ((15, None), (4, None), (16, (4, 4, 4)), (16, (8, 0, 0))):
        with pytest.raises(InvalidArgument, match="cannot share"):
            axial_tables(grid_positions(2, 2, 2), dim, shares=shares)
