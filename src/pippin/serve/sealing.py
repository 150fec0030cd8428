"""Sealed requests over HTTP: `GET /v1/attestation` returns a quote, `POST /v1/sealed` answers a sealed request.

Notable here:
- the inner request uses the same routes as an open one, inside this process; only its path is replaced
- every part of the answer, including its status, is sealed; in the open are 200, a media type and rounded lengths
- inner errors are sealed too; the log gets the name of the class and no text
- the API key stays in the open (in the outer headers), since limits and quotas need it
"""

from __future__ import annotations

import json
import logging
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from pippin.core.errors import InvalidArgument, SealBroken, StaleQuote
from pippin.core.trust.sealing import MEDIA_TYPE, OpenedRequest, ReplySealer, wipe
from pippin.serve.attestation import AttestedNode

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/extractions")
_LOG = logging.getLogger(__name__)
_OUTER_ONLY = {b"content-type", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"}


class _Routes(Protocol):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def router(node: AttestedNode) -> APIRouter:
    """The two routes of one node; the app that includes them answers the inner requests."""
    routes = APIRouter(tags=["sealed"])

    @routes.get("/v1/attestation", summary="A signed quote of what this node runs")
    async def quote(nonce: str, log_root: str | None = None) -> Response:
        try:
            document = node.quote(nonce, log_root)
        except InvalidArgument as error:
            return _refused(400, error)
        return JSONResponse(document, headers={"Cache-Control": "no-store"})

    @routes.post("/v1/sealed", summary="A request and its answer, sealed", response_class=Response)
    async def sealed(request: Request) -> Response:
        try:
            opened = node.open(await request.body())
        except StaleQuote as error:
            return _refused(409, error)
        except SealBroken as error:
            return _refused(400, error)
        return _Answer(request.app.router, opened)

    return routes


class _Answer(Response):
    """Runs the inner request when it is sent, and seals its messages."""

    def __init__(self, routes: _Routes, opened: OpenedRequest) -> None:
        super().__init__(media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._routes, self._opened = routes, opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        payload = self._opened.payload
        out = _Out(send, self._opened.reply, self.raw_headers)
        try:
            head, _, body = bytes(payload).partition(b"\n")
            path = _path(head)
            if path is None:
                await out.say(404, f"a sealed request may ask for {', '.join(PATHS)}")
                return
            await self._routes(_inner(scope, path, len(body)), _Body(body, receive), out)
        except Exception as error:
            # the text of an error may quote the prompt, so only its class is sent
            _LOG.error("a sealed request failed: %s", type(error).__name__)
            await out.say(500, "the server failed")
        finally:
            wipe(payload)


class _Body:
    """The body of the inner request, then the client's disconnection."""

    def __init__(self, body: bytes, outer: Receive) -> None:
        self._body: bytes | None = body
        self._outer = outer

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._outer()


class _Out:
    """Seals the messages of the inner answer: its headers, then each piece of its body."""

    def __init__(self, send: Send, reply: ReplySealer, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._reply, self._headers = send, reply, headers
        self.begun = self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self.begun = True
            head = {"status": message["status"], "headers": [_text(pair) for pair in message.get("headers", ())]}
            await self._part(json.dumps(head).encode())
        elif message["type"] == "http.response.body":
            body, is_last = message.get("body", b""), not message.get("more_body", False)
            if body or is_last:
                await self._part(body, last=is_last)

    async def say(self, status: int, text: str) -> None:
        """Send an error response; a started answer stays without its last part, which the client detects."""
        if self.begun:
            if not self.ended:
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body = json.dumps({"error": {"message": text, "type": "server_error", "code": None, "param": None}}).encode()
        headers = [(b"content-type", b"application/json")]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})

    async def _part(self, content: bytes, *, last: bool = False) -> None:
        self.ended = last
        sealed = self._reply.seal(content, last=last)
        await self._send({"type": "http.response.body", "body": sealed, "more_body": not last})


def _inner(scope: Scope, path: str, length: int) -> dict[str, Any]:
    """The ASGI scope of the inner request: the outer one, with its caller, another path and another length."""
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in _OUTER_ONLY]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    root = scope.get("app_root_path", scope.get("root_path", ""))
    state = {"state": dict(scope.get("state", {}))}
    full = root + path
    return {**scope, **state, "path": full, "raw_path": full.encode(), "headers": headers, "query_string": b""}


def _path(head: bytes) -> str | None:
    """The inner path from the first line; None for a path that is not allowed."""
    try:
        path = json.loads(head)["path"]
    except (ValueError, TypeError, KeyError):
        return None
    return path if path in PATHS else None


def _text(pair: tuple[bytes, bytes]) -> tuple[str, str]:
    return pair[0].decode("latin-1"), pair[1].decode("latin-1")


def _refused(status: int, error: Exception) -> JSONResponse:
    code = "stale_quote" if isinstance(error, StaleQuote) else "bad_seal"
    body = {"error": {"message": str(error), "type": "invalid_request_error", "code": code, "param": None}}
    return JSONResponse(body, status)
