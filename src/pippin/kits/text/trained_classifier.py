r"""Text classifier trained on labeled examples: a linear layer over sentence embeddings, with its uncertainty.

Notable here:
- few examples leave many layers possible: predictions integrate over their posterior, which also measures how far a
  text is from the examples
- prior and temperature maximize the likelihood of left-out examples; every example is left out once, so that each is
  used for training and for calibration
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.laplace.io import LaplaceConfig, describe, restore
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.predictors.temperature_scaling import BOUNDS, apply_correction, fit_temperature, log_probs
from pippin.core.checks import PositiveFloat
from pippin.core.errors import CorruptedFile, InferenceAtRisk, InvalidArgument
from pippin.core.formats import checkpoint
from pippin.kits.text.classify import TextClassification, evaluated
from pippin.kits.text.spans import check_text
from pippin.metrics import entropy, log_loss

if TYPE_CHECKING:
    from pippin.evaluate.calibration import ClassificationPredictions
    from pippin.language.encoder import TextEncoder

PRECISIONS: Final = tuple(10.0 ** (power / 2) for power in range(-6, 2))
"""Candidate prior precisions, from 0.001 to 3; the embeddings have length 1."""
FOLDS: Final = 5


@dataclass(frozen=True)
class TrainedClassifierConfig:
    """What a saved classifier says beside its tensors.

    Attributes:
        labels: in alphabetical order.
        temperature: divides the log-probabilities.
        encoder: name of the one that it was trained with.
        posterior: of the layer.
    """

    labels: tuple[str, ...]
    temperature: PositiveFloat
    encoder: str
    posterior: LaplaceConfig


class TrainedClassifier:
    """Assigns one of the labels of its training examples.

    Args:
        examples: pairs of a text and its label; two labels or more, two texts of each or more.
        encoder: embeds texts; None loads the default one.

    Attributes:
        labels: in alphabetical order.
        temperature: divides the log-probabilities; from cross-validation on the examples.

    Raises:
        InvalidArgument: fewer than two labels, or a label with a single example.
        InvalidInput: a text that is empty or not a text. ContextOverflow: one is longer than the encoder reads.

    Warns:
        InferenceAtRisk: every left-out example was labeled right, so the temperature is left at 1.

    Source: Daxberger et al. 2021, arXiv:2106.14806 (posterior); Guo et al. 2017, arXiv:1706.04599 (temperature).
    """

    model_type: ClassVar[str] = "pippin_trained_classifier"

    def __init__(self, examples: Iterable[tuple[str, str]], encoder: TextEncoder | None = None) -> None:
        pairs = [(check_text(text, "the text of an example"), label) for text, label in examples]
        counts: dict[str, int] = {}
        for _, label in pairs:
            counts[label] = counts.get(label, 0) + 1
        if len(counts) < 2:
            raise InvalidArgument(f"a classifier is trained on examples of two labels or more, got {list(counts)}")
        single = [label for label, count in counts.items() if count < 2]
        if single:
            raise InvalidArgument(f"label {single[0]!r} has a single example; give two of each label or more")
        self.encoder = encoder if encoder is not None else _default_encoder()
        self.labels = tuple(sorted(counts))
        x = self.encoder.embed([text for text, _ in pairs]).double()
        y = torch.tensor([self.labels.index(label) for _, label in pairs])
        tried = [(precision, *self._left_out(x, y, precision)) for precision in PRECISIONS]
        precision, self.temperature, _ = min(tried, key=lambda one: one[2])
        if self.temperature == 1.0:
            warnings.warn(
                f"all {len(y)} examples, each left out once, were labeled right (or none was), so they say nothing "
                "about how confident to be; give more examples, hard ones among them",
                InferenceAtRisk,
                stacklevel=2,
            )
        self.posterior = _fit(x, y, len(self.labels), precision)

    def _left_out(self, x: Float[Tensor, "n width"], y: Int[Tensor, " n"], precision: float) -> tuple[float, float]:
        """The temperature by cross-validation, 1 where none is best, and the loss with it."""
        probs = torch.zeros(len(y), len(self.labels), dtype=x.dtype)
        for part in _folds(y):
            training = torch.ones(len(y), dtype=torch.bool)
            training[part] = False
            probs[part] = _probs(_fit(x[training], y[training], len(self.labels), precision), x[part])
        found = fit_temperature(log_probs(probs), y)
        temperature = found if BOUNDS[0] * 1.01 < found < BOUNDS[1] / 1.01 else 1.0
        return temperature, log_loss((log_probs(probs) / temperature).softmax(-1), y)

    def classify(self, text: str) -> TextClassification:
        """The probabilities of the labels for a text; ``scores`` are the layer's logits.

        Raises:
            InvalidInput: the text is empty or not text. ContextOverflow: it is longer than the encoder reads.
        """
        return self.classify_all([text])[0]

    def classify_all(self, texts: Sequence[str]) -> list[TextClassification]:
        """The same for several texts."""
        if not texts:
            return []
        prediction = apply_correction(self.posterior(self._vectors(texts)), self.temperature)
        assert prediction.probs is not None
        found = []
        for chances, logits in zip(prediction.probs.tolist(), prediction.mean.tolist(), strict=True):
            ranked = sorted(zip(chances, logits, self.labels, strict=True), key=lambda one: -one[0])
            found.append(TextClassification({n: p for p, _, n in ranked}, {n: z for _, z, n in ranked}))
        return found

    def out_of_distribution_score(self, texts: Sequence[str]) -> Float[Tensor, " texts"]:
        """Uncertainty of each text given the examples: entropy of its probabilities before the temperature, in nats."""
        return entropy(_probs(self.posterior, self._vectors(texts)))

    def evaluate(self, examples: Iterable[tuple[str, str]]) -> ClassificationPredictions:
        """Its probabilities for labeled texts that it was not trained on, with `report()` and `plot(path)`.

        Raises:
            InvalidArgument: no examples, or one with another label.
        """
        return evaluated(self.classify_all, self.labels, examples)

    def save(self, path: str | Path) -> None:
        """Write layer and posterior to a folder that `load` reads; the encoder is not written.

        Raises:
            DiskFull: nothing was written. InvalidInput: the path is a file, or not writable.
        """
        posterior, tensors = describe(self.posterior)
        config = TrainedClassifierConfig(self.labels, self.temperature, self.encoder.name, posterior)
        layer = {f"layer.{name}": value for name, value in self.posterior.model.state_dict().items()}
        checkpoint.save(layer | tensors, path, model_type=self.model_type, config=config)

    @classmethod
    def load(cls, path: str | Path, encoder: TextEncoder | None = None) -> TrainedClassifier:
        """Read what `save` wrote.

        Args:
            path: the folder.
            encoder: the one that it was trained with; None loads the default one.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            InvalidArgument: it was trained with another encoder.
            CorruptedFile: a file is damaged, or the tensors do not fit.
        """
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=TrainedClassifierConfig)
        config, weights = saved.config, saved.checkpoint.tensors("layer.")
        try:
            layer = _layer(weights["weight"].shape[1], len(config.labels))
            layer.load_state_dict(weights)
        except (KeyError, IndexError, RuntimeError) as error:
            raise CorruptedFile(f"the classifier in {path} does not fit its config: {error}") from error
        made = cls.__new__(cls)
        made.encoder = encoder if encoder is not None else _default_encoder()
        if made.encoder.name != config.encoder:
            raise InvalidArgument(
                f"the classifier was trained with the encoder {config.encoder!r}, not {made.encoder.name!r}"
            )
        made.labels, made.temperature = config.labels, config.temperature
        made.posterior = restore(Laplace, config.posterior, saved.checkpoint.tensors(), layer, path)
        return made

    def _vectors(self, texts: Sequence[str]) -> Float[Tensor, "texts width"]:
        for text in texts:
            check_text(text)
        return self.encoder.embed(texts).double()


def _default_encoder() -> TextEncoder:
    from pippin.language.encoder import load_encoder

    return load_encoder()


def _layer(width: int, labels: int) -> nn.Linear:
    return nn.Linear(width, labels, dtype=torch.float64, device="meta").to_empty(device="cpu").eval()


def _fit(x: Float[Tensor, "n width"], y: Int[Tensor, " n"], labels: int, precision: float) -> Laplace:
    """The layer at its mode, by L-BFGS on a convex loss, and the posterior around it."""
    layer = _layer(x.shape[1], labels)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        squares = layer.weight.square().sum() + layer.bias.square().sum()
        total = nn.functional.cross_entropy(layer(x), y, reduction="sum") + 0.5 * precision * squares
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return Laplace(layer, "classification", "all", prior_precision=precision).fit([(x, y)])


def _folds(y: Int[Tensor, " n"]) -> list[Int[Tensor, " part"]]:
    """Stratified folds of the examples; no fold holds all examples of a label."""
    place = torch.empty_like(y)
    for label in y.unique():
        at = (y == label).nonzero()[:, 0]
        place[at] = torch.arange(len(at)) % FOLDS
    return [(place == fold).nonzero()[:, 0] for fold in range(FOLDS) if bool((place == fold).any())]


def _probs(posterior: Laplace, x: Float[Tensor, "n width"]) -> Float[Tensor, "n labels"]:
    probs = posterior(x).probs
    assert probs is not None
    return probs
