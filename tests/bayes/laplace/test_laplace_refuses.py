"""Every input that a posterior refuses, in words that say what to do, and the limits of its numbers."""

import math
import warnings
from unittest.mock import patch

import pytest
import torch
from tests.bayes.posteriors import classes, net
from torch import nn

from pippin.bayes.laplace import memory_check
from pippin.bayes.laplace.curvature import GGN, to_curvature
from pippin.bayes.laplace.functional import Functional
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.low_rank import LowRank
from pippin.bayes.laplace.structure import Full, to_structure
from pippin.bayes.likelihood import Regression
from pippin.core.errors import (
    InvalidArgument,
    InvalidInput,
    NonFiniteEvidence,
    NotEnoughMemory,
    NotFitted,
    SingularPosterior,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"likelihood": "poisson"}, "likelihood must be .*'multi_label', got 'poisson'"),
        ({"subset_of_weights": "first"}, "subset_of_weights must be 'all' or 'last_layer', got 'first'"),
        ({"hessian_structure": "block"}, "hessian_structure must be 'full', 'kron'.* got 'block'"),
        ({"curvature": "newton"}, "curvature must be 'ggn', 'mc', 'ef' or 'hessian', got 'newton'"),
        ({"prior_precision": 0.0}, "prior_precision holds 0"),
        ({"prior_precision": -1.0}, "prior_precision holds -1"),
        ({"prior_precision": math.nan}, "prior_precision holds nan"),
        (
            {"prior_precision": [1.0, 2.0, 3.0, 4.0]},
            "4 elements; give 1, one for each of 2 layers, or .* 39",
        ),
        ({"temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_arguments_are_checked_at_once(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        Laplace(
            net(),
            **{"likelihood": "classification", "subset_of_weights": "all", "hessian_structure": "diag", **arguments},
        )


def test_a_model_without_a_linear_last_layer_is_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    with pytest.raises(InvalidArgument, match=r"no linear last layer: the last layer is 1 \(LayerNorm\)"):
        Laplace(model, "classification")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.5)])
def test_layers_in_training_mode_are_refused(layer):
    model = nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 3)).double()
    laplace = Laplace(model, "classification", hessian_structure="diag")
    with pytest.raises(InvalidArgument, match=r"1 \(.*\) is in training mode.*call model.eval"):
        laplace.fit(classes())
    laplace.model.eval()
    laplace.fit(classes())
    laplace.model.train()
    with pytest.raises(InvalidArgument, match="training mode"):
        laplace(torch.zeros(1, 2).double())


def x_and(y):
    return [(torch.randn(len(y), 2).double(), y)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no batch"),
        (x_and(torch.zeros(0, dtype=torch.long)), "batch 0 is empty"),
        (x_and(torch.tensor([1, 1, 1])), "all 3 targets are class 1"),
        (x_and(torch.tensor([0, 7])), "class 7 is not among"),
        (x_and(torch.tensor([0.0, 1.0])), "must be integers"),
        ([(torch.tensor([[1.0, math.nan]]).double(), torch.tensor([0]))], "inputs of batch 0 hold nan at \\[0, 1\\]"),
        ([torch.zeros(3, 2)], "must be a pair"),
        ([{"input_ids": torch.zeros(3, 2)}], "has no targets"),
        ([(torch.zeros(3, 2).double(), [0, 1, 2])], "must be a tensor, got list"),
    ],
)
def test_data_that_cannot_be_used_is_named(data, message):
    with pytest.raises(InvalidInput, match=message):
        Laplace(net(), "classification", hessian_structure="diag").fit(data)


def test_targets_of_a_regression_are_checked():
    laplace = Laplace(net(1), "regression", hessian_structure="diag")
    with pytest.raises(InvalidInput, match="targets of batch 0 hold nan"):
        laplace.fit(x_and(torch.tensor([0.0, math.nan])))
    with pytest.raises(InvalidInput, match="must be real numbers"):
        laplace.fit(x_and(torch.tensor([0, 1])))


def test_data_that_can_be_read_once_is_refused():
    with pytest.raises(InvalidArgument, match="iterator"):
        Laplace(net(), "classification", hessian_structure="diag").fit(iter(classes()))
    with pytest.raises(InvalidArgument, match="iterable of batches"):
        Laplace(net(), "classification", hessian_structure="diag").fit(torch.zeros(3))


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p(torch.zeros(1, 2).double()),
        lambda p: p.log_marginal_likelihood(),
        lambda p: p.sample(1),
        lambda p: p.functional_samples(torch.zeros(1, 2).double(), 1),
        lambda p: p.log_prob(torch.zeros(21).double()),
        lambda p: p.tune(),
        lambda p: p.posterior,
        lambda p: p.save("nowhere"),
    ],
)
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_nothing_is_answered_before_the_fit(ask, structure):
    with pytest.raises(NotFitted, match="call fit"):
        ask(Laplace(net(), "classification", hessian_structure=structure))


def test_a_posterior_notices_that_its_model_moved():
    model = net()
    laplace = Laplace(model, "classification", hessian_structure="diag").fit(classes())
    with torch.no_grad():
        model[2].bias += 1
    with pytest.raises(NotFitted, match="changed since the fit"):
        laplace(torch.zeros(1, 2).double())


def test_calls_are_checked():
    laplace = Laplace(net(), "classification", hessian_structure="diag").fit(classes())
    x = torch.zeros(1, 2).double()
    cases = [
        (InvalidArgument, "pred_type must be", lambda: laplace(x, "magic")),
        (InvalidArgument, "link_approx must be", lambda: laplace(x, link_approx="magic")),
        (InvalidArgument, "num_samples must be at least 1", lambda: laplace(x, link_approx="mc", num_samples=0)),
        (InvalidArgument, "needs the linearized model", lambda: laplace(x, "mc", joint=True)),
        (InvalidArgument, "n must be at least 1", lambda: laplace.sample(0)),
        (InvalidArgument, "3 weights for a posterior over 21", lambda: laplace.log_prob(torch.zeros(3).double())),
        (InvalidArgument, "must stay 1", lambda: setattr(laplace, "sigma_noise", 2.0)),
        (InvalidArgument, "has no noise", lambda: laplace.log_marginal_likelihood(None, 2.0)),
        (InvalidArgument, "holds 0", lambda: laplace.log_marginal_likelihood(0.0)),
        (InvalidInput, "no inputs", lambda: laplace(x[:0])),
        (InvalidInput, "hold nan", lambda: laplace(x * math.nan)),
    ]
    for error, message, ask in cases:
        with pytest.raises(error, match=message):
            ask()
    labels = Laplace(net(), "multi_label", hessian_structure="diag").fit(x_and(torch.tensor([[0.0, 1, 0]]).double()))
    with pytest.raises(InvalidArgument, match="for classes, not for labels"):
        labels(x, link_approx="bridge")


def test_a_curvature_that_is_not_positive_is_refused_with_a_way_out():
    laplace = Laplace(net(), "classification", "all", "full", "hessian", 1e-3)
    laplace.fit(classes())
    for ask in (laplace.log_marginal_likelihood, lambda: laplace(torch.zeros(1, 2).double())):
        with pytest.raises(SingularPosterior, match="raise the prior precision"):
            ask()


def test_a_curvature_that_is_not_finite_is_refused():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            return x * self.w.abs().sqrt()

    for word in ("full", "diag"):
        with pytest.raises(SingularPosterior, match="infinite or NaN"):
            Laplace(Root(), "classification", "all", word).fit(x_and(torch.tensor([0, 1])))


def test_an_evidence_that_is_not_finite_names_its_term():
    model = net(1)
    laplace = Laplace(model, "regression", hessian_structure="diag").fit(
        x_and(torch.tensor([0.0, 1e200], dtype=torch.float64))
    )
    with pytest.raises(NonFiniteEvidence, match="the log-likelihood is -inf"):
        laplace.log_marginal_likelihood()


def test_outputs_that_are_not_finite_are_refused():
    model = net()
    with torch.no_grad():
        model[2].bias[0] = math.inf
    with pytest.raises(InvalidInput, match=r"outputs .* not finite"):
        Laplace(model, "classification", hessian_structure="diag").fit(classes())
    with pytest.raises(InvalidInput, match="outputs are infinite or NaN"):
        Laplace(model, "classification", "all", "full", "hessian").fit(classes())


def test_a_full_structure_that_does_not_fit_says_how_much_it_needs():
    model = nn.Linear(20_000, 100)
    laplace = Laplace(model, "classification", hessian_structure="full")
    data = [(torch.zeros(2, 20_000), torch.tensor([0, 1]))]
    with pytest.raises(
        NotEnoughMemory, match=r"2,000,100 weights needs .*96,009,600,240,000 bytes.*hessian_structure='kron'"
    ):
        laplace.fit(data)
    with patch.object(memory_check, "available_memory", return_value=1000):
        for chosen in (LowRank(5), Functional(2)):
            with pytest.raises(NotEnoughMemory):
                Laplace(net(), "classification", "all", chosen).fit(classes())


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowRank(0),
        lambda: LowRank(3, oversample=-1),
        lambda: LowRank(3, passes=1),
        lambda: Functional(0),
        lambda: GGN(num_samples=0),
        lambda: to_structure("block"),
        lambda: to_curvature("newton"),
    ],
)
def test_objects_check_their_numbers(make):
    with pytest.raises(InvalidArgument):
        make()


def test_words_are_objects():
    assert to_structure("full") == Full()
    assert to_structure("lowrank") == LowRank(50)
    assert to_curvature("mc") == GGN(num_samples=1)


def test_a_model_of_another_form_is_refused():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            return self.head(x)[:, None]

    with pytest.raises(InvalidInput, match=r"must return \(batch, outputs\)"):
        Laplace(Sequence().double(), "classification", "all", "full", "hessian").fit(classes())
    with warnings.catch_warnings(), pytest.raises(InvalidInput, match="one number per example"):
        Laplace(net(2), "reward_model", "all", "full", "hessian").fit(
            [((torch.zeros(2, 2).double(), torch.zeros(2, 2).double()), torch.tensor([0, 1]))]
        )


def test_rounding_in_float32_does_not_make_a_curvature_negative():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
    x = 30 * torch.randn(40, 1, generator=generator)
    laplace = Laplace(model, Regression(1e-3), "all", "full", prior_precision=1e-3).fit([(x, x.sin())])
    exact = Laplace(model.double(), Regression(1e-3), "all", "full", prior_precision=1e-3)
    exact.fit([(x.double(), x.double().sin())])
    found = float(laplace.posterior.log_det)
    assert math.isfinite(found)
    assert laplace.posterior.variances().min() > 0
    assert found == pytest.approx(float(exact.posterior.log_det), rel=1e-2)


def test_tuning_with_the_hessian_turns_back_where_there_is_no_posterior():
    laplace = Laplace(net(), "classification", "all", "full", "hessian", 100.0).fit(classes())
    laplace.tune()
    assert math.isfinite(float(laplace.log_marginal_likelihood()))


@pytest.mark.parametrize("kind", ["full", "diag", "kron"])
def test_a_prediction_goes_by_parts_that_fit_and_is_that_of_the_whole(kind, monkeypatch):
    model = net()
    posterior = Laplace(model, "classification", subset_of_weights="all", hessian_structure=kind).fit(classes())
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    width = posterior.selection.size if kind == "full" else 6 + 3  # what comes back to both layers of one example
    monkeypatch.setattr("pippin.bayes.laplace.laplace._MAX_ELEMENTS", 5 * 3 * width)
    sizes = []
    forward = posterior.rows.forward
    monkeypatch.setattr(posterior.rows, "forward", lambda part: (sizes.append(len(part)), forward(part))[1])
    found, covariance = posterior.outputs_at(x)
    assert max(sizes[1:]) == 5
    assert sum(sizes) == 40
    mean, whole = posterior.outputs_at(x, joint=True)
    torch.testing.assert_close(found, mean)
    blocks = whole.view(40, 3, 40, 3)[range(40), :, range(40)]
    torch.testing.assert_close(covariance, blocks)
