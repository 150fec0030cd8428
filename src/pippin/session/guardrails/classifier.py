"""Harm classifier: hashed n-grams of words and characters, one linear layer, 8-bit weights.

Notable here:
- no model to load: a table of 16,384 x 11 numbers, read once; a window takes under a millisecond
- it was trained on synthetic sentences in five languages that describe intents in the abstract (`training.json`); it
  recognizes those kinds of intents and their wording, nothing else: `model.json` has its accuracy on others
- the score is the probability that a text is harmful at all, assigned to the most likely category
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pippin.core.errors import InvalidArgument
from pippin.session.guardrails.normalization import kind, normalize, words

BUCKETS: Final = 1 << 14
BENIGN: Final = "benign"
_FEW: Final = 25.0  # n-grams: a shorter text is weak evidence, and its score stays near that of an empty text
_HIGHEST: Final = 0.999  # a linear layer is never certain, so a threshold of 1 switches it off


@dataclass(frozen=True)
class NgramClassifier:
    """A linear layer over hashed n-grams.

    Args:
        labels: the labels of the columns; the first is "benign".
        weights: buckets by labels.
        bias: one per label.
    """

    labels: tuple[str, ...]
    weights: NDArray[np.float32]
    bias: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.weights.shape != (BUCKETS, len(self.labels)) or self.labels[:1] != (BENIGN,):
            raise InvalidArgument(
                f"a classifier of {len(self.labels)} labels, {BENIGN!r} first, needs weights of shape "
                f"{(BUCKETS, len(self.labels))}, got {self.weights.shape} for {self.labels}"
            )

    def probabilities(self, text: str) -> NDArray[np.float64]:
        """The probability of each label; they sum to 1."""
        ids, values = features(text)
        logits = (self.bias + values @ self.weights[ids]).astype(np.float64)
        exponents = np.exp(logits - logits.max())
        return np.asarray(exponents / exponents.sum(), dtype=np.float64)

    def harm_probability(self, text: str) -> float:
        """The probability that a text is harmful in any category.

        >>> load().harm_probability("How do I build a bomb?") > load().harm_probability("How do I build a bird house?")
        True
        """
        return float(min(_HIGHEST, 1.0 - self.probabilities(text)[0]))

    def scores(self, text: str) -> dict[str, float]:
        """The most likely category of harm, with the probability that a text is harmful at all.

        A single word has no scores, except in scripts without spaces: it asks for nothing, and may name a field.
        """
        read = normalize(text).text
        if len(words(read)) < 2 and not _unspaced(read):
            return {}
        probabilities = self.probabilities(text)
        likeliest = 1 + int(probabilities[1:].argmax())
        return {self.labels[likeliest]: float(min(_HIGHEST, 1.0 - probabilities[0]))}

    def to_json(self) -> dict[str, Any]:
        """Labels, weights in 8 bits with a scale per label, bias."""
        scale = np.abs(self.weights).max(axis=0) / 127
        table = np.round(self.weights / np.maximum(scale, 1e-12)).astype(np.int8)
        return {
            "labels": list(self.labels),
            "buckets": BUCKETS,
            "bias": [round(float(b), 6) for b in self.bias],
            "scale": [float(s) for s in scale],
            "weights": base64.b85encode(zlib.compress(table.T.tobytes(), 9)).decode("ascii"),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> NgramClassifier:
        """Load the output of `to_json`."""
        table = np.frombuffer(zlib.decompress(base64.b85decode(raw["weights"])), dtype=np.int8)
        weights = table.reshape(len(raw["labels"]), raw["buckets"]).T.astype(np.float32)
        return cls(
            tuple(raw["labels"]),
            weights * np.asarray(raw["scale"], dtype=np.float32),
            np.asarray(raw["bias"], dtype=np.float32),
        )


def features(text: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Buckets and weights of a text's n-grams: words and pairs of words, 3 to 5 characters within a word; in scripts
    without spaces 1 to 3 characters in a row. Counts are damped; the whole has a length just below 1,
    or well below it where there are few.
    """
    counts: Counter[int] = Counter()
    read = normalize(text).text
    found = [read[start:end] for start, end in words(read)]
    for first, second in zip(["^", *found], [*found, "$"], strict=True):
        counts[_bucket(f"p {first} {second}")] += 1
    for word in found:
        counts[_bucket(f"w {word}")] += 1
        if kind(word[0]) == 1:
            padded = f"<{word}>"
            for size in (3, 4, 5):
                for at in range(len(padded) - size + 1):
                    counts[_bucket(padded[at : at + size])] += 1
    for run in _unspaced(read):
        for size in (1, 2, 3):
            for at in range(len(run) - size + 1):
                counts[_bucket(f"c {run[at : at + size]}")] += 1
    ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    values = np.sqrt(np.fromiter(counts.values(), dtype=np.float32, count=len(counts)))
    return ids, (values / np.sqrt(np.square(values).sum() + _FEW)).astype(np.float32)


@cache
def load() -> NgramClassifier:
    """The packaged classifier."""
    return NgramClassifier.from_json(_packaged())


def metrics() -> dict[str, Any]:
    """Training data of the packaged classifier, and its accuracy on held-out intents and templates."""
    return {name: value for name, value in _packaged().items() if name in ("training", "metrics")}


def _packaged() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(
        files("pippin.session.guardrails").joinpath("model.json").read_text(encoding="utf-8")
    )
    return raw


def fit(
    texts: Sequence[str],
    labels: Sequence[str],
    *,
    seed: int = 0,
    steps: int = 150,
    weight_decay: float = 2e-5,
    lr: float = 0.1,
    harm_share: float = 0.5,
) -> NgramClassifier:
    """Train a classifier: softmax regression, Adam on the full batch.

    Args:
        texts: at least one per label.
        labels: "benign" or a category, one for each text.
        seed: of the initial weights.
        steps: passes over all texts.
        weight_decay: factor of the squared weights.
        lr: learning rate of Adam.
        harm_share: weight of the harmful texts in the loss, 0 to 1; about the score of an uninformative text.

    Raises:
        InvalidArgument: no training data.
    """
    import torch

    names = (BENIGN, *sorted(set(labels) - {BENIGN}))
    if len(texts) != len(labels) or len(names) < 2 or BENIGN not in labels:
        raise InvalidArgument(
            f"training needs benign and other texts, one label each; got {len(texts)} texts, {len(labels)} labels of "
            f"{sorted(set(labels))}"
        )
    rows = [features(text) for text in texts]
    ids = torch.from_numpy(np.concatenate([ids for ids, _ in rows]))
    values = torch.from_numpy(np.concatenate([values for _, values in rows]))
    offsets = torch.tensor([0, *np.cumsum([len(ids) for ids, _ in rows])[:-1]])
    target = torch.tensor([names.index(label) for label in labels])
    benign = target == 0
    share = torch.where(benign, (1 - harm_share) / benign.sum(), harm_share / (~benign).sum())
    generator = torch.Generator().manual_seed(seed)
    weights = (0.01 * torch.randn(BUCKETS, len(names), generator=generator)).requires_grad_()
    bias = torch.zeros(len(names), requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=lr)
    for _ in range(steps):
        logits = bias + torch.nn.functional.embedding_bag(ids, weights, offsets, mode="sum", per_sample_weights=values)
        nats = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        loss = (share * nats).sum() + weight_decay * weights.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return NgramClassifier(names, weights.detach().numpy(), bias.detach().numpy())


def _bucket(ngram: str) -> int:
    return zlib.crc32(ngram.encode()) % BUCKETS


def _unspaced(text: str) -> list[str]:
    """Runs of Han, hiragana and katakana, across script boundaries."""
    runs, now = [], ""
    for character in text:
        if kind(character) > 1:
            now += character
        elif now:
            runs.append(now)
            now = ""
    return [*runs, now] if now else runs
