"""Middleware of every request: its id, authentication, size and time limits, and logging.

Notable here:
- a path needs a key unless it is listed as open; all keys are compared, in constant time
- a body is counted as it arrives, whatever its headers declare
- when a client disconnects, its request is cancelled, also if no answer is being streamed
- without keys, a page from another site is refused, also where the server is open to all; where it is not, only pages
  and programs of this machine are answered, even if a host name was made to resolve to it (DNS rebinding)
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pippin.core.errors import Overloaded, PippinError
from pippin.serve import logs
from pippin.serve.api.common.errors import failure
from pippin.serve.limits import Caller
from pippin.serve.service import Service
from pippin.serve.settings import is_local

_COUNTED = ("/v1/", "/mcp")  # POST to these counts as a request
_SECURITY = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_QUIET = ("/health", "/ready", "/metrics", "/v1/stats")  # requested every few seconds, not logged
_DISCARD_SECONDS = 2.0


class RequestMiddleware:
    """ASGI middleware around the whole app.

    Args:
        app: the wrapped app.
        service: its settings, limits and metrics.
        open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, service: Service, open_paths: Iterable[str] = ()) -> None:
        self.app, self.service, self.settings = app, service, service.settings
        self._open = frozenset(open_paths)
        self._keys = [(name, secret.encode()) for name, secret in self.settings.api_keys.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = logs.RequestRecord(logs.request_id(headers.get("x-request-id", "")), scope["method"], scope["path"])
        logs.current.set(record)
        inbox = _Inbox(receive, headers, self.settings.max_body_bytes, self.settings.body_timeout)
        outbox = _Outbox(send, inbox, record, lambda: self._headers(scope), lambda: self._count(scope, record))
        try:
            self._check(scope, headers, record)
        except (HTTPException, PippinError) as error:
            await failure(error).response()(scope, inbox.receive, outbox.send)
        else:
            await self._pass_on(scope, inbox, outbox, record)
        finally:
            if not outbox.ended:
                self._count(scope, record)
            self._log(scope, record)

    # --- authentication
    # ---------------------------------------------------------------------------------------------------

    def _check(self, scope: Scope, headers: Headers, record: logs.RequestRecord) -> None:
        """Reject requests that are not allowed, before any of their body is read."""
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may see another end of the body
            raise HTTPException(400, "a request has either a Content-Length or a Transfer-Encoding, not both")
        self._check_origin(headers)
        caller = self._caller(scope, headers)
        if caller is None:
            if not self._is_open(scope):
                wrong = "authorization" in headers
                what = "the API key is not one of this server's" if wrong else "an API key of this server is needed"
                raise HTTPException(401, f"{what}; it comes in the header Authorization: Bearer KEY")
            caller = Caller("nobody")
        scope.setdefault("state", {})["caller"] = caller
        record.key = caller.key_name
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.settings.max_body_bytes:
            raise too_large(self.settings.max_body_bytes)
        if scope["method"] == "POST" and _path(scope).startswith(_COUNTED):
            if self.service.draining:
                raise Overloaded("the server is about to stop; ask another, or again later", retry_after=5.0)
            self.service.limits.admit(caller)

    def _caller(self, scope: Scope, headers: Headers) -> Caller | None:
        """The caller of a request; None if it has no valid key."""
        if not self._keys:
            return Caller((scope.get("client") or ("local",))[0])
        scheme, _, given = headers.get("authorization", "").partition(" ")
        secret = given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
        found = None
        for name, known in self._keys:  # compares all keys, so that the time does not reveal which one matched
            if hmac.compare_digest(secret, known):
                found = name
        return None if found is None else Caller(f"key:{found}", found)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and _path(scope) in self._open

    def _check_origin(self, headers: Headers) -> None:
        """Without keys, reject pages of other sites, from which a browser near this machine could send requests."""
        settings = self.settings
        if self._keys:
            return
        try:
            host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
            own = urlsplit(headers.get("origin", "")).netloc == headers.get("host", "")
        except ValueError as error:
            raise HTTPException(400, f"the headers Host and Origin must be addresses: {error}") from None
        if not settings.open_to_all and not is_local(host):
            raise HTTPException(403, f"this server has no keys and answers to localhost only, not {host[:80]!r}")
        origin = headers.get("origin")
        if origin is None or origin in settings.cors_origins or "*" in settings.cors_origins:
            return
        if not own:
            raise HTTPException(403, f"this server has no keys and answers no page of {origin[:80]!r}")

    # --- request and response
    # ---------------------------------------------------------------------------------------------

    async def _pass_on(self, scope: Scope, inbox: _Inbox, outbox: _Outbox, record: logs.RequestRecord) -> None:
        """Run the app, and cancel it when the client disconnects."""
        work = asyncio.ensure_future(self._run(scope, inbox, outbox, record))
        gone = asyncio.ensure_future(inbox.watch())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if outbox.ended:  # after the last part, a client that disconnects interrupts nothing
                await asyncio.wait({work})
        finally:
            for task in (work, gone):
                if not task.done():
                    task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if work.cancelled() and not record.status:
            record.status = 499  # as nginx logs it: the client closed the connection

    async def _run(self, scope: Scope, inbox: _Inbox, outbox: _Outbox, record: logs.RequestRecord) -> None:
        try:
            await self.app(scope, inbox.receive, outbox.send)
        except Exception as error:
            record.error = type(error).__name__
            logs.log.error("unexpected error", extra={"fields": {"id": record.id}}, exc_info=error)
            if not outbox.began:  # else the answer stays incomplete, and the server closes the connection
                await failure(error).response()(scope, inbox.receive, outbox.send)

    def _headers(self, scope: Scope) -> dict[str, str]:
        extra = dict(_SECURITY)
        if _path(scope).startswith(("/v1/", "/mcp", "/metrics", "/ready")):
            extra["cache-control"] = "no-store"
        caller = scope.get("state", {}).get("caller")
        return extra | (self.service.limits.headers(caller) if caller is not None else {})

    def _count(self, scope: Scope, record: logs.RequestRecord) -> None:
        """Count a request, just before the client learns that it has ended."""
        self.service.metrics.http.labels(_route(scope), str(record.status)).inc()

    def _log(self, scope: Scope, record: logs.RequestRecord) -> None:
        quiet = _route(scope) in _QUIET and record.status in (200, 503)
        logs.log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": record.fields()})


def _path(scope: Scope) -> str:
    """The path inside the app, which may be mounted below a path of another."""
    root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _route(scope: Scope) -> str:
    """The path as declared in the route, so that ids in it create no metrics of their own."""
    return getattr(scope.get("route"), "path", None) or "other"


def too_large(limit: int) -> HTTPException:
    """The error of a body that is too large."""
    return HTTPException(413, f"the body is larger than the {limit:,} bytes that this server takes")


class _Inbox:
    """Receives the body of a request: counts and times it, then watches for the client's disconnection."""

    def __init__(self, receive: Receive, headers: Headers, limit: int, seconds: float) -> None:
        self._receive, self._limit = receive, limit
        self._announced = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        self._seconds, self._deadline = seconds, asyncio.get_running_loop().time() + seconds
        self._size = 0
        self._complete, self._gone = asyncio.Event(), asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether the whole body has arrived."""
        return self._complete.is_set()

    @property
    def is_incomplete(self) -> bool:
        """Whether a part of the body is still missing."""
        return self._announced and not self.complete

    async def receive(self) -> Message:
        """The next part of the body, then nothing until the client disconnects.

        Raises:
            HTTPException: the body is too large or too slow.
        """
        if self.complete:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body was not complete after {self._seconds:g} s") from None
        self._size += len(message.get("body", b""))
        if message["type"] == "http.disconnect":
            self._complete.set()
            self._gone.set()
        elif self._size > self._limit:
            raise too_large(self._limit)
        elif not message.get("more_body", False):
            self._complete.set()
        return message

    async def watch(self) -> None:
        """Return when the client has disconnected."""
        await self._complete.wait()
        while not self._gone.is_set():
            if (await self._receive())["type"] == "http.disconnect":
                self._gone.set()

    async def discard(self) -> None:
        """Read for a moment what a rejected client still sends, so that it can read the response."""
        left, loop = 4 * self._limit, asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(loop.time() + _DISCARD_SECONDS):
                while left > 0:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return


class _Outbox:
    """Sends the response, with the headers that every response has."""

    def __init__(
        self,
        send: Send,
        inbox: _Inbox,
        record: logs.RequestRecord,
        extra: Callable[[], dict[str, str]],
        on_end: Callable[[], None],
    ) -> None:
        self._send, self._inbox, self._record, self._extra, self._on_end = send, inbox, record, extra, on_end
        self.began = self.ended = False

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self.began, self._record.status = True, message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._record.id
            for name, value in self._extra().items():
                headers.setdefault(name, value)
            if self._inbox.is_incomplete and message["status"] >= 400:
                headers["connection"] = "close"
        elif not message.get("more_body", False) and self._inbox.is_incomplete and self._record.status >= 400:
            await self._send({**message, "more_body": True})
            await self._inbox.discard()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not self.ended:
            self.ended = True
            self._on_end()
        await self._send(message)
