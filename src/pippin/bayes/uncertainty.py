r"""Uncertainty for a trained classifier or regressor in one call: a Laplace posterior, calibrated and measured.

Notable here:
- the data is cut by a seed: one part fits the posterior, one sets its temperature, one is only measured
- the evidence sets the prior, so variance grows away from the data; the temperature makes it honest near them
- the report puts the plain network beside the result, on the same examples, so that what got worse is seen, too
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from pippin.bayes import metrics
from pippin.bayes.baselines import PlainNetwork
from pippin.bayes.batches import call, read, split
from pippin.bayes.laplace import Laplace
from pippin.bayes.likelihood import Classification, Likelihood, MultiLabel, Regression, likelihood as likelihood_of
from pippin.bayes.predictive import Prediction
from pippin.bayes.predictors import Predictor, gather, predict_all
from pippin.bayes.temperature import BOUNDS, TemperatureScaling
from pippin.core.errors import CorruptedFile, InferenceAtRisk, InvalidArgument, InvalidInput, MissingDependency
from pippin.core.files import atomic_write
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
        held_out: share of ``data`` (of nothing, where there is a ``validation``) that is kept from the posterior; one
            half of what is held out sets the temperature, the other is measured.
        seed: of the cut.
        batch: examples at once, where the data does not come in batches.
        laplace: further arguments of `Laplace`; by default the last layer, Kronecker-factored.

    Returns:
        An `Uncertainty`: call it like the model.

    Raises:
        InvalidArgument: a model in training mode, ``held_out`` outside (0, 1), arguments that `Laplace` refuses.
        InvalidInput: data without examples, too few to be cut, NaN, targets that do not fit the outputs, one class.
        UnsupportedLayer: the model has no linear last layer; choose another ``subset``.

    Warns:
        InferenceAtRisk: every held-out label was predicted right, so the temperature is left at 1.

    Source: Daxberger et al. 2021, arXiv:2106.14806 (posterior); Guo et al. 2017, arXiv:1706.04599 (temperature).

    >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] + torch.randn(400, generator=torch.Generator().manual_seed(1)) > 0).long()
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> _ = nn.init.constant_(model[0].bias, 0.0), nn.init.eye_(model[0].weight)
    >>> sure = uncertainty(model, (x, y))
    >>> sure(x[:5]).probs.shape
    torch.Size([5, 2])
    """
    if not 0 < held_out < 1:
        raise InvalidArgument(f"held_out is a share of the data, between 0 and 1, got {held_out}")
    if model.training:
        raise InvalidArgument("the model is in training mode, where dropout and batch norm change it; call model.eval()")
    if validation is None:
        fit, tune, test = _cut(data, (1 - held_out, held_out / 2, held_out / 2), seed, batch, model)
    else:
        [fit] = _cut(data, (1.0,), None, batch, model)
        tune, test = _cut(validation, (0.5, 0.5), seed, batch, model)
    chosen = _likelihood(model, likelihood, fit)
    for part in (fit, tune, test):
        _check(model, chosen, part)
    foreign = None if ood is None else _inputs(ood, batch, model)
    if isinstance(chosen, Regression):
        chosen = Regression(_residual(model, tune))
    posterior = Laplace(model, chosen, **laplace).fit(fit).tune()
    made = Uncertainty(model, posterior, seed=seed)
    made._calibrate(tune)
    made.report = made.measure(test, foreign)
    made._held = test
    return made


class Uncertainty:
    """A trained network with a posterior and a temperature; made by `uncertainty` or `Uncertainty.load`.

    Args:
        model: the network.
        posterior: fitted around it.
        temperature: divides log-probabilities, or multiplies variances.
        seed: of the cut of the data, for the record.

    Attributes:
        report: the figures on the part of the data that was only measured; None for one that was loaded.
    """

    def __init__(self, model: nn.Module, posterior: Laplace, *, temperature: float = 1.0, seed: int = 0) -> None:
        self.model, self.posterior, self.seed = model, posterior, seed
        self.likelihood = posterior.likelihood
        self._plain: Predictor = _two_sided(PlainNetwork(model, self.likelihood), self.likelihood)
        self._scaled = TemperatureScaling(_two_sided(posterior, self.likelihood))
        self._scaled.value = temperature
        self.report: Report | None = None
        self._held: Sequence[Any] | None = None

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
        return self._scaled(_on(self.model, x))

    def ood_score(self, x: Any) -> Float[Tensor, " n"]:
        """How foreign inputs look: the entropy of the probabilities, in nats, or the variance summed over outputs."""
        return _foreignness(self(x))

    def measure(self, data: Any, ood: Any = None, *, batch: int = 256) -> Report:
        """The scores on labelled data that nothing was fitted to, the plain network's beside them.

        Args:
            data: as for `uncertainty`.
            ood: inputs of another kind; the report then says how well they are told apart.
            batch: examples at once, where the data does not come in batches.

        Raises:
            InvalidInput: no data, NaN, or targets that do not fit.
        """
        [batches] = _cut(data, (1.0,), None, batch, self.model)
        plain, targets = gather(self._plain, batches)
        ours, _ = gather(self._scaled, batches)
        rows = [Row("examples measured", len(targets)), Row("temperature", self.temperature)]
        rows += _class_rows(plain, ours, targets) if ours.probs is not None else _real_rows(plain, ours, targets)
        if ood is not None:
            inputs = _inputs(ood, batch, self.model)
            rows += _ood_rows(plain, ours, predict_all(self._plain, inputs), predict_all(self._scaled, inputs))
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
            raise InvalidArgument("a regression has no probabilities of classes; its report gives coverage, plot draws it")
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
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependency("plots need matplotlib: pip install 'pippin[plot]'") from error
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        prediction, targets = gather(self._scaled, batches)
        if prediction.probs is not None:
            confidence, answer = prediction.probs.max(-1)
            metrics.reliability(prediction.probs, targets).draw(left)
            metrics.selective(confidence, answer == targets).draw(right)
        else:
            _draw_regression(left, right, prediction, targets.view_as(prediction.mean))
        with atomic_write(Path(path)) as file:
            figure.savefig(file, format=Path(path).suffix.removeprefix(".") or "png")

    def save(self, folder: Path) -> None:
        """Write posterior and temperature into a folder, which is made; the network's weights are the caller's to keep.

        Raises:
            DiskFull: the disk filled up.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.posterior.save(folder / "posterior")
        with atomic_write(folder / _FILE, mode="w") as file:
            json.dump({"temperature": self.temperature, "seed": self.seed}, file)

    @classmethod
    def load(cls, folder: Path, model: nn.Module) -> Uncertainty:
        """Read what `save` wrote, around the same trained network.

        Raises:
            CorruptedFile: the folder holds nothing of the kind.
        """
        try:
            fields = json.loads((Path(folder) / _FILE).read_text("utf-8"))
            temperature, seed = float(fields["temperature"]), int(fields["seed"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptedFile(f"{str(folder)!r} holds no saved uncertainty: {error}") from error
        return cls(model, Laplace.load(Path(folder) / "posterior", model), temperature=temperature, seed=seed)

    def _calibrate(self, batches: Sequence[Any]) -> None:
        self._scaled.fit(batches)
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
            return _cut(data, (1.0,), None, 256, self.model)[0]
        if self._held is None:
            raise InvalidArgument("nothing was held out here; give labelled data")
        return self._held
