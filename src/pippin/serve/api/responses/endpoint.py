"""POST /v1/responses, the count of its input tokens, and the stored responses.

Notable here:
- a response is stored in memory only, unless the request sets ``store: false`` or the server is stateless
- the conversation behind `previous_response_id` is stored as entries of a transcript, so nothing is parsed twice
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from pippin.serve.api.common import errors, priority as priorities, sse
from pippin.serve.api.common.body import JSONRoute
from pippin.serve.api.common.generation import Event, GenerationJob, OpenStream, merged, noted, opened
from pippin.serve.api.responses import input as response_input, types
from pippin.serve.api.responses.output import ResponseWriter
from pippin.serve.api.responses.store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    from pippin.serve.service import Service
    from pippin.session.providers.local import LocalModel
    from pippin.session.providers.provider import ProviderRequest

StoreFunction = Callable[[ResponseWriter], None]


def router(service: Service, store: ResponseStore | None = None) -> APIRouter:
    """The routes over a service; ``store`` holds responses, None makes one of the default size."""
    routes = APIRouter(route_class=JSONRoute, tags=["responses"])
    responses = ResponseStore() if store is None else store

    @routes.post(
        "/v1/responses",
        operation_id="createResponse",
        summary="Answer an input",
        response_model=types.ResponseObject,
        responses={200: {"content": types.STREAM}, **errors.responses(*errors.ALL)},
    )
    async def create(request: Request, body: types.ResponseRequest) -> Any:
        settings, caller = service.settings, request.state.caller
        owner = caller.id
        response_input.check(body, stateless=settings.stateless)
        before = (
            responses.get(body.previous_response_id, owner).entries if body.previous_response_id is not None else ()
        )
        conversation: list[tuple[Any, ...]] = []

        def make(local: LocalModel) -> ProviderRequest:
            conversation.append(response_input.entries(body.input, before))
            return response_input.provider_request(body, conversation[0], local)

        priority, tier = priorities.priority_of(body, settings)
        fields = {"prompt_field": "input", "format_field": "text.format"}
        job = GenerationJob(service, body.model or "", caller, make, priority=priority, **fields)
        stores = body.store is not False and not settings.stateless
        response = response_object(body, body.model or settings.default, stores) | tier
        writer = ResponseWriter(response, job, response_input.logprobs(body) is not None)

        def store_response(writer: ResponseWriter) -> None:
            if stores:
                responses.put(_stored_response(owner, writer, body, conversation[0]))

        if not body.stream:
            await _write(writer, job)
            store_response(writer)
            return JSONResponse(writer.response, headers=noted([job]))
        events = await opened(merged([job]))
        return sse.EventStreamResponse(frames(writer, events, store_response), events, noted([job]))

    @routes.post(
        "/v1/responses/input_tokens",
        operation_id="countInputTokens",
        summary="Count the tokens of an input",
        response_model=types.InputTokens,
        responses=errors.responses(*errors.ALL),
    )
    async def count(request: Request, body: types.InputTokensRequest) -> Any:
        response_input.check(body, stateless=service.settings.stateless)
        caller = request.state.caller
        before = (
            responses.get(body.previous_response_id, caller.id).entries if body.previous_response_id is not None else ()
        )

        found = await service.task(
            body.model or "", lambda local: response_input.token_count(body, before, local), caller
        )
        return JSONResponse({"object": "response.input_tokens", "input_tokens": found})

    _add_stored_routes(routes, responses)
    return routes


def _add_stored_routes(routes: APIRouter, responses: ResponseStore) -> None:
    """Add the routes of stored responses."""
    refusals = errors.responses(401, 403, 404, 429, 500)

    @routes.get(
        "/v1/responses/{response_id}",
        operation_id="getResponse",
        summary="Show a stored response",
        response_model=types.ResponseObject,
        responses=refusals,
    )
    async def show(request: Request, response_id: str) -> Any:
        return JSONResponse(responses.get(response_id, request.state.caller.id).response)

    @routes.delete(
        "/v1/responses/{response_id}",
        operation_id="deleteResponse",
        summary="Delete a stored response",
        response_model=types.Deleted,
        responses=refusals,
    )
    async def delete(request: Request, response_id: str) -> Any:
        responses.delete(response_id, request.state.caller.id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        operation_id="listInputItems",
        summary="List the input items of a stored response",
        response_model=types.InputItems,
        responses=refusals,
    )
    async def input_items(request: Request, response_id: str) -> Any:
        items = responses.get(response_id, request.state.caller.id).items
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return JSONResponse({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})


def response_object(body: types.ResponseRequest, model: str, stores: bool) -> dict[str, Any]:
    """The response before anything is generated, with the request's settings."""

    def dumped(value: Any) -> Any:
        return value if value is None or isinstance(value, str) else value.model_dump(by_alias=True, exclude_none=True)

    text = dumped(body.text) or {}
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "instructions": body.instructions,
        "tools": [{"parameters": None, "strict": False} | dumped(tool) for tool in body.tools or ()],
        "tool_choice": dumped(body.tool_choice) or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_tool_calls": body.max_tool_calls,
        "text": {"format": {"type": "text"}} | text,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": body.previous_response_id,
        "store": stores,
        "metadata": body.metadata or {},
        "truncation": "disabled",
        "background": False,
        "user": body.user,
    }


def _stored_response(
    owner: str, writer: ResponseWriter, body: types.ResponseRequest, conversation: tuple[Any, ...]
) -> StoredResponse:
    """A response for the store, with an estimate of its size."""
    given: list[dict[str, Any]]
    if isinstance(body.input, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    else:
        given = [item.model_dump(exclude_none=True) for item in body.input]
    items = [{"id": f"item_{secrets.token_hex(12)}"} | item for item in given]
    size = len(json.dumps([writer.response, items])) + sum(len(entry.model_dump_json()) for entry in conversation)
    return StoredResponse(owner, writer.response, items, (*conversation, *writer.entries), size)


async def _write(writer: ResponseWriter, job: GenerationJob) -> None:
    """Write the whole response."""
    for _ in writer.begin():
        pass
    async with aclosing(merged([job])) as events:
        async for _, event in events:
            for _ in writer.push(event):
                pass
    for _ in writer.finish():
        pass


async def frames(
    writer: ResponseWriter, events: OpenStream[tuple[int, Event]], store_response: StoreFunction
) -> AsyncGenerator[str]:
    """The typed events of a stream."""
    try:
        for kind, data in writer.begin():
            yield sse.frame(data, kind)
        async for _, event in events:
            for kind, data in writer.push(event):
                yield sse.frame(data, kind)
        last = list(writer.finish())
        store_response(writer)  # before the client learns that it is complete and may continue from it
        for kind, data in last:
            yield sse.frame(data, kind)
    except Exception as error:
        for kind, data in writer.fail(sse.failed(error)):
            yield sse.frame(data, kind)
