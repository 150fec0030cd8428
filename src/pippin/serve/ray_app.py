"""Replicas of the server on Ray Serve: `pippin serve --ray --replicas 1-4`.

Notable here:
- each replica runs the app of `create_app`; keys, limits, body sizes and slow clients are handled by the front process
- Ray Serve retries a request only if it never reached its replica. Here it is retried as long as nothing of the answer
  has been sent, so a replica that dies loses only requests that had started to stream
- Ray's own HTTP proxy is not started: the front calls the replicas through a handle, from the process of the command
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pippin.core import device as devices
from pippin.core.errors import InvalidArgument, MissingDependency, Overloaded
from pippin.serve import app as whole, logs, uvicorn_server
from pippin.serve.api.common import sse
from pippin.serve.api.common.errors import failure
from pippin.serve.limits import Caller
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings

NAME = "pippin"
_TRIES = 8  # retries of one request after a replica died
_PAUSE = 0.2  # seconds before a retry, times the number of tries
_LOCAL = ("/health", "/ready", "/metrics")
_HEALTH_SECONDS = 2.0
_STORE = 200 * 2**20  # bytes of Ray's object store; only requests and answers pass through it


@dataclass(frozen=True)
class Forwarded:
    """One complete, admitted request for a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    caller: Caller
    id: str

    def scope(self) -> Scope:
        """The ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": None,
            "server": None,
            "state": {"caller": self.caller},
        }


class Replica:
    """One replica of the server, which Ray Serve runs as an actor.

    Args:
        settings: the server's settings.
    """

    async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        logs.configure()
        self._app = whole.create_app(settings, middleware=False)
        self._service: Service = self._app.state.service
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        await self._service.prepare()
        if reason := self._service.ready():
            raise RuntimeError(reason)

    async def answer(self, request: Forwarded) -> AsyncGenerator[Message]:
        """The ASGI messages of the answer, and before the last one its usage."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        inbox: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
        record = logs.RequestRecord(request.id, request.method, request.path, request.caller.key_name)
        logs.current.set(record)
        scope = request.scope()

        async def receive() -> Message:
            if not inbox:
                await asyncio.Event().wait()  # forever: if the client disconnects, all of this is cancelled
            return inbox.pop()

        async def run() -> None:
            try:
                await self._app(scope, receive, queue.put)
            except Exception as error:
                logs.log.error("unexpected error", extra={"fields": {"id": record.id}}, exc_info=error)
            finally:
                await queue.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await queue.get()) is not None:
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    cost = {"model": record.model, "usage": record.usage, "first": record.first_token}
                    yield {"type": "cost", "route": getattr(scope.get("route"), "path", ""), **cost}
                yield message
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def check_health(self) -> None:
        """Ray Serve calls this every few seconds and replaces a replica that raises or does not answer."""
        if not self._service.draining and (reason := self._service.ready()):
            raise RuntimeError(reason)

    async def __del__(self) -> None:
        with suppress(Exception):
            await self._lifespan.__aexit__(None, None, None)


class ForwardingApp:
    """The app in front of the replicas: forwards requests, and retries them if their replica dies.

    Args:
        handle: the handle of the deployment of `Replica`.
        service: counts and limits; its own models are never loaded.
    """

    def __init__(self, handle: Any, service: Service) -> None:
        self._handle, self._service = handle.options(stream=True), service
        self._local = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        self._local.include_router(whole.operations(service))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan" or scope["path"] in _LOCAL:
            await self._local(scope, receive, send)
            return
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        else:
            return
        state, record = scope["state"], logs.current.get()
        assert record is not None
        request = Forwarded(
            scope["method"],
            scope["path"],
            scope["query_string"],
            tuple(scope["headers"]),
            bytes(body),
            state["caller"],
            record.id,
        )
        with self._service.count_elsewhere(request.caller):
            await self._forward(request, scope, _Passed(send), record)

    async def _forward(self, request: Forwarded, scope: Scope, out: _Passed, record: logs.RequestRecord) -> None:
        """Try replicas until one answers, or one has died during its answer."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError, RayServeException

        error = Overloaded("no replica of the server could answer; try again", retry_after=5.0)
        for attempt in range(1, _TRIES + 1):
            try:
                await self._ask(request, scope, out, record)
                return
            except BackPressureError:
                error = Overloaded("all replicas are busy and the queue is full; try again later", retry_after=5.0)
                break
            except (RayError, RayServeException) as broken:
                logs.log.warning("replica lost", extra={"fields": {"id": request.id, "error": type(broken).__name__}})
                if out.began:
                    await out.cut(Overloaded("the replica that wrote this answer was lost; ask again", retry_after=1.0))
                    return
                await asyncio.sleep(_PAUSE * attempt)
        await failure(error).response()(scope, _nothing, out.send)

    async def _ask(self, request: Forwarded, scope: Scope, out: _Passed, record: logs.RequestRecord) -> None:
        """Ask one replica."""
        answer = self._handle.answer.remote(request)
        cost: Message | None = None
        try:
            async for message in answer:
                if message["type"] == "cost":
                    cost = message
                    scope["route"] = SimpleNamespace(path=cost["route"])  # for the middleware's metrics
                    continue
                await out.send(message)
                if cost is not None:  # then that was the last message
                    self._count(request.caller, cost, record)
                    return
        except asyncio.CancelledError:
            answer.cancel()
            raise

    def _count(self, caller: Caller, cost: Message, record: logs.RequestRecord) -> None:
        record.model, record.usage, record.first_token = cost["model"], cost["usage"], cost["first"]
        if record.model:
            self._service.metrics.count_usage(record.model, record.usage)
            self._service.metrics.written(record.usage.output_tokens)
            self._service.limits.charge(caller, record.usage.input_tokens + record.usage.output_tokens)


class _Passed:
    """Sends messages to the client; the first one waits for the first part of the body, so that a retry is possible."""

    def __init__(self, send: Send) -> None:
        self._send, self.began, self._streams = send, False, False
        self._head: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if not self.began and self._head is not None:
            self.began = True
            kinds = [value for name, value in self._head["headers"] if name.lower() == b"content-type"]
            self._streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
            await self._send(self._head)
        await self._send(message)

    async def cut(self, error: Overloaded) -> None:
        """End an answer that cannot be completed: with an error event, or else by closing the connection."""
        if self._streams:
            await self._send({"type": "http.response.body", "body": sse.broken(error).encode(), "more_body": False})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def deploy(settings: ServerSettings, min_replicas: int, max_replicas: int, *, cpus: float | None = None) -> Any:
    """Start replicas on the running Ray; return their handle once all of them are ready.

    Args:
        settings: the server's settings; rates and quotas apply to all replicas together, everything else to each.
        min_replicas: replicas at the start, and the minimum.
        max_replicas: the maximum; more than ``min_replicas`` lets Ray Serve add some while the others are busy.
        cpus: cores of one replica; None divides those of this machine among ``max_replicas``.

    Raises:
        InvalidArgument: a setting that needs a single process.
    """
    from ray import serve

    if settings.seal_key is not None:
        raise InvalidArgument("a sealed request opens at the replica that made the key; run one server without --ray")
    share = cpus or max(1, devices.threads() // max_replicas)
    gpus = 1 if (settings.device or "").startswith("cuda") else 0
    one = replace(settings, requests_per_minute=None, tokens_per_minute=None, tokens_per_day=None)
    scaling: dict[str, Any] = {"num_replicas": min_replicas}
    if max_replicas > min_replicas:
        limits = {
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": settings.max_num_seqs,
        }
        scaling = {"autoscaling_config": limits}
    deployment: Any = serve.deployment(Replica)
    replicas = deployment.options(
        name="Replica",
        max_ongoing_requests=settings.max_num_seqs + settings.max_queued_requests,
        max_queued_requests=max(1, settings.max_queued_requests),
        ray_actor_options={"num_cpus": share, "num_gpus": gpus},
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        **scaling,
    )
    serve.start(http_options={"location": "NoServer"})
    return serve.run(replicas.bind(one), name=NAME, route_prefix=None)


def front(settings: ServerSettings, handle: Any) -> tuple[ASGIApp, Service]:
    """The app that clients connect to, and the service that counts for it."""
    service = Service(settings)
    service.prepared = True
    return whole.with_middleware(ForwardingApp(handle, service), service), service


def run(settings: ServerSettings, min_replicas: int, max_replicas: int, *, announce: Callable[[str], None]) -> None:
    """Serve with replicas until a signal stops it; joins the cluster of ``RAY_ADDRESS``, or starts one on this machine.

    Raises:
        MissingDependency: ray is not installed.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise MissingDependency("replicas need ray: pip install 'pippin[ray,serve]'") from error
    listener = uvicorn_server.listen(settings)
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {}
    if address is None:
        local = {
            "include_dashboard": False,
            "num_cpus": max(devices.threads(), max_replicas),
            "object_store_memory": _STORE,
        }
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        handle = deploy(settings, min_replicas, max_replicas, cpus=None if address is None else 1)
        app, service = front(settings, handle)
        listener.listen(uvicorn_server.BACKLOG)
        announce(uvicorn_server.url_of(listener))
        uvicorn_server.run(app, listener, service)
    finally:
        listener.close()
        if ray.is_initialized():
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()
