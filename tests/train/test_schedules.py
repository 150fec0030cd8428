"""Schedules against torch's own, and the laws they all keep."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch.optim import lr_scheduler

from pippin.core.errors import InvalidArgument
from pippin.train import WSD, Constant, Cosine, Linear


def by_torch(make, steps):
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimiser)
    rates = []
    for _ in range(steps):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return rates


def warm_then(after, warmup):
    """torch's linear warm-up over so many steps, then another scheduler."""

    def make(optimiser):
        warm = lr_scheduler.LinearLR(optimiser, 1 / warmup, 1.0, warmup - 1)
        return lr_scheduler.SequentialLR(optimiser, [warm, after(optimiser)], [warmup])

    return make


CASES = {
    "cosine": (
        Cosine(warmup=5, final=0.1),
        warm_then(lambda o: lr_scheduler.CosineAnnealingLR(o, 35, eta_min=0.1), 5),
    ),
    "cosine, warm-up as a share": (
        Cosine(warmup=0.25, final=0.0),
        warm_then(lambda o: lr_scheduler.CosineAnnealingLR(o, 30), 10),
    ),
    "linear": (Linear(warmup=5, final=0.2), warm_then(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, 35), 5)),
    "constant": (Constant(warmup=8), warm_then(lambda o: lr_scheduler.ConstantLR(o, 1.0), 8)),
    "wsd": (
        WSD(warmup=5, decay=0.25),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, 1 / 5, 1.0, 4),
                lr_scheduler.ConstantLR(o, 1.0),
                lr_scheduler.LinearLR(o, 1.0, 1e-9, 10),
            ],
            [5, 30],
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("case", CASES)
def test_the_rates_are_those_of_torchs_scheduler(case):
    ours, theirs = CASES[case]
    assert [ours(step, 40) for step in range(40)] == pytest.approx(by_torch(theirs, 40), abs=1e-8)


def test_warm_up_and_fall_are_those_of_one_cycle():
    """OneCycleLR begins to fall with the step that reaches the top; ours has one more step there."""
    rates = by_torch(
        lambda o: lr_scheduler.OneCycleLR(
            o, 1.0, total_steps=40, pct_start=10 / 40, anneal_strategy="linear", div_factor=10, final_div_factor=1e6
        ),
        40,
    )
    ours = [Linear(warmup=10, final=1e-7)(step, 40) for step in range(40)]
    assert ours[:10] == pytest.approx(rates[:10], abs=1e-6)
    assert ours[10:] == pytest.approx(rates[9:-1], abs=1e-6)


def test_the_square_root_falls_as_published():
    falls = [WSD(warmup=0, decay=10, shape="sqrt")(step, 100) for step in range(90, 100)]
    assert falls == pytest.approx([1 - math.sqrt(i / 10) for i in range(10)])


schedules = st.one_of(
    st.builds(Constant, st.floats(0, 50)),
    st.builds(Linear, st.floats(0, 50), st.floats(0, 1)),
    st.builds(Cosine, st.floats(0, 50), st.floats(0, 1)),
    st.builds(WSD, st.floats(0, 50), st.floats(0, 50), st.floats(0, 1), st.sampled_from(["linear", "sqrt"])),
)


@given(schedules, st.integers(1, 200))
def test_a_factor_lies_between_zero_and_one_and_the_first_step_is_not_lost(schedule, steps):
    factors = [schedule(step, steps) for step in range(steps)]
    assert all(0.0 <= factor <= 1.0 for factor in factors)
    assert factors[0] > 0.0


@given(schedules, st.integers(1, 200))
def test_a_factor_rises_then_falls(schedule, steps):
    factors = [schedule(step, steps) for step in range(steps)]
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(warmup=-1), "warmup .* got -1"),
        (lambda: Linear(final=1.5), "final .* 0 to 1, got 1.5"),
        (lambda: WSD(decay=math.inf), "decay .* got inf"),
        (lambda: Constant(math.nan), "warmup .* got nan"),
        (lambda: WSD(shape="cubic"), "'linear' or 'sqrt', got 'cubic'"),
    ],
)
def test_a_schedule_outside_its_range_is_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
