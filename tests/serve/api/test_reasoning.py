"""Reasoning and tool dialects over HTTP, with the client of OpenAI: deltas, budgets, items, and calls in a dialect."""

import json
from dataclasses import replace

import openai
import pytest

from pippin.data.text.chat_template import ChatTemplate

TALK = [{"role": "user", "content": "Who?"}]
ANSWER = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"x": {"enum": ["yes", "no"]}}}},
}
TOOL = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"where": {"enum": ["up", "down"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["where", "steps"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def thinker(tiny, build_app, start_app):
    source = tiny.template.source + "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    model = replace(tiny, template=ChatTemplate(source, tiny.tokenizer))
    running = start_app(build_app(load=lambda _: model, models=("tiny",), tool_dialect="qwen3-coder"))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key, max_retries=0) as client:
        yield client
    running.stop()


def ask(client, **more):
    given = {"model": "tiny", "messages": TALK, "max_tokens": 120, "temperature": 1, "seed": 3} | more
    return client.chat.completions.create(**given)


def test_a_thinking_budget_is_held_and_the_answer_keeps_its_format(thinker):
    answer = ask(thinker, response_format=ANSWER, extra_body={"max_thinking_tokens": 7})
    message = answer.choices[0].message
    assert answer.usage.completion_tokens_details.reasoning_tokens == 7
    assert message.reasoning_content
    assert json.loads(message.content).get("x") in ("yes", "no", None)
    assert "think>" not in message.reasoning_content + message.content


def test_reasoning_is_streamed_before_the_answer(thinker):
    whole = ask(thinker, response_format=ANSWER, extra_body={"max_thinking_tokens": 7}).choices[0].message
    kinds, thought, said = [], "", ""
    for chunk in ask(thinker, response_format=ANSWER, extra_body={"max_thinking_tokens": 7}, stream=True):
        for choice in chunk.choices:
            if more := getattr(choice.delta, "reasoning_content", None):
                kinds.append("reasoning")
                thought += more
            if choice.delta.content:
                kinds.append("answer")
                said += choice.delta.content
    assert (thought, said) == (whole.reasoning_content, whole.content)
    assert kinds == sorted(kinds, reverse=True)
    assert {"reasoning", "answer"} == set(kinds)


@pytest.mark.parametrize(
    ("field", "reasons"),
    [
        ({}, False),
        ({"reasoning_effort": "low"}, True),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, True),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
        ({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, True),
    ],
    ids=str,
)
def test_who_asks_for_reasoning_gets_it(thinker, field, reasons):
    used = ask(thinker, max_tokens=40, **field).usage
    assert (used.completion_tokens_details.reasoning_tokens > 0) == reasons


def test_responses_have_reasoning_items(thinker):
    given = {"model": "tiny", "input": "Who?", "max_output_tokens": 60, "temperature": 1}
    response = thinker.responses.create(**given, extra_body={"max_thinking_tokens": 5})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text
    assert response.usage.output_tokens_details.reasoning_tokens == 5


def test_a_contradiction_is_refused(thinker):
    with pytest.raises(openai.BadRequestError, match="max_thinking_tokens is 5, and reasoning_effort is 'none'"):
        ask(thinker, reasoning_effort="none", extra_body={"max_thinking_tokens": 5})


@pytest.mark.parametrize("thinking", [{}, {"max_thinking_tokens": 6}])
def test_a_call_in_the_dialect_that_the_server_was_told(thinker, thinking):
    tools = [{"type": "function", "function": TOOL}]
    message = ask(thinker, tools=tools, tool_choice="required", max_tokens=400, extra_body=thinking).choices[0].message
    arguments = json.loads(message.tool_calls[0].function.arguments)
    assert arguments["where"] in ("up", "down")
    assert arguments["steps"] in (1, 2, 3)
    assert bool(getattr(message, "reasoning_content", None)) == bool(thinking)
