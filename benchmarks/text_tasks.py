"""Text tasks of the default model: proofreading, calibration of a classifier, and grouping by topic.

Rows: F0.5 (precision counts double) of proofreading synthetic mistakes in prose, choosing against writing with the same
model and against a dictionary only; edits per 100 clean sentences; the ECE of a classifier, raw against
calibrated; the share of texts grouped with others of their topic, against grouping by shared words.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _rows import Row, main

from pippin.kits.text import Edit, LabelCalibration, TextTasks, apply_edits, compare
from pippin.kits.text.lexicon import Lexicon
from pippin.kits.text.spans import protected_spans, sentences
from pippin.kits.text.tags import clusters, likelihood_gain_vectors, word_vectors
from pippin.metrics import ReliabilityDiagram

HERE = Path(__file__).resolve().parent
LABELS = ("business", "sport", "science", "politics")

# What people write for what they mean; none of these pairs is in the rules' lists of spelling, because there is none.
SLIPS = {
    "their": "there", "there": "their", "its": "it's", "it's": "its", "your": "you're", "too": "to",
    "to": "too",
    "then": "than", "than": "then",
    "were": "was", "was": "were", "has": "have", "have": "has", "is": "are", "are": "is",
    "a": "an", "an": "a", "does": "do", "whose": "who's", "lose": "loose", "who": "whom", "where": "were", "of": "off",
    "because": "becuase", "received": "recieved", "until": "untill", "which": "wich", "before": "befor",
    "people": "poeple",
    "again": "agian", "their own": "there own", "through": "threw", "first": "frist", "between": "betwen",
    "nothing": "nothin",
}  # fmt: skip


def corpus() -> list[str]:
    """Sentences of the articles, the letter and the short texts: prose that was not written for this test."""
    text = "\n\n".join((HERE.parent / "examples" / name).read_text() for name in ("article.txt", "letter.txt"))
    short = [one for label in LABELS for one in json.loads((HERE / "data" / "short_texts.json").read_text())[label]]
    found = [" ".join(one.of(text).split()) for one in sentences(text)] + short
    return [one for one in found if len(one.split()) > 5 and re.search(r"[.!?]$", one) and not protected_spans(one)]


def corrupt(sentence: str, dice: random.Random) -> str:
    """One mistake in a sentence: a slip, a mistyped word, a lost capital, a doubled word or a space before a mark."""
    words = list(re.finditer(r"[A-Za-z']+", sentence))
    kind = dice.choice(["slip", "slip", "type", "type", "type", "double", "space", "capital"])
    slips = [word for word in words if word[0] in SLIPS]
    if kind == "slip" and slips:
        word = dice.choice(slips)
        return sentence[: word.start()] + SLIPS[word[0]] + sentence[word.end() :]
    if kind == "double":
        word = dice.choice(words[1:])
        return f"{sentence[: word.end()]} {sentence[word.start() :]}"
    if kind == "space":
        return f"{sentence[:-1]} {sentence[-1]}"
    if kind == "capital" and sentence[0].isupper():
        return sentence[0].lower() + sentence[1:]
    word = dice.choice([word for word in words if len(word[0]) > 3 and word[0].islower()] or words)
    return sentence[: word.start()] + mistype(word[0], dice) + sentence[word.end() :]


def mistype(word: str, dice: random.Random) -> str:
    """A word with two letters swapped, or one left out, doubled or replaced."""
    at = dice.randrange(len(word) - 1)
    made = dice.choice(
        [
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[: at + 1] + word[at + 2 :],
            word[: at + 1] + word[at:],
            word[: at + 1] + dice.choice("aeinorst") + word[at + 2 :],
        ]
    )
    return made if made != word else f"{word}{word[-1]}"


def f_half(pairs: list[tuple[str, str]], correct: Callable[[str], list[Edit]]) -> tuple[float, float, float]:
    """Precision, recall and F0.5 of edits, by the words they put in place."""
    hits = made = wanted = 0
    for wrong, right in pairs:
        needed = {(edit.span.start, edit.replacement) for edit in compare(wrong, right)}
        found = {(edit.span.start, edit.replacement) for edit in compare(wrong, apply_edits(wrong, correct(wrong)))}
        hits, made, wanted = hits + len(needed & found), made + len(found), wanted + len(needed)
    precision, recall = hits / max(made, 1), hits / max(wanted, 1)
    return precision, recall, 1.25 * precision * recall / max(0.25 * precision + recall, 1e-9)


def by_dictionary(lexicon: Lexicon) -> Callable[[str], list[Edit]]:
    """What a spelling checker does without a model: the nearest, most frequent word for each unknown one."""

    def correct(text: str) -> list[Edit]:
        def fixed(match: re.Match[str]) -> str:
            near = (
                lexicon.nearest(match[0]) if lexicon.familiarity(match[0]) == "unknown" and match[0].islower() else []
            )
            return near[0] if near else match[0]

        return compare(text, re.sub(r"[A-Za-z']{3,}", fixed, text))

    return correct


def proofreading(tasks: TextTasks, count: int) -> list[Row]:
    """Corrections of one synthetic mistake in each sentence, and of none."""
    dice = random.Random(7)
    clean = corpus()
    pairs = [(corrupt(one, dice), one) for one in (dice.choice(clean) for _ in range(count))]
    pairs = [(wrong, right) for wrong, right in pairs if wrong != right]
    chosen = f_half(pairs, lambda text: list(tasks.proofread(text).edits))
    written = f_half(pairs, lambda text: list(tasks.proofread(text, method="write").edits))
    listed = f_half(pairs, by_dictionary(tasks.sessions.lexicon))
    sample = clean[:: max(1, len(clean) // count)]
    needless = [
        100 * sum(bool(tasks.proofread(text, method=how).edits) for text in sample) / len(sample)
        for how in ("choose", "write")
    ]  # type: ignore[arg-type]
    return [
        Row("proofread, F0.5", "share", chosen[2], "same model, generating", written[2], 1.2),
        Row("proofread, precision", "share", chosen[0], "same model, generating", written[0], 1.2),
        Row("proofread, recall", "share", chosen[1], "same model, generating", written[1], 1.0),
        Row("proofread, F0.5", "share", chosen[2], "dictionary only", listed[2], 1.2),
        Row(
            "clean sentences changed",
            "%",
            max(needless[0], 0.1),
            "same model, generating",
            needless[1],
            2.0,
            higher_is_better=False,
        ),
    ]


def calibration(tasks: TextTasks, count: int) -> list[Row]:
    """Error and accuracy on the second half of the texts; the first half is for the fit."""
    data = json.loads((HERE / "data" / "short_texts.json").read_text())
    shown = [(data[label][0], label) for label in LABELS]
    fit = [(text, label) for label in LABELS for text in data[label][1:15][:count]]
    held = [(text, label) for label in LABELS for text in data[label][15:][:count]]
    classifier = tasks.classifier(LABELS, about="what a news item is about", examples=shown)
    answers = np.array([LABELS.index(label) for _, label in held])
    scores = classifier.scores([text for text, _ in held])
    plain = measure(LabelCalibration(LABELS), scores, answers)
    free = measure(classifier.calibration, scores, answers)
    fitted = measure(classifier.fit(fit).calibration, scores, answers)
    return [
        Row(
            "ECE, content-free",
            "ECE",
            free[0],
            "raw probabilities",
            plain[0],
            1.2,
            higher_is_better=False,
        ),
        Row("ECE, fitted", "ECE", fitted[0], "raw probabilities", plain[0], 1.5, higher_is_better=False),
        Row("accuracy, content-free", "share", free[1], "raw probabilities", plain[1], 1.0),
        Row("accuracy, fitted", "share", fitted[1], "raw probabilities", plain[1], 1.0),
    ]


def measure(calibration: LabelCalibration, scores: np.ndarray, answers: np.ndarray) -> tuple[float, float]:
    """Calibration error and accuracy."""
    chances = calibration.probabilities(scores)
    right = chances.argmax(1) == answers
    diagram = ReliabilityDiagram.from_confidence(chances.max(1), right, 10)
    return diagram.expected_calibration_error, float(right.mean())


def grouping(tasks: TextTasks, count: int) -> list[Row]:
    """Share of texts in a group whose most frequent topic is theirs, at four groups."""
    data = json.loads((HERE / "data" / "short_texts.json").read_text())
    texts = [text for label in LABELS for text in data[label][:count]]
    topics = np.repeat(range(len(LABELS)), count)

    def purity(vectors: np.ndarray) -> float:
        return sum(np.bincount(topics[members]).max() for members in clusters(vectors, len(LABELS), 0)) / len(texts)

    ours, words = purity(likelihood_gain_vectors(tasks.sessions, texts)), purity(word_vectors(texts))
    return [Row("topics, purity of four clusters", "share", ours, "shared words", words, 1.2)]


def measure_all(quick: bool) -> list[Row]:
    """All rows with the default model."""
    tasks = TextTasks("smollm2-135m")
    return [
        *proofreading(tasks, 12 if quick else 300),
        *calibration(tasks, 3 if quick else 15),
        *grouping(tasks, 3 if quick else 12),
    ]


if __name__ == "__main__":
    main(measure_all, __doc__)
