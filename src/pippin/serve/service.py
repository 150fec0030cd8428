"""The server without HTTP: who may run what, where it waits, how it ends.

Notable here:
- a turn runs in a worker thread; its events cross to the event loop, and a client that leaves ends the turn before its
  next token
- the slot is free again when the thread is done with it, not when somebody says so: what is counted is what is true
- errors that can be told before the first token are raised by the first step of the iterator, so that HTTP can still
  choose its status
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

from pippin.core import device
from pippin.core.errors import GuardrailViolation, Overloaded, PippinError, RateLimited, UnsupportedCapability
from pippin.serve import guarding, loading, logs
from pippin.serve.flight import Flight
from pippin.serve.limits import Caller, Limits
from pippin.serve.metrics import Metrics, Reading
from pippin.serve.pool import Loaded, ModelInfo, ModelPool
from pippin.serve.settings import Settings
from pippin.serve.task_model import TaskModel
from pippin.session.provider import Done, ReasoningDelta, TextDelta, Turn, TurnEvent
from pippin.session.response import Usage

if TYPE_CHECKING:
    from pippin.engine.engine import EngineStats
    from pippin.session.local import LocalModel

__all__ = ["Caller", "ModelInfo", "Service"]

T = TypeVar("T")

_THREADS = 512  # more than can ever run: what is let in is bounded by the gates
_TEXTS_AT_ONCE = 16  # in one pass of an encoder, after which it looks whether anyone still waits
# name, what it is, field of `EngineStats`
_OF_ENGINES = (
    ("pippin_cache_tokens_used", "Tokens in the cache of a model", "cache_tokens_used"),
    ("pippin_cache_tokens_capacity", "Tokens that fit into it", "cache_tokens_capacity"),
    ("pippin_cache_blocks", "Blocks of the cache of a model", "blocks_total"),
    ("pippin_cache_blocks_free", "Blocks that hold nothing", "blocks_free"),
    ("pippin_cache_blocks_kept", "Blocks kept for prompts that begin alike, used by nobody now", "blocks_cached"),
    ("pippin_state_bytes", "Memory of the states of recurrent layers", "state_bytes_used"),
    ("pippin_passes_total", "Passes over the model", "steps"),
    ("pippin_prefix_hits_total", "Requests that found the beginning of their prompt computed", "prefix_hits"),
    ("pippin_preemptions_total", "Requests put back because memory ran out", "preempted"),
    ("pippin_drafted_tokens_total", "Tokens guessed ahead", "drafted"),
    ("pippin_accepted_tokens_total", "Of those, tokens that became part of an answer", "accepted"),
)


class Service:
    """All that a server does, for one event loop.

    Args:
        settings: how.
        load: gives a `LocalModel` or a `LanguageModel` for a reference; None loads from disk.
        load_encoder: gives a `TextEncoder` for a reference; None loads from disk.
        encoders: names that are encoders, beside those whose files say so.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[str], Any] | None = None,
        load_encoder: Callable[[str], Any] | None = None,
        encoders: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.clock = settings, clock
        if settings.threads is not None:
            device.use_threads(settings.threads)
        self.limits = Limits(settings, clock=clock)
        self.metrics = Metrics(self._readings, clock)
        self.pool = ModelPool(
            settings,
            load=loading.language_loader(settings, load, lambda: self.pool.cache_bytes),
            load_encoder=load_encoder or loading.encoder_loader(settings),
            encoders=encoders,
            memory_needed=loading.memory_needed(settings) if load is None else None,
            clock=clock,
        )
        self._guardrails = guarding.guardrails(settings.guardrails)
        self.draining = False
        self.began = time.time()
        self._flights: set[Flight] = set()
        self._outstanding: Counter[str] = Counter()  # by model: let in and not over, down to the last thread
        self._of_caller: Counter[str] = Counter()
        self.prepared: Exception | bool = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="request")

    # --- what is there ------------------------------------------------------------------------------------------------

    def models(self) -> list[ModelInfo]:
        """All that requests may name."""
        return self.pool.models()

    @property
    def active(self) -> int:
        """Requests in a slot, or about to be."""
        return sum(min(count, self.settings.slots) for count in self._outstanding.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._outstanding.total() - self.active

    async def prepare(self) -> None:
        """Load the default model, so that the first request need not wait for it; `ready` tells how that went."""
        try:
            name, _ = self.pool.resolve("")
            self.pool.release(await self.pool.acquire(name))
            self.prepared = True
        except Exception as error:  # of whatever kind: nobody waits for this task, so it must be told here
            self.prepared = error
            known = isinstance(error, PippinError)
            why = {"error": type(error).__name__, "reason": str(error)} if known else {}
            fields = {"model": self.settings.default} | why
            logs.log.error("model not loaded", extra={"fields": fields}, exc_info=None if known else error)

    def ready(self) -> str:
        """Why no request should be sent here now; empty if one may."""
        if self.draining:
            return "the server is about to stop"
        if isinstance(self.prepared, PippinError):
            return str(self.prepared)
        if isinstance(self.prepared, Exception):
            return f"{self.settings.default} could not be loaded; the log says why"
        return "" if self.prepared else f"{self.settings.default} is being loaded"

    def stats(self) -> dict[str, Any]:
        """What the web page shows of the server."""
        engines = self._engines().values()
        return {
            "tokens_per_second": round(self.metrics.tokens_per_second, 2),
            "active": self.active,
            "waiting": self.waiting,
            "slots": self.settings.slots,
            "queue": self.settings.queue,
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
        self, model: str, build: Callable[[LocalModel], Turn], caller: Caller, *, priority: int = 0
    ) -> AsyncIterator[TurnEvent]:
        """Answer one turn; closing or cancelling the iterator ends it and frees its slot.

        Args:
            model: "NAME" or "NAME:ADAPTER".
            build: makes the turn, in a worker thread.
            caller: who asks.
            priority: -10 to 10; higher ones go before lower ones.

        Raises:
            ModelNotFound: no such model here.
            Overloaded: the queue is full, or the server is about to stop.
            RateLimited: the caller has as many requests running as it may.
            TimedOut: the answer was not complete in time.
            GuardrailViolation: a rule blocked the prompt or the answer.
            PippinError: whatever ``build`` and the provider raise.
        """
        flight = self._flight(model, caller, priority)
        with self._outcome(flight):
            loaded = await self._enter(flight)
            self._launch(flight, loaded, lambda: self._work(flight, loaded.model, build))
            try:
                async for event in flight.events():
                    self._note(flight, event)
                    yield event
            finally:
                flight.cancel()

    async def embed(self, model: str, texts: Sequence[str], caller: Caller) -> tuple[list[list[float]], int]:
        """Vectors of texts, one each, of length 1, and the number of tokens read.

        Raises:
            UnsupportedCapability: the model is no encoder.
            ModelNotFound, Overloaded, RateLimited, TimedOut: as `run`.
        """
        flight = self._flight(model, caller)
        vectors: list[list[float]] = []

        def work(encoder: Any) -> None:
            for at in range(0, len(texts), _TEXTS_AT_ONCE):
                if flight.cancelled:
                    return
                vectors.extend(encoder.embed(texts[at : at + _TEXTS_AT_ONCE]).tolist())
            flight.post(Done("stop", Usage(input_tokens=sum(encoder.token_count(texts)))))

        await self._do(flight, work, encoder=True)
        return vectors, flight.usage.input_tokens

    async def task(self, model: str, work: Callable[[TaskModel], T], caller: Caller) -> T:
        """Do any work with a model in one slot, such as a text task of several turns, in a worker thread.

        Args:
            model: as for `run`.
            work: called with the model; when the task is cancelled or late, its turns end before their next token.
            caller: who asks.

        Raises:
            UnsupportedCapability: the model is an encoder.
            ModelNotFound, Overloaded, RateLimited, TimedOut: as `run`. PippinError: whatever ``work`` raises.
        """
        flight = self._flight(model, caller)
        found: list[T] = []

        def change(turn: Turn) -> Turn:
            flight.turn = replace(turn, owner=caller.id, adapter=flight.adapter or turn.adapter)
            if flight.cancelled:  # before the turn was there to be told
                turn.cancel.set()
            return flight.turn

        def run(provider: LocalModel) -> None:
            watched = TaskModel(provider, change)
            try:
                found.append(work(watched))
            finally:
                flight.post(Done("stop", watched.usage))

        await self._do(flight, run)
        return found[0]

    # --- the way in and out -------------------------------------------------------------------------------------------

    def _flight(self, model: str, caller: Caller, priority: int = 0) -> Flight:
        name, adapter = self.pool.resolve(model)
        return Flight(name, adapter, caller, self.settings.request_timeout, self.clock, priority=priority)

    async def _do(self, flight: Flight, work: Callable[[Any], None], *, encoder: bool = False) -> None:
        """Do work in a slot, of which nothing is passed on before it is done."""
        with self._outcome(flight):
            loaded = await self._enter(flight, encoder=encoder)
            self._launch(flight, loaded, lambda: work(loaded.model))
            try:
                async for event in flight.events():
                    self._note(flight, event)
            finally:
                flight.cancel()

    async def _enter(self, flight: Flight, *, encoder: bool = False) -> Loaded:
        """A model of the kind that is wanted, and a place in it; `_launch` must follow."""
        self._admit(flight)
        loaded = None
        try:
            async with asyncio.timeout(flight.seconds_left):
                loaded = await self.pool.acquire(flight.model, flight.adapter)
                if flight.model == self.settings.default:
                    self.prepared = True  # also where the first try had failed
                if (loaded.kind == "encoder") != encoder:
                    what = "no encoder and makes no embeddings" if encoder else "an encoder and cannot write"
                    raise UnsupportedCapability(f"{flight.model} is {what}; name another model")
                await loaded.gate.enter(flight.caller.id, flight.priority)
        except BaseException as error:
            if loaded is not None:
                self.pool.release(loaded)
            self._drop(flight)
            if isinstance(error, TimeoutError) and not isinstance(error, PippinError):
                raise flight.timed_out() from None
            raise
        flight.entered = self.clock()
        self.metrics.queued.labels(flight.model).observe(flight.entered - flight.began)
        return loaded

    def _admit(self, flight: Flight, *, bounded: bool = True) -> None:
        """Let a request in, or refuse it."""
        settings, caller = self.settings, flight.caller.id
        if self.draining:
            raise Overloaded("the server is about to stop; ask another, or again later", retry_after=5.0)
        if settings.per_caller is not None and self._of_caller[caller] >= settings.per_caller:
            raise RateLimited(
                f"{settings.per_caller} requests of this caller are running or waiting already; wait for one of them",
                retry_after=self.metrics.wait_estimate(0, settings.slots),
            )
        if bounded and self._outstanding[flight.model] >= settings.slots and self.waiting >= settings.queue:
            raise Overloaded(
                f"all {settings.slots} slots of {flight.model} are taken and {self.waiting} requests are waiting, "
                "which is as many as may; try again later",
                retry_after=self.metrics.wait_estimate(self.waiting, settings.slots),
            )
        self._outstanding[flight.model] += 1
        self._of_caller[caller] += 1

    def _launch(self, flight: Flight, loaded: Loaded, work: Callable[[], None]) -> None:
        """Run in a worker thread; the place is free again when that is done."""
        loop = asyncio.get_running_loop()
        self._flights.add(flight)
        flight.start(loop)

        def run() -> None:
            try:
                work()
            except BaseException as error:
                flight.post(error)
            else:
                flight.post(None)

        task = loop.run_in_executor(self._threads, run)
        task.add_done_callback(lambda done: self._landed(flight, loaded))

    def _landed(self, flight: Flight, loaded: Loaded) -> None:
        self._flights.discard(flight)
        self.metrics.in_slot(self.clock() - flight.entered)
        self._count(flight)
        loaded.gate.leave()
        self.pool.release(loaded)
        self._drop(flight)

    def _drop(self, flight: Flight) -> None:
        for counter, key in ((self._outstanding, flight.model), (self._of_caller, flight.caller.id)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]

    # --- in the worker thread -----------------------------------------------------------------------------------------

    def _work(self, flight: Flight, provider: LocalModel, build: Callable[[LocalModel], Turn]) -> None:
        """Build the turn and hand over its events."""
        turn = build(provider)
        if self._guardrails is not None:
            turn = guarding.checked_turn(self._guardrails, turn)
        adapter = flight.adapter or turn.adapter
        turn = flight.turn = replace(turn, owner=flight.caller.id, adapter=adapter, priority=flight.priority)
        if self.settings.log_prompts and flight.record is not None:
            flight.record.texts["prompt"] = turn.transcript.to_json()
        if flight.cancelled:  # before the turn was there to be told
            turn.cancel.set()
        events, written = provider.stream(turn), guarding.Written()
        if self._guardrails is not None:
            events = guarding.guarded(self._guardrails, turn, written.counted(events))
        try:
            for event in events:
                flight.post(event)
        except GuardrailViolation:  # what it has cost stays to be paid
            flight.usage = Usage(provider.token_count(turn), 0, written.tokens)
            raise
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()

    @contextmanager
    def elsewhere(self, caller: Caller) -> Iterator[None]:
        """Count a request of a caller that is answered by another process.

        Raises:
            Overloaded, RateLimited: as `run`.
        """
        flight = Flight("", None, caller, self.settings.request_timeout, self.clock)
        self._admit(flight, bounded=False)
        try:
            yield
        finally:
            self._drop(flight)

    # --- counting -----------------------------------------------------------------------------------------------------

    def _note(self, flight: Flight, event: TurnEvent) -> None:
        """Count what an event tells, before it is passed on."""
        if isinstance(event, TextDelta | ReasoningDelta):
            if flight.first_token is None:
                flight.first_token = self.clock()
                if flight.record is not None and flight.record.first_token is None:
                    flight.record.first_token = flight.first_token - flight.began
                self.metrics.first_token.labels(flight.model).observe(flight.first_token - flight.began)
            self.metrics.written(len(event.tokens) if isinstance(event, TextDelta) else 1)
            if self.settings.log_prompts and flight.record is not None and isinstance(event, TextDelta):
                flight.record.texts["answer"] = flight.record.texts.get("answer", "") + event.text
        elif isinstance(event, Done):
            self._count(flight)

    def _count(self, flight: Flight) -> None:
        """Count the tokens of a request, once."""
        if flight.counted:
            return
        flight.counted = True
        if flight.record is not None:
            flight.record.usage += flight.usage
        self.metrics.count_usage(flight.model, flight.usage)
        self.limits.charge(flight.caller, flight.usage.input_tokens + flight.usage.output_tokens)
        if flight.first_token is not None and flight.usage.output_tokens > 1:
            seconds = self.clock() - flight.first_token
            self.metrics.rate.labels(flight.model).observe(flight.usage.output_tokens / max(seconds, 1e-6))

    @contextmanager
    def _outcome(self, flight: Flight) -> Iterator[None]:
        """Count how a request ended, and how long it took."""
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
            self.metrics.requests.labels(flight.model, outcome).inc()
            self.metrics.duration.labels(flight.model).observe(self.clock() - flight.began)

    def _engines(self) -> dict[str, EngineStats]:
        """What the engines have done and are doing, by model."""
        engines = {name: loaded.engine for name, loaded in self.pool.loaded.items()}
        return {name: engine.stats() for name, engine in engines.items() if engine is not None}

    def _readings(self) -> list[Reading]:
        """The gauges, and what the engines count."""
        loaded, engines = self.pool.loaded.values(), self._engines()

        def of_engines(field: str) -> dict[str, float]:
            return {name: getattr(now, field) for name, now in engines.items()}

        return [
            ("pippin_requests_active", "Requests in a slot", "", {"": self.active}),
            ("pippin_requests_waiting", "Requests that wait for a slot", "", {"": self.waiting}),
            ("pippin_slots", "Requests that one model answers at once", "", {"": self.settings.slots}),
            ("pippin_draining", "1 while the server is about to stop", "", {"": float(self.draining)}),
            ("pippin_models_loaded", "Models in memory", "", {"": len(loaded)}),
            ("pippin_model_bytes", "Memory of a model", "model", {one.name: one.nbytes for one in loaded}),
            ("pippin_memory_budget_bytes", "Memory that models may take", "", {"": self.pool.budget}),
            ("pippin_memory_used_bytes", "Memory that models and full caches take", "", {"": self.pool.nbytes}),
            ("pippin_process_memory_bytes", "Resident memory of the process", "", {"": process_memory()}),
            ("pippin_tokens_per_second_now", "Tokens written lately", "", {"": self.metrics.tokens_per_second}),
            *((name, text, "model", of_engines(field)) for name, text, field in _OF_ENGINES),
        ]

    # --- the end ------------------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> bool:
        """Take nothing more in, wait for what runs, and end what is not done in time; True if all was done."""
        self.draining = True
        end = self.clock() + seconds
        while self._outstanding and self.clock() < end:
            await asyncio.sleep(0.02)
        done = not self._outstanding
        for flight in list(self._flights):
            flight.abort(Overloaded("the server stops; ask another, or again later", retry_after=1.0))
        return done

    def close(self) -> None:
        """Give everything back; what still runs ends before its next token."""
        self.draining = True
        for flight in list(self._flights):
            flight.cancel()
        self.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def process_memory() -> int:
    """Bytes of memory that this process has now."""
    import psutil

    return int(psutil.Process().memory_info().rss)
