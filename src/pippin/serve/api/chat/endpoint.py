"""POST /v1/chat/completions.

Notable here:
- the answer is streamed as it is generated; a tool call is sent whole, in two deltas, when the model has completed it
- several answers (n) run in parallel, and their chunks are sent as they are generated, identified by their index
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from pippin.core.errors import InvalidRequest
from pippin.serve.api.chat import types
from pippin.serve.api.chat.input import transcript
from pippin.serve.api.common import errors, priority as priorities, provider_requests, sse
from pippin.serve.api.common.body import JSONRoute
from pippin.serve.api.common.calls import arguments
from pippin.serve.api.common.fields import Effort
from pippin.serve.api.common.generation import (
    Event,
    GeneratedAnswer,
    GenerationJob,
    OpenStream,
    collect,
    fingerprint,
    merged,
    noted,
    opened,
    total,
)
from pippin.serve.api.common.logprobs import chat_logprobs
from pippin.serve.api.common.usage import usage
from pippin.session.providers.provider import ProviderRequest, ReasoningDelta, Refused, TextDelta, ToolCallsMade
from pippin.session.response import Usage
from pippin.session.transcript import ToolCall

if TYPE_CHECKING:
    from pippin.engine.request import Token
    from pippin.serve.service import Service
    from pippin.session.providers.local import LocalModel


def router(service: Service) -> APIRouter:
    """The route over a service."""
    routes = APIRouter(route_class=JSONRoute, tags=["chat"])

    @routes.post(
        "/v1/chat/completions",
        operation_id="createChatCompletion",
        summary="Answer a conversation",
        response_model=types.ChatCompletion,
        responses={200: {"content": types.STREAM}, **errors.responses(*errors.ALL)},
    )
    async def create(request: Request, body: types.ChatRequest) -> Any:
        check(body)
        caller = request.state.caller
        priority, tier = priorities.priority_of(body, service.settings)
        name = body.model or ""
        jobs = [GenerationJob(service, name, caller, maker(body, n), priority=priority) for n in range(body.n or 1)]
        head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model or service.settings.default,
            **tier,
        }
        if not body.stream:
            answers = await collect(jobs)
            return JSONResponse(completion(head, body, jobs, answers), headers=noted(jobs))
        events = await opened(merged(jobs))
        return sse.EventStreamResponse(frames(head, body, jobs, events), events, noted(jobs))

    return routes


def check(body: types.ChatRequest) -> None:
    """Validate the combination of fields.

    Raises:
        InvalidRequest: fields that contradict each other.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs", code="invalid_value")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream to be true", param="stream_options", code="invalid_value")
    both = body.max_tokens, body.max_completion_tokens
    if None not in both and both[0] != both[1]:
        raise InvalidRequest(
            f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; give one of the two",
            param="max_tokens",
            code="invalid_value",
        )


def maker(body: types.ChatRequest, index: int) -> Callable[[LocalModel], ProviderRequest]:
    """A function that builds the provider request of answer ``index`` once the model is loaded."""

    def make(local: LocalModel) -> ProviderRequest:
        provider_requests.check_size("tools", *(tool.function.parameters for tool in body.tools or ()))
        named = [
            provider_requests.definition(
                tool.function.name,
                tool.function.description,
                tool.function.parameters,
                f"tools[{at}].function.parameters",
                strict=tool.function.strict,
            )
            for at, tool in enumerate(body.tools or ())
        ]
        tools, required = provider_requests.chosen(named, body.tool_choice)
        values = provider_requests.sampling(
            body,
            local,
            answers=body.n or 1,
            seed=provider_requests.seed(body.seed, index),
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            tool_calling="required" if required else "allowed",
            parallel_tool_calls=provider_requests.several(body.parallel_tool_calls, body.tool_choice),
            max_tool_calls=provider_requests.max_tool_calls(body.max_tool_calls),
            include_schema_in_prompt=body.include_schema_in_prompt is not False,
            reasoning=provider_requests.reasoning(
                _effort(body), local.capabilities.reasoning, "reasoning_effort", body.max_thinking_tokens
            ),
        )
        provider_requests.check_vocabulary(values.get("logit_bias"), local.model.vocab_size)
        schema = provider_requests.schema(body.response_format, "response_format")
        return ProviderRequest(transcript(body.messages), tools, schema, provider_requests.options(values))

    return make


def _effort(body: types.ChatRequest) -> Effort | None:
    """The effort of a request; the variables of a template that other servers take switch it on and off."""
    told = body.chat_template_kwargs
    wanted = None if told is None else told.enable_thinking if told.enable_thinking is not None else told.thinking
    if wanted is None or body.reasoning_effort is not None:
        return body.reasoning_effort
    return "high" if wanted else None


# --- a complete answer ------------------------------------------------------------------------------------------------


def completion(
    head: dict[str, Any], body: types.ChatRequest, jobs: list[GenerationJob], answers: list[GeneratedAnswer]
) -> dict[str, Any]:
    """All answers, as a chat completion object."""
    return {
        **head,
        "object": "chat.completion",
        "system_fingerprint": fingerprint(jobs[0].local),
        "choices": [_choice(body, job, answer) for job, answer in zip(jobs, answers, strict=True)],
        "usage": usage(total(answers)),
    }


def _choice(body: types.ChatRequest, job: GenerationJob, answer: GeneratedAnswer) -> dict[str, Any]:
    silent = not answer.text and (answer.calls or answer.refusal is not None)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if silent else answer.text,
        "refusal": answer.refusal,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [tool_call(call) for call in answer.calls]
    return {
        "index": answer.index,
        "message": message,
        "logprobs": _logprobs(job, answer.tokens) if body.logprobs else None,
        "finish_reason": answer.finish_reason or "stop",
    }


def _logprobs(job: GenerationJob, said: list[Token]) -> dict[str, Any]:
    return {"content": chat_logprobs(job.local.model.tokenizer, said), "refusal": None}


def tool_call(call: ToolCall) -> dict[str, Any]:
    """A tool call in the format of the API."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments(call)}}


# --- a stream ---------------------------------------------------------------------------------------------------------


async def frames(
    head: dict[str, Any], body: types.ChatRequest, jobs: list[GenerationJob], events: OpenStream[tuple[int, Event]]
) -> AsyncGenerator[str]:
    """The events of a stream: for each answer its role, its deltas and its finish reason, then the usage and the last
    frame."""
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    writers: dict[int, _Writer] = {}

    def chunk(choices: list[dict[str, Any]], used: Usage | None = None) -> str:
        more = {"usage": None if used is None else usage(used)} if with_usage else {}
        data = {**head, "object": "chat.completion.chunk", "system_fingerprint": mark, "choices": choices, **more}
        return sse.frame(data)

    try:
        async for index, event in events:
            if index not in writers:
                writers[index] = _Writer(index, jobs[index], bool(body.logprobs))
                mark = fingerprint(jobs[index].local)
                yield chunk([writers[index].begin()])
            for choice in writers[index].push(event):
                yield chunk([choice])
        for writer in writers.values():
            for choice in writer.finish():
                yield chunk([choice])
        if with_usage:
            yield chunk([], total([writer.answer for writer in writers.values()]))
        yield sse.DONE
    except Exception as error:
        yield sse.broken(error)


class _Writer:
    """Writes the chunks of one answer."""

    def __init__(self, index: int, job: GenerationJob, with_logprobs: bool) -> None:
        self.answer, self._job, self._with_logprobs = GeneratedAnswer(index), job, with_logprobs
        self._waiting: list[Token] = []

    def begin(self) -> dict[str, Any]:
        return self._choice({"role": "assistant", "content": "", "refusal": None})

    def push(self, event: Event) -> Iterator[dict[str, Any]]:
        """The chunks of an event."""
        before = len(self.answer.calls)
        self.answer.add(event)
        match event:
            case TextDelta():
                self._waiting += event.tokens
                if event.text:
                    yield self._choice({"content": event.text}, self._take())
            case ReasoningDelta():
                yield self._choice({"reasoning_content": event.text})
            case ToolCallsMade():
                for at, call in enumerate(event.calls, before):
                    opening = tool_call(call) | {"index": at, "function": {"name": call.name, "arguments": ""}}
                    yield self._choice({"tool_calls": [opening]})
                    yield self._choice({"tool_calls": [{"index": at, "function": {"arguments": arguments(call)}}]})
            case Refused():
                yield self._choice({"refusal": event.explanation})

    def finish(self) -> Iterator[dict[str, Any]]:
        """The remaining tokens without text of their own, and the finish reason."""
        if self._with_logprobs and self._waiting and not self.answer.calls:
            yield self._choice({"content": ""}, self._take())
        yield self._choice({}) | {"finish_reason": self.answer.finish_reason or "stop"}

    def _take(self) -> dict[str, Any] | None:
        taken, self._waiting = self._waiting, []
        return _logprobs(self._job, taken) if self._with_logprobs else None

    def _choice(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self.answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
