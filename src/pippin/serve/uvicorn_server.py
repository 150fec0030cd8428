"""The server process: its socket, timeouts for slow clients, and graceful shutdown.

Notable here:
- the headers of a request and the reading of an answer have timeouts, after which the connection is closed
- the first signal lets running answers finish while new requests are rejected; the second ends at once
- a requested shutdown is success: exit code 0; where a worker is stuck and nothing more is closed, the process is ended
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Generator
from dataclasses import asdict
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from pippin.core.errors import InvalidArgument
from pippin.core.trust import privacy
from pippin.serve import logs
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings

BACKLOG = 2048  # connections that the system queues until they are accepted
_LONGEST_HEAD = 64 * 1024  # bytes
_LINGER = 5  # seconds for written data to be read, once all requests have ended
_CLOSING = 20  # seconds after that to free models and write prompt caches
_UNSENT = 16 * 1024  # bytes of an answer that wait in the system for the client
_Protocol: Any = AutoHTTPProtocol  # the installed implementation decides which of the two it is
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def uvicorn_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """The configuration of uvicorn for an app."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=patient_protocol(settings),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.max_connections,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(settings.header_timeout)),
        timeout_graceful_shutdown=_LINGER,
        h11_max_incomplete_event_size=_LONGEST_HEAD,
        lifespan="on",
    )


def _keep_little(transport: asyncio.Transport) -> None:
    """Let the system accept little beyond what the client has room for; its buffers hide an unread answer."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)


def patient_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol with timeouts for slow clients.

    The headers must arrive within ``header_timeout`` and have at most 64 KiB; something of an answer must be read every
    ``write_timeout``.
    """

    class Protocol(_Protocol):  # type: ignore[misc]
        _head: asyncio.TimerHandle | None = None
        _stall: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # whatever the system does not accept at once counts as unread
            _keep_little(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head, self._stall):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._wait_for_head()
            super().data_received(data)
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                self._head_bytes = 0
                if self._head is not None:
                    self._head.cancel()
                    self._head = None
                return
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

        def _wait_for_head(self) -> None:
            if self._head is None:
                self._head = self.loop.call_later(settings.header_timeout, self.transport.abort)

        def _watch(self, unread: int) -> None:
            if self._stall is not None:
                self._stall.cancel()
            self._stall = self.loop.call_later(settings.write_timeout, self._check, unread)

        def _check(self, before: int) -> None:
            now = self.transport.get_write_buffer_size()
            if now >= before:
                self.transport.abort()
            else:
                self._watch(now)

    return Protocol


class Server(uvicorn.Server):
    """Uvicorn with a graceful shutdown: it finishes running requests before it closes its socket."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service, self._stopping = service, False
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while the server runs."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown; the second time, stop."""
        if self._stopping:
            os._exit(128 + sig)
        self._stopping = self._service.draining = True
        # Python waits for every worker at its end, and one that is stuck would keep the process forever.
        seconds = self._service.settings.drain_timeout + _LINGER + _CLOSING
        watchdog = threading.Timer(seconds, self._end, (128 + sig,))
        watchdog.daemon = True
        watchdog.start()

    def _end(self, code: int) -> None:
        stuck = [thread.name for thread in threading.enumerate() if not thread.daemon]
        logs.log.error("ended by force", extra={"fields": {"stuck": stuck}})
        os._exit(code)

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn's periodic tick, ten times a second."""
        if self._stopping and self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_exit())
        return await super().on_tick(counter)

    async def _drain_and_exit(self) -> None:
        done = await self._service.drain(self._service.settings.drain_timeout)
        logs.log.info("stopping", extra={"fields": {"all_answered": done}})
        self.should_exit = True


def listen(settings: ServerSettings) -> socket.socket:
    """A socket at the address of the settings, which does not accept connections yet.

    Raises:
        InvalidArgument: the address is taken, not this machine's, or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidArgument(
            f"cannot listen on {settings.host} port {settings.port}: {reason}; choose another host or port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: ASGIApp, listener: socket.socket, service: Service) -> None:
    """Serve an app until a signal stops it; ``service`` knows whether requests are still running."""
    logs.configure()
    if service.settings.stateless or service.settings.seal_key is not None:
        logs.log.info("hardened", extra={"fields": asdict(privacy.harden())})
    Server(uvicorn_config(app, service.settings), service).run(sockets=[listener])
