"""Oracles for weighted retraining: ranks by loops, frequencies of draws, a model that can be followed by hand."""

import itertools
import json
import math
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError

from pippin.bayes.latent.acquisition import ExpectedImprovement, GridSearch, PriorSampling
from pippin.bayes.latent.sample_weights import (
    cem_pi_weights,
    dbas_weights,
    rank_weights,
    replicate,
    rwr_weights,
)
from pippin.bayes.latent.vae import VAE, VAEConfig
from pippin.bayes.latent.weighted_retraining import LatentModel, LatentVAE, WeightedRetraining, _WeightedBatches
from pippin.core.errors import (
    InferenceAtRisk,
    InvalidArgument,
    InvalidInput,
    MissingDependency,
    ModelNotFound,
    NotFitted,
    ResumeMismatch,
)


class Identity:
    """A model whose codes are its examples, to one decimal; it remembers what it was asked to learn."""

    def __init__(self):
        self.fits = []

    def fit(self, x, sample_weight, epochs, seed):
        self.fits.append((len(x), sample_weight.clone(), epochs, seed))

    def encode(self, x):
        return x

    def decode(self, z):
        return (10 * z).round() / 10

    def state_dict(self):
        return {"nothing": torch.zeros(1)}

    def load_state_dict(self, state):
        assert set(state) == {"nothing"}


def hill(x):
    return -(x - torch.tensor([0.7, -0.4])).square().sum(-1)


def start(n=30, seed=0):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return x, hill(x)


# --- weights ----------------------------------------------------------------------------------------------------------


def ranks_by_hand(scores, k, maximize):
    better = (lambda a, b: a > b) if maximize else (lambda a, b: a < b)
    raw = [1 / (k * len(scores) + sum(better(other, score) for other in scores)) for score in scores]
    return [w * len(raw) / sum(raw) for w in raw]


@given(
    st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=30),
    st.sampled_from([1e-3, 0.1, 1.0, 50.0]),
    st.booleans(),
)
@settings(deadline=None)
def test_rank_weights_are_the_definition_with_ties(scores, k, maximize):
    found = rank_weights(torch.tensor(scores, dtype=torch.float64), k, maximize=maximize)
    assert found.tolist() == pytest.approx(ranks_by_hand(scores, k, maximize), rel=1e-9)
    assert float(found.mean()) == pytest.approx(1.0)


def test_a_monotone_change_leaves_weights_as_they_are():
    scores = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rank_weights(scores), rank_weights(scores.exp() * 100 - 3))
    assert torch.equal(rank_weights(scores), rank_weights(-scores, maximize=False))


def test_limits_of_k():
    scores = torch.tensor([1.0, 2.0, 3.0, 3.0])
    assert rank_weights(scores, math.inf).tolist() == [1.0] * 4
    torch.testing.assert_close(rank_weights(scores, 1e-9), torch.tensor([0.0, 0.0, 2.0, 2.0]), rtol=0, atol=1e-5)


def test_the_share_of_the_top_hardly_depends_on_the_number_of_points():
    shares = []
    for n in (1000, 100_000):
        weights = rank_weights(torch.arange(n).double(), 1e-2)
        shares.append(float(weights[-n // 100 :].sum() / n))
    assert shares[0] == pytest.approx(shares[1], abs=0.01)


def test_copies_add_up_to_the_weights_and_none_is_above_one():
    weights = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    weights[3] = 2.0
    rows, factors = replicate(weights)
    total = torch.zeros_like(weights).index_add_(0, rows, factors)
    torch.testing.assert_close(total, weights)
    assert float(factors.max()) <= 1.0
    assert len(rows) == sum(math.ceil(w) for w in weights.tolist())


def test_draws_have_the_frequency_of_their_weight():
    weights = torch.tensor([0.0, 1.0, 3.0])
    drawn = torch.cat(list(itertools.islice(_WeightedBatches(torch.arange(3.0)[:, None], weights, 1000, 0), 40)))[:, 0]
    torch.testing.assert_close(drawn.long().bincount(minlength=3) / 40_000, weights / 4, rtol=0, atol=0.01)


def test_sampling_rules_are_their_formulas():
    y = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert cem_pi_weights(y, quantile=0.5).tolist() == pytest.approx([0, 0, 5 / 3, 5 / 3, 5 / 3])
    raw = [0.5 * math.erfc(-(v - 2.0) / 0.7 / math.sqrt(2)) for v in y.tolist()]
    found = dbas_weights(y, quantile=0.5, noise=0.7).tolist()
    assert found == pytest.approx([5 * w / sum(raw) for w in raw])
    raw = [math.exp(0.3 * (v - 4)) for v in y.tolist()]
    assert rwr_weights(y, alpha=0.3).tolist() == pytest.approx([5 * w / sum(raw) for w in raw])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda y: rank_weights(y, 0.0), InvalidArgument, "k must be above 0"),
        (lambda y: rank_weights(y[:0]), InvalidInput, "no scores"),
        (lambda y: rank_weights(y / 0), InvalidInput, r"scores of rows \[0, 1\] are not finite"),
        (lambda y: replicate(-y), InvalidArgument, "0 or more"),
        (lambda y: replicate(0 * y), InvalidArgument, "all weights are 0"),
        (lambda y: dbas_weights(y, quantile=1.0), InvalidArgument, "quantile must be"),
        (lambda y: dbas_weights(y, noise=0.0), InvalidArgument, "noise must be"),
    ],
)
def test_bad_weights_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.tensor([1.0, 2.0]))


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_expected_improvement_climbs_the_hill_and_the_loop_keeps_its_books():
    pytest.importorskip("scipy")
    x, y = start()
    model = Identity()
    search = WeightedRetraining(model, x, y, retrain_every=5, init_epochs=2.0, retrain_epochs=0.5)
    result = search.run(hill, 12)
    assert result.best_y > float(y.max())
    assert result.best_y > -0.01  # the optimum is on the grid of decodings
    torch.testing.assert_close(result.best_x, torch.tensor([0.7, -0.4]), rtol=0, atol=0.11)
    assert len(result.history) == 12 == search.queries
    assert result.best_so_far[-1] == result.best_y == max(result.history)
    assert list(result.best_so_far) == sorted(result.best_so_far)
    assert [(n, epochs) for n, _, epochs, _ in model.fits] == [(30, 2.0), (35, 0.5), (40, 0.5)]
    for n, weights, _, _ in model.fits:
        torch.testing.assert_close(weights.double(), rank_weights(search.scores[:n]).double(), rtol=1e-5, atol=1e-6)


def test_minimizing_is_maximizing_the_negative():
    pytest.importorskip("scipy")
    x, y = start()
    up = WeightedRetraining(Identity(), x, y, retrain_every=3).run(hill, 5)
    down = WeightedRetraining(Identity(), x, -y, retrain_every=3, maximize=False).run(lambda z: -hill(z), 5)
    assert down.history == pytest.approx([-v for v in up.history])
    assert down.best_y == pytest.approx(-up.best_y)
    assert down.best_so_far == pytest.approx([-v for v in up.best_so_far])


def test_asking_for_several_spreads_them():
    pytest.importorskip("scipy")
    x, y = start()
    search = WeightedRetraining(Identity(), x, y)
    asked = search.ask(4)
    assert asked.shape == (4, 2)
    assert len(asked.unique(dim=0)) == 4
    search.tell(asked, hill(asked))
    assert search.queries == 4


def test_the_grid_gives_the_best_of_what_it_decodes_without_duplicates():
    model, grid = Identity(), GridSearch(hill, points_per_axis=61, bound=0.5)
    codes = grid.propose(model.decode, 3, 0)
    every = model.decode(torch.cartesian_prod(*[torch.linspace(-0.5, 0.5, 61)] * 2)).unique(dim=0)
    wanted = hill(every).sort(descending=True).values[:3]
    torch.testing.assert_close(hill(model.decode(codes)), wanted)
    assert (
        len(GridSearch(hill, points_per_axis=4, bound=0.01).propose(model.decode, 10, 0)) == 1
    )  # all decode to the same


def test_nothing_is_asked_for_twice_unless_it_may_be():
    pytest.importorskip("scipy")
    x, y = start()
    for repeat, wanted in ((False, 8), (True, 3)):
        search = WeightedRetraining(
            Identity(), x, y, allow_repeats=repeat, search=GridSearch(hill, points_per_axis=13), retrain_every=3
        )
        if repeat:  # a grid that is taken up again gives the same again
            search.run(hill, 6)
            assert len(search.x[30:].unique(dim=0)) == wanted
            continue
        search.run(hill, 8)
        assert len(search.x.unique(dim=0)) == 30 + wanted
    climbing = WeightedRetraining(Identity(), x, y, search=ExpectedImprovement(num_starts=4), retrain_every=3)
    climbing.run(hill, 6)
    assert len(climbing.x.unique(dim=0)) == 36


def test_trust_keeps_every_search_inside():
    pytest.importorskip("scipy")
    x, y = start()
    left = lambda z: -z[:, 0] - 0.2  # noqa: E731
    for found in (ExpectedImprovement(num_starts=6), GridSearch(hill, points_per_axis=21), PriorSampling(2)):
        search = WeightedRetraining(Identity(), x, y, search=found, trust=left, retrain_every=4)
        result = search.run(hill, 4)
        assert (search.x[30:, 0] <= -0.1).all()  # up to rounding
        assert len(result.history) == 4


def test_invalid_examples_count_and_get_the_worst_score():
    x, y = start()
    search = WeightedRetraining(Identity(), x, y, search=PriorSampling(2), retrain_every=4)
    result = search.run(lambda z: torch.where(torch.arange(len(z)) == 0, math.nan, hill(z)), 8)
    assert result.num_invalid == 2
    assert math.isnan(result.history[0])
    assert math.isnan(result.best_so_far[0])
    assert float(search.scores[30]) == float(y.min())
    with pytest.raises(InvalidInput, match="all of the last 4 examples were invalid"):
        WeightedRetraining(Identity(), x, y, search=PriorSampling(2), retrain_every=4).run(
            lambda z: [math.nan] * len(z), 8
        )
    only = WeightedRetraining(Identity(), x, y, search=PriorSampling(2), retrain_every=4).run(
        lambda z: [math.nan] * 4, 4
    )
    assert only.best_x is None
    assert math.isnan(only.best_y)


def test_sampling_search_by_other_weights():
    x, y = start()
    model = Identity()
    search = WeightedRetraining(
        model,
        x,
        y,
        search=PriorSampling(2),
        weighting=lambda s: cem_pi_weights(s, quantile=0.8),
        retrain_every=10,
    )
    search.run(hill, 20)
    assert set(model.fits[0][1].tolist()) == {0.0, 5.0}


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_resumed_search_asks_what_it_would_have_asked(at, tmp_path):
    pytest.importorskip("scipy")
    x, y = start()

    def made():
        return WeightedRetraining(Identity(), x, y, retrain_every=5, search=ExpectedImprovement(num_starts=4))

    whole = made().run(hill, 9)
    first = made()
    if at:
        first.run(hill, at) if at >= 5 else [first.tell(z, hill(z)) for z in (first.ask() for _ in range(at))]
    first.save(tmp_path / "search")
    again = made().resume(tmp_path / "search").run(hill, 9)
    assert again.history == whole.history


def test_other_settings_do_not_resume(tmp_path):
    x, y = start()
    search = WeightedRetraining(Identity(), x, y)
    search.save(tmp_path / "search")
    with pytest.raises(ResumeMismatch, match=r"k: 0\.001 there, 0\.1 here"):
        WeightedRetraining(Identity(), x, y, k=0.1).resume(tmp_path / "search")
    with pytest.raises(ModelNotFound):
        search.resume(tmp_path / "nowhere")
    config = tmp_path / "search" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "llama"}))
    with pytest.raises(ResumeMismatch, match="llama"):
        search.resume(tmp_path / "search")


def test_bad_input_is_named(monkeypatch):
    x, y = start()
    for arguments, message in (
        ({"k": -1.0}, "k must be"),
        ({"retrain_every": 0}, "retrain_every must be"),
        ({"init_epochs": -1.0}, r"init_epochs must be"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            WeightedRetraining(Identity(), x, y, **arguments)
    with pytest.raises((InvalidInput, TypeCheckError)):
        WeightedRetraining(Identity(), x, y[:-1])
    with pytest.raises(InvalidInput, match=r"rows \[2\]"):
        WeightedRetraining(Identity(), x, torch.where(torch.arange(30) == 2, math.nan, y))
    with pytest.raises(InvalidInput, match="no scores"):
        WeightedRetraining(Identity(), x[:0], y[:0])
    with pytest.raises((InvalidArgument, TypeCheckError)):
        WeightedRetraining(object(), x, y)
    search = WeightedRetraining(Identity(), x, y, search=PriorSampling(2))
    with pytest.raises(InvalidArgument, match="count must be"):
        search.ask(0)
    with pytest.raises(InvalidArgument, match="budget must be"):
        search.run(hill, 0)
    with pytest.raises(InvalidInput, match="score 1 is infinite"):
        search.tell(x[:2], torch.tensor([0.0, math.inf]))
    with pytest.raises(InvalidInput, match="known are"):
        search.tell(torch.zeros(2, 3), torch.zeros(2))
    for objective, message in (
        (lambda x: None, r"gave a NoneType for \d examples"),
        (lambda x: x, "give one number for each"),
        (lambda x: 3.0, r"scores of shape \(\)"),
    ):
        with pytest.raises((InvalidInput, TypeCheckError), match=f"{message}|type"):
            WeightedRetraining(Identity(), x, y, search=PriorSampling(2), retrain_every=5).run(objective, 10)
    with pytest.warns(InferenceAtRisk, match="never retrained"):
        search.run(hill, 3)
    for search_, message in (
        (lambda: ExpectedImprovement(num_starts=0), "num_starts must be at least 1, got 0"),
        (lambda: ExpectedImprovement(percentile=100.0), "percentile must be above 0 and below 100, got 100"),
        (lambda: GridSearch(hill, points_per_axis=1), "points_per_axis must be at least 2, got 1"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            search_()
    for call in (
        lambda: ExpectedImprovement().propose(lambda z: z, 1, 0),
        lambda: ExpectedImprovement().update(x, y),
    ):
        with pytest.raises(NotFitted):
            call()
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingDependency, match=r"pippin\[bayes\]"):
        WeightedRetraining(Identity(), x, y).ask()


# --- a VAE as the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["sampling", "loss"])
def test_a_vae_learns_what_weighs_most_on_either_route(route):
    x = torch.cat([torch.zeros(60, 4), torch.ones(20, 4)])
    weights = torch.cat([torch.full((60,), 0.04), torch.full((20,), 3.88)])
    model = LatentVAE(VAE(VAEConfig((4,), 1, (8,))), route=route, batch_size=16, lr=1e-2)
    assert isinstance(model, LatentModel)
    model.fit(x, weights, epochs=40.0, seed=0)
    drawn = model.decode(torch.randn(200, 1, generator=torch.Generator().manual_seed(0)))
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}
    assert float(drawn.mean()) > 0.7


def test_no_epochs_change_nothing_and_fractions_are_fractions():
    x, weights = torch.rand(64, 4).round(), torch.ones(64)
    model = LatentVAE(VAE(VAEConfig((4,), 1, (8,))), batch_size=16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.fit(x, weights, epochs=0.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.fit(x, weights, epochs=0.25)  # one update of 4
    moved = max(float((value - before[name]).abs().max()) for name, value in model.state_dict().items())
    assert moved == pytest.approx(1e-3, rel=0.01)  # Adam's first step is its rate
    with pytest.raises(InvalidArgument, match="epochs must be"):
        model.fit(x, weights, epochs=-1.0)
    with pytest.raises(InvalidArgument, match="all weights are 0"):
        model.fit(x, 0 * weights, epochs=1.0)
    with pytest.raises(InvalidInput, match="outside 0 to 1"):
        model.fit(x * 2, weights, epochs=1.0)
    with pytest.raises(InvalidArgument, match="batch_size must be"):
        LatentVAE(model.vae, batch_size=0)
    with pytest.raises((InvalidArgument, TypeCheckError)):
        LatentVAE(model.vae, route="other")


def test_choices_are_decoded_to_one_hot_and_numbers_to_their_mean():
    z = torch.randn(5, 1, generator=torch.Generator().manual_seed(0))
    choice = LatentVAE(VAE(VAEConfig((3, 4), 1, (8,), "categorical")))
    choice.vae.check(choice.decode(z))
    gaussian = LatentVAE(VAE(VAEConfig((3,), 1, (8,), "gaussian")))
    assert torch.equal(gaussian.decode(z), gaussian.vae.decode(z).detach())


def test_a_vae_and_its_search_come_back_together(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 6, generator=generator).round()

    def made():
        model = LatentVAE(VAE(VAEConfig((6,), 2, (8,))), batch_size=16)
        area = lambda v: v.flatten(1).sum(-1)  # noqa: E731
        return WeightedRetraining(
            model, x, area(x), search=GridSearch(area, points_per_axis=10), retrain_every=3, allow_repeats=True
        ), area

    search, area = made()
    whole = search.run(area, 9).history
    half, _ = made()
    half.run(area, 6)
    half.save(tmp_path / "search")
    again, _ = made()
    assert again.resume(tmp_path / "search").run(area, 9).history == whole
