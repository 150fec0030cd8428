"""Fixed-point inversion against one token after another, on a recurrence that can be written down."""

import pytest
import torch

from pippin.core.errors import InvalidArgument, JacobiUnconverged
from pippin.generate.flows.jacobi import Jacobi, jacobi_invert


class Recurrence:
    """Mean and scale from the sum of all tokens before."""

    def stats(self, x, first, stop):
        before = torch.cat([torch.zeros_like(x[:, :1]), x.cumsum(1)[:, :-1]], 1)[:, first:stop]
        return 0.9 * torch.sin(before), 0.3 * torch.tanh(before)


class Mild:
    """Mean and scale from the token before, a little."""

    def stats(self, x, first, stop):
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)[:, first:stop]
        return 0.3 * torch.sin(before), 0.1 * torch.tanh(before)


def one_by_one(z, recurrence=None):
    recurrence = recurrence or Recurrence()
    x = torch.zeros_like(z)
    for i in range(z.shape[1]):
        mean, log = recurrence.stats(x, i, i + 1)
        x[:, i] = mean[:, 0] + log[:, 0].exp() * z[:, i]
    return x


@pytest.fixture
def z():
    return torch.randn(3, 12, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("window", [1, 5, 12, 40])
def test_no_tolerance_gives_the_exact_result_after_as_many_rounds_as_tokens(z, window):
    x, info = jacobi_invert(Recurrence(), z, Jacobi(window, tolerance=0))
    torch.testing.assert_close(x, one_by_one(z), rtol=0, atol=1e-5)
    assert len(info.iterations) == -(-12 // window)
    assert all(made <= min(window, 12) for made in info.iterations)
    assert info.converged.all()


def test_the_tolerance_bounds_the_change_of_the_worst_number(z):
    # one sample is far from settled while the mean over all is small
    z = torch.cat([torch.zeros(50, 12, 2), z])
    x, info = jacobi_invert(Mild(), z, Jacobi(12, tolerance=1e-3))
    assert (info.residual <= 1e-3).all()
    assert (x - one_by_one(z, Mild())).abs().max() < 1e-2
    assert 1 < info.total < 12


def test_a_known_beginning_is_kept_and_a_good_guess_takes_fewer_rounds(z):
    right = one_by_one(z)
    x = torch.cat([right[:, :4], torch.full_like(right[:, 4:], torch.nan)], 1)
    solved, info = jacobi_invert(
        Recurrence(), z, Jacobi(8, tolerance=1e-4), x=x, first=4, guess=lambda x, a, b: right[:, a:b]
    )
    assert solved is x
    assert info.iterations == (1,)
    torch.testing.assert_close(solved, right, rtol=0, atol=1e-5)


def test_a_budget_that_is_too_small_warns_and_tells_which_samples(z):
    z[0] = 0  # all its tokens are 0, at once
    with pytest.warns(JacobiUnconverged, match="2 of 3 samples still changed"):
        _, info = jacobi_invert(Recurrence(), z, Jacobi(12, tolerance=1e-6, max_iterations=2))
    assert info.converged.tolist() == [True, False, False]
    assert info.iterations == (2,)


def test_overflow_on_the_way_does_no_harm_but_an_infinite_result_stays():
    class Spiky(Recurrence):
        def stats(self, x, first, stop):
            # infinite unless the token before is the right one, which is 1
            before = torch.cat([torch.ones_like(x[:, :1]), x], 1)[:, first:stop]
            return torch.where((before - 1).abs() < 0.5, 1.0, torch.inf), torch.zeros_like(before)

    x, info = jacobi_invert(Spiky(), torch.zeros(1, 6, 1), Jacobi(6, tolerance=0))
    assert torch.equal(x, torch.ones(1, 6, 1))
    assert info.iterations == (6,)
    z = torch.zeros(1, 6, 1)
    z[0, 3] = torch.inf
    x, _ = jacobi_invert(Recurrence(), z, Jacobi(6))
    assert x[0, :3].isfinite().all()
    assert not x[0, 3].isfinite().any()


def test_tokens_leave_a_window_when_they_and_those_before_are_settled(z):
    class Watched(Mild):
        def __init__(self):
            self.asked = []

        def stats(self, x, first, stop):
            self.asked.append((first, stop))
            return super().stats(x, first, stop)

    exact, quiet = Watched(), Watched()
    jacobi_invert(exact, z, Jacobi(12, tolerance=0))
    assert exact.asked[:3] == [(0, 12), (1, 12), (2, 12)]  # one with each round
    z[:, :6] = 0  # they are guessed right, and so is the one that reads them
    x, info = jacobi_invert(quiet, z, Jacobi(12, tolerance=1e-3))
    assert quiet.asked[:2] == [(0, 12), (7, 12)]
    assert info.converged.all()
    torch.testing.assert_close(x, one_by_one(z, Mild()), rtol=0, atol=2e-3)


def test_windows_are_told_in_order(z):
    told = []
    jacobi_invert(Recurrence(), z, Jacobi(5), on_tokens=lambda done, x: told.append(done))
    assert told == [5, 10, 12]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tolerance": -1.0}, "tolerance must be"),
        ({"max_iterations": 0}, "max_iterations must be"),
    ],
)
def test_numbers_out_of_range_are_named(values, message):
    with pytest.raises(InvalidArgument, match=message):
        Jacobi(**values)


def test_a_beginning_without_its_tokens_is_refused(z):
    with pytest.raises(InvalidArgument, match="first is 4 of 12"):
        jacobi_invert(Recurrence(), z, first=4)
