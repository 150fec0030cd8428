"""Requests for facts that only a tool can read."""

import json
import random

import jsonschema
import pytest

from pippin.data.synthetic import documents
from pippin.data.synthetic.tool_requests import is_held_out
from pippin.recipes.train.task_data import ExampleSplit
from pippin.recipes.train.task_data.record_requests import sample_record_request, values_text


def _requests(count, seed=0, **split):
    rng, found = random.Random(seed), []
    while len(found) < count:
        request = sample_record_request(rng, ExampleSplit(**split))
        if request is not None:
            found.append(request)
    return found


def test_the_user_says_what_the_call_needs():
    for request in _requests(60):
        name, arguments = request.call
        (function,) = (tool["function"] for tool in request.tools)
        assert function["name"] == name
        jsonschema.validate(arguments, function["parameters"])
        assert all(value in request.prompt for value in arguments.values())
        assert request.answer not in request.prompt or len(request.answer) < 5


@pytest.mark.parametrize("held_out", [True, False])
def test_tools_are_split_by_their_names(held_out):
    for request in _requests(40, 1, held_out=held_out):
        assert is_held_out(request.call[0]) == held_out


def test_kinds_of_documents_are_those_of_the_split():
    names = {request.call[0] for request in _requests(60, 2, kinds=("receipt",))}
    kinds = [kind for kind in documents.KINDS if any(kind in name for name in names)]
    assert kinds == ["receipt"]


def test_values_are_spelled_as_in_the_text():
    seen = set()
    for seed in range(12):
        document = documents.sample("invoice", language="de", seed=seed)
        text = values_text(document, random.Random(seed))
        seen.add(text[0] == "{")
        if text[0] == "{":
            values = json.loads(text)
            assert set(values) == {name for name, value in document.values.items() if value is not None}
            assert values["total"] == document.values["total"].text.replace("\n", ", ")
    assert seen == {True, False}
