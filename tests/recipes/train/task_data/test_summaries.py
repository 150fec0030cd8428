"""The data for summaries and short answers: prompts of inference, and answers that the documents bear out."""

import random
import re

import numpy as np
import pytest

import pippin
from pippin.data.synthetic import documents
from pippin.data.text.language import LANGUAGE_NAMES, language_of
from pippin.kits.text import TextTasks
from pippin.kits.text.unsupported_facts import unverified
from pippin.recipes.train import task_adapter
from pippin.recipes.train.task_data import ExampleSplit, summaries
from pippin.recipes.train.task_data.fact_sentences import FactWriter, on_one_line, phrase_file
from pippin.recipes.train.task_data.questions import sample_question
from pippin.session import chat_format
from pippin.session.transcript import Instructions, Prompt, Transcript

ONE_TOKEN = pippin.GenerationOptions(max_tokens=1)


def _documents(count, seed=0, **split):
    rng = random.Random(seed)
    return rng, [summaries.sample_document(rng, ExampleSplit(**split)) for _ in range(count)]


def _summaries(count, seed=0, **options):
    rng, found = _documents(count, seed)
    tasks = [summaries.sample_summary(document, rng, **options) for document in found]
    return [task for task in tasks if task is not None]


@pytest.fixture
def prompts_sent(monkeypatch):
    """The tokens of every prompt that a model is given."""
    sent, encode = [], chat_format.encode

    def spy(*args, **options):
        sent.append(encode(*args, **options))
        return sent[-1]

    monkeypatch.setattr(chat_format, "encode", spy)
    return sent


@pytest.mark.parametrize("seed", range(3))
def test_the_prompts_of_summaries_are_those_of_inference(model, prompts_sent, seed):
    task = next(task for task in _summaries(20, seed) if len(task.document.text) < 900)
    expected = chat_format.encode(model, task.transcript)
    prompts_sent.clear()
    TextTasks(model, options=ONE_TOKEN).summarize(task.document.text, length=task.count, language=task.requested)
    assert expected in prompts_sent


def test_the_prompts_of_key_points_are_those_of_inference(model, prompts_sent):
    task = next(task for task in _summaries(20, points=True) if len(task.document.text) < 900)
    expected = chat_format.encode(model, task.transcript)
    prompts_sent.clear()
    TextTasks(model, options=ONE_TOKEN).key_points(task.document.text, max_points=task.count)
    assert expected in prompts_sent


def test_the_prompts_of_questions_are_those_of_a_session(model, prompts_sent):
    rng, found = _documents(12)
    tasks = [task for document in found if (task := sample_question(document, rng)) and len(document.text) < 900]
    task = next(task for task in tasks if not task.instructions)
    pippin.Session(model).respond(task.prompt, options=ONE_TOKEN)
    assert prompts_sent[-1] == chat_format.encode(model, Transcript(entries=(Prompt(task.prompt),)))


@pytest.mark.parametrize("points", [False, True])
def test_summaries_state_facts_of_the_text_only(points):
    tasks = _summaries(150, points=points)
    assert len(tasks) > 90
    assert {task.document.language for task in tasks} == set(documents.LANGUAGES)
    for task in tasks:
        writer = FactWriter(task.document, task.language, random.Random(0))
        assert task.paths <= set(writer.facts)
        if task.language == task.document.language:
            source = f"{task.document.text} {on_one_line(task.document.text)}"
            numbers = [each for each in unverified(task.answer, source) if re.search(r"\d", each)]
            assert not numbers, (task.answer, task.document.text)
            for path in task.paths:
                if writer.forms[path].kind in ("amount", "number", "date"):
                    assert writer.facts[path].text.casefold() in task.answer.casefold()


def test_summaries_have_as_many_sentences_as_asked_for_at_most():
    from pippin.kits.text.summarize import bullets, first_sentences

    for task in _summaries(60):
        assert first_sentences(task.answer, task.count) == " ".join(task.answer.split())
    for task in _summaries(60, points=True):
        assert min(3, task.count) <= len(bullets(task.answer)) <= task.count


def test_summaries_are_in_the_language_that_is_asked_for():
    tasks = [task for task in _summaries(600, 4) if task.requested and task.requested != task.document.language]
    assert len(tasks) > 15
    for task in tasks:
        request = task.transcript.entries[-1].text.rpartition("\n")[2]
        assert request.endswith("." if task.requested == "en" else f"Write in {LANGUAGE_NAMES[task.requested]}.")
    long = [task for task in tasks if len(task.answer) > 150]
    right = [language_of(task.answer) == task.requested for task in long]
    assert sum(right) > 0.5 * len(right)
    assert sum(language_of(task.answer) == task.document.language for task in long) < 0.2 * len(right)


def test_required_facts_come_first():
    """A summary of one sentence states a fact that every document of the kind has, where it has any."""
    tasks = [task for task in _summaries(200, 2) if task.count == 1 and task.language == task.document.language]
    writers = [FactWriter(task.document, task.language, random.Random(0)) for task in tasks]
    required = [any(writer.forms[path].required for path in task.paths)
                for task, writer in zip(tasks, writers, strict=True)]  # fmt: skip
    assert len(tasks) > 20
    assert sum(required) / len(required) > 0.85


def test_answers_stand_in_the_text_and_absent_facts_are_said_to_be_absent():
    rng, found = _documents(400, 3)
    tasks = [task for document in found if (task := sample_question(document, rng)) is not None]
    assert len(tasks) > 330
    absent = [task for task in tasks if task.path is None]
    assert 0.15 < len(absent) / len(tasks) < 0.4
    said = {language: "".join(phrases[0]) for language, phrases in phrase_file("questions")["absent"].items()}
    for task in tasks:
        assert task.document.text in task.prompt
        assert (task.answer == said[task.language]) == (task.path is None)
        if task.path is None:
            continue
        writer = FactWriter(task.document, task.language, random.Random(0))
        form, fact = writer.forms[task.path], writer.facts[task.path]
        if form.kind in ("text", "amount", "number", "date") and task.language == task.document.language:
            assert on_one_line(fact.text).rstrip(".").casefold() in task.answer.casefold()


def test_questions_take_several_forms():
    rng, found = _documents(300, 5)
    tasks = [task for document in found if (task := sample_question(document, rng)) is not None]
    frames = {task.prompt.replace(task.document.text, "…") for task in tasks}
    assert len(frames) > 180
    starts = sum(task.prompt.startswith(task.document.text) for task in tasks)
    ends = sum(task.prompt.endswith(task.document.text) for task in tasks)
    assert starts > 30
    assert ends > 15
    assert sum(bool(task.instructions) for task in tasks) > 15


def test_the_same_generator_gives_the_same_task():
    first, again = (random.Random(9) for _ in range(2))
    for _ in range(5):
        assert summaries.sample_document(first, ExampleSplit()) == summaries.sample_document(again, ExampleSplit())
        assert first.getstate() == again.getstate()


def test_every_token_of_an_answer_counts_and_the_last_ends_the_turn(model):
    sample, rng = summaries.examples(model, ExampleSplit(kinds=("receipt",)), 900), random.Random(1)
    found = [example for _ in range(12) if (example := sample(rng)) is not None]
    assert len(found) > 5
    for example in found:
        assert example.targets[-1] in model.tokenizer.eos_ids
        first = example.places[0] + 1
        assert example.places.tolist() == list(range(first - 1, len(example.ids) - 1))
        assert list(example.ids[first:]) == example.targets.tolist()
        allowed = np.unpackbits(example.allowed, axis=1, bitorder="little")[:, : model.config.vocab_size]
        assert allowed.shape[1] == model.config.vocab_size
        assert allowed.all()
        assert model.tokenizer.decode(example.targets[:-1].tolist()).strip()


def test_a_question_with_instructions_has_them_before_the_conversation(model):
    rng, found = _documents(80, 6)
    tasks = [task for document in found if (task := sample_question(document, rng)) is not None]
    task = next(task for task in tasks if task.instructions)
    transcript = Transcript(entries=(Instructions(task.instructions), Prompt(task.prompt)))
    session = pippin.Session(model, instructions=task.instructions)
    assert list(session.transcript.add(Prompt(task.prompt))) == list(transcript)


def test_the_recipe_knows_the_task():
    assert task_adapter.samplers()["summaries"] is summaries.examples
