"""MCP over streamable HTTP: sessions that are only names, and cancellation of running calls.

Notable here:
- every request is served by itself, so any replica answers any call; the name of a session tells the calls of two
  clients of one key apart
- until protocol 2025-11-25 a client cancels with a request of its own, `notifications/cancelled`; later it closes the
  stream of the call; a client that closes its session or its connection ends its calls in every version
- this server has nothing to say between calls, so the stream that GET would open is refused
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pippin.serve.api.common.body import check_values

SESSION: Final = "mcp-session-id"
_LONGEST: Final = 64 * 1024  # bytes of a message that is looked at here; those that matter are far shorter

Call = tuple[str, str, str]
"""Caller, session and id of a call."""


class RunningCalls:
    """The calls that clients with a session may cancel."""

    def __init__(self) -> None:
        self._scopes: dict[Call, anyio.CancelScope] = {}

    @contextmanager
    def entered(self, request: Any, id: object) -> Iterator[None]:
        """A running call, which leaves the block early when it is cancelled.

        Args:
            request: the HTTP request; None where there is none.
            id: the id of the call, which its client chose.
        """
        session = request.headers.get(SESSION) if request is not None else None
        with anyio.CancelScope() as scope:
            if session is None:
                yield
                return
            call = (request.state.caller.id, session, str(id))
            self._scopes[call] = scope
            try:
                yield
            finally:
                if self._scopes.get(call) is scope:
                    del self._scopes[call]

    def cancel(self, caller: str, session: str, id: object = None) -> None:
        """Cancel a call of a session, or all of them (None); no effect on those that have ended."""
        for call, scope in list(self._scopes.items()):
            if call[:2] == (caller, session) and id in (None, call[2]):
                scope.cancel()


class Endpoint:
    """The ASGI app at `/mcp`, around that of the MCP library.

    Args:
        app: serves one request without a session.
        calls: the running calls.
    """

    def __init__(self, app: ASGIApp, calls: RunningCalls) -> None:
        self._app, self._calls = app, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            HTTPException: neither POST nor the end of a session, or a body of too many values.
        """
        session, caller = Headers(scope=scope).get(SESSION), scope["state"]["caller"].id
        if scope["method"] == "DELETE" and session is not None:
            self._calls.cancel(caller, session)
            await Response(status_code=204)(scope, receive, send)
            return
        if scope["method"] != "POST":
            raise HTTPException(
                405, f"/mcp takes no {scope['method']}: POST a message", headers={"Allow": "POST, DELETE"}
            )
        messages = await _body(receive)
        body = b"".join(part.get("body", b"") for part in messages)
        check_values(body)
        message = _message(body)
        method, params = message.get("method"), message.get("params")
        if method == "notifications/cancelled" and session is not None and isinstance(params, dict):
            id = params.get("requestId")
            if isinstance(id, str | int):
                self._calls.cancel(caller, session, str(id))

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, _named(send) if method == "initialize" else send)


def _named(send: Send) -> Send:
    """Name the session of a client in the answer to its first message."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            MutableHeaders(scope=message)[SESSION] = secrets.token_hex(16)
        await send(message)

    return answer


async def _body(receive: Receive) -> list[Message]:
    """The body of a request in its parts, whose size the middleware limits."""
    found = [await receive()]
    while found[-1]["type"] == "http.request" and found[-1].get("more_body", False):
        found.append(await receive())
    return found


def _message(body: bytes) -> dict[str, Any]:
    """A message of those that are looked at here; empty for any other, which the MCP library judges.

    >>> _message(b'{"method": "initialize"}'), _message(b'{"method": "tools/list"}'), _message(b'["initialize"')
    ({'method': 'initialize'}, {}, {})
    """
    if len(body) > _LONGEST or not (b"initialize" in body or b"cancelled" in body):
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
