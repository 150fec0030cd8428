"""Request bodies: strict JSON parsing with bounded time and depth.

Notable here:
- input that `json.loads` accepts is refused: NaN, invalid UTF-8, half a surrogate pair, a thousand brackets
- values are counted before they are made, and large bodies are counted and parsed off the event loop: millions of empty
  lists fit into the size of a body and would take seconds, in which nobody else is answered
- a body that is not declared as JSON gets 415, so a form or a file never reaches the models
"""

from __future__ import annotations

import asyncio
import email.message
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from starlette.exceptions import HTTPException

MAX_VALUES: Final = 1 << 18
"""Values in one body: texts, numbers, lists, keys; a prompt of so many token ids is longer than any context."""
_LARGE: Final = 1 << 16  # bytes, from which on a body is parsed off the event loop
_SEPARATORS: Final = (b",", b":", b"[", b"{")  # each value but the first follows one of them
_STRING_OR_SEPARATOR: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[,:\[{]', re.DOTALL)


class RequestPart(BaseModel):
    """Part of a request: types are exact ("1" is not a number, 1 is not true), unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, populate_by_name=False)


class InvalidJSON(HTTPException):
    """The body is not JSON."""

    code = "invalid_json"


class StrictRequest(Request):
    """A request whose JSON is read strictly."""

    async def json(self) -> Any:
        """The body as Python values; errors as of `parse`."""
        body = await self.body()
        return parse(body) if len(body) < _LARGE else await asyncio.to_thread(parse, body)


def parse(body: bytes) -> Any:
    """JSON as Python values.

    Raises:
        InvalidJSON: it is not JSON, is nested more than 200 levels deep, or holds a number or text that JSON does not
            allow.
        HTTPException: it holds more than `MAX_VALUES` values.

    >>> parse(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    check_values(body)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJSON(400, f"the body is not JSON in UTF-8: {error}") from None


def check_values(body: bytes) -> None:
    """Count the values of a body before they are made.

    Raises:
        HTTPException: there are more than `MAX_VALUES`.
    """
    if sum(map(body.count, _SEPARATORS)) < MAX_VALUES:
        return
    left = MAX_VALUES  # texts may hold as many commas as they like
    for match in _STRING_OR_SEPARATOR.finditer(body):
        left -= body[match.start()] != 0x22
        if not left:
            raise HTTPException(413, f"the body holds more than the {MAX_VALUES:,} values that this server takes")


class JSONRoute(APIRoute):
    """A route whose body is read by `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler after the checks of the body."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if request.method == "POST":
                _check_media_type(request.headers.get("content-type", ""))
            return await inner(StrictRequest(request.scope, request.receive))

        return handle


def _check_media_type(given: str) -> None:
    message = email.message.Message()
    message["content-type"] = given
    kind, charset = message.get_content_type(), message.get_content_charset("utf-8")
    if not given or not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        raise HTTPException(415, f"the body must be application/json, got {given or 'no content-type'!r:.80}")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise HTTPException(415, f"the body must be in UTF-8, got charset {charset!r:.40}")
