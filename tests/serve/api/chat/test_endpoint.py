"""Chat completions through OpenAI's client: shapes, order, usage, tools, formats, log-probabilities."""

import json
import math

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pippin.session import GenerationOptions, Session

HI = [{"role": "user", "content": "hi"}]
FORM = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "do", "parameters": FORM}}
    for name in ("feed", "call")
]


def ask(client, messages=HI, **options):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_tokens": 12, "seed": 3} | options
    )


def stream(client, **options):
    return list(ask(client, stream=True, **options))


def frames(server, **body):
    """The data of each event, as it was sent."""
    with server.client() as http:
        answer = http.post(
            "/v1/chat/completions", json={"messages": HI, "max_tokens": 5, "seed": 3, "stream": True} | body
        )
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_an_answer_is_complete(client, post):
    sent = post("chat/completions", {"model": "tiny", "messages": HI, "max_tokens": 12, "seed": 3}).json()
    ChatCompletion.model_validate(sent)
    made = ask(client)
    assert (made.object, made.model) == ("chat.completion", "tiny")
    assert made.id.startswith("chatcmpl-")
    assert made.system_fingerprint.startswith("fp_")
    (choice,) = made.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content == sent["choices"][0]["message"]["content"]
    usage = made.usage
    assert (usage.completion_tokens, usage.total_tokens) == (12, usage.prompt_tokens + 12)
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_the_prompt_is_what_the_template_writes(client, tiny):
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hé"}]
    ids = tiny.template.encode([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}])
    assert ask(client, messages).usage.prompt_tokens == len(ids)


def test_a_seed_gives_the_same_answer_and_another_seed_another(client):
    texts = [ask(client, seed=seed, temperature=1).choices[0].message.content for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_a_request_that_names_nothing_is_answered_as_a_session_answers(client, tiny):
    said = Session(tiny).respond("hi", options=GenerationOptions(max_tokens=8)).content
    messages = [{"role": "user", "content": "hi"}]
    made = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, n=2, seed=1)
    assert made.choices[0].message.content != made.choices[1].message.content  # several are sampled
    alone = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=3)
    assert alone.choices[0].message.content == said


def test_temperature_zero_is_the_likeliest_whatever_the_seed(client):
    assert len({ask(client, seed=seed, temperature=0).choices[0].message.content for seed in (1, 2)}) == 1
    assert ask(client, temperature=0).choices[0].message.content == ask(client, top_p=0).choices[0].message.content


def test_a_second_request_with_the_same_beginning_reads_it_from_the_cache(client):
    long = [{"role": "user", "content": "x" * 600}]
    ask(client, long)
    assert ask(client, long).usage.prompt_tokens_details.cached_tokens >= 256


def test_a_stream_says_role_text_end_usage_done_in_this_order(server):
    *chunks, done = frames(server, stream_options={"include_usage": True})
    assert done == "[DONE]"
    parsed = [ChatCompletionChunk.model_validate_json(chunk) for chunk in chunks]
    assert len({chunk.id for chunk in parsed}) == 1
    first, *middle, last, usage = parsed
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.content for chunk in middle)
    assert all(chunk.choices[0].delta.role is None and chunk.choices[0].finish_reason is None for chunk in middle)
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert usage.choices == []
    assert usage.usage.completion_tokens == 5
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks[:-1])


def test_a_stream_without_usage_has_none(server):
    assert all("usage" not in json.loads(chunk) for chunk in frames(server)[:-1])


def test_a_stream_holds_the_same_answer(client):
    whole = ask(client, n=3)
    texts, reasons = ["", "", ""], [None] * 3
    for chunk in stream(client, n=3):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * 3
    assert len(set(texts)) == 3


def test_several_answers_count_the_prompt_once(client):
    one, six = ask(client), ask(client, n=6)
    assert [choice.index for choice in six.choices] == list(range(6))
    assert six.usage.prompt_tokens == one.usage.prompt_tokens
    assert six.usage.completion_tokens == 6 * 12


def test_stop_cuts_before_its_text(client):
    text = ask(client, temperature=1).choices[0].message.content
    stop = next(letter for letter in text[1:] if letter != "�" and letter not in text[0])
    cut = ask(client, temperature=1, stop=stop).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(stop)], "stop")
    assert ask(client, temperature=1, stop=["nowhere", stop]).choices[0].message.content == cut.message.content


def test_a_bias_decides(client):
    made = ask(client, logit_bias={"65": 100}, max_tokens=4, logprobs=True)
    assert [entry.bytes for entry in made.choices[0].logprobs.content] == [
        made.choices[0].logprobs.content[0].bytes
    ] * 4


def test_penalties_and_the_parameters_of_other_servers_reach_the_engine(client):
    plain = ask(client, temperature=0, max_tokens=60).choices[0].message.content
    for extra in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert ask(client, temperature=0, max_tokens=60, **extra).choices[0].message.content != plain
    greedy = ask(client, extra_body={"top_k": 1}, max_tokens=60).choices[0].message.content
    assert greedy == plain == ask(client, extra_body={"min_p": 1.0}, max_tokens=60).choices[0].message.content
    assert (
        ask(client, temperature=0, max_tokens=60, extra_body={"repetition_penalty": 2.0}).choices[0].message.content
        != plain
    )


def test_logprobs_are_the_model_s_own(client):
    made = ask(client, logprobs=True, top_logprobs=20, temperature=0)
    content = made.choices[0].logprobs.content
    assert len(content) == 12
    for entry in content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 20
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == made.choices[0].message.content


def test_streamed_logprobs_are_all_there_once(client):
    whole = ask(client, logprobs=True).choices[0].logprobs.content
    said = [e for c in stream(client, logprobs=True) if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.bytes for entry in said] == [entry.bytes for entry in whole]


# --- formats ----------------------------------------------------------------------------------------------------------


class Pet(pydantic.BaseModel):
    kind: str = pydantic.Field(pattern="^(cat|dog)$")
    legs: int = pydantic.Field(ge=3, le=5)


def test_parse_gives_a_value_of_the_type(client):
    made = client.chat.completions.parse(model="tiny", messages=HI, response_format=Pet, seed=1, max_tokens=200)
    pet = made.choices[0].message.parsed
    assert isinstance(pet, Pet)
    assert pet.legs in (3, 4, 5)


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_enforced_strict_or_not(client, strict):
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM, "strict": strict}}
    value = json.loads(ask(client, response_format=wanted, max_tokens=200).choices[0].message.content)
    assert set(value) == {"ok", "kind"}
    assert value["kind"] in ("cat", "dog")


NOTED = {"type": "object", "properties": {"ok": {"type": "boolean", "minLenght": 3}}, "required": ["ok"]}


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_enforced_is_said_in_a_header(post, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": NOTED}}
    body = {"model": "tiny", "messages": HI, "response_format": wanted, "max_tokens": 50, "stream": stream}
    [note] = json.loads(post("chat/completions", body).headers["x-pippin-notes"])
    assert "'minLenght' is not a keyword of JSON Schema and is ignored; did you mean 'minLength'?" in note
    wanted["json_schema"]["schema"] = FORM
    assert "x-pippin-notes" not in post("chat/completions", body).headers


def test_a_pattern_with_counts_is_written_again_and_again_and_others_after_it(client):
    words = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}
    for schema in (words, words, FORM):
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        choice = ask(client, response_format=wanted, max_tokens=30).choices[0]
        assert choice.finish_reason in ("stop", "length")
        assert choice.message.content[0] in '"{'


def test_a_strict_schema_has_nothing_that_is_ignored(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": NOTED, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="did you mean 'minLength'"):
        ask(client, response_format=wanted)


def test_a_strict_tool_has_nothing_that_is_ignored(client):
    tools = [{"type": "function", "function": {"name": "feed", "parameters": NOTED}}]
    for strict in (None, False):
        tools[0]["function"]["strict"] = strict
        choice = ask(client, tools=tools, tool_choice="required", max_tokens=200).choices[0]
        assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"ok"}
    tools[0]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="did you mean 'minLength'") as refused:
        ask(client, tools=tools)
    assert refused.value.param == "tools[0].function.parameters"
    tools[0]["function"]["parameters"] = FORM
    ask(client, tools=tools, max_tokens=4)


def test_a_schema_out_of_the_prompt_makes_it_shorter(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
    with_it = ask(client, response_format=wanted, max_tokens=200)
    without = ask(client, response_format=wanted, max_tokens=200, extra_body={"include_schema_in_prompt": False})
    assert without.usage.prompt_tokens < with_it.usage.prompt_tokens
    json.loads(without.choices[0].message.content)


def test_json_mode_begins_an_object(client):
    assert ask(client, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        ({"type": "regex", "pattern": "[ab]{3}"}, set("ab")),
        ({"type": "choice", "choices": ["aab", "bba"]}, set("ab")),
        ({"type": "lark", "grammar": 'start: ("a" | "b") "ab"'}, set("ab")),
    ],
)
def test_other_grammars(client, wanted, allowed):
    choice = ask(client, extra_body={"response_format": wanted}).choices[0]
    assert (len(choice.message.content), choice.finish_reason) == (3, "stop")
    assert set(choice.message.content) <= allowed


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_required_call_fits_its_schema(client):
    choice = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=300).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.function.name in ("feed", "call")
    assert set(json.loads(call.function.arguments)) == {"ok", "kind"}


def test_a_named_call_is_of_that_tool(client):
    named = {"type": "function", "function": {"name": "call"}}
    calls = ask(client, tools=TOOLS, tool_choice=named, max_tokens=800).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["call"]
    several = ask(client, tools=TOOLS, tool_choice="required", max_tokens=800).choices[0].message.tool_calls
    assert len({call.id for call in several}) == len(several)


def test_no_tools_are_called_where_none_may_be(client):
    choice = ask(client, tools=TOOLS, tool_choice="none").choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content


def test_calls_stream_as_deltas_that_add_up(client):
    options = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 800}
    whole = ask(client, **options).choices[0]
    calls, reason = {}, None
    for chunk in stream(client, **options):
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.index not in calls:
                assert (delta.type, delta.function.arguments) == ("function", "")
                calls[delta.index] = {"id": delta.id, "name": delta.function.name, "arguments": ""}
            else:
                assert delta.id is None
            calls[delta.index]["arguments"] += delta.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    assert reason == whole.finish_reason
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert list(calls) == list(range(len(calls)))


def test_what_a_tool_returned_goes_back_in(client):
    first = (
        ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=300).choices[0].message
    )
    back = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}
    made = ask(client, [*HI, first, back], tools=TOOLS, tool_choice="none")
    assert made.choices[0].message.content
    assert made.usage.prompt_tokens > ask(client).usage.prompt_tokens


def test_a_call_that_is_cut_off_ends_by_length(client):
    whole = ask(client, tools=TOOLS, tool_choice="required", max_tokens=25)
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert whole.usage.completion_tokens > 0
    assert whole.usage.prompt_tokens > 100
    chunks = stream(client, tools=TOOLS, tool_choice="required", max_tokens=25)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_call_that_is_whole_survives_a_cut(client):
    options = {"tools": TOOLS, "tool_choice": "required", "temperature": 0}
    once = ask(client, **options, parallel_tool_calls=False, max_tokens=300)
    call = once.choices[0].message.tool_calls[0].function
    cut = options | {"max_tokens": once.usage.completion_tokens - len("_call>")}  # a token is a byte
    choice = ask(client, **cut).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert [made.function for made in choice.message.tool_calls] == [call]
    last = stream(client, **cut)[-2:]
    assert last[0].choices[0].delta.tool_calls[0].function.arguments == call.arguments
    assert last[1].choices[0].finish_reason == "length"


def test_the_calls_of_an_answer_are_limited_and_never_the_same(client):
    options = {"tools": TOOLS, "tool_choice": "required", "temperature": 2, "max_tokens": 1200}
    counts = []
    for seed in range(6):
        choice = ask(client, **options, seed=seed, extra_body={"max_tool_calls": 2}).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert len(set(calls)) == len(calls) <= 2
        counts.append(len(calls))
    assert max(counts) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **options, extra_body={"max_tool_calls": 0})
    assert caught.value.param == "max_tool_calls"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"65": 101}}, "logit_bias.65"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "very"}, "reasoning_effort"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": 1}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": TOOLS + TOOLS}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_bad_value_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **{"extra_body": options, "max_tokens": options.get("max_tokens", 4)})
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert param in caught.value.message


def test_fields_that_nobody_knows_are_ignored(client):
    ask(client, user="u", metadata={"a": "b"}, store=True, service_tier="auto", extra_body={"nonsense": [1]})


def test_an_unenforceable_guide_is_named(client):
    schema = {"type": "object", "properties": {"size": {"type": "number", "multipleOf": 0.000001234}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="multipleOf") as caught:
        ask(client, response_format=wanted)
    assert caught.value.code == "unsupported_schema"
    assert caught.value.param == "response_format.json_schema.schema"
    assert "size" in caught.value.message


def test_a_prompt_that_does_not_fit_is_refused_before_the_stream(client):
    with pytest.raises(openai.BadRequestError, match=r"2,048") as caught:
        stream(client, messages=[{"role": "user", "content": "x" * 3000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_model_that_is_not_served(client):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_an_encoder_cannot_chat(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, model="tiny-encoder")
    assert caught.value.code == "unsupported_capability"


def test_an_image_is_refused_by_a_model_that_is_blind(client):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(openai.BadRequestError, match="image/png") as caught:
        ask(client, [{"role": "user", "content": [image]}])
    assert caught.value.code == "unsupported_content"


async def test_the_asynchronous_client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key) as client:
        whole = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=6, seed=1)
        text = ""
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=6, seed=1, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content


def test_the_client_s_own_stream_helper(client):
    with client.chat.completions.stream(
        model="tiny", messages=HI, response_format=Pet, seed=1, max_tokens=200
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert kinds[-1] == "content.done" or "content.done" in kinds
    assert isinstance(final.choices[0].message.parsed, Pet)
