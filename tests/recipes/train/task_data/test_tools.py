"""The data for calls of tools: prompts and grammars of inference, right calls, and choices without a call."""

import json
import random

import numpy as np
import pytest

from pippin.data.synthetic import tool_requests
from pippin.data.synthetic.tool_requests import ToolRequest, is_held_out
from pippin.recipes.train import task_adapter
from pippin.recipes.train.task_data import ExampleSplit, function_requests, tools
from pippin.session import chat_format
from pippin.session.tool_dialects.grammar import tool_grammar


def _requests(count, seed=0):
    rng = random.Random(seed)
    return [tool_requests.sample(rng) for _ in range(count)]


def _allowed(row, model):
    return np.flatnonzero(np.unpackbits(row, bitorder="little")[: model.config.vocab_size])


def _example(model, request):
    return tools.request_example(model, request, random.Random(0))


def test_every_call_of_the_library_is_one_that_inference_allows(model):
    called = [request for request in _requests(60) if request.call]
    for request in called:
        example = _example(model, request)
        assert example is not None, request.call
        text = model.tokenizer.decode(example.ids)
        written = json.loads(text.rsplit("<tool_call>", 1)[1].removesuffix("</tool_call>"))
        assert (written["name"], written["arguments"]) == request.call
        for row, place, target in zip(example.allowed, example.places, example.targets, strict=True):
            allowed = _allowed(row, model)
            assert len(allowed) > 1
            assert target in allowed
            assert example.ids[place + 1] == target


def test_after_a_call_the_grammar_leaves_no_choice_but_the_end(model):
    request = next(request for request in _requests(20) if request.call)
    dialect, declared = chat_format.dialect_of(model), tools.declared(request)
    constraint = tool_grammar(dialect, model.tokenizer, None, declared, max_calls=1).start(model.tokenizer)
    for token in model.tokenizer.encode(dialect.write([request.call]), control=True):
        constraint.accept(token)
    assert constraint.may_end
    left = _allowed(constraint.mask().view(np.uint8), model)
    assert set(left) <= set(model.tokenizer.eos_ids)


def test_without_a_call_the_only_choice_is_between_the_marker_and_text(model):
    request = next(request for request in _requests(60, 1) if request.call is None and request.reply != "I")
    example = _example(model, request)
    marker = model.tokenizer.encode(chat_format.dialect_of(model).marker)[0]
    reply = model.tokenizer.encode(request.reply)[0]
    assert list(example.targets) == [reply]
    assert set(_allowed(example.allowed[0], model)) == {marker, reply}
    assert example.places[0] == len(example.ids) - 2


def test_the_choice_between_a_call_and_text_counts_most(model):
    for request in _requests(30):
        example = tools.request_example(model, request, random.Random(0))
        if example is None:
            continue
        weights = np.ones(len(example.targets)) if example.weights is None else example.weights
        assert weights[0] == 4.0
        assert (weights[1:] == 1.0).all()


def test_the_answer_to_an_output_counts_to_the_end_of_the_turn(model):
    request = next(request for request in _requests(60, 2) if request.answer)
    example = tools.answer_example(model, request)
    assert model.tokenizer.decode(example.targets[:-1].tolist()) == request.answer
    assert example.targets[-1] in model.tokenizer.eos_ids
    assert request.output in model.tokenizer.decode(example.ids[: example.places[0] + 1])


def test_what_only_the_output_says_counts_most(model):
    request = next(request for request in _requests(400, 3) if request.findings and len(request.findings[0][0]) > 2)
    example = tools.answer_example(model, request)
    heavy = [int(token) for token, weight in zip(example.targets, example.weights, strict=True) if weight > 1]
    text = model.tokenizer.decode(heavy)
    assert all(spellings[0] in text for spellings in request.findings)
    assert len(text) < len(request.answer)


def test_values_that_the_schema_does_not_allow_are_no_example(model):
    properties = {"state": {"enum": ["on", "off"]}}
    function = {"name": "switch", "description": "", "parameters": {"type": "object", "properties": properties}}
    offered = ({"type": "function", "function": function},)
    assert _example(model, ToolRequest(offered, "On", ("switch", {"state": "on"}))) is not None
    assert _example(model, ToolRequest(offered, "Up", ("switch", {"state": "up"}))) is None


def test_the_recipe_draws_examples_that_are_short_enough(model):
    sample = task_adapter.samplers()["tools"](model, ExampleSplit(), 400)
    found = [sample(random.Random(seed)) for seed in range(30)]
    lengths = [len(example.ids) for example in found if example is not None]
    assert len(lengths) > 5
    assert max(lengths) <= 400


def test_requests_of_bfcl_are_split_by_their_functions(tmp_path, monkeypatch):
    def function(name):
        properties = {"x": {"type": "float"}, "y": {"type": "any"}}
        parameters = {"type": "dict", "properties": properties, "required": ["x"]}
        return {"name": name, "description": "d", "parameters": parameters}

    names = [f"area.of{index}" for index in range(40)]
    held = [name for name in names if is_held_out(name.replace(".", "_"))]
    assert held
    entries = [{"id": name, "question": [[{"role": "user", "content": f"{name} of 2"}]], "function": [function(name)]}
               for name in names]  # fmt: skip
    truths = [{"id": name, "ground_truth": [{name: {"x": [2.0, 2], "y": ["", 3]}}]} for name in names]
    (tmp_path / "possible_answer").mkdir()
    for part in ("simple_python", "multiple", "live_simple", "live_multiple"):
        listed = part == "simple_python"
        for folder, values in ((tmp_path, entries), (tmp_path / "possible_answer", truths)):
            lines = [json.dumps(value) for value in values if listed]
            (folder / f"BFCL_v4_{part}.json").write_text("\n".join(lines))
    monkeypatch.setattr(function_requests.store, "find", lambda name: tmp_path)
    found = function_requests.function_requests.__wrapped__
    seen, unseen = (found(held_out=held_out, called=True) for held_out in (False, True))
    assert [request.prompt for request in unseen] == [f"{name} of 2" for name in held]
    assert len(seen) + len(unseen) == len(names)
    assert seen[0].call == (seen[0].tools[0]["function"]["name"], {"x": 2.0})
    assert seen[0].tools[0]["function"]["parameters"]["properties"] == {"x": {"type": "number"}, "y": {}}


def test_without_bfcl_only_the_library_is_used(monkeypatch):
    monkeypatch.setattr(function_requests.store, "find", lambda name: None)
    monkeypatch.setattr(tools, "function_requests", function_requests.function_requests.__wrapped__)
    rng, known = random.Random(0), tool_requests.library()
    for _ in range(50):
        request = tools.sample_request(rng, ExampleSplit(held_out=True))
        assert {tool["function"]["name"] for tool in request.tools} <= set(known)


@pytest.mark.parametrize("held_out", [True, False])
def test_the_split_holds_for_both_sources(held_out):
    rng = random.Random(1)
    for _ in range(200):
        for tool in tools.sample_request(rng, ExampleSplit(held_out=held_out)).tools:
            assert is_held_out(tool["function"]["name"]) == held_out
