"""Fake quantization against its formula by autograd, the known best levels, and its own export."""

import copy
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.nn.quantization.fake_quantize import FakeQuantizer, Levels, newton_scales, scale_shape
from pippin.nn.quantization.packed import BITS

GRANULARITIES = ("tensor", "channel", "group")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def straight(f: Tensor, value: Tensor) -> Tensor:
    """``value`` with the gradient of ``f``."""
    return value.detach() + (f - f.detach())


def reference(weight: Tensor, log_factor: Tensor, levels: Levels, groups: int, rows: int) -> Tensor:
    """The published formula, every step by autograd; rounding is the identity backward."""
    grouped = weight.view(len(weight), groups, -1)
    largest = grouped.detach().abs().amax(-1, keepdim=True)
    largest = largest if rows > 1 else largest.amax(0, keepdim=True)
    exact = log_factor.exp().view(rows, groups, 1) * largest / levels.high
    scale = straight(exact, exact.half().to(weight.dtype))
    u = grouped / scale + levels.shift
    q = straight(u, u.round()).clamp(levels.low, levels.high)
    return (scale * (q - levels.shift)).view(weight.shape)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_and_gradients_are_those_of_the_formula(bits, balanced, granularity):
    weight = normal(6, 64).requires_grad_()
    levels = Levels(bits, balanced)
    quantizer = FakeQuantizer(weight, levels, granularity, 16, init="newton")
    outer = normal(6, 64, seed=1)
    rounded = quantizer(weight)
    got = torch.autograd.grad(rounded, [weight, quantizer.log_factor], outer)
    slow = reference(weight, quantizer.log_factor, levels, quantizer.shape[1], quantizer.shape[0])
    expected = torch.autograd.grad(slow, [weight, quantizer.log_factor], outer)
    assert torch.equal(rounded, slow)
    assert torch.equal(got[0] == 0, expected[0] == 0)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=0)  # whose chain multiplies by s and by 1 / s
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-5)


def test_the_gradient_of_the_scale_is_the_cards():
    weight = torch.tensor([[0.3, -0.7, 2.4, -9.0]], requires_grad=True)
    quantizer = FakeQuantizer(torch.tensor([[1.0, 1.0, 1.0, 2.0]]), Levels(2), "tensor", init="absmax")
    quantizer.log_factor.data.fill_(math.log(1 / 9.0 * 2))  # s = f max|W| / 2 = 1
    (slope,) = torch.autograd.grad(quantizer(weight).sum(), [quantizer.log_factor])
    # q - z - u inside; the edge less z outside: 0.5 - 0.3, -0.5 + 0.7, 1.5 (clipped), -1.5 (clipped)
    assert float(slope) == pytest.approx(0.2 + 0.2 + 1.5 - 1.5, abs=1e-3)


def test_where_all_is_clipped_nothing_is_rounded_and_differences_agree():
    weight = torch.tensor([[5.0, -6.0, 7.0, -8.0]], dtype=torch.float64)
    quantizer = FakeQuantizer(weight, Levels(2), "tensor").double()

    def value(log_factor: float) -> float:
        quantizer.log_factor.data.fill_(log_factor)
        return (quantizer(weight) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().item()

    at, step = math.log(0.2), 0.1
    difference = (value(at + step) - value(at - step)) / (2 * step)
    quantizer.log_factor.data.fill_(at)
    total = (quantizer(weight) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()
    (slope,) = torch.autograd.grad(total, [quantizer.log_factor])
    assert float(slope) == pytest.approx(difference, rel=0.01)  # scales are rounded to half precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_may_be_read_by_several_backward_passes(dtype):
    weight = normal(8, 32).requires_grad_()
    quantizer = FakeQuantizer(weight, Levels(2), "group", 16, gain=0.5, keep=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        first = quantizer(weight)
        assert quantizer(weight) is first
        assert first.dtype == dtype
    first[:4].sum().backward()
    first[4:].sum().backward()
    together = weight.grad.clone()
    weight.grad = None
    FakeQuantizer(weight, Levels(2), "group", 16, gain=0.5)(weight).sum().backward()
    assert torch.equal(together, weight.grad)
    assert set(together.unique().tolist()) <= {0.0, 0.5}


def test_a_kept_result_is_forgotten_when_the_weight_changes():
    weight = normal(8, 32).requires_grad_()
    quantizer = FakeQuantizer(weight, Levels(2), keep=True, group_size=32)
    before = quantizer(weight)
    optimizer = torch.optim.AdamW([weight, quantizer.log_factor], lr=0.1, fused=True)
    before.sum().backward()
    optimizer.step()
    after = quantizer(weight)
    assert after is not before
    assert torch.equal(after, FakeQuantizer.forward(copy.deepcopy(quantizer), weight))
    with torch.no_grad():
        assert quantizer(weight) is not after  # which has a graph
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed between"):
        after.sum().backward()


@given(st.sampled_from(BITS), st.booleans(), st.sampled_from(GRANULARITIES), st.floats(1e-3, 1e3), st.integers(0, 50))
def test_the_export_is_the_forward_pass_to_the_bit(bits, balanced, granularity, size, seed):
    weight = normal(5, 32, seed=seed) ** 3 * size
    quantizer = FakeQuantizer(weight, Levels(bits, balanced), granularity, 8)
    quantizer.log_factor.data.add_(0.3 * normal(quantizer.log_factor.numel(), seed=seed + 1))
    codes = quantizer.codes(weight)
    assert torch.equal(codes.dense(), quantizer(weight))
    assert torch.equal(
        codes.dense(), type(codes).from_words(codes.words(), codes.scales, bits, 32, codes.zero_point).dense()
    )


# Source: the card of arXiv:2507.13575; the balanced row is Max 1960's.
@pytest.mark.parametrize(("balanced", "scale", "error"), [(True, 1.00, 0.119), (False, 1.05, 0.150)])
def test_newton_finds_the_known_best_scale_of_a_normal_law(balanced, scale, error):
    weight, levels = normal(1, 400_000), Levels(2, balanced)
    found = newton_scales(weight, levels, (1, 1), iterations=20)
    assert float(found) == pytest.approx(scale, abs=0.01)
    v = (weight / found + levels.shift).round().clamp(levels.low, levels.high) - levels.shift
    assert float((v * found - weight).square().mean()) == pytest.approx(error, abs=0.002)


def test_newtons_errors_fall_as_published():
    weight, levels, errors = normal(1, 400_000, seed=3), Levels(2), []
    for turns in (1, 2, 3, 4, 10):
        found = newton_scales(weight, levels, (1, 1), iterations=turns)
        v = (weight / found + levels.shift).round().clamp(levels.low, levels.high) - levels.shift
        errors.append(float((v * found - weight).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(0.119, abs=0.002)


def test_newton_beats_the_largest_weight_in_every_group():
    weight = normal(64, 128)
    errors = {
        init: (FakeQuantizer(weight, Levels(2), "group", 64, init=init)(weight) - weight)
        .square()
        .view(64, 2, 64)
        .sum(-1)
        for init in ("newton", "absmax")
    }
    assert (errors["newton"] <= errors["absmax"] + 1e-3).all()
    assert errors["newton"].mean() < 0.9 * errors["absmax"].mean()


def test_a_group_of_zeros_stays_zero_and_has_no_slope():
    weight = normal(2, 32)
    weight[0, :16] = 0
    weight.requires_grad_()
    quantizer = FakeQuantizer(weight, Levels(2), "group", 16)
    rounded = quantizer(weight)
    rounded.sum().backward()
    assert not rounded[0, :16].any()
    assert weight.grad.isfinite().all()
    assert quantizer.log_factor.grad[0] == 0


def test_what_is_clipped_is_counted():
    weight = torch.tensor([[1.0, -1.9, -3.0, 40.0]])
    quantizer = FakeQuantizer(weight, Levels(2), "tensor", init="absmax")
    assert quantizer.clipped(weight) == 0
    quantizer.log_factor.data.fill_(math.log(1 / 20))  # s = 1: 2 and -2 are half a step beyond the levels
    assert quantizer.clipped(weight) == 0.5


@pytest.mark.parametrize(
    ("weight", "arguments", "message"),
    [
        (torch.zeros(2, 4), {}, "q_proj is all zeros"),
        (torch.full((2, 4), torch.nan), {}, "q_proj holds values that are not finite"),
        (torch.full((2, 4), 1e7), {}, "q_proj holds 1e.07, too large"),
        (
            torch.ones(2, 4),
            {"granularity": "group", "group_size": 3},
            "q_proj has rows of 4 weights, which groups of 3",
        ),
    ],
)
def test_weights_that_cannot_be_rounded_are_named(weight, arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        FakeQuantizer(weight, Levels(2), **{"granularity": "tensor", **arguments}, name="q_proj")


def test_other_bits_are_refused():
    with pytest.raises(InvalidArgument, match="bits must be 2, 3, 4 or 8, got 5"):
        Levels(5)
    assert scale_shape((4, 96), "group", 32) == (4, 3)
