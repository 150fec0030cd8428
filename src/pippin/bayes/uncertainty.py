r"""Uncertainty for a trained classifier or regressor in one call: a Laplace posterior, calibrated and evaluated.

Notable here:
- the data is split by a seed: one part fits the posterior, one its temperature, one is used for evaluation only
- the prior precision trades calibration in distribution against conservative predictions out of distribution; one
  curvature serves two precisions, so that probabilities are calibrated and OOD scores are conservative
- the report compares with the MAP network on the same examples, so that it also shows what got worse
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from pippin import metrics
from pippin.bayes.batches import call_model, check_inputs, check_mode, iterate_batches, to_model
from pippin.bayes.laplace.io import LaplaceConfig, describe, restore
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.likelihood import (
    Classification,
    Likelihood,
    LikelihoodName,
    MultiLabel,
    Regression,
    to_likelihood,
)
from pippin.bayes.prediction import Prediction
from pippin.bayes.predictors.conformal import ConformalPredictor
from pippin.bayes.predictors.map_network import MAPNetwork
from pippin.bayes.predictors.predictor import Predictor, predict_all, predict_with_targets
from pippin.bayes.predictors.temperature_scaling import TemperatureScaling, log_probs
from pippin.bayes.train_test_split import input_batches, split_data, tensor
from pippin.core import plotting
from pippin.core.checks import OpenFraction, PositiveFloat, PositiveInt, checked
from pippin.core.errors import CorruptedFile, InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.core.formats import checkpoint
from pippin.core.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = tuple(level / 20 for level in range(1, 20))
"""Nominal probabilities of the intervals in a regression's calibration diagram."""


@checked
def quantify_uncertainty(
    model: nn.Module,
    data: Any,
    *,
    validation: Any = None,
    ood: Any = None,
    likelihood: LikelihoodName | Likelihood | None = None,
    prior: Literal["calibrated", "conservative"] = "calibrated",
    held_out: OpenFraction = 0.4,
    seed: int = 0,
    batch_size: PositiveInt = 256,
    **laplace: Any,
) -> Uncertainty:
    """Fit a calibrated posterior around a trained network, and evaluate it on held-out data.

    Args:
        model: a trained classifier (an output for each class, or a single logit) or regressor, in evaluation mode.
        data: labeled examples: a pair (inputs, targets) of tensors or arrays, a `Dataset`, a `DataLoader`, or an
            iterable of batches. Without ``validation`` a part of them is held out, and the model must not have been
            trained on any of them.
        validation: labeled examples that the model was not trained on, in the same forms. With it, all of ``data``,
            which may then be the training data, fits the posterior.
        ood: out-of-distribution inputs for the report: a tensor, an iterable of batches of inputs, or data as above,
            whose targets are ignored. Nothing is fitted to them.
        likelihood: None takes a classification for integer targets and a regression for real ones.
        prior: how the prior precision is chosen. "calibrated" maximizes the likelihood on held-out data (for a
            regression the evidence) and then fits a temperature: predictions are calibrated in distribution, and only
            `Uncertainty.ood_score` uses a conservative posterior. "conservative" maximizes the evidence and fits no
            temperature: a classifier is then much less confident on shifted and OOD inputs, and underconfident in
            distribution.
        held_out: share of ``data`` that is held out; ignored with ``validation``. Half of the held-out examples fit the
            temperature, the other half are used for the report.
        seed: seed of the split.
        batch_size: examples per batch, where the data is not in batches.
        laplace: further arguments of `Laplace`; by default the last layer, Kronecker-factored.

    Returns:
        An `Uncertainty`: call it like the model.

    Raises:
        InvalidArgument: a model in training mode or without a linear last layer (name one, or choose another
            ``subset``), ``held_out`` outside (0, 1), arguments that `Laplace` refuses.
        InvalidInput: data without examples, too few to split, NaN, targets that do not fit the outputs, or one class.
        UnsupportedLayer: the structure does not support a layer.

    Warns:
        InferenceAtRisk: all (or no) labels for the temperature were predicted right, and the temperature stays 1; or,
            with the calibrated prior, the MAP network predicts the held-out examples better, by more than two
            standard errors and 1 %.

    Source: Daxberger et al. 2021, arXiv:2106.14806 (posterior); Guo et al. 2017, arXiv:1706.04599 (temperature).

    >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] + torch.randn(400, generator=torch.Generator().manual_seed(1)) > 0).long()
    >>> model = nn.Linear(2, 2).eval()
    >>> _ = model.load_state_dict({"weight": torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), "bias": torch.zeros(2)})
    >>> calibrated = quantify_uncertainty(model, (x, y))
    >>> calibrated(x[:5]).probs.shape
    torch.Size([5, 2])
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_mode(model)
    if validation is None:
        shares = (1 - held_out, held_out / 2, held_out / 2)
        fit, tune, test = split_data(data, shares, seed=seed, batch_size=batch_size, model=model)
    else:
        [fit] = split_data(data, (1.0,), seed=None, batch_size=batch_size, model=model)
        tune, test = split_data(validation, (0.5, 0.5), seed=seed, batch_size=batch_size, model=model)
    chosen = _likelihood(model, likelihood, fit)
    for part in (fit, tune, test):
        _check(model, chosen, part)
    ood_inputs = None if ood is None else input_batches(ood, batch_size=batch_size, model=model)
    for x in ood_inputs or ():
        check_inputs(x)
    if ood_inputs:
        with torch.no_grad():
            call_model(model, to_model(ood_inputs[0], model))
    if isinstance(chosen, Regression):
        chosen = Regression(_residual(model, tune))
    posterior, conservative = Laplace(model, chosen, **laplace).fit(fit).tune(noise=False), None
    if prior == "calibrated" and chosen.name != "regression":
        conservative = posterior
        posterior = _with_prior(conservative, conservative.prior_precision).tune_on_validation(tune)
    uncertainty = Uncertainty(model, posterior, conservative=conservative, seed=seed)
    if prior == "calibrated":
        uncertainty._scaled.fit(iterate_batches(tune, model))
    uncertainty.report = uncertainty._scores(test, ood_inputs)
    uncertainty._held_out = test
    uncertainty.advice, network_wins = uncertainty._compare(test)
    if network_wins and prior == "calibrated":  # a conservative prior is less confident here on purpose
        warnings.warn(uncertainty.advice, InferenceAtRisk, stacklevel=2)
    return uncertainty


@dataclass(frozen=True)
class UncertaintyConfig:
    """The config of a saved `Uncertainty`.

    Attributes:
        posterior: config of the posterior.
        temperature: see `Uncertainty.temperature`.
        conservative_precision: prior precision of the posterior for OOD scores; None where there is only one posterior.
        seed: seed of the split of the data.
    """

    posterior: LaplaceConfig
    temperature: PositiveFloat
    conservative_precision: tuple[PositiveFloat, ...] | None = None
    seed: int = 0


class Uncertainty:
    """A trained network with a posterior and a temperature; made by `quantify_uncertainty` or `Uncertainty.load`.

    Args:
        model: the network.
        posterior: a posterior fitted around the network.
        temperature: divides log-probabilities, or multiplies variances.
        conservative: another posterior for the OOD scores; None takes ``posterior`` and the temperature.
        seed: seed of the split of the data, for the record.

    Attributes:
        report: the evaluation on held-out data; None after loading.
        advice: in a sentence, whether the posterior or the MAP network predicts the held-out data better; None after
            loading.
    """

    model_type: ClassVar[str] = "pippin_uncertainty"

    def __init__(
        self,
        model: nn.Module,
        posterior: Laplace,
        *,
        temperature: float = 1.0,
        conservative: Laplace | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.posterior, self.conservative, self.seed = model, posterior, conservative, seed
        self.likelihood = posterior.likelihood
        self._plain: Predictor = _two_sided(MAPNetwork(model, self.likelihood), self.likelihood)
        self._scaled = TemperatureScaling(_two_sided(posterior, self.likelihood))
        self._scaled.value = temperature
        self._scoring: Predictor = self._scaled if conservative is None else _two_sided(conservative, self.likelihood)
        self.report: Report | None = None
        self.advice: str | None = None
        self._held_out: Iterable[Any] | None = None

    @property
    def temperature(self) -> float:
        """The divisor of log-probabilities; for a regression, the factor of variances."""
        assert self._scaled.value is not None
        return self._scaled.value

    def __call__(self, x: Any) -> Prediction:
        """Predict a batch of the model's inputs.

        Returns:
            For classes ``probs``, [n, classes], two columns for a single logit. For a regression ``mean`` and
            ``variance``, [n, outputs], noise included.
        """
        return self._scaled(to_model(tensor(x, self.model), self.model))

    def __repr__(self) -> str:
        return f"<Uncertainty: {self.likelihood.name}, temperature {self.temperature:.4g}, around {self.posterior!r}>"

    def ood_score(self, x: Any) -> Float[Tensor, " n"]:
        """A score of how far inputs are out of distribution: the predictive entropy in nats, or the summed variance.

        For a calibrated classifier the entropy is that of the posterior with the highest evidence, without temperature,
        as calibrated probabilities are close to the network's own, which are overconfident on OOD inputs.
        """
        return _ood_scores(self._scoring(to_model(tensor(x, self.model), self.model)))

    @checked
    def interval(
        self, x: Any, level: OpenFraction = 0.95, *, method: Literal["gaussian", "conformal"] = "gaussian"
    ) -> tuple[Float[Tensor, "n outputs"], Float[Tensor, "n outputs"]]:
        """The interval of a regression's targets for a batch of inputs.

        Args:
            x: a batch of the model's inputs.
            level: the probability that the interval has a new target.
            method: "gaussian" takes the predicted variance; "conformal" calibrates the width on the examples that were
                held out for the report, and keeps its level for any distribution of the targets.

        Returns:
            The lower and the upper ends, [n, outputs].

        Raises:
            InvalidArgument: a classification, or "conformal" after loading, when nothing is held out.
            InvalidInput: too few held-out examples for the level.
        """
        inputs = to_model(tensor(x, self.model), self.model)
        if method == "gaussian" or self.likelihood.name != "regression":
            return self._scaled(inputs).interval(level)
        return ConformalPredictor(self._scaled).fit(self._batches(None)).interval(inputs, level)

    @checked
    def evaluate(self, data: Any, ood: Any = None, *, batch_size: PositiveInt = 256) -> Report:
        """Evaluate on new labeled data, in comparison with the MAP network.

        Args:
            data: see `quantify_uncertainty`.
            ood: OOD inputs; the report then includes OOD detection.
            batch_size: examples per batch, where the data is not in batches.

        Raises:
            InvalidInput: no data, NaN, or targets that do not fit.
        """
        [batches] = split_data(data, (1.0,), seed=None, batch_size=batch_size, model=self.model)
        return self._scores(
            batches, None if ood is None else input_batches(ood, batch_size=batch_size, model=self.model)
        )

    def _scores(self, batches: Iterable[Any], ood: Sequence[Any] | None) -> Report:
        plain, targets = predict_with_targets(self._plain, iterate_batches(batches, self.model))
        ours, _ = predict_with_targets(self._scaled, iterate_batches(batches, self.model))
        rows = [Row("examples measured", len(targets)), Row("temperature", self.temperature)]
        rows += _class_rows(plain, ours, targets) if ours.probs is not None else _real_rows(plain, ours, targets)
        if ood is not None:
            inputs = [to_model(x, self.model) for x in ood]
            rows += _ood_rows(plain, ours, predict_all(self._plain, inputs), predict_all(self._scaled, inputs))
            if self.conservative is not None:
                near, _ = predict_with_targets(self._scoring, iterate_batches(batches, self.model))
                scores = _ood_scores(predict_all(self._scoring, inputs)), _ood_scores(near)
                rows += _ood_metrics(*scores, ", by ood_score")
        return Report("Uncertainty on held-out data", rows)

    def _compare(self, batches: Iterable[Any]) -> tuple[str, bool]:
        """What the held-out negative log-likelihoods say of posterior and network, and whether the network wins."""
        losses = []
        for predictor in (self._plain, self._scaled):
            prediction, targets = predict_with_targets(predictor, iterate_batches(batches, self.model))
            losses.append(_losses(prediction, targets))
        plain, ours = (float(loss.mean()) for loss in losses)
        difference = losses[1] - losses[0]
        error = float(difference.std() / math.sqrt(len(difference))) if len(difference) > 1 else math.inf
        found = (
            f"({ours:.3g} against {plain:.3g} nats on {len(difference)} held-out examples, difference ± {error:.2g})"
        )
        if ours - plain > max(2 * error, 0.01 * abs(plain)):
            return (
                f"the MAP network predicts better than with this posterior {found}: use the network, or "
                "TemperatureScaling(MAPNetwork(...)), or fit on more examples",
                True,
            )
        if plain - ours > 2 * error:
            return f"the posterior predicts better than the MAP network {found}", False
        return f"posterior and network predict equally well, as far as these examples tell {found}", False

    def reliability(self, data: Any = None) -> metrics.ReliabilityDiagram:
        """The reliability diagram: accuracy by confidence.

        Args:
            data: labeled data; None takes the data that were held out for the report.

        Raises:
            InvalidArgument: a regression, or no data after loading.
        """
        prediction, targets = predict_with_targets(self._scaled, self._batches(data))
        if prediction.probs is None:
            raise InvalidArgument(
                "a regression has no probabilities of classes; its report gives coverage, plot draws it"
            )
        return metrics.reliability_diagram(prediction.probs, targets)

    def plot(self, path: Path, data: Any = None) -> None:
        """Plot the reliability diagram and the risk-coverage curve.

        For a regression: the coverage of intervals of each nominal probability, and the error over coverage.

        Args:
            path: the image file; its suffix chooses the format (.png, .svg, .pdf).
            data: labeled data; None takes the data that were held out for the report.

        Raises:
            InvalidArgument: no data after loading.
            MissingDependency: matplotlib is not installed.
        """
        batches = self._batches(data)
        figure = plotting.new(9, 4.5)
        left, right = figure.subplots(1, 2)
        prediction, targets = predict_with_targets(self._scaled, batches)
        if prediction.probs is not None:
            confidence, answer = prediction.probs.max(-1)
            metrics.reliability_diagram(prediction.probs, targets).draw(left)
            metrics.risk_coverage_curve(confidence, answer == targets).draw(right)
        else:
            _draw_regression(left, right, prediction, targets.view_as(prediction.mean))
        plotting.save(figure, path)

    def save(self, path: str | Path) -> None:
        """Write posterior and temperature, but not the network, to a folder that `load` reads.

        Raises:
            DiskFull: nothing was written.
            InvalidInput: the path is a file, or not writable.
        """
        posterior, tensors = describe(self.posterior)
        precision = None if self.conservative is None else tuple(self.conservative.prior_precision.tolist())
        config = UncertaintyConfig(posterior, self.temperature, precision, self.seed)
        checkpoint.save(tensors, path, model_type=self.model_type, config=config)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Uncertainty:
        """Read a folder that `save` wrote, around the same trained network.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CheckpointError: the network's weights are not those of the fit.
            CorruptedFile: the files are damaged.
        """
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=UncertaintyConfig)
        config = saved.config
        posterior, conservative = restore(Laplace, config.posterior, saved.checkpoint.tensors(), model, path), None
        if config.conservative_precision is not None:
            precision = torch.tensor(config.conservative_precision, dtype=torch.float64)
            try:
                conservative = _with_prior(posterior, precision)
            except InvalidArgument as error:
                raise CorruptedFile(f"the uncertainty in {path} contradicts itself: {error}") from error
        return cls(model, posterior, temperature=config.temperature, conservative=conservative, seed=config.seed)

    def _batches(self, data: Any) -> Sequence[Any]:
        if data is not None:
            return list(
                iterate_batches(split_data(data, (1.0,), seed=None, batch_size=256, model=self.model)[0], self.model)
            )
        if self._held_out is None:
            raise InvalidArgument("nothing was held out here; give labeled data")
        return list(iterate_batches(self._held_out, self.model))


# --- before the fit ---------------------------------------------------------------------------------------------------


def _likelihood(model: nn.Module, choice: LikelihoodName | Likelihood | None, batches: Iterable[Any]) -> Likelihood:
    """The given likelihood, or one by the type of the targets: regression, classification or one binary label."""
    if choice is not None:
        found = to_likelihood(choice)
        if type(found) is Classification or isinstance(found, (Regression, MultiLabel)):
            return found
        raise InvalidArgument(f"likelihood must be classification, multi_label or regression here, got {found.name!r}")
    x, y = next(iterate_batches(batches, model))
    with torch.no_grad():
        outputs = call_model(model, x).shape[1]
    if not y.is_floating_point():
        if outputs == 1 and bool((y.long() != y.bool()).any()):
            raise InvalidInput(
                f"whole-number targets from {y.min():d} to {y.max():d} for a model of one output: labels of a single "
                "logit are 0 and 1; for a regression give y.float()"
            )
        return MultiLabel() if outputs == 1 else Classification()
    if bool(((y == 0) | (y == 1)).all()):
        raise InvalidInput(
            f"every target is 0.0 or 1.0, in {str(y.dtype).removeprefix('torch.')}: give classes as integers, y.long() "
            "or, of one-hot rows, y.argmax(-1); say likelihood='regression' if they are measurements"
        )
    if outputs > 1 and y.numel() == len(y) and bool((y == y.round()).all()):
        raise InvalidInput(
            f"targets like {y.flatten()[0]:g} for a model of {outputs} outputs: give classes as integers, y.long()"
        )
    return Regression()


def _check(model: nn.Module, likelihood: Likelihood, batches: Iterable[Any]) -> None:
    """Check that model and data fit together, before anything is fitted."""
    classes: set[int] = set()
    with torch.no_grad():
        for x, y in iterate_batches(batches, model):
            outputs = call_model(model, x)
            if not bool(outputs.isfinite().all()):
                raise InvalidInput(
                    "the model's outputs are not finite for this data; is it trained, and the data scaled?"
                )
            targets = likelihood.check(outputs, y)
            if likelihood.name == "multi_label" and outputs.shape[1] > 1:
                raise InvalidInput(
                    f"the model has {outputs.shape[1]} independent labels; uncertainty is for classes, one label or a "
                    "regression; use Laplace(model, 'multi_label')"
                )
            if likelihood.name != "regression":
                classes.update(targets.long().flatten().tolist())
    if len(classes) == 1:
        raise InvalidInput(
            f"every target of a part of the data is {classes.pop()}; give examples of two classes or more"
        )


def _residual(model: nn.Module, batches: Iterable[Any]) -> float:
    """Root mean square of the residuals on held-out examples."""
    prediction, targets = predict_with_targets(MAPNetwork(model, "regression"), iterate_batches(batches, model))
    found = float((targets.view_as(prediction.mean).double() - prediction.mean.double()).square().mean().sqrt())
    if found == 0:
        raise InvalidInput("every held-out target is met exactly, so there is no noise to estimate; give new examples")
    return found


def _with_prior(posterior: Laplace, precision: Tensor) -> Laplace:
    """A posterior with the same curvature, which is shared, and another prior precision."""
    other = copy.copy(posterior)
    other.prior_precision = precision
    return other


def _two_sided(predictor: Predictor, likelihood: Likelihood) -> Predictor:
    """A predictor of two columns of probabilities, from one that predicts a single binary label."""
    if likelihood.name != "multi_label":
        return predictor

    def both(x: Any) -> Prediction:
        prediction = predictor(x)
        assert prediction.probs is not None
        covariance = prediction.covariance
        return replace(
            prediction,
            mean=functional.pad(prediction.mean, (1, 0)),  # the logit of class 0 is 0
            covariance=None if covariance is None else functional.pad(covariance, (1, 0, 1, 0)),
            probs=torch.cat([1 - prediction.probs, prediction.probs], 1),
        )

    return both


# --- the report -------------------------------------------------------------------------------------------------------


def _ood_scores(prediction: Prediction) -> Float[Tensor, " n"]:
    return prediction.variance.sum(-1) if prediction.probs is None else metrics.entropy(prediction.probs)


def _losses(prediction: Prediction, targets: Tensor) -> Float[Tensor, " n"]:
    """Negative log-likelihood of each example, in nats."""
    if prediction.probs is not None:
        labels = targets.flatten().long()
        return -log_probs(prediction.probs).double().gather(1, labels[:, None])[:, 0]
    residual, variance = (targets.view_as(prediction.mean) - prediction.mean).double(), prediction.variance.double()
    return ((2 * math.pi * variance).log() + residual.square() / variance).sum(-1) / 2


def _class_rows(plain: Prediction, ours: Prediction, targets: Tensor) -> list[Row]:
    rows: list[Row] = []
    labels = targets.flatten().long()
    for name, one in (("", ours), (", MAP", plain)):
        assert one.probs is not None
        confidence, answer = one.probs.max(-1)
        curve = metrics.risk_coverage_curve(confidence, answer == labels)
        rows += [
            Row(f"accuracy{name}", metrics.accuracy(one.probs, labels)),
            Row(f"negative log-likelihood{name}", metrics.log_loss(one.probs, labels), "nats"),
            Row(f"ECE{name}", metrics.expected_calibration_error(one.probs, labels)),
            Row(f"Brier score{name}", metrics.brier_score(one.probs, labels)),
            Row(f"AURC{name}", curve.aurc),
            Row(f"selective error at 80 % coverage{name}", curve.risk_at(0.8)),
        ]
    return rows


def _real_rows(plain: Prediction, ours: Prediction, targets: Tensor) -> list[Row]:
    y = targets.view_as(ours.mean).to(ours.mean)
    rows = [Row("root mean square error", float((y - ours.mean).square().mean().sqrt()))]
    for name, one in (("", ours), (", one variance for all", plain)):
        rows += [
            Row(f"negative log-likelihood{name}", metrics.gaussian_nll(one.mean, one.variance, y), "nats"),
            Row(f"continuous ranked probability score{name}", metrics.gaussian_crps(one.mean, one.variance, y)),
            Row(f"coverage of the 95 % interval{name}", metrics.interval_coverage(one.mean, one.variance, y)),
            Row(f"width of the 95 % interval{name}", float(2 * 1.96 * one.variance.sqrt().mean())),
        ]
    return rows


def _ood_rows(plain: Prediction, ours: Prediction, plain_ood: Prediction, ours_ood: Prediction) -> list[Row]:
    rows = [Row("OOD inputs", len(ours_ood.mean))]
    for name, near, far in (("", ours, ours_ood), (", MAP", plain, plain_ood)):
        if near.probs is None and name:
            continue  # one variance for all inputs cannot detect anything
        rows += _ood_metrics(_ood_scores(far), _ood_scores(near), name)
        if far.probs is not None:
            rows.append(Row(f"mean confidence on OOD inputs{name}", float(far.probs.max(-1).values.mean())))
    return rows


def _ood_metrics(far: Tensor, near: Tensor, name: str) -> list[Row]:
    return [
        Row(f"OOD AUROC{name}", metrics.roc_auc(far, near)),
        Row(f"OOD FPR at 95 % TPR{name}", metrics.fpr_at_tpr(far, near)),
    ]


def _draw_regression(left: Axes, right: Axes, prediction: Prediction, y: Tensor) -> None:
    y = y.to(prediction.mean)
    found = [metrics.interval_coverage(prediction.mean, prediction.variance, y, level) for level in LEVELS]
    left.plot([0, 1], [0, 1], color="0.4", linewidth=1, linestyle="--")
    left.plot(LEVELS, found, "o-", color="tab:green", markersize=4)
    left.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the interval", ylabel="share of targets inside")
    order = prediction.variance.sum(-1).argsort()
    error = (y - prediction.mean).square().mean(-1)[order].cpu().double()
    given = torch.arange(1, len(error) + 1, dtype=torch.float64)
    right.plot((given / len(error)).numpy(), (error.cumsum(0) / given).sqrt().numpy(), color="tab:green")
    right.set(xlim=(0, 1), xlabel="share of predictions given, most confident first", ylabel="root mean square error")
    right.set_ylim(bottom=0)
