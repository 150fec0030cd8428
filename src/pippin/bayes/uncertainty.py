r"""Uncertainty for a trained classifier or regressor in one call: a Laplace posterior, calibrated and measured.

Notable here:
- the data is cut by a seed: one part fits the posterior, one sets its temperature, one is only measured
- the prior's precision is a dial from well calibrated near the data to cautious away from them: both ends have a name,
  and one curvature serves both, so that probabilities can be calibrated while foreign inputs are scored cautiously
- the report puts the plain network beside the result, on the same examples, so that what got worse is seen, too
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from pippin.bayes import metrics
from pippin.bayes.baselines import PlainNetwork
from pippin.bayes.batches import call, check_inputs, check_mode, read, to_model
from pippin.bayes.examples import cut, inputs_alone, tensor
from pippin.bayes.laplace import Laplace
from pippin.bayes.likelihood import Classification, Likelihood, MultiLabel, Regression, likelihood as likelihood_of
from pippin.bayes.predictive import Prediction
from pippin.bayes.predictors import Predictor, gather, predict_all
from pippin.bayes.temperature import BOUNDS, TemperatureScaling
from pippin.core import figures
from pippin.core.errors import CorruptedFile, InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.core.files import atomic_write, make_folder
from pippin.core.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FILE = "uncertainty.json"
LEVELS = tuple(level / 20 for level in range(1, 20))
"""Nominal probabilities of the intervals in a regression's calibration diagram."""


def uncertainty(
    model: nn.Module,
    data: Any,
    *,
    validation: Any = None,
    ood: Any = None,
    likelihood: str | Likelihood | None = None,
    prior: Literal["calibrated", "cautious"] = "calibrated",
    held_out: float = 0.4,
    seed: int = 0,
    batch: int = 256,
    **laplace: Any,
) -> Uncertainty:
    """A calibrated predictive around a trained network, and a report of what it is worth.

    Args:
        model: a trained classifier (an output for each class, or a single logit) or regressor, in evaluation mode.
        data: examples with targets: a pair (inputs, targets) of tensors or arrays, a `Dataset`, a `DataLoader`, or an
            iterable of batches. Without ``validation``, part of them is held out, and these must be new to the model.
        validation: examples that the model was not trained on, in the same forms. With it, all of ``data``, which may
            then be the training data, fits the posterior, and nothing is held out of it.
        ood: inputs of another kind than the data, for the report: a tensor, an iterable of batches of inputs, or data
            as above, whose targets are ignored. Nothing is fitted to them.
        likelihood: None takes a classification for integer targets and a regression for real ones.
        prior: how the precision of the prior is chosen. "calibrated" takes that of the highest likelihood on held-out
            data (for a regression, of the highest evidence), then fits a temperature: what is said holds on data like
            these, and `Uncertainty.ood_score` alone is that of a cautious posterior. "cautious" takes that of the
            highest evidence and fits no temperature: a classifier is then much less sure of shifted and foreign inputs,
            and too unsure of its own.
        held_out: share of ``data`` (of nothing, where there is a ``validation``) that is kept from the posterior; one
            half of what is held out sets the temperature, the other is measured.
        seed: of the cut.
        batch: examples at once, where the data does not come in batches.
        laplace: further arguments of `Laplace`; by default the last layer, Kronecker-factored.

    Returns:
        An `Uncertainty`: call it like the model.

    Raises:
        InvalidArgument: a model in training mode or without a linear last layer (name one, or choose another
            ``subset``), ``held_out`` outside (0, 1), arguments that `Laplace` refuses.
        InvalidInput: data without examples, too few to be cut, NaN, targets that do not fit the outputs, one class.
        UnsupportedLayer: the structure has no rule for a layer.

    Warns:
        InferenceAtRisk: every label that the temperature was to be fitted to was predicted right; it is left at 1.

    Source: Daxberger et al. 2021, arXiv:2106.14806 (posterior); Guo et al. 2017, arXiv:1706.04599 (temperature).

    >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] + torch.randn(400, generator=torch.Generator().manual_seed(1)) > 0).long()
    >>> model = nn.Linear(2, 2).eval()
    >>> _ = model.load_state_dict({"weight": torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), "bias": torch.zeros(2)})
    >>> sure = uncertainty(model, (x, y))
    >>> sure(x[:5]).probs.shape
    torch.Size([5, 2])
    """
    if prior not in ("calibrated", "cautious"):
        raise InvalidArgument(f"prior must be calibrated or cautious, got {prior!r}")
    if not 0 < held_out < 1:
        raise InvalidArgument(f"held_out is a share of the data, between 0 and 1, got {held_out}")
    if batch < 1:
        raise InvalidArgument(f"batch is {batch}; predict 1 example at once or more")
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_mode(model)
    if validation is None:
        shares = (1 - held_out, held_out / 2, held_out / 2)
        fit, tune, test = cut(data, shares, seed=seed, batch=batch, model=model)
    else:
        [fit] = cut(data, (1.0,), seed=None, batch=batch, model=model)
        tune, test = cut(validation, (0.5, 0.5), seed=seed, batch=batch, model=model)
    chosen = _likelihood(model, likelihood, fit)
    for part in (fit, tune, test):
        _check(model, chosen, part)
    foreign = None if ood is None else inputs_alone(ood, batch=batch, model=model)
    for x in foreign or ():
        check_inputs(x)
    if foreign:
        with torch.no_grad():
            call(model, to_model(foreign[0], model))
    if isinstance(chosen, Regression):
        chosen = Regression(_residual(model, tune))
    posterior, wary = Laplace(model, chosen, **laplace).fit(fit).tune(noise=False), None
    if prior == "calibrated" and chosen.name != "regression":
        wary = posterior
        posterior = _with_prior(wary, wary.prior_precision).tune("grid", validation=tune)
    made = Uncertainty(model, posterior, wary=wary, seed=seed)
    if prior == "calibrated":
        made._calibrate(tune)
    made.report = made._scores(test, foreign)
    made._held = test
    return made


class Uncertainty:
    """A trained network with a posterior and a temperature; made by `uncertainty` or `Uncertainty.load`.

    Args:
        model: the network.
        posterior: fitted around it.
        temperature: divides log-probabilities, or multiplies variances.
        wary: another one, which scores how foreign inputs are; None takes ``posterior`` and the temperature.
        seed: of the cut of the data, for the record.

    Attributes:
        report: the figures on the part of the data that was only measured; None for one that was loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Laplace,
        *,
        temperature: float = 1.0,
        wary: Laplace | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.posterior, self.wary, self.seed = model, posterior, wary, seed
        self.likelihood = posterior.likelihood
        self._plain: Predictor = _two_sided(PlainNetwork(model, self.likelihood), self.likelihood)
        self._scaled = TemperatureScaling(_two_sided(posterior, self.likelihood))
        self._scaled.value = temperature
        self._scoring: Predictor = self._scaled if wary is None else _two_sided(wary, self.likelihood)
        self.report: Report | None = None
        self._held: Iterable[Any] | None = None

    @property
    def temperature(self) -> float:
        """What divides the log-probabilities; for a regression, what multiplies the variances."""
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
        """How foreign inputs look: the entropy of the probabilities, in nats, or the variance summed over outputs.

        Of a calibrated classifier it is the entropy under the posterior of the highest evidence, without a temperature:
        the calibrated probabilities are nearly the network's own, which far from the data is as sure as near them.
        """
        return _foreignness(self._scoring(to_model(tensor(x, self.model), self.model)))

    def measure(self, data: Any, ood: Any = None, *, batch: int = 256) -> Report:
        """The scores on labelled data that nothing was fitted to, the plain network's beside them.

        Args:
            data: as for `uncertainty`.
            ood: inputs of another kind; the report then says how well they are told apart.
            batch: examples at once, where the data does not come in batches.

        Raises:
            InvalidInput: no data, NaN, or targets that do not fit.
        """
        [batches] = cut(data, (1.0,), seed=None, batch=batch, model=self.model)
        return self._scores(batches, None if ood is None else inputs_alone(ood, batch=batch, model=self.model))

    def _scores(self, batches: Iterable[Any], ood: Sequence[Any] | None) -> Report:
        plain, targets = gather(self._plain, read(batches, self.model))
        ours, _ = gather(self._scaled, read(batches, self.model))
        rows = [Row("examples measured", len(targets)), Row("temperature", self.temperature)]
        rows += _class_rows(plain, ours, targets) if ours.probs is not None else _real_rows(plain, ours, targets)
        if ood is not None:
            inputs = [to_model(x, self.model) for x in ood]
            rows += _ood_rows(plain, ours, predict_all(self._plain, inputs), predict_all(self._scaled, inputs))
            if self.wary is not None:
                near, _ = gather(self._scoring, read(batches, self.model))
                scores = _foreignness(predict_all(self._scoring, inputs)), _foreignness(near)
                rows += _told_apart(*scores, ", by ood_score")
        return Report("Uncertainty on held-out data", rows)

    def reliability(self, data: Any = None) -> metrics.Reliability:
        """How often probabilities of each size come true.

        Args:
            data: labelled data; None takes the part that was held out for measuring.

        Raises:
            InvalidArgument: a regression, or no data where none was held out.
        """
        prediction, targets = gather(self._scaled, self._batches(data))
        if prediction.probs is None:
            raise InvalidArgument(
                "a regression has no probabilities of classes; its report gives coverage, plot draws it"
            )
        return metrics.reliability(prediction.probs, targets)

    def plot(self, path: Path, data: Any = None) -> None:
        """Draw how far the confidence can be believed: reliability, and what withholding the unsure ones gains.

        For a regression the left side is the share of targets inside intervals of each nominal probability.

        Args:
            path: the picture; its suffix chooses the format (.png, .svg, .pdf).
            data: labelled data; None takes the part that was held out for measuring.

        Raises:
            InvalidArgument: no data where none was held out. MissingDependency: matplotlib is not installed.
        """
        batches = self._batches(data)
        figure = figures.new(9, 4.5)
        left, right = figure.subplots(1, 2)
        prediction, targets = gather(self._scaled, batches)
        if prediction.probs is not None:
            confidence, answer = prediction.probs.max(-1)
            metrics.reliability(prediction.probs, targets).draw(left)
            metrics.selective(confidence, answer == targets).draw(right)
        else:
            _draw_regression(left, right, prediction, targets.view_as(prediction.mean))
        figures.save(figure, path)

    def save(self, folder: Path) -> None:
        """Write posterior and temperature into a folder, which is made; the network's weights are the caller's to keep.

        Raises:
            DiskFull: the disk filled up. InvalidInput: the place is a file, or closed to writing.
        """
        folder = make_folder(folder)
        self.posterior.save(folder / "posterior")
        with atomic_write(folder / _FILE, mode="w") as file:
            precision = None if self.wary is None else self.wary.prior_precision.tolist()
            json.dump({"temperature": self.temperature, "seed": self.seed, "wary_precision": precision}, file)

    @classmethod
    def load(cls, folder: Path, model: nn.Module) -> Uncertainty:
        """Read what `save` wrote, around the same trained network.

        Raises:
            CorruptedFile: the folder holds nothing of the kind.
        """
        try:
            fields = json.loads((Path(folder) / _FILE).read_text("utf-8"))
            temperature, seed = float(fields["temperature"]), int(fields["seed"])
            if not 0 < temperature < math.inf:
                raise ValueError(f"its temperature is {temperature}")
            precision = fields["wary_precision"]
            if precision is not None and not all(0 < float(value) < math.inf for value in precision):
                raise ValueError(f"the prior of its scores has a precision of {precision}")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptedFile(f"{str(folder)!r} holds no saved uncertainty: {error}") from error
        posterior = Laplace.load(Path(folder) / "posterior", model)
        wary = None if precision is None else _with_prior(posterior, torch.tensor(precision, dtype=torch.float64))
        return cls(model, posterior, temperature=temperature, wary=wary, seed=seed)

    def _calibrate(self, batches: Iterable[Any]) -> None:
        self._scaled.fit(read(batches, self.model))
        if self.likelihood.name != "regression" and not BOUNDS[0] * 1.01 < self.temperature < BOUNDS[1] / 1.01:
            warnings.warn(
                "every held-out label was predicted right (or none), so no temperature is best and it is left at 1; if "
                "the model was trained on this data, give examples that are new to it as validation=",
                InferenceAtRisk,
                stacklevel=3,
            )
            self._scaled.value = 1.0

    def _batches(self, data: Any) -> Sequence[Any]:
        if data is not None:
            return list(read(cut(data, (1.0,), seed=None, batch=256, model=self.model)[0], self.model))
        if self._held is None:
            raise InvalidArgument("nothing was held out here; give labelled data")
        return list(read(self._held, self.model))


# --- before the fit ---------------------------------------------------------------------------------------------------


def _likelihood(model: nn.Module, choice: str | Likelihood | None, batches: Iterable[Any]) -> Likelihood:
    """What was asked for, or what the targets are: real ones a regression, whole ones classes or yes and no."""
    if choice is not None:
        found = likelihood_of(choice)
        if type(found) is Classification or isinstance(found, (Regression, MultiLabel)):
            return found
        raise InvalidArgument(f"likelihood must be classification, multi_label or regression here, got {found.name!r}")
    x, y = next(read(batches, model))
    with torch.no_grad():
        outputs = call(model, x).shape[1]
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
    """See that model and data fit together, before anything is fitted."""
    classes: set[int] = set()
    with torch.no_grad():
        for x, y in read(batches, model):
            outputs = call(model, x)
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
    """Root mean square of the residuals on examples that the posterior does not see."""
    prediction, targets = gather(PlainNetwork(model, "regression"), read(batches, model))
    found = float((targets.view_as(prediction.mean).double() - prediction.mean.double()).square().mean().sqrt())
    if found == 0:
        raise InvalidInput("every held-out target is met exactly, so there is no noise to estimate; give new examples")
    return found


def _with_prior(posterior: Laplace, precision: Tensor) -> Laplace:
    """The same curvature, which both hold, under a prior of its own."""
    other = copy.copy(posterior)
    other.prior_precision = precision
    return other


def _two_sided(predictor: Predictor, likelihood: Likelihood) -> Predictor:
    """Probabilities of no and yes where a predictor gives that of yes alone."""
    if likelihood.name != "multi_label":
        return predictor

    def both(x: Any) -> Prediction:
        prediction = predictor(x)
        assert prediction.probs is not None
        covariance = prediction.covariance
        return replace(
            prediction,
            mean=functional.pad(prediction.mean, (1, 0)),  # the logit of "no" is 0
            covariance=None if covariance is None else functional.pad(covariance, (1, 0, 1, 0)),
            probs=torch.cat([1 - prediction.probs, prediction.probs], 1),
        )

    return both


# --- the report -------------------------------------------------------------------------------------------------------


def _foreignness(prediction: Prediction) -> Float[Tensor, " n"]:
    return prediction.variance.sum(-1) if prediction.probs is None else metrics.entropy(prediction.probs)


def _class_rows(plain: Prediction, ours: Prediction, targets: Tensor) -> list[Row]:
    rows: list[Row] = []
    labels = targets.flatten().long()
    for name, one in (("", ours), (", network alone", plain)):
        assert one.probs is not None
        confidence, answer = one.probs.max(-1)
        curve = metrics.selective(confidence, answer == labels)
        rows += [
            Row(f"accuracy{name}", metrics.accuracy(one.probs, labels)),
            Row(f"negative log-likelihood{name}", metrics.nll(one.probs, labels), "nats"),
            Row(f"calibration error{name}", metrics.ece(one.probs, labels)),
            Row(f"Brier score{name}", metrics.brier(one.probs, labels)),
            Row(f"risk over all coverages{name}", curve.area),
            Row(f"error at 80 % coverage{name}", curve.at(0.8)),
        ]
    return rows


def _real_rows(plain: Prediction, ours: Prediction, targets: Tensor) -> list[Row]:
    y = targets.view_as(ours.mean).to(ours.mean)
    rows = [Row("root mean square error", float((y - ours.mean).square().mean().sqrt()))]
    for name, one in (("", ours), (", one variance for all", plain)):
        rows += [
            Row(f"negative log-likelihood{name}", metrics.gaussian_nll(one.mean, one.variance, y), "nats"),
            Row(f"continuous ranked probability score{name}", metrics.gaussian_crps(one.mean, one.variance, y)),
            Row(f"inside the 95 % interval{name}", metrics.interval_coverage(one.mean, one.variance, y)),
            Row(f"width of the 95 % interval{name}", float(2 * 1.96 * one.variance.sqrt().mean())),
        ]
    return rows


def _ood_rows(plain: Prediction, ours: Prediction, plain_ood: Prediction, ours_ood: Prediction) -> list[Row]:
    rows = [Row("foreign inputs", len(ours_ood.mean))]
    for name, near, far in (("", ours, ours_ood), (", network alone", plain, plain_ood)):
        if near.probs is None and name:
            continue  # one variance for all tells nothing apart
        rows += _told_apart(_foreignness(far), _foreignness(near), name)
        if far.probs is not None:
            rows.append(Row(f"mean confidence on foreign inputs{name}", float(far.probs.max(-1).values.mean())))
    return rows


def _told_apart(far: Tensor, near: Tensor, name: str) -> list[Row]:
    return [
        Row(f"foreign told from own, AUROC{name}", metrics.auroc(far, near)),
        Row(f"own taken for foreign at 95 % found{name}", metrics.fpr_at_tpr(far, near)),
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
    right.set(xlim=(0, 1), xlabel="share of predictions given, surest first", ylabel="root mean square error")
    right.set_ylim(bottom=0)
