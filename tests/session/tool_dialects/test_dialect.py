"""Each family's way of writing calls, as its documentation shows it, and who is found to speak it."""

import contextlib
from dataclasses import replace
from typing import Literal

import pytest

from pippin.core.errors import TooManyToolRounds
from pippin.data.text.chat_template import ChatTemplate
from pippin.session import (
    GenerationOptions,
    LocalModel,
    Prompt,
    Session,
    ToolCall,
    ToolCalls,
    ToolDefinition,
    ToolOutput,
    Transcript,
    chat_format,
)
from pippin.session.tool_dialects.dialect import BY_NAME, DIALECTS, detect, writes
from pippin.session.types.schema import Schema

from .speakers import FAMILIES, speaker

CALLS = [("get_weather", {"city": "Paris", "days": 2}), ("get_time", {"zone": "CET"})]
TWO = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
    '{"name": "get_time", "arguments": {"zone": "CET"}}]',
    "mistral-args": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
    '[TOOL_CALLS]get_time[ARGS]{"zone": "CET"}',
    "gemma": '```tool_code\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}\n```\n'
    '```tool_code\n{"name": "get_time", "parameters": {"zone": "CET"}}\n```',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n"
    '{"zone": "CET"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 2}'
    '<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"zone": "CET"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>",
    "seed-oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=get_time>\n<parameter=zone>CET</parameter>\n</function>\n</seed:tool_call>",
    "glm-4.5": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
    "<tool_call>get_time\n<arg_key>zone</arg_key>\n<arg_value>CET</arg_value>\n</tool_call>",
    "glm-4.7": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
    "<tool_call>get_time<arg_key>zone</arg_key><arg_value>CET</arg_value></tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n'
    '<invoke name="get_time">\n<parameter name="zone">CET</parameter>\n</invoke>\n</minimax:tool_call>',
    "pythonic": '[get_weather(city="Paris", days=2), get_time(zone="CET")]',
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris", days=2), get_time(zone="CET")]<|tool_call_end|>',
    "olmo": '<function_calls>\nget_weather(city="Paris", days=2)\nget_time(zone="CET")\n</function_calls>',
    "gemma-4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
    '<|tool_call>call:get_time{zone:<|"|>CET<|"|>}<tool_call|>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
    '{"name": "get_time", "arguments": {"zone": "CET"}}]',
    "phi-4-mini": 'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
    '{"name": "get_time", "arguments": {"zone": "CET"}}]',
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
    '{"name": "get_time", "arguments": {"zone": "CET"}}]</TOOLCALL>',
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>'
    '{"zone": "CET"}<|tool_call_end|><|tool_calls_section_end|>',
}
ONE = {
    "llama": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": 2}',
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_calls_are_written_as_the_family_documents_them(dialect):
    if dialect.name in TWO:
        assert dialect.write(CALLS) == TWO[dialect.name]
    else:
        assert dialect.write(CALLS[:1]) == ONE[dialect.name]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_known_by_its_template(name):
    template = speaker(name).template
    assert (detect(template).name, writes(template, detect(template))) == (
        name,
        name not in ("gemma", "lfm2", "phi-4-mini"),
    )


def test_who_names_no_dialect_speaks_hermes(tiny):
    assert detect(tiny.template).name == "hermes"
    assert not writes(tiny.template, detect(tiny.template))
    tagged = ChatTemplate("<tool_call><function=", tiny.tokenizer)
    assert not writes(tagged, BY_NAME["hermes"]), "XML between the same tags is another dialect"
    plain = ChatTemplate("<|channel|><|message|>", tiny.tokenizer)
    assert detect(plain).name == "hermes", "without the control tokens there are no channels"


CONVERSATION = Transcript(
    entries=(
        Prompt("Weather and time?"),
        ToolCalls(calls=tuple(ToolCall(id=f"x{at}", name=n, arguments=a) for at, (n, a) in enumerate(CALLS))),
        ToolOutput("sunny", call_id="x0", name="get_weather"),
        ToolOutput("noon", call_id="x1", name="get_time"),
    )
)
TOOLS = [
    ToolDefinition("get_weather", "The weather", Schema({"type": "object"})),
    ToolDefinition("get_time", "The time", Schema({"type": "object"})),
]


def prompt(name):
    """The prompt for the conversation, spelled with its control tokens."""
    model = speaker(name)
    ids = chat_format.encode(model, CONVERSATION, TOOLS)
    return b"".join(map(model.tokenizer.spelled_bytes, ids)).decode()


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_calls_and_outputs_reach_the_prompt_in_the_dialect(name):
    text = prompt(name)
    assert "The weather" in text
    assert "The time" in text
    for part in ("Paris", "CET", "sunny", "noon"):
        assert part in text
    if name in TWO and name != "mistral":  # whose template adds ids
        assert TWO[name] in text


def test_templates_that_take_one_call_get_one_after_the_other():
    assert prompt("llama").endswith(
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"sunny"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "get_time", "parameters": {"zone": "CET"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"noon"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert prompt("harmony").count("<|call|>") == 2


def test_a_dialect_that_the_user_names_is_the_one_that_is_spoken():
    named = replace(speaker("hermes"), tool_dialect="qwen3-coder")
    assert chat_format.dialect_of(named).name == "qwen3-coder"
    text = named.tokenizer.decode(chat_format.encode(named, CONVERSATION, TOOLS))
    assert "<parameter=argument>\nvalue\n</parameter>" in text, "the instructions show it"
    assert TWO["qwen3-coder"] in text


def test_calls_of_kimi_have_the_name_in_their_ids():
    assert "## Return of functions.get_weather:0\nsunny" in prompt("kimi-k2")


def test_calls_of_mistral_have_ids_of_nine_characters():
    assert '"id": "000000000"}, {"name": "get_time"' in prompt("mistral")
    assert '"call_id": "000000001"}[/TOOL_RESULTS]' in prompt("mistral")


def test_outputs_without_a_role_of_their_own_are_one_message():
    assert prompt("gemma").endswith(
        "<start_of_turn>user\n```tool_output\nsunny\n```\n```tool_output\nnoon\n```<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_session_calls_a_tool_and_answers(name):
    def look(where: Literal["up", "down"]) -> str:
        """Look."""
        return f"nothing at {where}"

    session = Session(LocalModel(speaker(name)), tools=[look], max_tool_rounds=1, on_error="preserve")
    options = GenerationOptions(tool_calling="required", max_tokens=150)
    with contextlib.suppress(TooManyToolRounds):  # a model of random weights may call again and again
        session.respond("What is there?", options=options)
    prompt, *_, calls, output = [
        entry for entry in session.transcript if entry.kind in ("prompt", "tool_calls", "tool_output")
    ]
    assert prompt.text == "What is there?"
    assert output.text == f"nothing at {calls.calls[-1].arguments['where']}"
