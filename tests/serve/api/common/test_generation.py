"""How answers end that do not end well: broken streams, lost clients, filtered text, many at a time."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from openai.types.responses import Response

from pippin.core.errors import (
    Cancelled,
    CheckpointError,
    ContextOverflow,
    DecodingFailure,
    GuardrailViolation,
    InvalidRequest,
    Overloaded,
    Refusal,
    SchemaError,
)
from pippin.engine.request import Token
from pippin.serve.api.chat import endpoint as chat
from pippin.serve.api.chat.types import ChatRequest
from pippin.serve.api.common import sse
from pippin.serve.api.common.generation import (
    AT_ONCE,
    GeneratedAnswer,
    GenerationJob,
    StoppedEarly,
    collect,
    merged,
    opened,
    total,
)
from pippin.serve.api.responses import endpoint as responses, output as response_output
from pippin.serve.api.responses.types import ResponseRequest
from pippin.session.providers.provider import Done, ProviderRequest, ReasoningDelta, Refused, TextDelta, ToolCallsMade
from pippin.session.response import Usage
from pippin.session.transcript import Prompt, ToolCall, Transcript

TURN = ProviderRequest(Transcript(entries=(Prompt("hi"),)))


class Scripted:
    """A service that says what it was told to say; an exception in the script is raised."""

    def __init__(self, *script, builds=True):
        self.script, self.builds = script, builds
        self.running = self.most = self.begun = self.closed = 0

    async def run(self, model, build, caller, *, priority=0):
        self.begun += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.builds:
                model = SimpleNamespace(name="m", dtype="d", device=SimpleNamespace(type="cpu"))
                build(SimpleNamespace(model=model, token_count=lambda turn: 7))
            for event in self.script:
                await asyncio.sleep(0)
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self.running -= 1
            self.closed += 1

    def jobs(self, count=1):
        return [GenerationJob(self, "m", None, lambda local: TURN) for _ in range(count)]


async def events(service):
    return [event async for event in service.jobs()[0].events()]


async def test_calls_have_ids_of_their_own():
    call = ToolCall(id="call_0", name="f", arguments={"a": 1})
    script = (ToolCallsMade((call, call)), Done("stop", Usage(1, 0, 2)))
    made = [
        event.calls for _ in range(2) for event in await events(Scripted(*script)) if isinstance(event, ToolCallsMade)
    ]
    ids = {one.id for calls in made for one in calls}
    assert len(ids) == 4
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)
    assert {(one.name, one.arguments["a"]) for calls in made for one in calls} == {("f", 1)}


VIOLATION = GuardrailViolation("no", verdict=None)


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (VIOLATION, StoppedEarly("content_filter", Usage(7, 0, 2))),
        (Refusal("no", explanation="I will not."), Refused("I will not.")),
    ],
)
async def test_what_ends_an_answer_early_is_an_event(error, event):
    said = TextDelta("a", (Token(1, "a"), Token(2, "")))
    assert await events(Scripted(said, error)) == [said, event]


@pytest.mark.parametrize(
    ("script", "builds", "error", "param"),
    [
        ([VIOLATION], True, GuardrailViolation, None),
        ([TextDelta("a"), DecodingFailure("nan")], True, DecodingFailure, None),
        ([Done("cancelled")], True, Cancelled, None),
        ([CheckpointError("roles must alternate")], True, InvalidRequest, "messages"),
        ([CheckpointError("a broken file")], False, CheckpointError, None),
        ([ContextOverflow("long", context_size=1, token_count=2)], True, ContextOverflow, "messages"),
        ([SchemaError("too large")], True, SchemaError, "response_format"),
        ([RecursionError()], True, InvalidRequest, "response_format"),
    ],
)
async def test_what_is_an_error_stays_one_and_names_its_field(script, builds, error, param):
    with pytest.raises(error) as caught:
        await events(Scripted(*script, builds=builds))
    assert getattr(caught.value, "param", None) == param


def test_an_answer_gathers_its_events():
    answer = GeneratedAnswer()
    call = ToolCall(id="c", name="f", arguments={})
    end = Done("stop", Usage(1, 0, 2, 1))
    for event in (ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("a"), ToolCallsMade((call,)), end):
        answer.add(event)
    assert (answer.reasoning, answer.text, answer.calls, answer.finish_reason) == ("hm", "a", [call], "tool_calls")
    cut = GeneratedAnswer()
    cut.add(StoppedEarly("length", Usage(7, 0, 2)))
    assert (cut.finish_reason, cut.usage) == ("length", Usage(7, 0, 2))


def test_the_total_counts_the_prompt_once():
    made = [GeneratedAnswer(usage=Usage(5, 0, 2, 1)), GeneratedAnswer(usage=Usage(5, 4, 3, 0))]
    assert total(made) == Usage(5, 0, 5, 1)
    assert total([]) == Usage()


async def test_only_so_many_answers_run_at_a_time():
    service = Scripted(*[TextDelta("a")] * 5, Done("stop"))
    answers = await collect(service.jobs(11))
    assert [answer.text for answer in answers] == ["aaaaa"] * 11
    assert service.most == AT_ONCE
    assert service.closed == 11


async def test_the_first_error_ends_all_and_frees_all():
    service = Scripted(TextDelta("a"), DecodingFailure("nan"))
    with pytest.raises(DecodingFailure):
        await collect(service.jobs(6))
    assert service.running == 0


@pytest.mark.parametrize("jobs", [1, 6])
@pytest.mark.parametrize("read", [0, 1, 3])
async def test_whoever_stops_reading_frees_every_slot(jobs, read):
    service = Scripted(*[TextDelta("a")] * 50, Done("stop"))
    async with aclosing(await opened(merged(service.jobs(jobs)))) as stream:
        for _ in range(read):
            await anext(stream)
    assert (service.running, service.closed) == (0, service.begun)


async def test_a_task_that_is_cancelled_frees_its_slots():
    service = Scripted(*[TextDelta("a")] * 10**6)
    task = asyncio.create_task(collect(service.jobs(3)))
    while service.running < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.running == 0


async def test_an_error_before_the_first_event_is_raised_at_once():
    with pytest.raises(Overloaded):
        await opened(merged(Scripted(Overloaded("full")).jobs()))


# --- streams ----------------------------------------------------------------------------------------------------------

HEAD = {"id": "x", "created": 0, "model": "m"}


async def chat_frames(service, **body):
    jobs = service.jobs()
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "stream": True} | body)
    return [frame async for frame in chat.frames(HEAD, asked, jobs, await opened(merged(jobs)))]


async def test_a_chat_stream_that_breaks_ends_with_an_error_and_not_with_done():
    *_, last = await chat_frames(Scripted(TextDelta("a"), DecodingFailure("the logits are not finite")))
    assert last.startswith('data: {"error":{"message":"the logits are not finite","type":"server_error"')


async def test_a_chat_stream_that_is_filtered_says_so():
    frames = await chat_frames(Scripted(TextDelta("a"), VIOLATION))
    assert '"finish_reason":"content_filter"' in frames[-2]
    assert frames[-1] == sse.DONE


async def test_reasoning_and_refusal_have_deltas_of_their_own():
    text = "".join(await chat_frames(Scripted(ReasoningDelta("hm"), Refused("No."), Done("stop"))))
    assert '"delta":{"reasoning_content":"hm"}' in text
    assert '"delta":{"refusal":"No."}' in text


async def test_a_refusal_is_no_content():
    jobs = Scripted(ReasoningDelta("hm"), Refused("No."), Done("stop", Usage(1, 0, 2, 1))).jobs()
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    made = chat.completion(HEAD, asked, jobs, await collect(jobs))
    message = made["choices"][0]["message"]
    assert (message["content"], message["refusal"], message["reasoning_content"]) == (None, "No.", "hm")
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


async def response_frames(*script):
    (job,) = Scripted(*script).jobs()
    asked = ResponseRequest.model_validate({"input": "hi"})
    writer = response_output.ResponseWriter(responses.response_object(asked, "m", False), job, False)
    kept = []
    found = [frame async for frame in responses.frames(writer, await opened(merged([job])), kept.append)]
    Response.model_validate(writer.response)
    return writer, [frame.split("\n")[0].removeprefix("event: response.") for frame in found], kept


async def test_a_response_with_reasoning_text_and_calls_has_an_item_for_each():
    calls = ToolCallsMade((ToolCall(id="c1", name="f", arguments={"a": 1}), ToolCall(id="c2", name="g", arguments={})))
    end = Done("stop", Usage(3, 1, 4, 2))
    writer, kinds, kept = await response_frames(ReasoningDelta("hm"), TextDelta("so"), calls, end)
    output = writer.response["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in output] == ["completed"] * 4
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 4
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
    assert (kinds[-1], kept) == ("completed", [writer])
    assert [entry.kind for entry in writer.entries] == ["reasoning", "tool_calls"]
    assert writer.response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


async def test_a_response_that_breaks_has_failed_and_is_not_kept():
    writer, kinds, kept = await response_frames(TextDelta("a"), DecodingFailure("not finite"))
    assert kinds[-2:] == ["failed", "event: error"]
    assert (writer.response["status"], writer.response["error"]["message"], kept) == ("failed", "not finite", [])


async def test_a_response_that_is_filtered_or_refused():
    writer, kinds, _ = await response_frames(TextDelta("a"), VIOLATION)
    assert (kinds[-1], writer.response["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
    writer, kinds, _ = await response_frames(Refused("No."), Done("stop"))
    assert writer.response["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]
    assert "refusal.delta" in kinds
    assert writer.entries[0].text == "No."


def test_a_frame_is_one_line_whatever_it_holds():
    text = "a\nb\u2028c\u2029d\x85e\r"
    frame = sse.frame({"text": text})
    assert len(frame.splitlines()) == 2  # the data and the empty line behind it
    assert json.loads(frame.removeprefix("data: ")) == {"text": text}
