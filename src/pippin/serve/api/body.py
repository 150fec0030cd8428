"""Request bodies: strict JSON parsing with bounded time and depth.

Notable here:
- input that `json.loads` accepts is refused: NaN, invalid UTF-8, half a surrogate pair, a thousand brackets
- a body that is not declared as JSON gets 415, so a form or a file never reaches the models
"""

from __future__ import annotations

import email.message
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from starlette.exceptions import HTTPException


class RequestPart(BaseModel):
    """Part of a request: types are exact ("1" is not a number, 1 is not true), unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, populate_by_name=False)


class InvalidJSON(HTTPException):
    """The body is not JSON."""

    code = "invalid_json"


class StrictRequest(Request):
    """A request whose JSON is read strictly."""

    async def json(self) -> Any:
        """The body as Python values.

        Raises:
            InvalidJSON: it is not JSON, is nested more than 200 levels deep, or holds a number or text that JSON does
                not allow.
        """
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise InvalidJSON(400, f"the body is not JSON in UTF-8: {error}") from None


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
