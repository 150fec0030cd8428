"""Tool calls in a conversation: their arguments as text, calls that a client sends back, and their outputs."""

from __future__ import annotations

import json

from pydantic import ValidationError
from pydantic_core import from_json

from pippin.core.errors import InvalidRequest
from pippin.session.transcript import Segment, ToolCall, ToolOutput


def arguments(call: ToolCall) -> str:
    """The arguments of a call as JSON text."""
    return json.dumps(call.arguments, ensure_ascii=False)


def output(call_id: str, content: tuple[Segment, ...], called: dict[str, str], param: str) -> ToolOutput:
    """The output of a tool call, with the name of the tool.

    Raises:
        InvalidRequest: no earlier message made this call.
    """
    if call_id not in called:
        raise InvalidRequest(
            f"{param}: no call before it has the id {call_id[:100]!r}", param=param, code="unknown_tool_call"
        )
    return ToolOutput(segments=content, call_id=call_id, name=called[call_id])


def call(id: str, name: str, arguments: str, param: str) -> ToolCall:
    """A tool call that the model made earlier.

    Raises:
        InvalidRequest: its arguments are not a JSON object.
    """
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False)
        return ToolCall(id=id, name=name, arguments=value)
    except (ValueError, ValidationError) as error:
        raise InvalidRequest(
            f"{param}: the arguments {arguments[:60]!r} are no JSON object", param=param, code="invalid_json"
        ) from error
