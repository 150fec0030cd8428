"""The autoregressive network of images: its probabilities add up, and no element is predicted from what follows it."""

import math
from itertools import product

import pytest
import torch

from pippin.claims.worlds.images.patch_autoregression import PatchAutoregression, bits


@pytest.fixture(scope="module")
def model():
    """Of two levels, with weights that matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = PatchAutoregression(side=4, levels=2, layers=2, width=8, heads=1).eval()
        for parameter in made.parameters():
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return made


def test_probabilities_of_all_images_add_up_to_one():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        small = PatchAutoregression(side=2, levels=3, layers=1, width=8, heads=1).eval()
        for parameter in small.parameters():
            parameter.data.add_(0.5 * torch.randn(parameter.shape))
    images = torch.tensor(list(product(range(3), repeat=4))).view(-1, 1, 2, 2)
    with torch.no_grad():
        assert float((-small.nats(images)).exp().sum()) == pytest.approx(1, abs=1e-5)


def test_probabilities_of_several_patches_add_up_to_one(model):
    images = torch.tensor(list(product(range(2), repeat=16))).view(-1, 1, 4, 4)
    with torch.no_grad():
        total = sum(float((-model.nats(part)).exp().sum()) for part in images.split(8192))
    assert total == pytest.approx(1, abs=1e-4)


def test_bits_are_those_of_a_uniform_prediction_where_nothing_is_known():
    plain = PatchAutoregression(side=4, levels=16, layers=1, width=8, heads=1).eval()
    torch.nn.init.zeros_(plain.out.weight)
    torch.nn.init.zeros_(plain.out.bias)
    assert bits(plain, torch.zeros(3, 1, 4, 4)) == pytest.approx(math.log2(16), abs=1e-5)
