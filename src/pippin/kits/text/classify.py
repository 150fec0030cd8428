"""Classification by log-probabilities: how likely is each label as the answer, exactly, and calibrated.

Notable here:
- nothing is sampled: the log-probability of every label, to its end of turn, is computed and normalised over the labels
- what the model says about texts without content is its bias, and is taken out (arXiv:2102.09690)
- labelled examples fit a temperature and biases on top; the result can be kept as JSON
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float

from pippin.core.errors import InvalidArgument
from pippin.kits.text.calibration import Calibration
from pippin.kits.text.desk import Desk, Preset
from pippin.kits.text.spans import check_text
from pippin.session.transcript import Prompt

if TYPE_CHECKING:
    from pippin.evaluate.calibration import ClassPredictions

# Texts that say nothing, as the paper has them; their probabilities are averaged.
CONTENT_FREE = ("N/A", "[MASK]", "")

Calibrate = Literal["content-free", "off"]


@dataclass(frozen=True)
class Classification:
    """How probable each label is; ``probabilities`` lists the likeliest first and adds up to 1.

    ``scores`` are the model's own log-probabilities of the labels, before calibration and normalisation.
    """

    probabilities: dict[str, float]
    scores: dict[str, float]

    @property
    def label(self) -> str:
        """The likeliest label."""
        return next(iter(self.probabilities))

    @property
    def probability(self) -> float:
        """Its probability."""
        return self.probabilities[self.label]


class Classifier:
    """Assigns one of some labels.

    Args:
        desk: the model.
        labels: at least two; a mapping gives each a description that the model reads.
        about: what the labels say about a text, such as "the mood of the writer".
        examples: pairs of a text and its label that the model is shown; a few, of all labels.
        calibrate: "content-free", "off", or a `Calibration` that was fitted before.

    Raises:
        InvalidArgument: fewer than two labels, one twice or empty, or an example with another label.
        UnsupportedCapability: the model's provider does not report log-probabilities.
    """

    def __init__(
        self,
        desk: Desk,
        labels: Sequence[str] | Mapping[str, str],
        *,
        about: str = "",
        examples: Iterable[tuple[str, str]] = (),
        calibrate: Calibrate | Calibration = "content-free",
    ) -> None:
        self.labels = _checked(labels)
        descriptions = dict(labels) if isinstance(labels, Mapping) else {}
        examples = tuple((check_text(text, "the text of an example"), label) for text, label in examples)
        unknown = [label for _, label in examples if label not in self.labels]
        if unknown:
            raise InvalidArgument(f"an example has the label {unknown[0]!r}; the labels are {', '.join(self.labels)}")
        desk.local  # noqa: B018  (raises where no log-probabilities can be had)
        self.desk = desk
        self.preset = _preset(self.labels, descriptions, about, examples)
        if isinstance(calibrate, Calibration):
            if calibrate.labels != self.labels:
                raise InvalidArgument(
                    f"the calibration is for the labels {', '.join(calibrate.labels)}, not {', '.join(self.labels)}"
                )
            self.calibration = calibrate
        elif calibrate == "content-free":
            self.calibration = Calibration(self.labels, tuple(self._content_free()))
        elif calibrate == "off":
            self.calibration = Calibration(self.labels)
        else:
            raise InvalidArgument(f"calibrate must be content-free, off or a Calibration, got {calibrate!r}")

    def scores(self, texts: Sequence[str]) -> Float[np.ndarray, "texts labels"]:
        """Log-probability of each label as the whole answer to each text, as the model has it.

        Raises:
            InvalidInput: a text is empty or not text. ContextOverflow: one is too long.
        """
        return self._scores([self.desk.admit(text) for text in texts])

    def classify(self, text: str) -> Classification:
        """The probabilities of the labels for a text.

        Raises:
            InvalidInput: the text is empty or not text. ContextOverflow: it is too long.
        """
        return self.classify_all([text])[0]

    def classify_all(self, texts: Sequence[str]) -> list[Classification]:
        """The same for several texts."""
        scores = self.scores(texts)
        chances = self.calibration.probabilities(scores)
        found = []
        for row, raw in zip(chances.tolist(), scores.tolist(), strict=True):
            ranked = sorted(zip(row, raw, self.labels, strict=True), key=lambda one: -one[0])
            found.append(Classification({n: p for p, _, n in ranked}, {n: s for _, s, n in ranked}))
        return found

    def fit(self, examples: Iterable[tuple[str, str]], *, bias: bool = True, ridge: float = 1.0) -> Calibration:
        """Fit temperature and biases on labelled texts, and use them from now on.

        Args:
            examples: pairs of a text and its right label, none of which the model was shown.
            bias, ridge: see `Calibration.fit`.

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
        return self.calibration

    def measure(self, examples: Iterable[tuple[str, str]]) -> ClassPredictions:
        """How far its probabilities can be believed, on labelled texts that it was neither shown nor fitted to.

        Returns:
            Its probabilities and what was right; `report()` gives calibration error, likelihood and selective risk,
            `plot(path)` draws them.

        Raises:
            InvalidArgument: no examples, or one with another label.
        """
        from pippin.kits.text.learned import measured

        return measured(self.classify_all, self.labels, examples)

    def _scores(self, texts: Sequence[str]) -> Float[np.ndarray, "texts labels"]:
        room = self.desk.room(self.preset, 0)
        rows = []
        for text in texts:
            self.desk.check_fits(text, room)
            transcript = self.preset.transcript.add(Prompt(_asked(text)))
            rows.append(self.desk.score_answers(transcript, self.labels))
        return np.array(rows, dtype=float).reshape(len(rows), len(self.labels))

    def _content_free(self) -> list[float]:
        scores = self._scores(CONTENT_FREE)
        chances = Calibration(self.labels).probabilities(scores).mean(0)
        return [float(value) for value in np.log(chances)]


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


def _preset(
    labels: tuple[str, ...], descriptions: Mapping[str, str], about: str, examples: tuple[tuple[str, str], ...]
) -> Preset:
    goal = f"You say {about} of a text." if about else "You classify texts."
    lines = [f"- {label}: {descriptions[label]}" if descriptions.get(label) else f"- {label}" for label in labels]
    told = "\n".join([f"{goal} Answer with one of these labels and nothing else:", *lines])
    return Preset(told, tuple((_asked(text), label) for text, label in examples))


def _asked(text: str) -> str:
    return f"Text: {text.strip()}\nLabel:"
