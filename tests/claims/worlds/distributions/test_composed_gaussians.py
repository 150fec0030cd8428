"""Features of composed Gaussians: separate ones come out at 1, sheared ones not until the corrector moves them."""

import pytest

from pippin.claims.worlds.distributions.composed_gaussians import feature_means


def test_means_are_those_of_the_closed_forms():
    found = feature_means((0.9,), 4000, (100, 120), 200, seed=0)
    assert found["separate, few steps"] == pytest.approx(1, abs=0.01)
    assert found["shear 0.9, few steps"] == pytest.approx(1.08, abs=0.015)
    assert found["shear 0.9, corrected"] == pytest.approx(1, abs=0.015)
