"""Several copies of the server on Ray Serve, behind one door: `pippin serve --ray --replicas 1-4`.

Notable here:
- each replica runs the very app of `create_app`; keys, limits, body sizes and slow clients are dealt with at the front
- Ray Serve sends a request again only if it never reached its replica. Here it is sent again as long as nothing of the
  answer has been passed on, so a replica that dies loses no request but those that had begun to stream
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
from pippin.serve import app as whole, logs, process
from pippin.serve.api import sse
from pippin.serve.api.errors import failure
from pippin.serve.limits import Caller
from pippin.serve.service import Service
from pippin.serve.settings import Settings

NAME = "pippin"
_TRIES = 8  # so many replicas may die under one request
_PAUSE = 0.2  # seconds before it is tried again, times the number of tries
_LOCAL = ("/health", "/ready", "/metrics")
_HEALTH_SECONDS = 2.0
_STORE = 200 * 2**20  # bytes of Ray's own store; only requests and answers pass through it


@dataclass(frozen=True)
class Forwarded:
    """One request on its way to a replica: complete, and already let in."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    caller: Caller
    id: str

    def scope(self) -> Scope:
        """The request as an app reads it."""
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
    """One copy of the server, of which Ray Serve makes an actor.

    Args:
        settings: of the server.
    """

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray awaits it
        logs.configure()
        self._app = whole.create_app(settings, door=False)
        self._service: Service = self._app.state.service
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        await self._service.prepare()
        if reason := self._service.ready():
            raise RuntimeError(reason)

    async def answer(self, request: Forwarded) -> AsyncGenerator[Message]:
        """The messages of the answer, as ASGI has them, and before the last one what it has cost."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        inbox: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
        record = logs.Record(request.id, request.method, request.path, request.caller.key_name)
        logs.current.set(record)
        scope = request.scope()

        async def receive() -> Message:
            if not inbox:
                await asyncio.Event().wait()  # for ever: if the client leaves, all of this is cancelled
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
        """Ray Serve asks this every few seconds and replaces a replica that raises or does not answer."""
        if not self._service.draining and (reason := self._service.ready()):
            raise RuntimeError(reason)

    async def __del__(self) -> None:
        with suppress(Exception):
            await self._lifespan.__aexit__(None, None, None)


class Front:
    """The app before the replicas: passes requests on, and passes them on again if their replica dies.

    Args:
        handle: of the deployment of `Replica`.
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
        with self._service.elsewhere(request.caller):
            await self._forward(request, scope, _Passed(send), record)

    async def _forward(self, request: Forwarded, scope: Scope, out: _Passed, record: logs.Record) -> None:
        """Ask replicas until one answers, or one has died in the middle of its answer."""
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

    async def _ask(self, request: Forwarded, scope: Scope, out: _Passed, record: logs.Record) -> None:
        """One try."""
        answer = self._handle.answer.remote(request)
        cost: Message | None = None
        try:
            async for message in answer:
                if message["type"] == "cost":
                    cost = message
                    scope["route"] = SimpleNamespace(path=cost["route"])  # for the door's figures
                    continue
                await out.send(message)
                if cost is not None:  # then that was the last
                    self._count(request.caller, cost, record)
                    return
        except asyncio.CancelledError:
            answer.cancel()
            raise

    def _count(self, caller: Caller, cost: Message, record: logs.Record) -> None:
        record.model, record.usage, record.first_token = cost["model"], cost["usage"], cost["first"]
        if record.model:
            self._service.metrics.count_usage(record.model, record.usage)
            self._service.metrics.written(record.usage.output_tokens)
            self._service.limits.charge(caller, record.usage.input_tokens + record.usage.output_tokens)


class _Passed:
    """What has gone to the client: nothing, before there is something of the answer's body too."""

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


def deploy(settings: Settings, low: int, high: int, *, cpus: float | None = None) -> Any:
    """Start replicas on the running Ray; return their handle once all of them are ready.

    Args:
        settings: of the server; rates and quotas hold for all replicas together, everything else for each.
        low: fewest replicas.
        high: most; more than ``low`` lets Ray Serve add some while the slots of those that run are taken.
        cpus: cores of one replica; None shares those of this machine among ``high``.

    Raises:
        InvalidArgument: what needs one process was asked for.
    """
    from ray import serve

    if settings.seal_key is not None:
        raise InvalidArgument("a sealed request opens at the replica that made the key; run one server without --ray")
    share = cpus or max(1, devices.threads() // high)
    gpus = 1 if (settings.device or "").startswith("cuda") else 0
    one = replace(settings, requests_per_minute=None, tokens_per_minute=None, tokens_per_day=None)
    scaling: dict[str, Any] = {"num_replicas": low}
    if high > low:
        limits = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": settings.slots}
        scaling = {"autoscaling_config": limits}
    deployment: Any = serve.deployment(Replica)
    made = deployment.options(
        name="Replica",
        max_ongoing_requests=settings.slots + settings.queue,
        max_queued_requests=max(1, settings.queue),
        ray_actor_options={"num_cpus": share, "num_gpus": gpus},
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        **scaling,
    )
    serve.start(http_options={"location": "NoServer"})
    return serve.run(made.bind(one), name=NAME, route_prefix=None)


def front(settings: Settings, handle: Any) -> tuple[ASGIApp, Service]:
    """The app that a client talks to, and the service that counts for it."""
    service = Service(settings)
    service.prepared = True
    return whole.behind_door(Front(handle, service), service), service


def run(settings: Settings, low: int, high: int, *, announce: Callable[[str], None]) -> None:
    """Serve with replicas until a signal says to stop; joins the cluster of ``RAY_ADDRESS``, or starts one here.

    Raises:
        MissingDependency: ray is not installed.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise MissingDependency("replicas need ray: pip install 'pippin[ray,serve]'") from error
    listener = process.listen(settings)
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {}
    if address is None:
        local = {"include_dashboard": False, "num_cpus": max(devices.threads(), high), "object_store_memory": _STORE}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        handle = deploy(settings, low, high, cpus=None if address is None else 1)
        app, service = front(settings, handle)
        listener.listen(process.BACKLOG)
        announce(process.url_of(listener))
        process.run(app, listener, service)
    finally:
        listener.close()
        if ray.is_initialized():
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()
