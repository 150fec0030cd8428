"""Text classification by log-probabilities of labels, with calibration.

Notable here:
- nothing is sampled: the log-probability of every label, to its end of turn, is computed and normalized over the labels
- the model's probabilities for texts without content are its bias, and are divided out (arXiv:2102.09690)
- labeled examples additionally fit a temperature and biases; the result can be saved as JSON
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float

from pippin.core.errors import InvalidArgument
from pippin.kits.text.calibration import LabelCalibration
from pippin.kits.text.session_pool import SessionPool
from pippin.kits.text.spans import check_text
from pippin.session.text_prompts import label_request, labels_preset
from pippin.session.transcript import Prompt

if TYPE_CHECKING:
    from pippin.evaluate.calibration import ClassificationPredictions

# Texts without content, from the paper; their probabilities are averaged.
CONTENT_FREE = ("N/A", "[MASK]", "")

Calibrate = Literal["content-free", "off"]


@dataclass(frozen=True)
class TextClassification:
    """The probability of each label; ``probabilities`` lists the most likely first and adds up to 1.

    ``scores`` are the model's own log-probabilities of the labels, before calibration and normalization.
    """

    probabilities: dict[str, float]
    scores: dict[str, float]

    @property
    def label(self) -> str:
        """The most likely label."""
        return next(iter(self.probabilities))

    @property
    def probability(self) -> float:
        """Its probability."""
        return self.probabilities[self.label]


class TextClassifier:
    """Assigns one of several labels.

    Args:
        sessions: sessions of the model.
        labels: at least two; a mapping gives each a description for the model.
        about: what the labels say about a text, such as "the mood of the writer".
        examples: pairs of a text and its label for the prompt; a few, of all labels.
        calibrate: "content-free", "off", or an already fitted `LabelCalibration`.

    Raises:
        InvalidArgument: fewer than two labels, one twice or empty, or an example with another label.
        UnsupportedCapability: the model's provider does not report log-probabilities.
    """

    def __init__(
        self,
        sessions: SessionPool,
        labels: Sequence[str] | Mapping[str, str],
        *,
        about: str = "",
        examples: Iterable[tuple[str, str]] = (),
        calibrate: Calibrate | LabelCalibration = "content-free",
    ) -> None:
        self.labels = _checked(labels)
        descriptions = dict(labels) if isinstance(labels, Mapping) else {}
        examples = tuple((check_text(text, "the text of an example"), label) for text, label in examples)
        unknown = [label for _, label in examples if label not in self.labels]
        if unknown:
            raise InvalidArgument(f"an example has the label {unknown[0]!r}; the labels are {', '.join(self.labels)}")
        sessions.local_model  # noqa: B018  (raises where no log-probabilities can be had)
        self.sessions = sessions
        self.preset = labels_preset(self.labels, descriptions, about, examples)
        if isinstance(calibrate, LabelCalibration):
            if calibrate.labels != self.labels:
                raise InvalidArgument(
                    f"the calibration is for the labels {', '.join(calibrate.labels)}, not {', '.join(self.labels)}"
                )
            self.calibration = calibrate
        elif calibrate == "content-free":
            self.calibration = LabelCalibration(self.labels, tuple(self._content_free()))
        elif calibrate == "off":
            self.calibration = LabelCalibration(self.labels)
        else:
            raise InvalidArgument(f"calibrate must be content-free, off or a LabelCalibration, got {calibrate!r}")

    def scores(self, texts: Sequence[str]) -> Float[np.ndarray, "texts labels"]:
        """Log-probability of each label as the whole answer to each text, before calibration.

        Raises:
            InvalidInput: a text is empty or not text. ContextOverflow: one is too long.
        """
        return self._scores([self.sessions.check_input(text) for text in texts])

    def classify(self, text: str) -> TextClassification:
        """The probabilities of the labels for a text.

        Raises:
            InvalidInput: the text is empty or not text. ContextOverflow: it is too long.
        """
        return self.classify_all([text])[0]

    def classify_all(self, texts: Sequence[str]) -> list[TextClassification]:
        """The same for several texts."""
        scores = self.scores(texts)
        chances = self.calibration.probabilities(scores)
        found = []
        for row, raw in zip(chances.tolist(), scores.tolist(), strict=True):
            ranked = sorted(zip(row, raw, self.labels, strict=True), key=lambda one: -one[0])
            found.append(TextClassification({n: p for p, _, n in ranked}, {n: s for _, s, n in ranked}))
        return found

    def fit(self, examples: Iterable[tuple[str, str]], *, bias: bool = True, ridge: float = 1.0) -> TextClassifier:
        """Fit temperature and biases on labeled texts, and use them from now on.

        Args:
            examples: pairs of a text and its right label, none of which is in the prompt.
            bias, ridge: see `LabelCalibration.fit`.

        Raises:
            InvalidArgument: no examples, or one with another label.
        """
        pairs = list(examples)
        unknown = [label for _, label in pairs if label not in self.labels]
        if unknown or not pairs:
            raise InvalidArgument(f"examples need labels out of {', '.join(self.labels)}; got {unknown or 'none'}")
        targets = np.array([self.labels.index(label) for _, label in pairs])
        self.calibration = self.calibration.fit(
            self.scores([text for text, _ in pairs]), targets, bias=bias, ridge=ridge
        )
        return self

    def evaluate(self, examples: Iterable[tuple[str, str]]) -> ClassificationPredictions:
        """Evaluate its probabilities on labeled texts that are neither in the prompt nor used for fitting.

        Returns:
            Its probabilities and the right labels; `report()` gives calibration error, likelihood and selective error,
            `plot(path)` plots them.

        Raises:
            InvalidArgument: no examples, or one with another label.
        """
        return evaluated(self.classify_all, self.labels, examples)

    def _scores(self, texts: Sequence[str]) -> Float[np.ndarray, "texts labels"]:
        room = self.sessions.max_text_tokens(self.preset, 0)
        rows = []
        for text in texts:
            self.sessions.check_fits(text, room)
            transcript = self.preset.transcript.add(Prompt(label_request(text)))
            rows.append(self.sessions.score_answers(transcript, self.labels, task=self.preset.task))
        return np.array(rows, dtype=float).reshape(len(rows), len(self.labels))

    def _content_free(self) -> list[float]:
        scores = self._scores(CONTENT_FREE)
        chances = LabelCalibration(self.labels).probabilities(scores).mean(0)
        return [float(value) for value in np.log(chances)]


def evaluated(
    classify_all: Callable[[Sequence[str]], list[TextClassification]],
    labels: Sequence[str],
    examples: Iterable[tuple[str, str]],
) -> ClassificationPredictions:
    """The probabilities of a classifier for labeled texts, with the right labels.

    Raises:
        InvalidArgument: no examples, or one with another label.
    """
    import torch

    from pippin.evaluate.calibration import ClassificationPredictions

    pairs = list(examples)
    unknown = [label for _, label in pairs if label not in labels]
    if unknown or not pairs:
        raise InvalidArgument(f"examples need labels out of {', '.join(labels)}; got {unknown or 'none'}")
    found = classify_all([text for text, _ in pairs])
    probs = torch.tensor([[one.probabilities[label] for label in labels] for one in found])
    targets = torch.tensor([list(labels).index(label) for _, label in pairs])
    return ClassificationPredictions(probs, targets, tuple(labels))


def _checked(labels: Sequence[str] | Mapping[str, str]) -> tuple[str, ...]:
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise InvalidArgument(
            f"labels are a list of texts, or a mapping from labels to descriptions, got {labels!r:.80}"
        )
    names = tuple(labels)
    if len(names) < 2 or len(set(names)) < len(names):
        raise InvalidArgument(f"a classification needs at least two labels, each once, got {list(names)}")
    if any(not name.strip() or name != name.strip() or "\n" in name for name in names):
        raise InvalidArgument(f"a label is one line without space around it, got {list(names)}")
    return names
