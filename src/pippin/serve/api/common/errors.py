"""Error responses in OpenAI's format: a status, and a JSON object with message, type, param and code.

Notable here:
- one table maps the classes of `pippin.core.errors`; the nearest ancestor of an error applies
- the same object is the body of a failed request and the last event of a failed stream
- an unexpected error is a 500 without its text, which may hold user data
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from pippin.core import errors
from pippin.serve import logs

log = logging.getLogger(__name__)


LONGEST: Final = 1000  # characters of a message, which may quote the request


class ErrorDetail(BaseModel):
    """The error."""

    message: str = Field(description="For people: what is wrong, with the offending value, and what to do.")
    type: str = Field(description="The kind of error, such as invalid_request_error.")
    param: str | None = Field(description="The field of the request that it is about.")
    code: str | None = Field(description="A word for programs, such as context_length_exceeded.")


class ErrorBody(BaseModel):
    """The body of every error response."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "message": "temperature: Input should be less than or equal to 2",
                        "type": "invalid_request_error",
                        "param": "temperature",
                        "code": "invalid_value",
                    }
                }
            ]
        }
    )

    error: ErrorDetail


class ErrorResponse:
    """An error response: status, body and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.headers = status, dict(headers or {})
        message = message if len(message) <= LONGEST else f"{message[:LONGEST]}…"
        self.detail = ErrorDetail(message=message, type=type or _type(status), param=param, code=code)

    def log(self) -> None:
        """Name the code in the log line of the request."""
        record = logs.current.get()
        if record is not None:
            record.code = self.detail.code or self.detail.type

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        return {"error": self.detail.model_dump()}

    def response(self) -> JSONResponse:
        """The HTTP response; the log line of its request names the code."""
        self.log()
        return JSONResponse(self.body, self.status, self.headers)


# Class -> status, type (None for the usual one of the status), code. The nearest ancestor applies.
TABLE: Final[dict[type[BaseException], tuple[int, str | None, str | None]]] = {
    errors.PippinError: (500, None, None),
    errors.InvalidArgument: (400, None, "invalid_value"),
    errors.InvalidInput: (400, None, None),
    errors.MissingDependency: (501, None, "not_installed"),
    errors.AssetError: (503, None, "model_unavailable"),
    errors.ModelNotFound: (404, None, "model_not_found"),
    errors.CheckpointError: (500, None, "model_unusable"),
    errors.NotEnoughMemory: (503, None, "not_enough_memory"),
    errors.SchemaError: (400, None, "invalid_schema"),
    errors.UnsupportedGuide: (400, None, "unsupported_schema"),
    errors.GenerationError: (500, None, None),
    errors.ContextOverflow: (400, None, "context_length_exceeded"),
    errors.AnswerTruncated: (400, None, "max_tokens_too_small"),
    errors.InvalidAnswer: (500, None, "answer_not_accepted"),
    errors.Cancelled: (499, None, "request_cancelled"),
    errors.ConcurrentRequests: (409, None, "concurrent_requests"),
    errors.UnsupportedCapability: (400, None, "unsupported_capability"),
    errors.UnsupportedContent: (400, None, "unsupported_content"),
    errors.UnsupportedLanguage: (400, None, "unsupported_language"),
    errors.TimedOut: (504, "timeout_error", "timeout"),
    errors.Denied: (403, None, "denied"),
    errors.GuardrailViolation: (400, None, "content_filter"),
    errors.Refusal: (400, None, "refusal"),
    errors.RateLimited: (429, None, "rate_limit_exceeded"),
    errors.QuotaExceeded: (429, "insufficient_quota", "insufficient_quota"),
    errors.Overloaded: (503, "overloaded_error", "overloaded"),
    errors.ProviderError: (502, None, "provider_error"),
    errors.ServiceUnavailable: (503, None, "provider_unavailable"),
    errors.InvalidTool: (400, None, "invalid_tool"),
    errors.ToolServerError: (502, None, "tool_server_error"),
    errors.ResponseNotFound: (404, None, "response_not_found"),
}

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: Final = {
    401: "invalid_api_key",
    404: "unknown_url",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}
# The field (param) that a class refers to, where the error itself does not name one.
_PARAMS: Final[dict[type[BaseException], str]] = {
    errors.ModelNotFound: "model",
}


def failure(error: BaseException) -> ErrorResponse:
    """The error response of any exception.

    >>> failure(errors.ModelNotFound("no model 'x'")).status
    404
    >>> failure(errors.RateLimited("wait", retry_after=1.2)).headers
    {'Retry-After': '2'}
    """
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors(), error.body)
    if isinstance(error, HTTPException):
        code = getattr(error, "code", None) or _CODES.get(error.status_code)
        return ErrorResponse(error.status_code, str(error.detail), code=code, headers=error.headers)
    if not isinstance(error, errors.PippinError):
        return ErrorResponse(500, "the server met an error of its own; its log says more", code="internal_error")
    nearest = next(kind for kind in type(error).__mro__ if kind in TABLE)
    status, kind, code = TABLE[nearest]
    param = next((_PARAMS[base] for base in type(error).__mro__ if base in _PARAMS), None)
    message = str(error)
    if isinstance(error, errors.ContextOverflow) and "maximum context length" not in message:
        # clients know this error by OpenAI's words, whatever its code is
        message = f"This model's maximum context length is {error.context_size} tokens. However, {message}"
    return ErrorResponse(
        status,
        message,
        type=kind,
        code=getattr(error, "code", None) or code,
        param=getattr(error, "param", None) or param,
        headers=_headers(error),
    )


def _headers(error: errors.PippinError) -> dict[str, str]:
    """Headers: how long to wait, and whether a client should retry; a request that was too slow should not be
    retried."""
    headers = {"x-should-retry": "false"} if isinstance(error, errors.TimedOut | errors.QuotaExceeded) else {}
    seconds = getattr(error, "retry_after", None)
    if seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    elif isinstance(error, errors.Overloaded):
        headers["Retry-After"] = "1"
    return headers


def _type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def _invalid(problems: Sequence[Any], body: Any) -> ErrorResponse:
    """A validation error of pydantic, with its location written as in a program: messages[0].content.

    Of a union field, each alternative fails by itself. The alternative with the right type but another error is
    reported; otherwise the one that matched deepest into the body.
    """
    found = [(_path(list(problem["loc"]), body, missing=problem["type"] == "missing"), problem) for problem in problems]
    param, problem = max(found, key=lambda one: ("_type" not in one[1]["type"], one[0].count(".") + one[0].count("[")))
    kind = problem["type"]
    if not param and kind == "missing":
        return ErrorResponse(400, "the request needs a body of JSON", code="missing_body")
    code = {"missing": "missing_required_parameter"}.get(kind, "invalid_type" if "_type" in kind else "invalid_value")
    return ErrorResponse(400, f"{param or 'the body'}: {problem['msg']}", param=param or None, code=code)


def _path(location: Sequence[str | int], body: Any, *, missing: bool) -> str:
    """The location of the problem, without the names of pydantic's union members, which are not keys of the body."""
    if location[0] != "body":
        return str(location[-1])
    path, value = "", body
    for index, step in enumerate(location):
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(step, str) and isinstance(value, dict):
            if step in value:
                path, value = f"{path}.{step}", value[step]
            elif missing and index == len(location) - 1:
                path = f"{path}.{step}"
    return path.removeprefix(".")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a route may return, for the OpenAPI document."""
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}


_DESCRIPTIONS: Final = {
    400: "The request is malformed, asks for what cannot be done, or does not fit the context.",
    401: "The API key is missing or wrong.",
    403: "The API key may not do this.",
    404: "There is no such model, response or address.",
    405: "The address does not take this method.",
    408: "The request did not arrive in time.",
    413: "The body is larger than the server takes.",
    415: "The body is not application/json.",
    429: "Too many requests or tokens; Retry-After says how many seconds to wait.",
    500: "The server met an error of its own.",
    503: "Every slot is taken, or the model cannot be loaded now; Retry-After says how many seconds to wait.",
    504: "The answer was not complete in the time that the server allows.",
}
ALL: Final = tuple(_DESCRIPTIONS)


def install(app: FastAPI, routers: Sequence[APIRouter] = ()) -> None:
    """Return these bodies for every error of an app.

    Args:
        app: the app.
        routers: routers whose routes may share a path; the response to a wrong method lists all methods of the path.
    """

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.detail == HTTPStatus(error.status_code).phrase:
            what = "takes no" if error.status_code == 405 else "answers no"
            error.detail = f"{request.url.path[:100]!r} {what} {request.method} here ({error.detail})"
        response = failure(error)
        if response.status == 405 and (methods := _methods(routers, request.scope)):
            response.headers["Allow"] = ", ".join(sorted(methods))
        if response.status == 500:
            log.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
        return response.response()

    for kind in (errors.PippinError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _methods(routers: Sequence[APIRouter], scope: Scope) -> set[str]:
    """The methods of a path: each route knows only its own."""
    routes = (route for router in routers for route in router.routes if route.matches(scope)[0] is not Match.NONE)
    return {method for route in routes for method in getattr(route, "methods", None) or ()}
