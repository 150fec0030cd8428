"""Blocks of 36 weights: their rate, their bits, and errors that a search by hand does not beat."""

import pytest
import torch
from hypothesis import given, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.shape.quantize.block36 import Block36
from pippin.shape.quantize.qat_fraction import optimal_qat_fraction


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_block_takes_128_bits():
    coded = Block36.encode(normal(600, 600))
    assert coded.pack().shape == (10_000, 16)
    assert coded.bits == 128 * 10_000 + 64
    assert coded.bits_per_weight == pytest.approx(128 / 36, rel=1e-3)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 20))
def test_packed_blocks_come_back_and_edges_are_cut_off(rows, columns, seed):
    coded = Block36.encode(normal(rows, columns, seed=seed))
    again = Block36.unpack(coded.pack(), coded.shape, coded.low, coded.step)
    assert torch.equal(again.decode(), coded.decode())
    assert coded.decode().shape == (rows, columns)


def test_bits_of_a_block_are_two_endpoints_and_36_indices_little_end_first():
    coded = Block36.encode(normal(6, 6))
    whole = int.from_bytes(bytes(coded.pack()[0].tolist()), "little")
    assert [whole & 1023, whole >> 10 & 1023] == coded.endpoints[0].tolist()
    assert [whole >> 20 + 3 * i & 7 for i in range(36)] == coded.indices[0].tolist()


def test_what_lies_on_a_line_of_eight_values_is_kept():
    weight = torch.arange(36).remainder(8).float().view(6, 6) * 0.5 - 1
    assert Block36.encode(weight).decode() == pytest.approx(weight, abs=1e-2)
    assert Block36.encode(torch.full((6, 6), 3.0)).decode() == pytest.approx(torch.full((6, 6), 3.0))


def test_max_iterations_lower_the_error_and_come_near_the_best_endpoints():
    weight = normal(60, 60)
    errors = [float((Block36.encode(weight, max_iterations=n).decode() - weight).square().mean()) for n in (1, 2, 5)]
    assert errors[0] >= errors[1] >= errors[2]
    block = weight[:6, :6]
    found = float((Block36.encode(block).decode() - block).square().mean())
    low, high = float(block.min()), float(block.max())
    best = float("inf")
    for a in torch.linspace(low, low + (high - low) / 3, 40).tolist():
        for b in torch.linspace(high - (high - low) / 3, high, 40).tolist():
            place = ((block - a) / (b - a) * 7).round().clamp(0, 7)
            best = min(best, float((a + place / 7 * (b - a) - block).square().mean()))
    assert found <= 1.15 * best


def test_it_beats_three_bits_with_one_scale_for_so_many_weights_and_costs_more():
    from pippin.nn.quantization.fake_quantize import FakeQuantizer, Levels

    weight = normal(72, 72) * torch.rand(72, 1, generator=torch.Generator().manual_seed(1))
    ours = (Block36.encode(weight).decode() - weight).square().mean()
    theirs = (FakeQuantizer(weight, Levels(3), "tensor")(weight) - weight).square().mean()
    assert ours < theirs


@pytest.mark.parametrize(
    ("weight", "max_iterations", "message"),
    [
        (torch.full((6, 6), torch.nan), 5, "all of them finite"),
        (torch.ones(0, 6), 5, "must hold values"),
        (torch.ones(6, 6), 0, "max_iterations must be at least 1"),
    ],
)
def test_what_cannot_be_coded_is_refused(weight, max_iterations, message):
    with pytest.raises(InvalidArgument, match=message):
        Block36.encode(weight, max_iterations=max_iterations)


def test_blocks_of_another_shape_are_refused():
    with pytest.raises(InvalidArgument, match="a matrix of 7 x 6 has 2 blocks, not 1"):
        Block36.unpack(torch.zeros(1, 16, dtype=torch.uint8), (7, 6), 0.0, 1.0)


# Source: arXiv:2509.22935: about 10 % for a short run of 86M parameters, 40 % for a long one, at 2 bits.
def test_the_share_of_training_grows_with_the_run():
    shares = [optimal_qat_fraction(tokens, 86e6, bits=2) for tokens in (4e8, 2e9, 1e10, 4e10)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.10, abs=0.05)
    assert shares[-1] == pytest.approx(0.40, abs=0.05)
    assert optimal_qat_fraction(1e10, 1e9, bits=4) < optimal_qat_fraction(1e10, 1e9, bits=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 1, 2), "tokens must be above 0"), ((1e9, 1e9, float("nan")), "bits must be"),
     ((1e6, 1e9, 2), "fit holds above 1")],
)  # fmt: skip
def test_runs_that_the_fit_says_nothing_of_are_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        optimal_qat_fraction(*map(float, arguments))
