"""Classification against brute force with transformers, and every way to ask for it wrongly."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from transformers import AutoModelForCausalLM

from pippin.core.errors import ContextOverflow, InvalidArgument, InvalidInput, UnsupportedCapability
from pippin.kits.text import LabelCalibration, TextTasks
from pippin.kits.text.classify import CONTENT_FREE

LABELS = ["good", "bad", "so-so"]
TEXTS = ["It rained.", "What a day!"]


@pytest.fixture(scope="module")
def tasks(tiny):
    return TextTasks(tiny)


@pytest.fixture(scope="module")
def brute_force(tiny, tmp_path_factory):
    """Log-probabilities of answers by another implementation, without a cache, one token after the other."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save(folder)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def scores(system, text):
        turns = [{"role": "system", "content": system}, {"role": "user", "content": f"Text: {text}\nLabel:"}]
        prompt = tiny.template.encode(turns)
        rows = []
        for label in LABELS:
            answer = [*tiny.tokenizer.encode(label), 256]  # the token that ends a turn
            logits = other(torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
            rows.append(sum(float(logits[len(prompt) - 1 + at, id]) for at, id in enumerate(answer)))
        return rows

    return scores


SYSTEM = "You classify texts. Answer with one of these labels and nothing else:\n- good\n- bad\n- so-so"


def test_scores_are_the_log_probabilities_of_whole_answers(tasks, brute_force):
    found = tasks.classifier(LABELS, calibrate="off").scores(TEXTS)
    assert np.allclose(found, [brute_force(SYSTEM, text) for text in TEXTS], atol=2e-4)


def test_probabilities_are_normalized_over_the_labels(tasks, brute_force):
    found = tasks.classify(TEXTS[0], LABELS, calibrate="off")
    expected = dict(zip(LABELS, softmax(brute_force(SYSTEM, TEXTS[0])), strict=True))
    assert found.probabilities == pytest.approx(expected, abs=1e-4)
    assert list(found.probabilities.values()) == sorted(found.probabilities.values(), reverse=True)
    assert (found.label, found.probability) == max(found.probabilities.items(), key=lambda one: one[1])


def test_content_free_calibration_divides_by_what_empty_texts_get(tasks, brute_force):
    prior = np.mean([softmax(brute_force(SYSTEM, text)) for text in CONTENT_FREE], axis=0)
    expected = softmax(log_softmax(brute_force(SYSTEM, TEXTS[0])) - np.log(prior))
    found = tasks.classify(TEXTS[0], LABELS).probabilities
    assert found == pytest.approx(dict(zip(LABELS, expected, strict=True)), abs=1e-4)


def test_descriptions_purpose_and_examples_are_read(tasks):
    plain = tasks.classifier(LABELS, calibrate="off")
    for other in (
        tasks.classifier(dict.fromkeys(LABELS, "as it is"), calibrate="off"),
        tasks.classifier(LABELS, about="the weather", calibrate="off"),
        tasks.classifier(LABELS, examples=[("Sun!", "good")], calibrate="off"),
    ):
        assert not np.allclose(plain.scores(TEXTS), other.scores(TEXTS))


def test_one_by_one_or_together_is_the_same(tasks):
    classifier = tasks.classifier(LABELS)
    together = classifier.classify_all(TEXTS)
    for text, result in zip(TEXTS, together, strict=True):
        assert classifier.classify(text).probabilities == pytest.approx(result.probabilities, abs=1e-5)


def test_fitting_makes_the_right_answers_likelier_and_can_be_kept(tasks):
    classifier = tasks.classifier(LABELS)
    pairs = [("Rain again.", "bad"), ("A fine day.", "good"), ("Fog.", "so-so"), ("Hail!", "bad")]

    def likelihood(one):
        return sum(np.log(one.classify(text).probabilities[label]) for text, label in pairs)

    before = likelihood(classifier)
    kept = classifier.fit(pairs).calibration
    assert likelihood(classifier) > before
    again = tasks.classifier(LABELS, calibrate=LabelCalibration.from_json(kept.to_json()))
    # the second begins from blocks that the first left in the cache: float32 sums in another order
    wanted = classifier.classify("Mist.").probabilities
    assert again.classify("Mist.").probabilities == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("labels", "more", "message"),
    [
        (["one"], {}, "at least two labels"),
        (["a", "a"], {}, "each once"),
        (["a", ""], {}, "one line"),
        (["a", " b"], {}, "one line"),
        ("ab", {}, "a list of texts"),
        (["a", 1], {}, "a list of texts"),
        (["a", "b"], {"calibrate": "always"}, "content-free, off or a LabelCalibration"),
        (["a", "b"], {"calibrate": LabelCalibration(("a", "c"))}, "is for the labels a, c"),
        (["a", "b"], {"examples": [("x", "c")]}, "has the label 'c'"),
    ],
)
def test_what_cannot_be_asked(tasks, labels, more, message):
    with pytest.raises(InvalidArgument, match=message):
        tasks.classifier(labels, **more)


def test_what_cannot_be_fitted(tasks):
    for pairs in ([], [("x", "c")]):
        with pytest.raises(InvalidArgument, match="examples need labels"):
            tasks.classifier(["a", "b"], calibrate="off").fit(pairs)


def test_texts_are_checked(tasks):
    with pytest.raises(InvalidInput):
        tasks.classify(" ", LABELS)
    with pytest.raises(ContextOverflow, match="takes at most") as caught:
        tasks.classify("word " * 500, LABELS, calibrate="off")
    assert caught.value.context_size == 2048
    with pytest.raises(ContextOverflow):
        tasks.classify("word " * 500_000, LABELS, calibrate="off")


def test_a_provider_without_log_probabilities_says_what_to_do(scripted):
    with pytest.raises(UnsupportedCapability, match=r"does not report how likely .*generating=Choice\(labels\)"):
        TextTasks(scripted(str)).classify("x", ["a", "b"])
