"""The server without HTTP: admission, queueing, execution and cancellation of requests.

Notable here:
- a request runs in a worker thread; its events are passed to the event loop, and a client that disconnects cancels it
  before its next token
- a slot of the batch is free when its worker thread has ended, so that the counts are always true
- errors that are known before the first token are raised by the first step of the iterator, so that HTTP can still set
  its status
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pippin.core.errors import GuardrailViolation, Overloaded, PippinError, RateLimited, UnsupportedCapability
from pippin.core.threads import use_threads
from pippin.serve import guardrails, logs, model_loading
from pippin.serve.active_request import ActiveRequest
from pippin.serve.limits import Caller, Limits
from pippin.serve.metrics import Metrics, Reading
from pippin.serve.model_pool import LoadedModel, ModelInfo, ModelPool
from pippin.serve.settings import ServerSettings
from pippin.serve.task_model import TaskModel
from pippin.session.providers.provider import Done, ProviderEvent, ProviderRequest, ReasoningDelta, TextDelta
from pippin.session.response import Usage

if TYPE_CHECKING:
    from pippin.engine.engine_stats import EngineStats
    from pippin.session.providers.local import LocalModel

__all__ = ["Caller", "ModelInfo", "Service"]

T = TypeVar("T")

_THREADS = 512  # more than can ever run: admission is bounded per model
_TEXTS_AT_ONCE = 16  # texts in one pass of an encoder, after which cancellation is checked
# name, description, field of `EngineStats`
_ENGINE_METRICS = (
    ("pippin_cache_tokens_used", "Tokens in the cache of a model", "cache_tokens_used"),
    ("pippin_cache_tokens_capacity", "Tokens that fit into the cache of a model", "cache_tokens_capacity"),
    ("pippin_cache_blocks", "Blocks of the cache of a model", "blocks_total"),
    ("pippin_cache_blocks_free", "Free blocks of the cache", "blocks_free"),
    ("pippin_cache_blocks_cached", "Blocks of the prefix cache that no request uses now", "blocks_cached"),
    ("pippin_state_bytes", "Memory of the states of recurrent layers", "state_bytes_used"),
    ("pippin_passes_total", "Forward passes of the model", "steps"),
    ("pippin_prefix_hits_total", "Requests whose prompt began with a cached prefix", "prefix_hits"),
    ("pippin_preemptions_total", "Requests preempted because the cache was full", "preempted"),
    ("pippin_drafted_tokens_total", "Draft tokens proposed by speculative decoding", "drafted"),
    ("pippin_accepted_tokens_total", "Draft tokens that became part of an answer", "accepted"),
)


class Service:
    """All functions of a server, for one event loop.

    Args:
        settings: the server's settings.
        load: returns a `LocalModel` or a `LanguageModel` for a reference; None loads from disk.
        load_encoder: returns a `TextEncoder` for a reference; None loads from disk.
        encoders: names of encoders, besides those whose files identify them.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        load: Callable[[str], Any] | None = None,
        load_encoder: Callable[[str], Any] | None = None,
        encoders: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.clock = settings, clock
        if settings.threads is not None:
            use_threads(settings.threads)
        self.limits = Limits(settings, clock=clock)
        self.metrics = Metrics(self._readings, clock)
        self.pool = ModelPool(
            settings,
            load=model_loading.language_loader(settings, load, lambda: self.pool.cache_bytes),
            load_encoder=load_encoder or model_loading.encoder_loader(settings),
            encoders=encoders,
            memory_needed=model_loading.memory_needed(settings) if load is None else None,
            least_memory=model_loading.least_memory(settings) if load is None else None,
            clock=clock,
        )
        self._guardrails = guardrails.guardrails(settings.guardrails)
        self.draining = False
        self.began = time.time()
        self._active_requests: set[ActiveRequest] = set()
        self._outstanding: Counter[str] = Counter()  # by model: admitted and not ended, including worker threads
        self._of_caller: Counter[str] = Counter()
        self.prepared: Exception | bool = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="request")

    # --- state --------------------------------------------------------------------------------------------------------

    def models(self) -> list[ModelInfo]:
        """All models that requests may name."""
        return self.pool.models()

    @property
    def active(self) -> int:
        """Requests that are running, or about to."""
        return sum(min(count, self.settings.max_num_seqs) for count in self._outstanding.values())

    @property
    def waiting(self) -> int:
        """Requests that wait in the queue."""
        return self._outstanding.total() - self.active

    async def prepare(self) -> None:
        """Load the default model, so that the first request need not wait for it; `ready` reports the result."""
        try:
            name, _ = self.pool.resolve("")
            self.pool.release(await self.pool.acquire(name))
            self.prepared = True
        except Exception as error:  # of any kind: nothing awaits this task, so it must be logged here
            self.prepared = error
            known = isinstance(error, PippinError)
            why = {"error": type(error).__name__, "reason": str(error)} if known else {}
            fields = {"model": self.settings.default} | why
            logs.log.error("model not loaded", extra={"fields": fields}, exc_info=None if known else error)

    def ready(self) -> str:
        """Why no request should be sent to this server now; empty if it is ready."""
        if self.draining:
            return "the server is about to stop"
        if isinstance(self.prepared, PippinError):
            return str(self.prepared)
        if isinstance(self.prepared, Exception):
            return f"{self.settings.default} could not be loaded; the log says why"
        return "" if self.prepared else f"{self.settings.default} is being loaded"

    def stats(self) -> dict[str, Any]:
        """Statistics for the web page."""
        engines = self._engines().values()
        return {
            "tokens_per_second": round(self.metrics.tokens_per_second, 2),
            "active": self.active,
            "waiting": self.waiting,
            "max_num_seqs": self.settings.max_num_seqs,
            "max_queued_requests": self.settings.max_queued_requests,
            "draining": self.draining,
            "uptime_seconds": round(time.time() - self.began, 1),
            "cache": {
                "tokens_used": sum(now.cache_tokens_used for now in engines),
                "tokens_capacity": sum(now.cache_tokens_capacity for now in engines),
            },
            "memory": {"models": self.pool.nbytes, "budget": self.pool.budget},
            "models": [
                {
                    "id": one.id,
                    "kind": one.kind,
                    "loaded": one.loaded,
                    "context_size": one.context_size,
                    "bytes": one.nbytes,
                }
                for one in self.models()
            ],
        }

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(
        self, model: str, build: Callable[[LocalModel], ProviderRequest], caller: Caller, *, priority: int = 0
    ) -> AsyncIterator[ProviderEvent]:
        """Answer one request; closing or cancelling the iterator ends it and frees its slot.

        Args:
            model: "NAME" or "NAME:ADAPTER".
            build: makes the provider request, in a worker thread.
            caller: the sender of the request.
            priority: -10 to 10; higher priorities run first.

        Raises:
            ModelNotFound: the server has no such model.
            Overloaded: the queue is full, or the server is shutting down.
            RateLimited: the caller has reached its number of concurrent requests.
            TimedOut: the answer was not complete in time.
            GuardrailViolation: a rule blocked the prompt or the answer.
            PippinError: whatever ``build`` and the provider raise.
        """
        request = self._new_request(model, caller, priority)
        with self._outcome(request):
            loaded = await self._enter(request)
            self._start(request, loaded, lambda: self._stream_events(request, loaded.model, build))
            try:
                async for event in request.events():
                    self._record_event(request, event)
                    yield event
            finally:
                request.cancel()

    async def embed(
        self, model: str, texts: Sequence[str], caller: Caller, *, on_texts: Callable[[int], None] | None = None
    ) -> tuple[list[list[float]], int]:
        """Embeddings of texts, one each, of length 1, and the number of input tokens.

        ``on_texts`` is called, in the worker thread, with the number of texts that were embedded since its last call.

        Raises:
            UnsupportedCapability: the model is not an encoder.
            ModelNotFound, Overloaded, RateLimited, TimedOut: as `run`.
        """
        request = self._new_request(model, caller)
        vectors: list[list[float]] = []

        def work(encoder: Any) -> None:
            for at in range(0, len(texts), _TEXTS_AT_ONCE):
                if request.cancelled:
                    return
                vectors.extend(encoder.embed(texts[at : at + _TEXTS_AT_ONCE]).tolist())
                if on_texts is not None:
                    on_texts(len(texts[at : at + _TEXTS_AT_ONCE]))
            request.post(Done("stop", Usage(input_tokens=sum(encoder.token_count(texts)))))

        await self._run_to_end(request, work, encoder=True)
        return vectors, request.usage.input_tokens

    async def task(
        self,
        model: str,
        work: Callable[[TaskModel], T],
        caller: Caller,
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> T:
        """Run any work with a model as one request, such as a text task of several calls, in a worker thread.

        Args:
            model: as for `run`.
            work: called with the model; on cancellation or timeout, its calls end before their next token.
            caller: the sender of the request.
            on_tokens: called, in the worker thread, with the number of tokens of each part of an answer.

        Raises:
            UnsupportedCapability: the model is an encoder.
            ModelNotFound, Overloaded, RateLimited, TimedOut: as `run`. PippinError: whatever ``work`` raises.
        """
        request = self._new_request(model, caller)
        found: list[T] = []

        def change(provider_request: ProviderRequest) -> ProviderRequest:
            request.provider_request = replace(
                provider_request, owner=caller.id, adapter=request.adapter_or(provider_request.adapter)
            )
            if request.cancelled:  # before the provider request existed
                provider_request.cancel.set()
            return request.provider_request

        def run(provider: LocalModel) -> None:
            watched = TaskModel(provider, change, on_tokens)
            try:
                found.append(work(watched))
            finally:
                request.post(Done("stop", watched.usage))

        await self._run_to_end(request, run)
        return found[0]

    # --- admission and execution --------------------------------------------------------------------------------------

    def _new_request(self, model: str, caller: Caller, priority: int = 0) -> ActiveRequest:
        name, adapter = self.pool.resolve(model)
        return ActiveRequest(name, adapter, caller, self.settings.request_timeout, self.clock, priority=priority)

    async def _run_to_end(self, request: ActiveRequest, work: Callable[[Any], None], *, encoder: bool = False) -> None:
        """Run work as a request that returns nothing before it is done."""
        with self._outcome(request):
            loaded = await self._enter(request, encoder=encoder)
            self._start(request, loaded, lambda: work(loaded.model))
            try:
                async for event in request.events():
                    self._record_event(request, event)
            finally:
                request.cancel()

    async def _enter(self, request: ActiveRequest, *, encoder: bool = False) -> LoadedModel:
        """Wait for a model of the required kind and a slot of its batch; `_start` must follow."""
        self._admit(request)
        loaded = None
        try:
            async with asyncio.timeout(request.seconds_left):
                loaded = await self.pool.acquire(request.model, request.adapter)
                if request.model == self.settings.default:
                    self.prepared = True  # also if the first try had failed
                if (loaded.kind == "encoder") != encoder:
                    what = "no encoder and makes no embeddings" if encoder else "an encoder and cannot write"
                    raise UnsupportedCapability(f"{request.model} is {what}; name another model")
                await loaded.admission.enter(request.caller.id, request.priority)
        except BaseException as error:
            if loaded is not None:
                self.pool.release(loaded)
            self._drop(request)
            if isinstance(error, TimeoutError) and not isinstance(error, PippinError):
                raise request.timed_out() from None
            raise
        request.entered = self.clock()
        self.metrics.queued.labels(request.model).observe(request.entered - request.began)
        return loaded

    def _admit(self, request: ActiveRequest, *, bounded: bool = True) -> None:
        """Admit a request, or reject it."""
        settings, caller = self.settings, request.caller.id
        if self.draining:
            raise Overloaded("the server is about to stop; ask another, or again later", retry_after=5.0)
        if settings.max_requests_per_caller is not None and self._of_caller[caller] >= settings.max_requests_per_caller:
            raise RateLimited(
                f"{settings.max_requests_per_caller} requests of this caller are running or waiting already; wait for "
                "one of them",
                retry_after=self.metrics.wait_estimate(0, settings.max_num_seqs),
            )
        if (
            bounded
            and self._outstanding[request.model] >= settings.max_num_seqs
            and self.waiting >= settings.max_queued_requests
        ):
            raise Overloaded(
                f"{request.model} answers {settings.max_num_seqs} requests and {self.waiting} are waiting, "
                "which is as many as may; try again later",
                retry_after=self.metrics.wait_estimate(self.waiting, settings.max_num_seqs),
            )
        self._outstanding[request.model] += 1
        self._of_caller[caller] += 1

    def _start(self, request: ActiveRequest, loaded: LoadedModel, work: Callable[[], None]) -> None:
        """Run in a worker thread; the slot is free again when the thread has ended."""
        loop = asyncio.get_running_loop()
        self._active_requests.add(request)
        request.start(loop)

        def run() -> None:
            try:
                work()
            except BaseException as error:
                request.post(error)
            else:
                request.post(None)

        task = loop.run_in_executor(self._threads, run)
        task.add_done_callback(lambda done: self._finished(request, loaded))

    def _finished(self, request: ActiveRequest, loaded: LoadedModel) -> None:
        self._active_requests.discard(request)
        self.metrics.in_slot(self.clock() - request.entered)
        self._count(request)
        loaded.admission.leave()
        self.pool.release(loaded)
        self._drop(request)

    def _drop(self, request: ActiveRequest) -> None:
        for counter, key in ((self._outstanding, request.model), (self._of_caller, request.caller.id)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]

    # --- in the worker thread -----------------------------------------------------------------------------------------

    def _stream_events(
        self, request: ActiveRequest, provider: LocalModel, build: Callable[[LocalModel], ProviderRequest]
    ) -> None:
        """Build the provider request, in the worker thread, and pass on its events."""
        provider_request = build(provider)
        if self._guardrails is not None:
            provider_request = guardrails.checked_request(self._guardrails, provider_request)
        tools = provider_request.tools and provider_request.options.tool_calling != "disallowed"
        suitable = provider_request.adapter or (provider.task_adapter("tools") if tools else None)
        provider_request = request.provider_request = replace(
            provider_request, owner=request.caller.id, adapter=request.adapter_or(suitable), priority=request.priority
        )
        if self.settings.log_prompts and request.record is not None:
            request.record.texts["prompt"] = provider_request.transcript.model_dump(mode="json")["entries"]
        if request.cancelled:  # before the provider request existed
            provider_request.cancel.set()
        events, written = provider.stream(provider_request), guardrails.TokenCounter()
        if self._guardrails is not None:
            events = guardrails.guarded(self._guardrails, provider_request, written.counted(events))
        try:
            for event in events:
                request.post(event)
        except GuardrailViolation:  # its tokens are still charged
            request.usage = Usage(provider.token_count(provider_request), 0, written.tokens)
            raise
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()

    @contextmanager
    def count_elsewhere(self, caller: Caller) -> Iterator[None]:
        """Count a request of a caller that another process answers.

        Raises:
            Overloaded, RateLimited: as `run`.
        """
        request = ActiveRequest("", None, caller, self.settings.request_timeout, self.clock)
        self._admit(request, bounded=False)
        try:
            yield
        finally:
            self._drop(request)

    # --- usage and metrics --------------------------------------------------------------------------------------------

    def _record_event(self, request: ActiveRequest, event: ProviderEvent) -> None:
        """Count an event before it is passed on."""
        if isinstance(event, TextDelta | ReasoningDelta):
            if request.first_token is None:
                request.first_token = self.clock()
                if request.record is not None and request.record.first_token is None:
                    request.record.first_token = request.first_token - request.began
                self.metrics.first_token.labels(request.model).observe(request.first_token - request.began)
            self.metrics.written(len(event.tokens) if isinstance(event, TextDelta) else 1)
            if self.settings.log_prompts and request.record is not None and isinstance(event, TextDelta):
                request.record.texts["answer"] = request.record.texts.get("answer", "") + event.text
        elif isinstance(event, Done):
            self._count(request)

    def _count(self, request: ActiveRequest) -> None:
        """Charge the tokens of a request, once."""
        if request.counted:
            return
        request.counted = True
        if request.record is not None:
            request.record.usage += request.usage
        self.metrics.count_usage(request.model, request.usage)
        self.limits.charge(request.caller, request.usage.input_tokens + request.usage.output_tokens)
        if request.first_token is not None and request.usage.output_tokens > 1:
            seconds = self.clock() - request.first_token
            self.metrics.rate.labels(request.model).observe(request.usage.output_tokens / max(seconds, 1e-6))

    @contextmanager
    def _outcome(self, request: ActiveRequest) -> Iterator[None]:
        """Count the outcome of a request, and its duration."""
        outcome = "complete"
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self.metrics.requests.labels(request.model, outcome).inc()
            self.metrics.duration.labels(request.model).observe(self.clock() - request.began)

    def _engines(self) -> dict[str, EngineStats]:
        """Statistics of the engines, by model."""
        engines = {name: loaded.engine for name, loaded in self.pool.loaded.items()}
        return {name: engine.stats() for name, engine in engines.items() if engine is not None}

    def _readings(self) -> list[Reading]:
        """The gauges, and the counters of the engines."""
        loaded, engines = self.pool.loaded.values(), self._engines()

        def engine_values(field: str) -> dict[str, float]:
            return {name: getattr(now, field) for name, now in engines.items()}

        return [
            ("pippin_requests_active", "Requests that are being answered", "", {"": self.active}),
            ("pippin_requests_waiting", "Requests in the queue", "", {"": self.waiting}),
            ("pippin_max_num_seqs", "Requests that one model answers at once", "", {"": self.settings.max_num_seqs}),
            ("pippin_draining", "1 while the server is about to stop", "", {"": float(self.draining)}),
            ("pippin_models_loaded", "Models in memory", "", {"": len(loaded)}),
            ("pippin_model_bytes", "Memory of a model", "model", {one.name: one.nbytes for one in loaded}),
            ("pippin_memory_budget_bytes", "Memory that models may take", "", {"": self.pool.budget}),
            ("pippin_memory_used_bytes", "Memory that models and full caches take", "", {"": self.pool.nbytes}),
            ("pippin_process_memory_bytes", "Resident memory of the process", "", {"": process_memory()}),
            (
                "pippin_tokens_per_second_now",
                "Tokens generated per second over the last five seconds",
                "",
                {"": self.metrics.tokens_per_second},
            ),
            *((name, text, "model", engine_values(field)) for name, text, field in _ENGINE_METRICS),
        ]

    # --- shutdown -----------------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> bool:
        """Reject new requests, wait for running ones, and cancel what is not done in time; True if all was done."""
        self.draining = True
        end = self.clock() + seconds
        while self._outstanding and self.clock() < end:
            await asyncio.sleep(0.02)
        done = not self._outstanding
        for request in list(self._active_requests):
            request.abort(Overloaded("the server stops; ask another, or again later", retry_after=1.0))
        return done

    def close(self) -> None:
        """Free all resources; running requests end before their next token."""
        self.draining = True
        for request in list(self._active_requests):
            request.cancel()
        self.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def process_memory() -> int:
    """Resident memory of this process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)
