"""`quantify_uncertainty` against its parts, in every form that data and models have; and what it refuses."""

import json
import warnings

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pippin import metrics
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.predictors.temperature_scaling import TemperatureScaling
from pippin.bayes.train_test_split import split_data
from pippin.bayes.uncertainty import Uncertainty, quantify_uncertainty
from pippin.core.errors import (
    CorruptedFile,
    InferenceAtRisk,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
)


def network(outputs, inputs=2, sharper=1.0):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)).eval()
    with torch.no_grad():
        model[2].weight *= 6 * sharper
    return model


def labeled(model, n, seed, temperature=1.0):
    """Inputs, and labels drawn from the model's own probabilities at a temperature: what is right is known."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    with torch.no_grad():
        probs = (model(x) / temperature).softmax(-1)
    return x, torch.multinomial(probs, 1, generator=generator)[:, 0]


def rows(report):
    return {row.name: row.value for row in report.rows}


def test_a_network_that_is_three_times_too_sure_is_corrected():
    model = network(3)
    data = labeled(model, 4000, 1, temperature=3.0)
    sure = quantify_uncertainty(model, data, held_out=0.6)
    found = rows(sure.report)
    assert found["ECE"] < 0.05 < found["ECE, MAP"]
    assert found["negative log-likelihood"] < found["negative log-likelihood, MAP"] - 0.1
    assert found["examples measured"] == 1200
    x, _ = labeled(model, 50, 2)
    assert torch.equal(sure(x).probs.argmax(-1), model(x).argmax(-1))


def test_it_is_the_tuned_laplace_at_the_fitted_temperature_on_the_parts_of_the_seed():
    model = network(3)
    data = labeled(model, 300, 1, temperature=2.0)
    sure = quantify_uncertainty(model, data, seed=5, hessian_structure="full")
    fit, tune, test = split_data(data, (0.6, 0.2, 0.2), seed=5, batch_size=256, model=model)
    by_hand = Laplace(model, "classification", hessian_structure="full").fit(fit).tune_on_validation(tune)
    scaled = TemperatureScaling(by_hand).fit(tune)
    x, y = test[0]
    torch.testing.assert_close(sure(x).probs, scaled(x).probs)
    found = rows(sure.report)
    assert found["negative log-likelihood"] == pytest.approx(metrics.log_loss(scaled(x).probs, y), rel=1e-5)
    assert found["Brier score, MAP"] == pytest.approx(metrics.brier_score(model(x).softmax(-1), y), rel=1e-5)
    seen = torch.cat([x for part in (fit, tune, test) for x, _ in part])
    assert len(torch.unique(seen, dim=0)) == len(seen) == 300  # every example in one part


def test_the_cautious_prior_is_that_of_the_evidence_without_a_temperature():
    model = network(3)
    data, other = labeled(model, 200, 1), labeled(model, 100, 2)
    sure = quantify_uncertainty(model, data, validation=other, prior="conservative", hessian_structure="full")
    by_hand = Laplace(model, "classification", hessian_structure="full").fit([data]).tune()
    x = 100 * torch.randn(20, 2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(sure(x).probs, by_hand(x).probs)
    assert sure.temperature == 1.0
    assert sure(x).probs.max(-1).values.mean() < model(x).softmax(-1).max(-1).values.mean()


def test_every_form_of_data_gives_the_same():
    model = network(3)
    x, y = labeled(model, 200, 1)
    whole = TensorDataset(x, y)
    forms = {
        "tensors": (x, y),
        "arrays": (x.double().numpy(), y.numpy()),
        "data set": whole,
        "shuffling loader": DataLoader(whole, batch_size=32, shuffle=True),
        "batches": [(x[:150], y[:150]), (x[150:], y[150:])],
        "loader of batches": DataLoader(whole, batch_size=64),
    }
    found = {name: quantify_uncertainty(model, data, seed=1)(x[:9]).probs for name, data in forms.items()}
    for name, probs in found.items():
        torch.testing.assert_close(probs, found["tensors"], rtol=1e-4, atol=1e-5, msg=name)


class Named(nn.Module):
    """Takes its inputs by name, as Hugging Face's models do."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, features):
        return {"logits": self.inner(features)}


def test_a_model_of_named_inputs():
    model = network(3)
    x, y = labeled(model, 200, 1)
    sure = quantify_uncertainty(Named(model).eval(), [{"features": x, "labels": y}], hessian_structure="full")
    torch.testing.assert_close(
        sure({"features": x}).probs, quantify_uncertainty(model, (x, y), hessian_structure="full")(x).probs
    )


def test_a_single_logit_is_two_classes():
    model = network(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2000, 2, generator=generator)
    with torch.no_grad():
        y = torch.bernoulli((model(x) / 3).sigmoid(), generator=generator)[:, 0].long()
    sure = quantify_uncertainty(model, (x, y), held_out=0.6)
    assert sure(x).probs.shape == (2000, 2)
    torch.testing.assert_close(sure(x).probs.sum(-1), torch.ones(2000))
    assert rows(sure.report)["ECE"] < 0.06 < rows(sure.report)["ECE, MAP"]


def test_a_regressions_intervals_hold_what_they_promise():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1500, 2, generator=generator)
    model = network(2)
    with torch.no_grad():
        y = model(x) + 0.3 * torch.randn(1500, 2, generator=generator)
    sure = quantify_uncertainty(model, (x, y), ood=50 * x[:100])
    found = rows(sure.report)
    assert found["coverage of the 95 % interval"] == pytest.approx(0.95, abs=0.03)
    assert found["root mean square error"] == pytest.approx(0.3, rel=0.1)
    prediction = sure(x)
    assert prediction.probs is None
    assert float(prediction.variance.mean()) == pytest.approx(0.09, rel=0.15)
    with pytest.raises(InvalidArgument, match="no probabilities"):
        sure.reliability()


def test_intervals_cover_as_they_promise_and_conformal_ones_whatever_the_noise():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 2, generator=generator)
    model = network(1)
    with torch.no_grad():
        y = model(x) + 0.1 * torch.randn(4000, 1, generator=generator) / torch.rand(4000, 1, generator=generator)
    sure = quantify_uncertainty(model, (x[:2000], y[:2000]))
    new, targets = x[2000:], y[2000:]

    def coverage(ends):
        return float(((ends[0] <= targets) & (targets <= ends[1])).float().mean())

    prediction = sure(new)
    for ours, plain in zip(sure.interval(new, 0.9), prediction.interval(0.9), strict=True):
        assert torch.equal(ours, plain)
    n = 400  # held out for the report
    deviation = (0.25 * (1 / n + 1 / len(new))) ** 0.5
    assert coverage(sure.interval(new, 0.5, method="conformal")) == pytest.approx(0.5, abs=4 * deviation)
    assert coverage(sure.interval(new, 0.5)) > 0.5 + 8 * deviation  # the variance is that of rare, large errors
    with pytest.raises(InvalidArgument, match="intervals are for regressions"):
        quantify_uncertainty(network(3), labeled(network(3), 400, 1)).interval(x, method="conformal")


def test_the_better_of_posterior_and_network_is_named():
    """The negative log-likelihoods of the report decide, and their paired difference tells what is noise."""
    model = network(3)
    data = labeled(
        model, 60, 15
    )  # from the model's own probabilities: no posterior can do better, and few may do worse
    with pytest.warns(InferenceAtRisk, match="the MAP network predicts better than with this posterior") as said:
        worse = quantify_uncertainty(model, data, held_out=0.5)
    assert worse.advice == str(said[0].message)
    found = rows(worse.report)
    ours, plain = found["negative log-likelihood"], found["negative log-likelihood, MAP"]
    assert ours > 1.01 * plain
    assert f"({ours:.3g} against {plain:.3g} nats on 15 held-out examples" in worse.advice
    careful = quantify_uncertainty(
        model, labeled(model, 3000, 1), prior="conservative"
    )  # as it promises, and no warning
    assert careful.advice.startswith("the MAP network predicts better")
    assert "equally well" in quantify_uncertainty(model, labeled(model, 400, 1)).advice
    overconfident = network(3, sharper=4)
    better = quantify_uncertainty(overconfident, labeled(overconfident, 3000, 1, temperature=4.0))
    assert better.advice.startswith("the posterior predicts better than the MAP network")


def test_foreign_inputs_are_in_the_report_and_change_nothing():
    model = network(3)
    data = labeled(model, 400, 1)
    foreign = 0.05 * torch.randn(80, 2, generator=torch.Generator().manual_seed(4))  # where the model is least sure
    sure, plain = quantify_uncertainty(model, data, ood=foreign), quantify_uncertainty(model, data)
    assert torch.equal(sure(data[0]).probs, plain(data[0]).probs)
    found = rows(sure.report)
    assert found["OOD inputs"] == 80
    test = split_data(data, (0.6, 0.2, 0.2), seed=0, batch_size=256, model=model)[2]
    own = torch.cat([sure.ood_score(x) for x, _ in test])
    assert found["OOD AUROC, by ood_score"] == pytest.approx(metrics.roc_auc(sure.ood_score(foreign), own))
    near, far = (metrics.entropy(p) for p in (torch.cat([sure(x).probs for x, _ in test]), sure(foreign).probs))
    assert found["OOD AUROC"] == pytest.approx(metrics.roc_auc(far, near))
    again = sure.evaluate(data, [foreign[:30], foreign[30:60], foreign[60:]])
    assert rows(again)["OOD inputs"] == 80
    assert "OOD inputs" not in rows(plain.report)


def test_foreign_inputs_are_scored_by_the_posterior_of_the_evidence():
    model = network(3)
    data = labeled(model, 400, 1)
    sure, careful = quantify_uncertainty(model, data), quantify_uncertainty(model, data, prior="conservative")
    assert careful.conservative is None
    assert sure.conservative.posterior is not sure.posterior.posterior  # two priors...
    assert sure.conservative._state is sure.posterior._state  # ... and one curvature
    alone = (
        Laplace(model, "classification")
        .fit(split_data(data, (0.6, 0.2, 0.2), seed=0, batch_size=256, model=model)[0])
        .tune()
    )
    expected = metrics.entropy(alone(data[0]).probs)
    torch.testing.assert_close(sure.ood_score(data[0]), expected)
    torch.testing.assert_close(careful.ood_score(data[0]), expected)
    assert not torch.allclose(metrics.entropy(sure(data[0]).probs), expected, atol=1e-3)
    x, y = data[0], data[0][:, 0] + 0.1 * torch.randn(400, generator=torch.Generator().manual_seed(0))
    line = quantify_uncertainty(network(1), (x, y))
    assert line.conservative is None
    assert torch.equal(line.ood_score(x), line(x).variance.sum(-1))


def test_saved_and_loaded_it_predicts_the_same(tmp_path):
    model = network(3)
    data = labeled(model, 200, 1)
    sure = quantify_uncertainty(model, data)
    sure.save(tmp_path / "kept")
    again = Uncertainty.load(tmp_path / "kept", model)
    torch.testing.assert_close(again(data[0]).probs, sure(data[0]).probs)
    torch.testing.assert_close(again.ood_score(data[0]), sure.ood_score(data[0]))
    assert rows(again.evaluate(data)) == pytest.approx(rows(sure.evaluate(data)), rel=1e-4, abs=1e-4)
    assert again.report is None
    with pytest.raises(InvalidArgument, match="give labeled data"):
        again.reliability()
    file = tmp_path / "kept" / "config.json"
    config = json.loads(file.read_text())
    for name, wrong in (
        ("temperature", "hot"),
        ("temperature", -1.0),
        ("conservative_precision", [-2.0]),
        ("conservative_precision", [1.0, 1.0, 1.0]),
    ):
        file.write_text(json.dumps(config | {name: wrong}))
        with pytest.raises(CorruptedFile, match=name.removeprefix("conservative_")):
            Uncertainty.load(tmp_path / "kept", model)
    with pytest.raises(ModelNotFound):
        Uncertainty.load(tmp_path / "nothing", model)


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    model = network(3)
    data = labeled(model, 200, 1)
    sure = quantify_uncertainty(model, data)
    sure.plot(tmp_path / "classes.png")
    sure.plot(tmp_path / "others.svg", data)
    one = network(1)
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    quantify_uncertainty(one, (x, torch.randn(100, generator=torch.Generator().manual_seed(1)))).plot(
        tmp_path / "real.png"
    )
    for name in ("classes.png", "others.svg", "real.png"):
        assert (tmp_path / name).stat().st_size > 1000


def test_reliability_is_of_the_corrected_probabilities():
    model = network(3)
    data = labeled(model, 300, 1)
    sure = quantify_uncertainty(model, data)
    assert sure.reliability(data).expected_calibration_error == pytest.approx(
        metrics.expected_calibration_error(sure(data[0]).probs, data[1]), abs=1e-6
    )
    assert sure.reliability().expected_calibration_error == pytest.approx(rows(sure.report)["ECE"], abs=1e-9)


def test_labels_that_are_all_right_are_no_ground_for_a_temperature():
    model = network(3)
    x, _ = labeled(model, 300, 1)
    with pytest.warns(InferenceAtRisk, match="predicted right"):
        sure = quantify_uncertainty(model, (x, model(x).argmax(-1)))
    assert sure.temperature == 1.0


def test_nothing_is_random_and_nothing_is_left_changed():
    model = network(3)
    data = labeled(model, 200, 1)
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    first, second = quantify_uncertainty(model, data, seed=3), quantify_uncertainty(model, data, seed=3)
    assert torch.equal(first(data[0]).probs, second(data[0]).probs)
    assert not torch.equal(quantify_uncertainty(model, data, seed=4)(data[0]).probs, first(data[0]).probs)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


MODEL = network(3)
X, Y = labeled(MODEL, 60, 1)
BAD = [
    ((X, Y[:50]), {}, InvalidInput, "60 inputs and 50 targets"),
    ((X[:0], Y[:0]), {}, InvalidInput, "no examples"),
    ((X[:4], Y[:4]), {}, InvalidInput, "too few"),
    ([], {}, InvalidInput, "no batch"),
    (iter([(X, Y)]), {}, InvalidArgument, "read once"),
    (5, {}, InvalidArgument, "iterable of batches"),
    ([X, X, X], {}, InvalidInput, "a pair"),
    ((X * torch.nan, Y), {}, InvalidInput, "nan"),
    ((X, Y + 1), {}, InvalidInput, "class 3 is not among"),
    ((X, torch.zeros(60).long()), {}, InvalidInput, "every target of a part of the data is 0"),
    ((X, Y.float()), {}, InvalidInput, "give classes as integers"),
    ((X, Y.float()), {"likelihood": "classification"}, InvalidInput, "integers"),
    ((X, Y), {"held_out": 1.0}, InvalidArgument, "held_out"),
    ((X, Y), {"likelihood": "reward_model"}, InvalidArgument, "reward_model"),
    ((X, Y), {"likelihood": "multi_label"}, InvalidInput, "do not fit outputs"),
    ((X, Y), {"prior_precision": -1.0}, InvalidArgument, "prior"),
    ((X, Y), {"hessian_structure": "pyramid"}, InvalidArgument, "pyramid"),
    ((X, Y), {"ood": X[:0]}, InvalidInput, "no inputs"),
    ((X, Y), {"validation": (X[:0], Y[:0])}, InvalidInput, "no examples"),
]


@pytest.mark.parametrize(("data", "how", "kind", "message"), BAD)
def test_bad_input_names_what_is_wrong(data, how, kind, message):
    with pytest.raises(kind, match=message):
        quantify_uncertainty(MODEL, data, **how)


def test_models_that_cannot_be_used():
    with pytest.raises((InvalidArgument, TypeCheckError), match="brave"):
        quantify_uncertainty(MODEL, (X, Y), prior="brave")
    with pytest.raises(InvalidArgument, match="no linear last layer"):
        quantify_uncertainty(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)).eval(), (X, Y))
    with pytest.raises(InvalidArgument, match="training mode"):
        quantify_uncertainty(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), (X, Y))
    broken = network(3)
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.nan
    with pytest.raises(InvalidInput, match="not finite"):
        quantify_uncertainty(broken, (X, Y))
    many = torch.randint(0, 2, (60, 3), generator=torch.Generator().manual_seed(0)).float()
    with pytest.raises(InvalidInput, match="independent labels"):
        quantify_uncertainty(MODEL, (X, many), likelihood="multi_label")
    with torch.no_grad():
        exact = MODEL(X)
    with pytest.raises(InvalidInput, match="met exactly"):
        quantify_uncertainty(MODEL, (X, exact))


def test_batch_norm_in_evaluation_mode_will_do():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceAtRisk)
        assert np.isfinite(rows(quantify_uncertainty(model, (X, Y)).report)["negative log-likelihood"])


def test_tables_columns_booleans_and_other_precisions_are_the_same_data():
    model = network(2)
    x, y = labeled(model, 300, 1, temperature=3.0)
    expected = quantify_uncertainty(model, (x, y)).temperature
    assert quantify_uncertainty(model, (x.double(), y[:, None])).temperature == expected
    pandas = pytest.importorskip("pandas")
    frozen = pandas.DataFrame(x.numpy())
    sure = quantify_uncertainty(model, (frozen, pandas.Series(y.numpy())))
    assert sure.temperature == expected
    assert torch.equal(sure(frozen).probs, sure(x).probs)
    assert torch.equal(sure(x.double().numpy()).probs, sure(x).probs)
    single = network(1)
    with torch.no_grad():
        y = torch.bernoulli((single(x) / 3).sigmoid(), generator=torch.Generator().manual_seed(2))[:, 0].long()
    assert quantify_uncertainty(single, (x, y == 1)).temperature == quantify_uncertainty(single, (x, y)).temperature
    words = pandas.DataFrame({"a": ["low"] * 300, "b": ["high"] * 300})
    with pytest.raises(InvalidInput, match="convert them to numbers"):
        quantify_uncertainty(model, (words, y))


def test_labels_that_are_written_as_real_numbers_are_no_regression():
    model = network(3)
    x, y = labeled(model, 200, 1)
    one_hot = nn.functional.one_hot(y, 3).float()
    for targets, way_out in ((one_hot, "argmax"), (y.float(), r"y.long\(\)")):
        with pytest.raises(InvalidInput, match=way_out):
            quantify_uncertainty(model, (x, targets))
    with pytest.raises(InvalidInput, match=r"from 0 to 2 for a model of one output.*y\.float\(\)"):
        quantify_uncertainty(network(1), (x, y))
    assert quantify_uncertainty(model, (x, one_hot), likelihood="regression").likelihood.name == "regression"


def test_foreign_inputs_are_looked_at_before_the_fit():
    model = network(2)
    data = labeled(model, 300, 1)
    x = data[0]
    with pytest.raises(InvalidInput, match="the inputs hold nan"):
        quantify_uncertainty(model, data, ood=x * torch.nan)
    with pytest.raises(InvalidInput, match=r"does not run on float32 inputs of shape \(256, 3\)"):
        quantify_uncertainty(model, data, ood=torch.zeros(300, 3))
    two = quantify_uncertainty(model, data, ood=[x, x + 9])  # two batches of inputs, not inputs and targets
    assert rows(two.report)["OOD inputs"] == 600
    with pytest.raises(InvalidArgument, match="batch_size must be"):
        quantify_uncertainty(model, data, batch_size=0)
    with pytest.raises((InvalidArgument, TypeCheckError)):
        quantify_uncertainty(None, data)


def test_it_says_what_it_is():
    model = network(2)
    shown = repr(quantify_uncertainty(model, labeled(model, 300, 1, temperature=3.0)))
    assert shown.startswith("<Uncertainty: classification, temperature ")
    assert "<Laplace: classification, kron ggn, 34 weights, fitted to 180 examples>" in shown
