"""The recipe of the task adapters: the data of extraction, and that a short run learns from it."""

import json
import random
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import pippin
from pippin.core.errors import InvalidArgument
from pippin.data.synthetic import documents
from pippin.recipes.train import task_adapter
from pippin.recipes.train.task_data import ExampleSplit, extraction as form_data
from pippin.session.extraction import Form, SourceText
from pippin.session.extraction.answers import KnownValue, write
from pippin.session.extraction.prompt import encode_prompt


@pytest.fixture
def loaded_tokenizer(default_model_path):
    return pippin.load(default_model_path).tokenizer


def test_the_answers_of_tasks_can_be_written_and_are_read_back():
    rng, written, styles = random.Random(0), 0, set()
    for _ in range(120):
        task = form_data.sample_task(rng)
        try:
            form = Form(task.schema, SourceText(task.document.text, language=task.document.language))
            text = write(form, task.answers)
        except pippin.errors.PippinError:
            continue
        written += 1
        assert form.grammar.allows(text)
        form.read(text)
        styles |= {name for name in task.schema["properties"] if "_" in name or " " in name}
    assert written > 100  # the others have a value that is spelled in a way that is not read
    assert len(styles) > 40


def test_the_choices_of_an_example_are_those_that_the_grammar_leaves(model):
    rng = random.Random(3)
    task = form_data.sample_task(rng, languages=["en"])
    example = form_data.tokenize_task(task, lambda text: encode_prompt(model, text), model.tokenizer, max_length=2000)
    prompt = encode_prompt(model, task.document.text)
    assert list(example.ids[: len(prompt)]) == prompt
    form = Form(task.schema, SourceText(task.document.text, language=task.document.language))
    assert model.tokenizer.decode(list(example.ids[len(prompt) :])) == write(form, task.answers)
    allowed = np.unpackbits(example.allowed, axis=1, bitorder="little")
    assert (allowed.sum(1) > 1).all()
    assert allowed[np.arange(len(example.targets)), example.targets].all()
    assert [example.ids[place + 1] for place in example.places] == example.targets.tolist()
    assert example.places[0] >= len(prompt) - 1


def test_batches_are_a_function_of_the_seed_and_their_number(model):
    def stream(seed=1):
        sample = form_data.examples(model, ExampleSplit(kinds=("receipt",)), 700)
        return task_adapter.ExampleStream(sample, batch_tokens=900, seed=seed)

    first = stream()
    batches = [batch for batch, _ in zip(first, range(3), strict=False)]
    assert first.state_dict()["count"] >= 2
    again = stream()
    again.load_state_dict({"count": 2})
    assert next(iter(again)).tokens.ids.tolist() == batches[2].tokens.ids.tolist()
    assert next(iter(stream(2))).tokens.ids.tolist() != batches[0].tokens.ids.tolist()
    assert all(batch.tokens.ids.numel() <= 900 for batch in batches)


def test_a_short_run_learns_and_its_adapter_answers(default_model_path, tmp_path):
    config = task_adapter.Config(
        model=str(default_model_path), task="extraction", out=tmp_path / "adapter",
        steps=4, batch_tokens=500, max_length=450, rank=4,
        held_out_layouts=("thread",), held_out_kinds=("job_posting",), held_out_languages=("it",),
        lr=2e-3, eval_every=4,
    )  # fmt: skip
    result = task_adapter.run(config, show_progress=False)
    assert len(result.training.losses) == 4
    assert result.summary()["steps"] == 4
    assert result.report().rows
    assert result.training.evaluations[-1][1]["loss"] > 0
    written = "".join(path.read_text() for path in (tmp_path / "adapter").glob("*.json"))
    assert '"task": "extraction"' in written
    model = pippin.load(default_model_path)
    model.load_adapter("extract", tmp_path / "adapter")
    found = pippin.Session(model).extract(
        "Total: 12 EUR", {"properties": {"total": {"type": "integer"}}}, adapter="extract"
    )
    assert found.content in ({"total": 12}, {})
    with pytest.raises(InvalidArgument, match="resume"):
        task_adapter.run(config, show_progress=False)


def test_the_average_of_the_factors_is_saved(default_model_path, tmp_path):
    config = task_adapter.Config(
        model=str(default_model_path), task="extraction", out=tmp_path / "adapter",
        steps=3, batch_tokens=300, max_length=290, rank=2, lr=1e-2, eval_every=3,
    )  # fmt: skip
    task_adapter.run(config, show_progress=False)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()
    step = tmp_path / "adapter" / "run" / "step-00000003"
    averages, last = (load_file(step / name).values() for name in ("ema.safetensors", "model.safetensors"))

    def among(tensor, others):
        return any(each.shape == tensor.shape and torch.allclose(each, tensor, atol=1e-7) for each in others)

    assert all(among(tensor, averages) for tensor in saved)
    assert not all(among(tensor, last) for tensor in saved)


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ({"held_out_kinds": ("poem",)}, "there is no kind 'poem'"),
        ({"held_out_languages": documents.LANGUAGES}, "every language is held out"),
    ],
)
def test_what_cannot_be_held_out_is_refused_before_a_model_is_loaded(tmp_path, held_out, message):
    with pytest.raises(InvalidArgument, match=message):
        task_adapter.run(
            task_adapter.Config(model="no such model", task="extraction", out=tmp_path / "a", **held_out),
            show_progress=False,
        )


def test_choices_about_whole_values_count_more(loaded_tokenizer):
    text = "Ann and Bob paid."
    schema = {"type": "object", "properties": {
        "who": {"type": "array", "items": {"type": "string"}}, "where": {"type": "string"},
    }}  # fmt: skip
    document = documents.Document(text, "invoice", "en", "prose", (), {})
    task = form_data.FormTask(
        document, schema, {"who": [KnownValue(0, 3, None), KnownValue(8, 11, None)], "where": None}
    )
    example = form_data.tokenize_task(task, lambda text: [1], loaded_tokenizer, max_length=200)
    chosen = {}
    for token, weight in zip(example.targets, example.weights, strict=True):
        chosen.setdefault(weight, []).append(loaded_tokenizer.decode([int(token)]).strip())
    assert chosen[2.0] == ["null"]
    assert chosen[3.0][0].startswith("[")  # a list that is not empty, that goes on, and that ends
    assert "]" in chosen[3.0][-1]
    assert any("," in each and "]" not in each for each in chosen[3.0])
    assert any(each in text for each in chosen[1.0])


def test_a_form_names_its_fields_in_one_language():
    rng, seen = random.Random(2), set()
    for _ in range(80):
        sampler = form_data._Sampler(documents.sample("invoice", language="de", seed=rng), rng)
        seen.add(sampler.language)
        for field in sampler.document.fields:
            name = sampler.name(field)
            if sampler.cryptic or not field.aliases.get(sampler.language):
                continue
            known = [field.name, *field.aliases[sampler.language]]
            plain = {re.sub(r"\W|_", "", each).lower() for each in known}
            assert re.sub(r"\W|_", "", name).lower() in plain, (sampler.language, name)
    assert {"en", "de"} < seen


def test_what_a_text_does_not_say_is_asked_for_too():
    """As in forms of people: of ten values that one asks for, one to three are not there, of five lists one or two."""
    rng, empty, lists, nothing, values = random.Random(3), 0, 0, 0, 0

    def count(answer):
        nonlocal empty, lists, nothing, values
        if isinstance(answer, dict | list):
            empty, lists = empty + (answer == []), lists + isinstance(answer, list)
            for each in answer.values() if isinstance(answer, dict) else answer:
                count(each)
        else:
            nothing, values = nothing + (answer is None), values + 1

    for _ in range(150):
        count(form_data.sample_task(rng).answers)
    assert 0.15 * values < nothing < 0.3 * values
    assert 0.2 * lists < empty < 0.4 * lists


def test_a_currency_is_a_choice_that_the_text_spells_in_its_own_way():
    rng, spelled = random.Random(0), set()
    for _ in range(900):
        task = form_data.sample_task(rng, kinds=["invoice", "receipt"])
        for name, schema in task.schema["properties"].items():
            if "EUR" in schema.get("enum", ()) or "USD" in schema.get("enum", ()):
                answer = task.answers[name]
                assert answer.value in schema["enum"]
                spelled.add((task.document.text[answer.start : answer.end], answer.value))
    assert {("€", "EUR"), ("EUR", "EUR"), ("$", "USD"), ("£", "GBP"), ("CHF", "CHF")} <= spelled


def test_a_run_goes_on_from_an_earlier_adapter_and_says_so(default_model_path, tmp_path):
    size = {"model": str(default_model_path), "task": "extraction", "steps": 1, "batch_tokens": 300, "max_length": 300}
    task_adapter.run(task_adapter.Config(**size, out=tmp_path / "a", rank=2, lr=1e-2, seed=7), show_progress=False)
    second = task_adapter.Config(**size, out=tmp_path / "b", init_adapter=str(tmp_path / "a"), rank=2, lr=1e-9, seed=8)
    task_adapter.run(second, show_progress=False)
    first, then = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab")
    assert any(tensor.abs().max() > 0 for name, tensor in first.items() if "lora_B" in name)
    assert all(torch.allclose(first[name], then[name], atol=1e-6) for name in first)
    made = json.loads((tmp_path / "b" / "base_model.json").read_text())["made"]
    assert (made["seed"], made["continues"]["seed"], made["continues"]["continues"]) == (8, 7, None)
