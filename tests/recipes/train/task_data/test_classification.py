"""The data for classification: prompts of inference, right labels, and the tokens that the labels leave open."""

import random
import zlib

import numpy as np
import pytest
import torch

from pippin.data.synthetic import documents, label_sets
from pippin.data.synthetic.documents.grammar import variants
from pippin.kits.text import TextTasks
from pippin.language.constrained_objective import ConstrainedBatch, ConstrainedNextToken
from pippin.recipes.train import task_adapter
from pippin.recipes.train.task_data import ExampleSplit, classification
from pippin.session import chat_format


def _tasks(count, seed=0, **split):
    rng, found = random.Random(seed), []
    while len(found) < count:
        task = classification.sample_text(rng, ExampleSplit(**split))
        if task is not None:
            found.append(task)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_prompts_are_those_of_inference(model, monkeypatch, seed):
    task = next(task for task in _tasks(30, seed) if len(task.text) < 400 and (seed != 1 or task.descriptions))
    sent, encode = [], chat_format.encode

    def spy(*args, **options):
        sent.append(encode(*args, **options))
        return sent[-1]

    expected = encode(model, task.transcript)
    monkeypatch.setattr(chat_format, "encode", spy)
    labels = {label: task.descriptions.get(label, "") for label in task.labels} if task.descriptions else task.labels
    classifier = TextTasks(model).classifier(labels, about=task.about, examples=task.examples, calibrate="off")
    classifier.classify(task.text)
    assert sent == [expected]


def test_the_loss_of_an_example_is_that_of_the_scores_of_inference(model):
    """Labels that part at their first token: a choice between two tokens, then tokens among all."""
    task = next(task for task in _tasks(200, 5) if len(task.text) < 200 and len(task.labels) == 2)
    end = [model.tokenizer.eos_ids[0]]
    answers = [[*model.tokenizer.encode(label), *end] for label in task.labels]
    assert answers[0][0] != answers[1][0]
    prompt = chat_format.encode(model, task.transcript)
    right = task.labels.index(task.label)
    example = classification.label_example(prompt, answers, right, model.config.vocab_size)
    with torch.no_grad():
        loss = ConstrainedNextToken()(model.module, ConstrainedBatch.of([example]))
        ids = torch.tensor([[*prompt, *answers[right]]])
        logits = model.module(ids)[0].float()
    scores = logits[len(prompt) - 1, [answer[0] for answer in answers]].log_softmax(0)[right]
    rest = logits[len(prompt) : -1].log_softmax(-1)[range(len(answers[right]) - 1), answers[right][1:]].sum()
    count, weight = len(answers[right]), float(example.weights[0])
    expected = (weight * scores + rest) * count / (weight + count - 1)  # weights have mean 1
    assert weight > 1
    assert float(loss.total) == pytest.approx(-float(expected), rel=1e-3, abs=1e-3)


def test_the_allowed_tokens_are_those_that_continue_a_label():
    rng = random.Random(0)
    for _ in range(200):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 5))]
        answers = list({(*(rng.randrange(3) for _ in range(rng.randint(1, 4))), 49) for _ in range(rng.randint(2, 8))})
        if len(answers) < 2:
            continue
        right = rng.randrange(len(answers))
        example = classification.label_example(prompt, answers, right, 50)
        assert example.ids == (*prompt, *answers[right])
        allowed = np.unpackbits(example.allowed, axis=1, bitorder="little")[:, :50]
        for row, place, target in zip(allowed, example.places, example.targets, strict=True):
            before = example.ids[len(prompt) : place + 1]
            assert example.ids[place + 1] == target
            open_ = {token for token in range(50)
                     if any(answer[: len(before) + 1] == (*before, token) for answer in answers)}  # fmt: skip
            assert target in open_
            assert set(np.flatnonzero(row)) == (open_ if len(open_) > 1 else set(range(50)))
            assert (example.weights[place - len(prompt) + 1] > 1) == (len(open_) > 1)


def test_labels_are_decoded_back_and_end_the_turn(model):
    sample, rng = classification.examples(model, ExampleSplit(kinds=("receipt",)), 900), random.Random(2)
    found = [example for _ in range(30) if (example := sample(rng)) is not None]
    assert len(found) > 15
    for example in found:
        assert example.targets[-1] in model.tokenizer.eos_ids
        answer = model.tokenizer.decode(example.targets[:-1].tolist())
        assert f"\n- {answer}" in model.tokenizer.decode(list(example.ids[: example.places[0] + 1]))
        allowed = np.unpackbits(example.allowed, axis=1, bitorder="little")
        assert allowed[range(len(example.targets)), example.targets].all()
        assert allowed.sum(1).min() >= 2


def test_the_label_is_one_of_two_to_twelve_different_ones():
    tasks = _tasks(300)
    for task in tasks:
        assert task.label in task.labels
        assert 2 <= len(task.labels) == len(set(task.labels)) <= 12
        assert all(label == label.strip() and label and "\n" not in label for label in task.labels)
        assert set(task.descriptions) <= set(task.labels)
        assert {label for _, label in task.examples} <= set(task.labels)
    places = [task.labels.index(task.label) for task in tasks if len(task.labels) == 2]
    assert 0.3 < sum(places) / len(places) < 0.7
    assert len({task.name for task in tasks}) > 30
    assert max(len(task.labels) for task in tasks) > 8
    assert sum(bool(task.about) for task in tasks) > 100
    assert sum(bool(task.descriptions) for task in tasks) > 40
    assert sum(bool(task.examples) for task in tasks) > 5


def test_written_texts_have_their_label():
    """The label's position in its set is found again from the phrases, in any language."""
    checked = 0
    for task in _tasks(200, 1):
        named = {each for language in label_sets.LANGUAGES for each in label_sets.label_sets(language)}
        if task.name not in named or len(task.text.split(". ")) > 1:
            continue
        places = {index for language in label_sets.LANGUAGES
                  for index, label in enumerate(label_sets.label_sets(language)[task.name].labels)
                  if any(task.text == text.replace(" ,", ",") for phrase in label.phrases
                         for text in variants(phrase, 200))}  # fmt: skip
        if len(places) != 1:
            continue  # several sentences
        (place,) = places
        names = {name.casefold().replace(" ", "_") for language in label_sets.LANGUAGES
                 for name in label_sets.label_sets(language)[task.name].labels[place].names}  # fmt: skip
        plain = {name.replace("'", "_").replace("’", "_") for name in names}
        assert task.label.casefold().replace(" ", "_").replace("'", "_") in plain
        checked += 1
    assert checked > 40


def test_values_of_documents_are_their_labels():
    rng, found = random.Random(4), []
    while len(found) < 25:
        task = classification._by_value(rng, ExampleSplit(kinds=("receipt", "invoice"), languages=("en",)))
        found += [task] if task else []
    methods = {task.label for task in found if task.name == "value receipt.payment_method"}
    assert methods <= {"cash", "card", "voucher"}
    for task in found:
        if task.name == "value invoice.paid":
            assert set(task.labels) == {"yes", "no"}


def test_sets_are_held_out_by_a_hash_of_their_names():
    seen, unseen = ({task.name for task in _tasks(700, held_out=held_out)} for held_out in (False, True))
    assert not seen & unseen
    assert len(unseen) >= 5
    assert {zlib.crc32(name.encode()) % 5 for name in unseen} == {4}
    assert {"kind", "language", "topic"} <= seen
    assert unseen & set(label_sets.label_sets("en"))


def test_documents_of_other_kinds_do_not_occur():
    rng = random.Random(3)
    split = ExampleSplit(kinds=("receipt",), languages=("it",))
    names = {task.name for _ in range(60) if (task := classification._by_fact(rng, split))}
    assert names == {"fact receipt"}
    assert "receipt" in documents.KINDS


def test_the_recipe_knows_the_task():
    assert task_adapter.samplers()["classification"] is classification.examples
