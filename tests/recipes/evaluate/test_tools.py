"""The measurement of tool calls: tools that no adapter saw, the same for every model."""

import pytest

from pippin.data.synthetic.tool_requests import ToolRequest, is_held_out
from pippin.recipes.evaluate import tools
from pippin.session.providers.local import LocalModel


def test_requests_are_a_function_of_the_seed_and_of_tools_that_are_held_out():
    found = tools.requests(30, seed=2)
    assert found == tools.requests(30, seed=2)
    assert found != tools.requests(30, seed=3)
    assert 3 < sum(each.call is None for each in found) < 20
    offered = {tool["function"]["name"] for each in found for tool in each.tools if each.call is not None}
    assert any(map(is_held_out, offered))


def test_a_model_is_measured(default_model_path):
    config = tools.Config(model=str(default_model_path), items=2, seed=1)
    result = tools.run(config, show_progress=False)
    summary = result.summary()
    assert summary["requests"] == 2
    assert summary["failed"] == 0
    assert summary["seconds_per_request"] > 0
    assert len(result.report().rows) == 10


def test_calls_are_what_the_model_wrote(tiny):
    request = next(each for each in tools.requests(20, seed=0) if each.call is not None)
    found = tools.calls(LocalModel(tiny), request, None)
    names = {tool["function"]["name"] for tool in request.tools}
    assert all(name in names and isinstance(arguments, dict) for name, arguments in found)


def test_an_answer_to_an_output_is_text(tiny):
    request = next(each for each in tools.requests(40, seed=0) if each.findings)
    assert isinstance(tools.answer(LocalModel(tiny), request, None), str)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The net pay is 1,950.60 euros.", 1),
        ("1950.6", 1),
        ("1950.60", 0),  # neither spelling
        ("It is 11,950.60 or 1,950.605.", 0),
        ("Ask kessler ag about 1950.6.", 2),
        ('{"net": 1950.6, "company": "Kessler AG"}', 0),  # the output itself
        ("<tool_response>\n1950.6\n</tool_response>", 0),
        ("", 0),
    ],
)
def test_facts_are_found_in_both_spellings_and_not_in_a_copy(text, count):
    request = ToolRequest((), "", findings=(("1,950.60", "1950.6"), ("Kessler AG",)))
    assert tools.findings_stated(request, text) == count
