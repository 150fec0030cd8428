"""Schedules against torch's own, and the laws they all keep."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch.optim import lr_scheduler

from pippin.core.errors import InvalidArgument
from pippin.train import ConstantSchedule, CosineSchedule, LinearSchedule, WSDSchedule


def by_torch(make, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warm_then(after, warmup):
    """torch's linear warm-up over so many steps, then another scheduler."""

    def make(optimizer):
        warm = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        return lr_scheduler.SequentialLR(optimizer, [warm, after(optimizer)], [warmup])

    return make


CASES = {
    "cosine": (
        CosineSchedule(warmup_steps=5, min_lr_ratio=0.1),
        warm_then(lambda o: lr_scheduler.CosineAnnealingLR(o, 35, eta_min=0.1), 5),
    ),
    "cosine, warm-up as a share": (
        CosineSchedule(warmup_steps=0.25, min_lr_ratio=0.0),
        warm_then(lambda o: lr_scheduler.CosineAnnealingLR(o, 30), 10),
    ),
    "linear": (
        LinearSchedule(warmup_steps=5, min_lr_ratio=0.2),
        warm_then(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, 35), 5),
    ),
    "constant": (ConstantSchedule(warmup_steps=8), warm_then(lambda o: lr_scheduler.ConstantLR(o, 1.0), 8)),
    "wsd": (
        WSDSchedule(warmup_steps=5, decay_steps=0.25),
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
    ours = [LinearSchedule(warmup_steps=10, min_lr_ratio=1e-7)(step, 40) for step in range(40)]
    assert ours[:10] == pytest.approx(rates[:10], abs=1e-6)
    assert ours[10:] == pytest.approx(rates[9:-1], abs=1e-6)


def test_the_square_root_falls_as_published():
    falls = [WSDSchedule(warmup_steps=0, decay_steps=10, decay_type="sqrt")(step, 100) for step in range(90, 100)]
    assert falls == pytest.approx([1 - math.sqrt(i / 10) for i in range(10)])


@pytest.mark.parametrize(
    ("length", "steps", "taken"),
    [(0.25, 10, 2), (0.29, 10, 3), (0.999, 10, 10), (1.0, 10, 1), (1.4, 10, 1), (2.6, 10, 3), (99, 10, 10)],
)
def test_a_share_and_a_number_of_steps_are_rounded_to_the_nearest(length, steps, taken):
    """The warm-up of so many steps ends with the full rate at the last of them."""
    rates = [ConstantSchedule(warmup_steps=length)(step, steps) for step in range(steps)]
    assert rates == pytest.approx([min((step + 1) / taken, 1.0) for step in range(steps)])
    falls = [WSDSchedule(warmup_steps=0, decay_steps=length)(step, steps) for step in range(steps)]
    assert falls == pytest.approx([min((steps - step) / taken, 1.0) for step in range(steps)])


@pytest.mark.parametrize("make", [LinearSchedule, CosineSchedule, WSDSchedule])
@pytest.mark.parametrize("warmup", [0.0, 9])
def test_the_last_rate_is_reached_after_the_last_update_and_stays(make, warmup):
    schedule = make(warmup_steps=warmup, min_lr_ratio=0.25)
    assert [schedule(step, 10) for step in (10, 11, 1000)] == pytest.approx([0.25] * 3)


def test_a_decay_that_does_not_fit_behind_the_warm_up_is_the_shorter():
    rates = [WSDSchedule(warmup_steps=6, decay_steps=6)(step, 10) for step in range(10)]
    assert rates == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0, 1.0, 3 / 4, 2 / 4, 1 / 4])


schedules = st.one_of(
    st.builds(ConstantSchedule, st.floats(0, 50)),
    st.builds(LinearSchedule, st.floats(0, 50), st.floats(0, 1)),
    st.builds(CosineSchedule, st.floats(0, 50), st.floats(0, 1)),
    st.builds(WSDSchedule, st.floats(0, 50), st.floats(0, 50), st.floats(0, 1), st.sampled_from(["linear", "sqrt"])),
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
        (lambda: CosineSchedule(warmup_steps=-1), "warmup_steps .* got -1"),
        (lambda: LinearSchedule(min_lr_ratio=1.5), "min_lr_ratio must be from 0 to 1, got 1.5"),
        (lambda: WSDSchedule(decay_steps=math.inf), "decay_steps .* got inf"),
        (lambda: ConstantSchedule(math.nan), "warmup_steps .* got nan"),
        (lambda: WSDSchedule(decay_type="cubic"), "'linear' or 'sqrt', got 'cubic'"),
    ],
)
def test_a_schedule_outside_its_range_is_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
