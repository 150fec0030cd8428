"""Responses through OpenAI's client: items, typed events, what is kept, and for whom."""

import json

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

HI = {"model": "tiny", "input": "hi", "max_output_tokens": 8}
TOOL = {
    "type": "function",
    "name": "feed",
    "description": "Feed it.",
    "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    "strict": True,
}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def ask(client, **options):
    return client.responses.create(**HI | {"temperature": 0} | options)


def events(server, **body):
    """The events as they were sent, each checked against its name and OpenAI's type."""
    with server.client() as http:
        text = http.post("/v1/responses", json=HI | {"stream": True} | body).text
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        EVENT.validate_python(value)
        found.append(value)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_input_tokens_are_those_that_an_answer_reads(client):
    asked = {"model": "tiny", "input": "Feed it.", "instructions": "Be kind.", "tools": [TOOL]}
    counted = client.responses.input_tokens.count(**asked)
    made = client.responses.create(**asked, tool_choice="required", max_output_tokens=200)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
    follows = {"model": "tiny", "previous_response_id": ask(client).id}
    shorter = client.responses.input_tokens.count(**follows)
    longer = client.responses.input_tokens.count(**follows, input="And then?")
    made = client.responses.create(**follows, input="And then?", max_output_tokens=4)
    assert shorter.input_tokens < longer.input_tokens == made.usage.input_tokens
    assert client.responses.input_tokens.count(model="tiny", input="word " * 3000).input_tokens > 2048


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": 3}, "invalid_type", "input"),
        ({"input": "x", "previous_response_id": "none"}, "response_not_found", None),
        ({"input": "x", "model": "tiny-encoder"}, "unsupported_capability", None),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,eA=="}]}
                ]
            },
            "unsupported_content",
            "input",
        ),
    ],
)
def test_what_cannot_be_counted(client, body, code, param):
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.input_tokens.count(**{"model": "tiny"} | body)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_response_is_complete(client, post):
    sent = post("responses", HI | {"temperature": 0, "metadata": {"a": "b"}, "user": "u"}).json()
    Response.model_validate(sent)
    assert (sent["metadata"], sent["user"]) == ({"a": "b"}, "u")
    made = ask(client)
    assert made.output_text == sent["output"][0]["content"][0]["text"]
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.usage.total_tokens == made.usage.input_tokens + 8
    assert made.output[0].status == "incomplete"


def test_an_answer_that_ends_is_completed(client):
    made = ask(client, text={"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["a", "b"]}}})
    assert (made.status, made.incomplete_details) == ("completed", None)
    assert json.loads(made.output_text) in ("a", "b")
    assert made.completed_at >= made.created_at


def test_input_may_be_items(client, tiny):
    one = ask(client)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert ask(client, input=items).output_text == one.output_text
    long = ask(
        client,
        instructions="Be brief.",
        input=[
            {"type": "message", "role": "developer", "content": "And kind."},
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "m", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "feed", "arguments": '{"n": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "feed", "arguments": '{"n": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        ],
    )  # fmt: skip
    assert long.usage.input_tokens > one.usage.input_tokens + len("Be brief.And kind.yesonetwo")


def test_a_response_with_whole_calls_is_completed_and_says_that_it_was_cut(client):
    options = {"tools": [TOOL], "tool_choice": "required", "max_tool_calls": 1}
    once = ask(client, **options, max_output_tokens=300)
    assert (once.status, once.incomplete_details, once.max_tool_calls) == ("completed", None, 1)
    cut = ask(client, **options, max_output_tokens=once.usage.output_tokens - len("_call>"))  # a token is a byte
    assert (cut.status, cut.incomplete_details.reason) == ("completed", "max_output_tokens")
    assert [(item.type, item.arguments) for item in cut.output] == [("function_call", once.output[0].arguments)]
    none = ask(client, **options, max_output_tokens=25)
    assert (none.status, none.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream_is_told_in_order(server):
    found = events(server, temperature=0)
    kinds = [event["type"] for event in found]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event["delta"] for event in found[4:-4])
    final = found[-1]["response"]
    assert text == found[-4]["text"] == final["output"][0]["content"][0]["text"]
    assert found[0]["response"]["output"] == []
    assert found[0]["response"]["id"] == final["id"]
    assert len({event["item_id"] for event in found if "item_id" in event}) == 1


def test_a_call_is_told_in_order(server):
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 300}
    found = events(server, **options)
    assert [event["type"] for event in found] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    item = found[-1]["response"]["output"][0]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "feed", "completed")
    assert found[3]["delta"] == found[4]["arguments"] == item["arguments"]
    assert json.loads(item["arguments"])["n"] in (1, 2)


class Pet(pydantic.BaseModel):
    legs: int = pydantic.Field(ge=3, le=5)


def test_parse_gives_a_value_of_the_type(client):
    made = client.responses.parse(model="tiny", input="hi", text_format=Pet, max_output_tokens=100)
    assert made.output_parsed.legs in (3, 4, 5)


def test_the_client_s_own_stream_helper(client):
    with client.responses.stream(model="tiny", input="hi", text_format=Pet, max_output_tokens=100) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed.legs in (3, 4, 5)
    assert kinds[-1] == "response.completed"


def test_a_strict_tool_has_nothing_that_is_ignored(client):
    noted = {"type": "object", "properties": {"n": {"enum": [1, 2], "minLenght": 3}}, "required": ["n"]}
    loose = ask(client, tools=[TOOL | {"parameters": noted, "strict": False}])
    assert loose.tools[0].strict is False
    assert ask(client, tools=[TOOL]).tools[0].strict is True
    with pytest.raises(openai.BadRequestError, match="did you mean 'minLength'") as refused:
        ask(client, tools=[TOOL | {"parameters": noted}])
    assert refused.value.param == "tools[0].parameters"


def test_a_named_and_an_allowed_tool(client):
    other = TOOL | {"name": "call"}
    for choice in (
        {"type": "function", "name": "call"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "call"}]},
    ):
        made = ask(client, tools=[TOOL, other], tool_choice=choice, max_output_tokens=600)
        assert {item.name for item in made.output if item.type == "function_call"} == {"call"}


def test_logprobs_are_reported_where_they_are_asked_for(client):
    assert ask(client).output[0].content[0].logprobs == []
    one = ask(client, include=["message.output_text.logprobs"]).output[0].content[0].logprobs
    assert len(one) == 8
    two = ask(client, top_logprobs=2).output[0].content[0].logprobs
    assert [entry.logprob for entry in two] == [entry.top_logprobs[0].logprob for entry in two]
    assert [entry.bytes for entry in two] == [entry.bytes for entry in one]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_response_can_be_read_again_and_forgotten(client, server):
    made = ask(client, input=[{"role": "user", "content": "hi"}])
    assert client.responses.retrieve(made.id) == made
    (item,) = client.responses.input_items.list(made.id).data
    assert (item.role, item.content) == ("user", "hi")
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_a_conversation_goes_on_from_a_response(client, tiny):
    first = ask(client, instructions="Only for the first.")
    second = ask(client, input="more", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first.output_text}]
    whole = ask(client, input=[*said, {"role": "user", "content": "more"}])
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens
    third = ask(client, input="again", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_a_call_and_its_output_go_on_from_a_response(client):
    first = ask(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=300)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "fed"}
    assert ask(client, input=[output], previous_response_id=first.id, tools=[TOOL], tool_choice="none").output_text


def test_a_streamed_response_is_kept_before_its_last_event(client, server):
    final = events(server)[-1]["response"]
    assert client.responses.retrieve(final["id"]).output_text == final["output"][0]["content"][0]["text"]


def test_what_was_not_to_be_kept_is_not(client):
    made = ask(client, store=False)
    assert made.model_extra.get("store") is False or made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        ask(client, previous_response_id=made.id)


def test_another_key_does_not_find_it(make_server):
    running = make_server(api_keys={"ann": "k-ann", "bob": "k-bob"})
    ann, bob = (openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) for key in ("k-ann", "k-bob"))
    with ann, bob:
        made = ask(ann)
        assert ann.responses.retrieve(made.id).id == made.id
        for forbidden in (
            lambda: bob.responses.retrieve(made.id),
            lambda: bob.responses.delete(made.id),
            lambda: bob.responses.input_items.list(made.id),
            lambda: ask(bob, previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                forbidden()


def test_a_stateless_server_keeps_nothing(make_server):
    running = make_server(stateless=True)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key, max_retries=0) as client:
        made = ask(client, store=True)
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="stateless") as caught:
            ask(client, previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "absent"}}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"enum": []}}}}, "text.format.schema"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y"}]}]},
         "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"k": 1}}, "metadata.k"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=options)
    assert caught.value.param == param


async def test_the_asynchronous_client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key) as client:
        whole = await client.responses.create(**HI, temperature=0)
        stream = await client.responses.create(**HI, temperature=0, stream=True)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    assert text == whole.output_text
