r"""A classifier of texts learnt from labelled examples: a linear layer over sentence vectors, with its uncertainty.

Notable here:
- few examples leave many layers possible: their posterior is integrated over, and says how foreign a text is
- prior and temperature are those under which examples are likeliest that the layer did not see; every example is left
  out once, so that each is used to learn and to calibrate
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pippin.bayes.laplace import Laplace
from pippin.bayes.metrics import entropy, nll
from pippin.bayes.temperature import BOUNDS, fit_temperature, log_probs, tempered
from pippin.core.errors import CorruptedFile, InferenceAtRisk, InvalidArgument
from pippin.core.files import atomic_write, make_folder
from pippin.kits.text.classify import Classification
from pippin.kits.text.spans import check_text

if TYPE_CHECKING:
    from pippin.evaluate.calibration import ClassPredictions
    from pippin.language.encoder import TextEncoder

PRECISIONS: Final = tuple(10.0 ** (power / 2) for power in range(-6, 2))
"""Prior precisions that are compared, from 0.001 to 3; the vectors have length 1."""
FOLDS: Final = 5
_FILES: Final = ("learned.json", "learned.safetensors")


class LearnedClassifier:
    """Assigns a label out of those in the examples that it was learnt from.

    Args:
        examples: pairs of a text and its label; two labels or more, two texts of each or more.
        encoder: turns texts into vectors; None loads the default one.

    Attributes:
        labels: in alphabetical order.
        temperature: divides the log-probabilities; from the examples, each left out once.

    Raises:
        InvalidArgument: fewer than two labels, or a label with a single example.
        InvalidInput: a text that is empty or no text. ContextOverflow: one is longer than the encoder reads.

    Warns:
        InferenceAtRisk: every example left out was labelled right, so the temperature is left at 1.

    Source: Daxberger et al. 2021, arXiv:2106.14806 (posterior); Guo et al. 2017, arXiv:1706.04599 (temperature).
    """

    def __init__(self, examples: Iterable[tuple[str, str]], encoder: TextEncoder | None = None) -> None:
        pairs = [(check_text(text, "the text of an example"), label) for text, label in examples]
        counts: dict[str, int] = {}
        for _, label in pairs:
            counts[label] = counts.get(label, 0) + 1
        if len(counts) < 2:
            raise InvalidArgument(f"a classifier is learnt from examples of two labels or more, got {list(counts)}")
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
                f"all {len(y)} examples, each left out once, were labelled right (or none was), so they say nothing "
                "about how sure to be; give more examples, hard ones among them",
                InferenceAtRisk,
                stacklevel=2,
            )
        self.posterior = _fit(x, y, len(self.labels), precision)

    def _left_out(self, x: Float[Tensor, "n width"], y: Int[Tensor, " n"], precision: float) -> tuple[float, float]:
        """The temperature for examples that are left out in turn, 1 where none is best, and their loss under it."""
        probs = torch.zeros(len(y), len(self.labels), dtype=x.dtype)
        for part in _folds(y):
            kept = torch.ones(len(y), dtype=torch.bool)
            kept[part] = False
            probs[part] = _probs(_fit(x[kept], y[kept], len(self.labels), precision), x[part])
        found = fit_temperature(log_probs(probs), y)
        temperature = found if BOUNDS[0] * 1.01 < found < BOUNDS[1] / 1.01 else 1.0
        return temperature, nll((log_probs(probs) / temperature).softmax(-1), y)

    def classify(self, text: str) -> Classification:
        """The probabilities of the labels for a text; ``scores`` are the layer's logits.

        Raises:
            InvalidInput: the text is empty or not text. ContextOverflow: it is longer than the encoder reads.
        """
        return self.classify_all([text])[0]

    def classify_all(self, texts: Sequence[str]) -> list[Classification]:
        """The same for several texts."""
        if not texts:
            return []
        prediction = tempered(self.posterior(self._vectors(texts)), self.temperature)
        assert prediction.probs is not None
        found = []
        for chances, logits in zip(prediction.probs.tolist(), prediction.mean.tolist(), strict=True):
            ranked = sorted(zip(chances, logits, self.labels, strict=True), key=lambda one: -one[0])
            found.append(Classification({n: p for p, _, n in ranked}, {n: z for _, z, n in ranked}))
        return found

    def foreignness(self, texts: Sequence[str]) -> Float[Tensor, " texts"]:
        """How little the examples say of each text: entropy of its probabilities before the temperature, in nats."""
        return entropy(_probs(self.posterior, self._vectors(texts)))

    def measure(self, examples: Iterable[tuple[str, str]]) -> ClassPredictions:
        """Its probabilities for labelled texts that it was not learnt from, with `report()` and `plot(path)`.

        Raises:
            InvalidArgument: no examples, or one with another label.
        """
        return measured(self.classify_all, self.labels, examples)

    def save(self, folder: Path) -> None:
        """Write layer and posterior into a folder, which is made; the encoder is not written.

        Raises:
            DiskFull: the disk filled up. InvalidInput: the place is a file, or closed to writing.
        """
        folder = make_folder(folder)
        self.posterior.save(folder / "posterior")
        save_file(
            {name: value.contiguous() for name, value in self.posterior.model.state_dict().items()}, folder / _FILES[1]
        )
        fields = {"labels": self.labels, "temperature": self.temperature, "encoder": self.encoder.name}
        with atomic_write(folder / _FILES[0], mode="w") as file:
            json.dump(fields, file, ensure_ascii=False)

    @classmethod
    def load(cls, folder: Path, encoder: TextEncoder | None = None) -> LearnedClassifier:
        """Read what `save` wrote.

        Raises:
            CorruptedFile: the folder holds no classifier. InvalidArgument: it was learnt with another encoder.
        """
        folder = Path(folder)
        try:
            fields = json.loads((folder / _FILES[0]).read_text("utf-8"))
            labels, temperature = tuple(map(str, fields["labels"])), float(fields["temperature"])
            name, weights = str(fields["encoder"]), load_file(folder / _FILES[1])
            layer = _layer(weights["weight"].shape[1], len(labels))
            layer.load_state_dict(weights)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CorruptedFile(f"{str(folder)!r} holds no learnt classifier: {error}") from error
        made = cls.__new__(cls)
        made.encoder = encoder if encoder is not None else _default_encoder()
        if made.encoder.name != name:
            raise InvalidArgument(f"the classifier was learnt with the encoder {name!r}, not {made.encoder.name!r}")
        made.labels, made.temperature = labels, temperature
        made.posterior = Laplace.load(folder / "posterior", layer)
        return made

    def _vectors(self, texts: Sequence[str]) -> Float[Tensor, "texts width"]:
        for text in texts:
            check_text(text)
        return self.encoder.embed(texts).double()


def measured(
    classify_all: Callable[[Sequence[str]], list[Classification]],
    labels: Sequence[str],
    examples: Iterable[tuple[str, str]],
) -> ClassPredictions:
    """The probabilities of a classifier for labelled texts, and what came true.

    Raises:
        InvalidArgument: no examples, or one with another label.
    """
    from pippin.evaluate.calibration import ClassPredictions

    pairs = list(examples)
    unknown = [label for _, label in pairs if label not in labels]
    if unknown or not pairs:
        raise InvalidArgument(f"examples need labels out of {', '.join(labels)}; got {unknown or 'none'}")
    found = classify_all([text for text, _ in pairs])
    probs = torch.tensor([[one.probabilities[label] for label in labels] for one in found])
    targets = torch.tensor([list(labels).index(label) for _, label in pairs])
    return ClassPredictions(probs, targets, tuple(labels))


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
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        squares = layer.weight.square().sum() + layer.bias.square().sum()
        total = nn.functional.cross_entropy(layer(x), y, reduction="sum") + 0.5 * precision * squares
        total.backward()
        return total

    with torch.enable_grad():
        optimiser.step(loss)
    return Laplace(layer, "classification", "all", prior_precision=precision).fit([(x, y)])


def _folds(y: Int[Tensor, " n"]) -> list[Int[Tensor, " part"]]:
    """Parts of the examples in which each label has its share; no part holds all examples of a label."""
    place = torch.empty_like(y)
    for label in y.unique():
        at = (y == label).nonzero()[:, 0]
        place[at] = torch.arange(len(at)) % FOLDS
    return [(place == fold).nonzero()[:, 0] for fold in range(FOLDS) if bool((place == fold).any())]


def _probs(posterior: Laplace, x: Float[Tensor, "n width"]) -> Float[Tensor, "n labels"]:
    probs = posterior(x).probs
    assert probs is not None
    return probs
