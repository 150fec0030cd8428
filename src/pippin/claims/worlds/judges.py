"""Panels of nine judges: simulated ones with a known common cause, digit classifiers, language models, readers.

Notable here:
- synthetic judges share one Gaussian cause, so the correlation of their errors and the accuracy of their majority are
  integrals
- language models choose which of two sentences a person wrote; in the other one two neighboring words are swapped
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pippin.language import LanguageModel

JUDGES, ACCURACY = 9, 0.68
UNEQUAL = tuple(np.linspace(0.55, 0.81, JUDGES))
"""Accuracies of judges of unequal skill, in the mean that of the others."""
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
"""Language models of the catalog that come in packages."""
OPENINGS = (
    "\n", "A sentence: ", "From a manual: ", "He wrote: ", "In good English: ", "Question and answer. ", "Text: ",
    "The documentation says: ", "\n\n- ",
)  # fmt: skip


class Votes(NamedTuple):
    """Votes of a panel: labels [items, judges], true labels [items], and the difficulty of the items."""

    labels: NDArray[np.int64]
    gold: NDArray[np.int64]
    difficulty: NDArray[Any] | None = None


def truth(weight: float) -> tuple[float, float, float]:
    """True error correlation, majority accuracy and share of items that all judges get wrong, by integration."""
    from scipy.stats import binom, norm

    z, step = np.linspace(-9, 9, 20_001, retstep=True)
    density = norm.pdf(z) * step
    wrong = norm.cdf((norm.ppf(1 - ACCURACY) - math.sqrt(weight) * z) / math.sqrt(1 - weight))
    phi = ((density * wrong**2).sum() - (1 - ACCURACY) ** 2) / (ACCURACY * (1 - ACCURACY))
    majority = (density * binom.cdf((JUDGES - 1) // 2, JUDGES, wrong)).sum()
    return float(phi), float(majority), float((density * wrong**JUDGES).sum())


def synthetic(weight: float, seed: int, items: int, accuracies: Sequence[float] = (ACCURACY,) * JUDGES) -> Votes:
    """Votes of judges whose errors share a cause of that weight."""
    from scipy.stats import norm

    rng = np.random.default_rng((4_000, seed, round(100 * weight)))
    cause = math.sqrt(weight) * rng.standard_normal((items, 1))
    hidden = cause + math.sqrt(1 - weight) * rng.standard_normal((items, JUDGES))
    gold = rng.integers(0, 2, items)
    return Votes(np.where(hidden < norm.ppf(1 - np.array(accuracies)), 1 - gold[:, None], gold[:, None]), gold)


def difficulty_only(seed: int, items: int) -> Votes:
    """Votes of judges with independent errors that are more frequent on items of known difficulty."""
    rng = np.random.default_rng((5_000, seed))
    gold, hard = rng.integers(0, 2, items), rng.integers(0, 3, items)
    wrong = rng.random((items, JUDGES)) < np.array([0.05, 0.25, 0.48])[hard][:, None]
    return Votes(np.where(wrong, 1 - gold[:, None], gold[:, None]), gold, hard)


def classifiers(seed: int, *, quick: bool = False) -> Iterator[tuple[str, Votes]]:
    """Two panels on the same digits, a fifth of them blurred: trained on the same images, and on disjoint ones."""
    from scipy.ndimage import gaussian_filter
    from sklearn.datasets import load_digits

    rng = np.random.default_rng((6_000, seed))
    x, y = load_digits(return_X_y=True)
    order = rng.permutation(len(x))
    x, y = x[order] / 16, y[order]
    train, test, gold = x[:897], x[897:].copy(), y[897:]
    blurred = rng.random(len(test)) < 0.2
    test[blurred] = gaussian_filter(test[blurred].reshape(-1, 8, 8), (0, 1.2, 1.2)).reshape(-1, 64)
    same = [np.arange(60 if quick else 300)] * JUDGES
    for arm, parts in (("same images", same), ("other images", np.array_split(np.arange(len(train)), JUDGES))):
        kinds = zip(_kinds(seed, quick), parts, strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a judge need not have converged
            votes = [model.fit(train[at], y[at]).predict(test) for model, at in kinds]
        yield arm, Votes(np.stack(votes, 1), gold, blurred.astype(float))


def _kinds(seed: int, quick: bool) -> list[Any]:
    """Nine classifiers of five families."""
    from sklearn.ensemble import AdaBoostClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.svm import SVC
    from sklearn.tree import DecisionTreeClassifier

    trees, boosts, steps = (5, 3, 20) if quick else (100, 50, 500)
    return [
        RandomForestClassifier(trees, random_state=seed),
        AdaBoostClassifier(DecisionTreeClassifier(max_depth=4), n_estimators=boosts, random_state=seed),
        SVC(C=10),
        SVC(kernel="linear"),
        KNeighborsClassifier(1),
        KNeighborsClassifier(5),
        LogisticRegression(max_iter=steps),
        MLPClassifier((64,), max_iter=steps, random_state=seed, tol=1e-3),
        MLPClassifier((32, 32), max_iter=steps, random_state=seed + 1, tol=1e-3),
    ]


def language_models(pairs: int, load: Callable[[str], LanguageModel] | None = None) -> tuple[str, Votes] | None:
    """Votes of nine judges made from the language models that are available.

    A judge is a model with a prompt before both sentences; it votes for the likelier one.

    Args:
        pairs: number of pairs of sentences, at most 260.
        load: loads a model by its name; None for those in the store or on the network.

    Returns:
        The name of the panel, which says whether it has one model or several, and the votes.
    """
    from pippin.claims.worlds.small_networks import available
    from pippin.language import load as load_model
    from pippin.language.likelihood import text_likelihood

    names = [name for name in MODELS if load or available(name)]
    written, swapped, gold = _sentences(pairs)
    votes = np.zeros((pairs, JUDGES), dtype=np.int64)
    for name in names:
        model = (load or load_model)(name)
        for judge, opening in enumerate(OPENINGS):
            if names[judge % len(names)] == name:
                for item, texts in enumerate(zip(written, swapped, strict=True)):
                    good, bad = (text_likelihood(model, opening + text).nats for text in texts)
                    votes[item, judge] = gold[item] if good < bad else 1 - gold[item]
    arm = "language models" if len(names) > 1 else "nine openings of one language model"
    return (arm, Votes(votes, gold)) if names else None


def _sentences(pairs: int) -> tuple[list[str], list[str], NDArray[np.int64]]:
    """Sentences of Python's language reference, the same with two words swapped, and which of them comes first."""
    from pydoc_data import topics

    source = random.Random(0)
    text = re.sub(r"\s+", " ", " ".join(text for _, text in sorted(topics.topics.items())))
    found = sorted({one for one in re.findall(r"[A-Z][a-z]+(?: [a-z]+,?){7,14}\.", text)})
    written = source.sample(found, pairs)
    swapped = []
    for sentence in written:
        words = sentence.split(" ")
        places = [at for at in range(1, len(words) - 2) if words[at] != words[at + 1]]
        at = source.choice(places)
        words[at], words[at + 1] = words[at + 1], words[at]
        swapped.append(" ".join(words))
    return written, swapped, np.array([source.randrange(2) for _ in written])


def readers(seed: int, items: int, widths: Sequence[int]) -> Iterator[tuple[str, Votes]]:
    """Two panels of transformers that judge entailment: trained on the same sentences, and on disjoint ones."""
    from pippin.claims.worlds.sequences.entailment import Sentences, trained_reader

    test, counts = Sentences(9_000 + seed).draw(items)
    share = counts.double() / counts.sum(1, keepdim=True)
    difficulty = torch.special.entr(share).sum(1).numpy()
    for arm in ("readers, same sentences", "readers, other sentences"):
        votes = []
        for judge, width in enumerate(widths):
            source = Sentences(100 * seed + (judge if "other" in arm else 0))
            model = trained_reader(source, width, 12_000, 1500, 1000 * seed + judge)
            device = next(model.parameters()).device
            with torch.no_grad():
                votes.append(torch.cat([model(part.to(device)).argmax(1).cpu() for part in test.split(500)]).numpy())
        yield arm, Votes(np.stack(votes, 1), counts.argmax(1).numpy(), difficulty)
