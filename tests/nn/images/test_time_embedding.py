"""The time as a vector, against the formula in Python's own numbers; the head, against torch's float64."""

import math

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.nn.images.time_embedding import TimedHead, TimeEmbedding, sinusoidal


def test_sinusoids_are_those_of_the_formula():
    times = [0.0, 0.013, 0.5, 1.0]
    found = sinusoidal(torch.tensor(times), 12, period=500.0, scale=100.0)
    for row, t in zip(found.tolist(), times, strict=True):
        angles = [100.0 * t * 500.0 ** (-2 * i / 12) for i in range(6)]
        assert row == pytest.approx([*map(math.cos, angles), *map(math.sin, angles)], abs=2e-5)


def test_near_times_are_near_and_far_ones_are_not():
    embed = TimeEmbedding(32).initialize(torch.Generator().manual_seed(0))
    here, near, far = embed(torch.tensor([0.5, 0.5001, 0.9])).unbind()
    assert (here - near).norm() < 0.1 * (here - far).norm()
    sizes = embed(torch.linspace(0, 1, 64)).square().mean().sqrt().item()
    assert 0.3 < sizes < 3.0


def test_a_head_is_zero_at_first_and_then_a_norm_that_time_moves():
    head = TimedHead(6, 3).initialize()
    hidden, time = torch.randn(2, 4, 6), torch.randn(2, 6)
    assert torch.equal(head(hidden, time), torch.zeros(2, 4, 3))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    silu = (time * time.sigmoid()).double()
    shift, scale = (silu @ head.adapt.weight.double().T + head.adapt.bias.double()).split(6, -1)
    x = hidden.double()
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    wanted = (normed * (1 + scale[:, None]) + shift[:, None]) @ head.out.weight.double().T + head.out.bias.double()
    torch.testing.assert_close(head(hidden, time).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "settings", "message"),
    [(3, {}, "width must be even"), (0, {}, "width must be at least 2"), (4, {"period": 0.0}, "period")],
)
def test_numbers_out_of_range_are_refused(width, settings, message):
    with pytest.raises(InvalidArgument, match=message):
        sinusoidal(torch.zeros(1), width, **settings)
