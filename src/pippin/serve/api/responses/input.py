"""Conversion of the input of /v1/responses to the parts of a provider request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pippin.core.errors import CheckpointError, InvalidRequest, UnsupportedContent
from pippin.serve.api.common import calls, fields, provider_requests
from pippin.serve.api.responses import types
from pippin.session.providers.provider import ProviderRequest, require
from pippin.session.transcript import (
    Answer,
    Instructions,
    Prompt,
    Reasoning,
    Segment,
    TextSegment,
    ToolCalls,
    Transcript,
)
from pippin.session.types.schema import Schema

if TYPE_CHECKING:
    from pippin.session.providers.local import LocalModel

LOGPROBS = "message.output_text.logprobs"


def entries(given: str | Sequence[types.Item], before: Sequence[Any] = ()) -> tuple[Any, ...]:
    """The conversation: the previous entries and the new items.

    Consecutive calls belong to one message of the model.

    Raises:
        InvalidRequest: an output of a call that does not exist, arguments that are not a JSON object, an attachment
            that is not in the request.

    >>> [entry.kind for entry in entries("Hi", [Answer("Hello")])]
    ['response', 'prompt']
    """
    if isinstance(given, str):
        return (*before, Prompt(given))
    found = list(before)
    called = {call.id: call.name for entry in found if isinstance(entry, ToolCalls) for call in entry.calls}
    for index, item in enumerate(given):
        param = f"input[{index}]"
        match item:
            case types.InputMessage():
                found.append(_message(item, param))
            case types.InputCall():
                call = calls.call(item.call_id, item.name, item.arguments, f"{param}.arguments")
                called[call.id] = call.name
                if found and isinstance(found[-1], ToolCalls) and index:
                    found[-1] = ToolCalls(calls=(*found[-1].calls, call), text=found[-1].text)
                else:
                    found.append(ToolCalls(calls=(call,)))
            case types.InputOutput():
                found.append(calls.output(item.call_id, _segments(item.output, param), called, param))
            case types.InputReasoning() if item.content:
                found.append(Reasoning(text="".join(part.text for part in item.content)))
    return tuple(found)


def _message(item: types.InputMessage, param: str) -> Any:
    segments = _segments(item.content, param)
    if item.role == "user":
        return Prompt(segments=segments)
    if item.role == "assistant":
        return Answer(segments=segments)
    return Instructions(segments=segments)


def _segments(content: str | Sequence[types.Part], param: str) -> tuple[Segment, ...]:
    if isinstance(content, str):
        return (TextSegment(text=content),)
    return tuple(_segment(part, f"{param}.content[{index}]") for index, part in enumerate(content))


def _segment(part: types.Part, param: str) -> Segment:
    match part:
        case types.InputText():
            return TextSegment(text=part.text)
        case fields.RefusalPart():
            return TextSegment(text=part.refusal)
        case types.InputImage():
            if part.image_url is None:
                raise InvalidRequest(f"{param}: this server keeps no files; give image_url", param=param)
            return provider_requests.attachment(part.image_url, f"{param}.image_url")
    if part.file_data is None:
        raise InvalidRequest(f"{param}: this server keeps no files; give file_data", param=param)
    return provider_requests.attachment(part.file_data, f"{param}.file_data", label=part.filename or "")


def check(body: types.ResponseRequest, *, stateless: bool) -> None:
    """Validate the combination of fields.

    Raises:
        InvalidRequest: a feature that this server does not support.
    """
    refusals = [
        (bool(body.background), "background", "this server answers at once; leave it out"),
        (body.conversation is not None, "conversation", "this server keeps no conversations; use previous_response_id"),
        (body.prompt is not None, "prompt", "this server keeps no prompts; send the text itself"),
        (body.truncation == "auto", "truncation", "'auto' would drop items silently; shorten the input yourself"),
        (
            stateless and body.previous_response_id is not None,
            "previous_response_id",
            "this server is stateless and keeps no responses; send the whole conversation as input",
        ),
        (body.stream_options is not None and not body.stream, "stream_options", "needs stream to be true"),
    ]
    for refused, param, why in refusals:
        if refused:
            raise InvalidRequest(f"{param}: {why}", param=param, code="unsupported_value")


def logprobs(body: types.ResponseRequest) -> int | None:
    """How many alternatives to report with each token; None for no log-probabilities."""
    return body.top_logprobs or 0 if body.top_logprobs or LOGPROBS in (body.include or ()) else None


def provider_request(
    body: types.ResponseRequest, conversation_entries: tuple[Any, ...], local: LocalModel
) -> ProviderRequest:
    """The provider request that answers a request.

    Args:
        body: the request.
        conversation_entries: the conversation, without the request's own instructions.
        local: the model.

    Raises:
        SchemaError, InvalidTool, InvalidRequest: a field that is invalid or not supported.
    """
    provider_requests.check_size("tools", *(tool.parameters for tool in body.tools or ()))
    named = [
        provider_requests.definition(
            tool.name, tool.description, tool.parameters, f"tools[{at}].parameters", strict=tool.strict
        )
        for at, tool in enumerate(body.tools or ())
    ]
    choice = _choice(body.tool_choice)
    tools, required = provider_requests.chosen(named, choice)
    effort = body.reasoning.effort if body.reasoning is not None else None
    values = provider_requests.sampling(
        body,
        local,
        max_tokens=body.max_output_tokens,
        logprobs=logprobs(body),
        tool_calling="required" if required else "allowed",
        parallel_tool_calls=provider_requests.several(body.parallel_tool_calls, choice),
        max_tool_calls=provider_requests.max_tool_calls(body.max_tool_calls),
        reasoning=provider_requests.reasoning(
            effort, local.capabilities.reasoning, "reasoning.effort", body.max_thinking_tokens
        ),
    )
    first = (Instructions(body.instructions),) if body.instructions else ()
    return ProviderRequest(
        Transcript(entries=(*first, *conversation_entries)),
        tools,
        _schema(body.text),
        provider_requests.options(values),
    )


def token_count(body: types.InputTokensRequest, before: Sequence[Any], local: LocalModel) -> int:
    """The tokens that the model would read for a request, instructions, tools and schema included.

    Args:
        body: the request.
        before: the conversation before it.
        local: the model.

    Raises:
        InvalidRequest: nothing to count, or a conversation that the model's template cannot render.
        SchemaError, InvalidTool, UnsupportedCapability, UnsupportedContent: as for an answer.
    """
    conversation = tuple(before) if body.input is None else entries(body.input, before)
    if not conversation:
        raise InvalidRequest(
            "input: give the input to count, or previous_response_id", param="input", code="missing_required_parameter"
        )
    request = provider_request(body, conversation, local)
    try:
        require(local, request)
        return local.token_count(request)
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="input", code="invalid_conversation") from error
    except UnsupportedContent as error:
        error.param = "input"  # type: ignore[attr-defined]
        raise


def _choice(choice: types.ResponseToolChoice | None) -> fields.ToolChoice | None:
    """The same choice in the format of a chat request."""

    def named(name: str) -> fields.NamedTool:
        return fields.NamedTool(type="function", function=fields.NamedFunction(name=name))

    if isinstance(choice, types.NamedResponseTool):
        return named(choice.name)
    if isinstance(choice, types.AllowedResponseTools):
        allowed = fields.AllowedTools(mode=choice.mode, tools=[named(tool.name) for tool in choice.tools])
        return fields.AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _schema(text: types.TextSettings | None) -> Schema[Any] | None:
    wanted = text.format if text is not None else None
    if isinstance(wanted, types.ResponseSchemaFormat):
        provider_requests.check_size("text.format.schema", wanted.schema_)
        with provider_requests.about("text.format.schema"):
            return Schema(provider_requests.closed(wanted.schema_), strict=bool(wanted.strict))
    return provider_requests.schema(wanted, "text.format")
