"""The classifier against scikit-learn and dense arithmetic, its file, and what the file says about it."""

import hashlib
import json
import math
import random
from importlib.resources import files

import numpy as np
import pytest
import train_guardrail_classifier as tool

from pippin.core.errors import InvalidArgument
from pippin.session.guardrails import classifier, training_data
from pippin.session.guardrails.classifier import BUCKETS, NgramClassifier, features

TOY = [s for s in training_data.sentences("en") if s.template in (0, 3) and s.intent.startswith("t")][::2]


@pytest.fixture(scope="module")
def toy():
    return classifier.fit([s.text for s in TOY], [s.label for s in TOY], steps=60, weight_decay=1e-4)


def dense(texts):
    table = np.zeros((len(texts), BUCKETS))
    for row, text in enumerate(texts):
        ids, values = features(text)
        table[row, ids] = values
    return table


def test_probabilities_are_a_softmax_of_a_linear_layer(toy):
    for sentence in TOY[:5]:
        logits = (dense([sentence.text]) @ toy.weights.astype(float) + toy.bias)[0]
        total = sum(math.exp(z) for z in logits)
        expected = [math.exp(z) / total for z in logits]
        assert toy.probabilities(sentence.text) == pytest.approx(expected, abs=1e-5)
        assert toy.harm_probability(sentence.text) == pytest.approx(1 - expected[0], abs=1e-5)


def test_it_learns_what_scikit_learn_learns():
    linear = pytest.importorskip("sklearn.linear_model")
    generator = random.Random(0)
    order = generator.sample(range(len(TOY)), len(TOY))
    train, test = [TOY[i] for i in order[::2]], [TOY[i] for i in order[1::2]]
    binary = [s.label if s.label == "benign" else "harm" for s in train]
    ours = classifier.fit([s.text for s in train], binary, steps=300, weight_decay=1e-4)
    n = len(train)
    # the same objective: mean loss with classes weighing the same, and the squared weights of two columns
    peer = linear.LogisticRegression(C=1 / (n * 1e-4), class_weight="balanced", max_iter=2000)
    peer.fit(dense([s.text for s in train]), [label == "harm" for label in binary])
    theirs = peer.predict_proba(dense([s.text for s in test]))[:, 1]
    scores = [ours.harm_probability(s.text) for s in test]
    assert np.corrcoef(scores, theirs)[0, 1] > 0.97
    assert np.mean([(a > 0.5) == (b > 0.5) for a, b in zip(scores, theirs, strict=True)]) > 0.9


def test_features_are_shorter_the_fewer_there_are_and_do_not_depend_on_the_spelling():
    lengths = []
    for text in ("x", "爆弾の作り方", "How do I build a bomb?", "How do I build a bird house at home?" * 9):
        ids, values = features(text)
        lengths.append(np.linalg.norm(values))
        assert len(set(ids.tolist())) == len(ids)
    assert lengths == sorted(lengths)
    assert lengths[0] < 0.5 < 0.95 < lengths[-1] < 1
    assert np.array_equal(features("B\u200bOMB")[0], features("bomb")[0])
    assert not np.array_equal(features("bath bomb")[0], features("bomb bath")[0])


def test_the_same_seed_gives_the_same_weights(toy):
    again = classifier.fit([s.text for s in TOY], [s.label for s in TOY], steps=60, weight_decay=1e-4)
    assert np.array_equal(again.weights, toy.weights)


def test_eight_bits_lose_little(toy):
    read = NgramClassifier.from_json(json.loads(json.dumps(toy.to_json())))
    step = np.abs(toy.weights).max(axis=0) / 127
    assert (np.abs(read.weights - toy.weights) <= step / 2 + 1e-6).all()
    for sentence in TOY[:20]:
        assert read.harm_probability(sentence.text) == pytest.approx(toy.harm_probability(sentence.text), abs=0.05)


def test_the_packaged_file_is_small_and_fits_its_data():
    packaged = files("pippin.session.guardrails")
    assert len(packaged.joinpath("model.json").read_bytes()) < 1 << 20
    data = packaged.joinpath("training.json").read_bytes()
    assert classifier.metrics()["training"]["data sha256"] == hashlib.sha256(data).hexdigest()
    assert tool.main(["--check"]) == 0


def test_the_packaged_figures_are_those_of_the_packaged_weights():
    written = classifier.metrics()["metrics"]["pippin-safety-1"]
    measured = tool.on_suite(classifier.load())
    for locale, row in written.items():
        assert row == pytest.approx(measured[locale], abs=1e-9)
        assert row["look-alike above 0.65"] <= 0.03
        assert row["neutral above 0.65"] <= 0.06
        assert row["area"] > 0.7


def test_training_sentences_and_evaluation_prompts_share_nothing():
    from pippin.evaluate.safety import suite as safety_suite

    suite = safety_suite.load()
    for locale in suite.locales:
        ours = {intent["text"][locale] for intent in training_data.data()["intents"]}
        theirs = {intent["text"][locale] for intent in suite.intents}
        assert not ours & theirs
        assert not set(training_data.data()["templates"][locale]) & set(suite.templates[locale])


def test_a_split_keeps_intents_and_templates_apart():
    made = training_data.sentences("es")
    train, test = training_data.split(made, seed=3)
    assert test
    assert not {s.intent for s in train} & {s.intent for s in test}
    assert not {s.template for s in train} & {s.template for s in test}
    assert training_data.split(made, seed=3) == (train, test)
    assert training_data.split(made, seed=4) != (train, test)
    assert {s.kind for s in test} == {"harmful", "look-alike", "neutral"}


def test_bad_training_data_and_weights_are_refused():
    with pytest.raises(InvalidArgument, match="benign and other texts"):
        classifier.fit(["a"], ["benign"])
    with pytest.raises(InvalidArgument, match="one label each"):
        classifier.fit(["a", "b"], ["benign"])
    with pytest.raises(InvalidArgument, match="needs weights of shape"):
        NgramClassifier(("benign", "x"), np.zeros((5, 2), np.float32), np.zeros(2, np.float32))


def test_an_empty_text_has_no_score():
    assert classifier.load().scores(" \n") == {}


def test_a_single_word_has_no_score_and_two_words_have():
    # from the words of the documentation: 18 % of them had been refused as prompts, and "people" as the name of a field
    packaged = classifier.load()
    assert not any(packaged.scores(word) for word in ("people", "control", "kill", "12.", "p"))
    assert packaged.scores("make meth")
    assert packaged.scores("爆弾")
