"""The laws of forgetting and of the target loss: recovery, doses by hand, bounds on what they may be fitted to."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn

from pippin.core.errors import Extrapolation, InvalidArgument, InvalidInput, NotPrepared
from pippin.train import AdamW, ConstantSchedule, Loss, Trainer
from pippin.train.laws.forgetting import FinetuningLaw, ForgettingLaw, forgetting_evaluation
from pippin.train.laws.io import load_law

TRUTH = {"A": 3.0, "alpha": 0.42, "beta": 0.16, "B": 130.0}


def runs(noise=0.0, offset=0.0, seed=0):
    sizes, amounts, shares = [3e5, 1e6, 4e6, 16e6], [3e5, 3e6, 3e7], [0.0, 0.001, 0.005, 0.01, 0.05]
    N, D, p = (x.ravel() for x in np.meshgrid(sizes, amounts, shares))
    before = 4.0 - 0.1 * np.log(N / 1e5)
    forgotten = TRUTH["A"] * D ** TRUTH["beta"] / ((1 + TRUTH["B"] * p) * N) ** TRUTH["alpha"] + offset
    noisy = np.exp(noise * np.random.default_rng(seed).standard_normal(len(N)))
    return N, D, p, before, (before + forgotten) * noisy


@pytest.fixture(scope="module")
def law():
    return ForgettingLaw().fit(*runs(0.002), num_resamples=60)


def test_without_noise_every_coefficient_is_recovered():
    found = ForgettingLaw().fit(*runs(), num_resamples=0)
    for name, value in TRUTH.items():
        assert found.coefficients[name] == pytest.approx(value, rel=1e-5), name
    assert found.r2_forgetting == pytest.approx(1.0)
    with_offset = ForgettingLaw(with_offset=True).fit(*runs(offset=0.07), num_resamples=0)
    assert with_offset.coefficients["E"] == pytest.approx(0.07, rel=1e-3)
    assert with_offset.coefficients["B"] == pytest.approx(TRUTH["B"], rel=1e-3)


def test_intervals_hold_the_truth_and_the_total_flatters_the_fit(law):
    for name, value in TRUTH.items():
        low, high = law.intervals[name]
        assert low <= value <= high, name
    assert law.r2_forgetting > 0.98
    assert law.mae < 0.003
    # a law that forgets nothing at all looks bad only on the forgetting itself
    *_, before, after = runs(0.002)
    assert np.mean(np.abs(before - after) / after) < 0.2
    rows = {row.name: row.value for row in law.report().rows}
    assert rows["R2 of the forgetting"] == law.r2_forgetting


def test_a_larger_size_is_predicted_from_smaller_ones():
    N, D, p, before, after = runs(0.002, seed=1)
    small = N < 1e7
    found = ForgettingLaw().fit(N[small], D[small], p[small], before[small], after[small], num_resamples=0)
    predicted = found.predict(N[~small], D[~small], p[~small], before[~small])
    assert np.mean(np.abs(predicted - after[~small]) / after[~small]) < 0.01


def test_a_dose_is_where_the_law_meets_the_tolerance(law):
    dose = law.required_share(4e6, 3e6, 0.03)
    by_hand = brentq(lambda p: float(law.forgetting(4e6, 3e6, p)) - 0.03, 0, 0.5)
    assert dose.share == pytest.approx(by_hand, rel=1e-9)
    assert dose.reached
    low, high = dose.interval
    assert low < dose.share < high
    nothing = law.required_share(4e6, 3e6, 10.0)
    assert (nothing.share, nothing.reached) == (0.0, True)


def test_doses_out_of_reach_or_far_from_the_runs_are_warned_about(law):
    with pytest.warns(Extrapolation, match="over 4 times the largest of the fit"):
        law.required_share(1e8, 3e6, 0.05)
    with pytest.warns(Extrapolation, match="no share of pretraining data"):
        dose = law.required_share(3e5, 3e7, 0.001)
    assert not dose.reached
    assert dose.share < 1
    with pytest.warns(Extrapolation, match=r"a share of .* is over 4 times"):
        assert 0.2 < law.required_share(3e5, 3e7, 0.06).share < 1
    offset = ForgettingLaw(with_offset=True).fit(*runs(offset=0.07), num_resamples=0)
    with pytest.warns(Extrapolation, match="no share"):
        assert not offset.required_share(4e6, 3e6, 0.05).reached


def test_the_law_of_the_target_loss_is_recovered_with_and_without_old_data():
    N, D, p, *_ = runs()
    loss = 1.2 + 40 / (((1 + 20 * p) * N) ** 0.2 * D**0.1)
    found = FinetuningLaw(with_share=True).fit(N, D, loss, p, num_resamples=0)
    wanted = {"E": 1.2, "A": 40, "alpha": 0.2, "beta": 0.1, "B": 20}
    for name, value in wanted.items():
        assert found.coefficients[name] == pytest.approx(value, rel=1e-3), name
    np.testing.assert_allclose(found.predict(N, D, p), loss, rtol=1e-6)
    none = p == 0
    without = FinetuningLaw().fit(N[none], D[none], loss[none], num_resamples=10)
    assert without.coefficients["A"] == pytest.approx(40, rel=1e-3)
    assert "B" not in without.coefficients


@pytest.mark.parametrize("kind", ["forgetting", "finetuning"])
def test_laws_are_saved_opened_and_drawn(kind, law, tmp_path):
    N, D, p, _, after = runs(0.002)
    if kind == "finetuning":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Extrapolation)
            law = FinetuningLaw(with_share=True).fit(N, D, after, p, num_resamples=10)
    law.save(tmp_path / "law.json")
    again = load_law(tmp_path / "law.json")
    assert type(again) is type(law)
    assert again.intervals == law.intervals
    assert str(again.report()) == str(law.report())
    again.plot(tmp_path / "law.svg")
    assert (tmp_path / "law.svg").read_text().count("<use") > 30


N, D, P, BEFORE, AFTER = runs()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"p": P - 0.001}, "share of pretraining data is -0.001"),
        ({"p": P + 1}, "from 0 to below 1"),
        ({"N": N * 0}, "N of run 0"),
        ({"D": -D}, "D of run 0"),
        ({"N": N[:7], "D": D[:7], "p": P[:7], "loss_before": 4.0, "loss_after": AFTER[:7]}, "at least 8 runs, got 7"),
        ({"N": N * 0 + 5}, "2 different values of N, got 5"),
        ({"p": P * 0}, "2 different values of p"),
        ({"loss_after": np.where(np.arange(len(N)) == 3, BEFORE - 0.2, AFTER)}, "no forgetting in run 3"),
        ({"loss_after": BEFORE - 0.01}, "nothing to fit"),
        ({"loss_after": AFTER * math.nan}, "loss_after of run 0 is nan"),
    ],
)
def test_runs_that_determine_no_law_are_refused(changed, message):
    given = {"N": N, "D": D, "p": P, "loss_before": BEFORE, "loss_after": AFTER} | changed
    with pytest.raises(InvalidArgument, match=message):
        ForgettingLaw().fit(**given)


def test_what_is_asked_is_checked(law):
    with pytest.raises(InvalidArgument, match="max_forgetting must be above 0"):
        law.required_share(1e6, 1e6, 0)
    with pytest.raises(InvalidArgument, match="D must be above 0"):
        law.required_share(1e6, 0, 0.1)
    with pytest.raises(InvalidArgument, match="share of pretraining data is 1"):
        law.forgetting(1e6, 1e6, 1.0)
    with pytest.raises(NotPrepared, match="call fit first"):
        ForgettingLaw().required_share(1e6, 1e6, 0.1)
    with pytest.raises(InvalidArgument, match="2 different values of D"):
        FinetuningLaw().fit(N, D * 0 + 1, AFTER)
    growing = ForgettingLaw()
    growing._set({k: np.array([v]) for k, v in (TRUTH | {"alpha": -0.1}).items()}, {}, law.runs)
    with pytest.raises(InvalidInput, match="neither size nor pretraining data helps"):
        growing.required_share(1e6, 1e6, 0.1)


def test_the_best_checkpoint_is_that_of_the_target_loss():
    """One weight goes from 0 past the target's 1 to 3, ever further from the old optimum at 0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def at(wanted):
        return lambda model: {"loss": float((model.weight - wanted).square())}

    def objective(model, batch, generator):
        return Loss((model.weight - 3).square().sum(), 1)

    trainer = Trainer(
        model,
        objective,
        [torch.zeros(1)] * 30,
        steps=30,
        optimizer=AdamW(lr=0.1, weight_decay=0.0),
        schedule=ConstantSchedule(),
        evaluation=forgetting_evaluation(at(1.0), at(0.0), eval_every=5),
        show_progress=False,
    )
    training = trainer.fit()
    targets = [figures["loss"] for _, figures in training.evaluations]
    old = [figures["pretraining loss"] for _, figures in training.evaluations]
    assert old == sorted(old)
    assert trainer.best["step"] == training.evaluations[int(np.argmin(targets))][0] == 10
