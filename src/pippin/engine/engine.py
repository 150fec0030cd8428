"""The engine: one thread answers many requests at once, and each may come and go between two passes.

Notable here:
- a step is one pass over the new tokens of all requests, laid end to end; who takes part is the `Scheduler`'s matter,
  what is computed a `Runner`'s, which token follows a `Writer`'s
- whatever has been computed is found again by later requests of the same owner and adapter, whoever asked
- an error of one request reaches its caller only; an error of a pass reaches the callers of that pass, and the engine
  goes on with an empty cache
- recurrent layers keep a state in place of keys and values: it lies with its request and goes with it, and nothing is
  found again by others, since a state is of use only to the very text that it was computed from, at its very end
- where the runner is invariant, a request's answer is the same to the bit whatever the company, the cuts of its prompt,
  the preemptions and the cache; with torch it is the same except where two tokens are closer than rounding
- nothing polls: callers wait for events, and can be interrupted; the thread waits for work, and ends when there is none
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import UInt8
from torch import Tensor

from pippin.core import device as devices
from pippin.core.errors import InvalidArgument, PippinError
from pippin.engine import prompt_cache as files, scores as scoring, writer as writing
from pippin.engine.loop import Loop
from pippin.engine.radix import Key
from pippin.engine.request import Finished, Request, Token
from pippin.engine.runner import BLOCK, CacheType, make_runner, runner_class
from pippin.engine.sampling import SamplingOptions
from pippin.engine.scheduler import Scheduler
from pippin.engine.scores import Scores
from pippin.engine.sequences import Events, Job, blocks_for
from pippin.engine.writer import Writer
from pippin.language.load import LanguageModel


@dataclass(frozen=True)
class EngineStats:
    """What an `Engine` has done and is doing.

    Args:
        slots: requests that can be answered at the same time.
        active: requests with a place. waiting: requests in the queue.
        requests: taken in so far. refused: turned away because the queue was full.
        finished, cancelled, failed: how the others ended.
        preempted: how often a request was put back in the queue, because memory ran out or a higher priority came.
        prompt_tokens: tokens of the prompts of all requests that got a place. cached_tokens: those of them that were
            not computed, because they had been before. prefix_hits: requests of which that is true for some token.
        tokens_generated: tokens of all answers.
        drafted, accepted: tokens that speculation proposed, and those of them that became part of an answer.
        steps: passes.
        blocks_total: blocks of 16 tokens in the pool. blocks_free: those that hold nothing. blocks_cached: those that
            are only kept for later requests, and are given up when there is no other.
        cache_tokens_used: tokens of the blocks that hold something. cache_tokens_capacity: of all.
        cache_bytes_used: memory of the blocks that hold something.
        state_bytes_used: memory of the states of recurrent layers, which is the same for each sequence, however long.
    """

    slots: int
    active: int
    waiting: int
    requests: int
    refused: int
    finished: int
    cancelled: int
    failed: int
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    prefix_hits: int
    tokens_generated: int
    drafted: int
    accepted: int
    steps: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    cache_tokens_used: int
    cache_tokens_capacity: int
    cache_bytes_used: int
    state_bytes_used: int = 0


class Engine:
    """Runs one model for many requests at once; every method may be called from any thread.

    The choice of tokens belongs to the request: its random numbers, penalties and grammar depend on nothing else.

    Args:
        model: what `pippin.load` returned.
        slots: requests answered at the same time.
        queue: requests that may wait for a place; one more raises `Overloaded`.
        chunk: prompt tokens computed in one pass while nobody is writing, None for 256 on a CPU and 1,024 on an
            accelerator; a quarter of it while somebody is.
        cache_tokens: tokens that fit the cache, at least 16 for each slot; the cache is filled from its beginning, so
            that what is not needed takes no memory. None for the full context in every slot, or what a quarter of the
            free memory holds if that is less. No request may be longer.
        cache_type: precision of keys and values; "auto" for what suits the model.
        reuse: whether what was computed is kept for later requests; False forgets it with the request, as always where
            layers are recurrent.
        prompt_cache: a file to begin with what an earlier engine had computed, if it is there, and to leave it in when
            this one is closed; None for neither. Not for a model with recurrent layers.

    Attributes:
        context_size: tokens that prompt and answer may take together.
        cache_type: precision of keys and values.

    Raises:
        InvalidArgument: a number outside its range, an unknown precision, or a prompt cache of a recurrent model.
        NotEnoughMemory: there is no memory for the cache.
        InvalidInput, CorruptedFile, PromptCacheMismatch: the prompt cache cannot be used.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int = 8,
        queue: int = 64,
        chunk: int | None = None,
        cache_tokens: int | None = None,
        cache_type: CacheType | Literal["auto"] = "auto",
        reuse: bool = True,
        prompt_cache: str | Path | None = None,
    ) -> None:
        if slots < 1:
            raise InvalidArgument(f"slots must be at least 1, got {slots}")
        if chunk is not None and chunk < 1:
            raise InvalidArgument(f"chunk must be at least 1 token, got {chunk}")
        if queue < 0:
            raise InvalidArgument(f"queue must be 0 or more, got {queue}")
        if cache_tokens is not None and cache_tokens < slots * BLOCK:
            raise InvalidArgument(
                f"cache_tokens must be at least {slots * BLOCK}, one block of {BLOCK} for each of {slots} slots, got "
                f"{cache_tokens}"
            )
        if prompt_cache is not None:
            _check_reusable(model)
        blocks = affordable(model, slots, cache_type) if cache_tokens is None else cache_tokens // BLOCK
        self.model, self.queue = model, queue
        self.chunk = chunk or (256 if model.device.type == "cpu" else 1024)
        self.prompt_cache = None if prompt_cache is None else Path(prompt_cache)
        if self.prompt_cache is not None:
            files.check_place(self.prompt_cache)
        self._runner = make_runner(model, blocks, cache_type)
        self.cache_type: CacheType = self._runner.cache_type
        reuse = reuse and not model.config.recurrent_layers
        self._scheduler = Scheduler(slots, self.chunk, blocks, self._runner.copy, reuse=reuse)
        self.context_size = min(model.context_size, blocks * BLOCK)
        # weights that training may change, which makes what was computed with them worthless
        self._trainable = [weight for weight in model.module.parameters() if weight.requires_grad]
        self._version = self._weights_version()
        self._loop = Loop(self._runner, self._scheduler, queue)
        self._closed = False
        self._lock = threading.Lock()
        _engines.add(self)
        if self.prompt_cache is not None and self.prompt_cache.exists():
            try:
                self.load_prompt_cache()
            except BaseException:
                self.prompt_cache = None  # a file that could not be used is not written over
                self.close()
                raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, request: Request) -> Iterator[Token | Finished]:
        """Answer a request, token by token; the last event is `Finished`.

        Closing the iterator, or dropping it, ends the request within one step.

        Raises:
            InvalidArgument: an empty prompt, an id outside the vocabulary (in ``logit_bias`` too), or a speculation
                that this model cannot do.
            ContextOverflow: prompt and ``max_tokens`` do not fit the context or ``cache_tokens``.
            ModelNotFound: no adapter of this name is loaded.
            Overloaded: the queue is full, or the engine is closed.
            SchemaError, UnsupportedGuide, EmptySchema: the grammar cannot be used.
            DecodingFailure: (while iterating) no token can be chosen.
            GenerationError: (while iterating) the step that the request took part in failed.
        """
        self.check(request.prompt, request.options)
        adapter = self.model.adapter(request.adapter)
        self._loop.refuse_if_full()
        speculation = request.speculation
        job = Job(
            request.prompt,
            adapter,
            writer=Writer(self.model, request, self.context_size),
            owner=request.owner,
            priority=request.priority,
            draft_room=0 if speculation is None else speculation.tokens,
        )
        if request.cancel is not None:
            job.cancelled = request.cancel.is_set
        self._submit(job)
        return Events(job)

    def check(self, prompt: Sequence[int], options: SamplingOptions) -> None:
        """Raise what `stream` raises for this prompt, without starting.

        Raises:
            InvalidArgument: an empty prompt, or an id outside the vocabulary (in ``logit_bias`` too).
            ContextOverflow: prompt and answer do not fit.
        """
        writing.check(self.model, prompt, options, self.context_size)

    def prefill(self, prompt: Sequence[int], *, adapter: str | None = None, owner: str = "") -> int:
        """Compute a prompt: a request that begins with it starts sooner. Returns how many tokens that are.

        Raises:
            InvalidArgument, ContextOverflow, ModelNotFound, Overloaded: as `stream`.
        """
        if not prompt:
            return 0
        scoring.check(self.model, prompt, (), self.context_size)
        return int(self._ask(Job(prompt, self.model.adapter(adapter), owner=owner)))

    def score(
        self,
        prompt: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        adapter: str | None = None,
        owner: str = "",
    ) -> list[float]:
        """How likely each continuation is after the prompt: the sum of the natural logarithms of its probabilities.

        The prompt is computed once, and the continuations go through the model together. No penalty, bias or
        temperature applies, and an end token counts only where a continuation holds it.

        Args:
            prompt: token ids, at least one.
            continuations: token ids of each, at least one.
            adapter: name of the loaded adapter to score with.
            owner: for whom; see `Request`.

        Raises:
            InvalidArgument: an empty prompt or continuation, or an id outside the vocabulary.
            ContextOverflow: the prompt and its longest continuation do not fit.
            ModelNotFound: no adapter of this name is loaded.
            Overloaded: the queue is full, or the engine is closed.
        """
        scoring.check(self.model, prompt, continuations, self._fork_size)
        if not continuations:
            return []
        scores = Scores(continuations)
        self._ask(Job(prompt, self.model.adapter(adapter), scores=scores, owner=owner))
        return scores.sums

    def prompt_logprobs(
        self, ids: Sequence[int], top: int = 0, *, adapter: str | None = None, owner: str = ""
    ) -> list[Token]:
        """Each token of a text with its natural log-probability after those before it; the first has none.

        Args:
            ids: at least one.
            top: how many likeliest tokens to report with each.
            adapter: name of the loaded adapter to ask.
            owner: for whom; see `Request`.

        Raises:
            InvalidArgument, ContextOverflow, ModelNotFound, Overloaded: as `score`.
        """
        rest = [ids[1:]] if len(ids) > 1 else []
        scoring.check(self.model, ids[:1], rest, self._fork_size)
        low_rank = self.model.adapter(adapter)
        scores = Scores(rest, top)
        if rest:
            self._ask(Job(ids[:1], low_rank, scores=scores, owner=owner))
        return [Token(ids[0], ""), *(token for tokens in scores.tokens for token in tokens)]

    def stats(self) -> EngineStats:
        """Counts so far and the state of this moment."""
        scheduler, pool, loop = self._scheduler, self._scheduler.pool, self._loop
        active = len(scheduler.active)
        used = 0 if self._closed else pool.count - pool.free
        return EngineStats(
            slots=scheduler.slots,
            active=active,
            waiting=max(0, len(loop.jobs) - active),
            preempted=scheduler.preempted,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            prefix_hits=scheduler.prefix_hits,
            blocks_total=pool.count,
            blocks_free=pool.count - used,
            blocks_cached=0 if self._closed else len(pool.idle),
            cache_tokens_used=used * BLOCK,
            cache_tokens_capacity=pool.count * BLOCK,
            cache_bytes_used=used * self._runner.block_bytes,
            state_bytes_used=self._state_bytes(),
            **loop.counts,
        )

    def save_prompt_cache(self, path: str | Path | None = None) -> int:
        """Write what was computed to a file, for `load_prompt_cache` of an engine with the same model.

        Requests go on when it is written.

        Args:
            path: the file; None for the engine's own ``prompt_cache``.

        Returns the bytes of the file.

        Raises:
            InvalidArgument: no path here, and none given to the engine; or the model has recurrent layers.
            DiskFull: the disk has no room for it. InvalidInput: nothing may be written there.
            Overloaded: the engine is closed.
        """
        target = self._cache_path(path)
        return self._loop.between(
            lambda: files.save(target, self.model, self._runner, self._scheduler.tree.sequences())
        )

    def load_prompt_cache(self, path: str | Path | None = None) -> int:
        """Take in what `save_prompt_cache` wrote, as far as there is room. Returns how many prompts the file holds.

        Args:
            path: the file; None for the engine's own ``prompt_cache``.

        Raises:
            InvalidArgument: no path here, and none given to the engine; or the model has recurrent layers.
            InvalidInput, CorruptedFile: the file cannot be read, or is damaged; nothing has changed then.
            PromptCacheMismatch: another model wrote it, or with another precision of the cache.
            Overloaded: the engine is closed.
        """
        source = self._cache_path(path)

        def load() -> int:
            return sum(self._restore(*each) for each in files.load(source, self.model, self._runner))

        return self._loop.between(load)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Take no more requests, end those that run, and free the memory. Closing twice is harmless.

        Args:
            drain: answer what is running and waiting first; otherwise it is cancelled.
            timeout: seconds after which draining becomes cancelling; None waits as long as it takes.

        Raises:
            DiskFull, InvalidInput: the prompt cache could not be written; the engine is closed nevertheless.
        """
        self._loop.close(drain=drain, timeout=timeout)
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        try:
            if self.prompt_cache is not None:
                files.save(self.prompt_cache, self.model, self._runner, self._scheduler.tree.sequences())
        finally:
            self._scheduler.reset()
            self._runner.close()

    # --- for callers ----------------------------------------------------------------------------------------------

    def _state_bytes(self) -> int:
        """Memory of the states of all that is being computed."""
        if not self.model.config.recurrent_layers:
            return 0
        lines = [line for job in self._scheduler.active.copy() for line in (job, *job.branches.copy())]
        return sum(bool(line.states) for line in lines) * self.model.config.state_bytes

    @property
    def _fork_size(self) -> int:
        """Tokens of a prompt and a continuation: the block in which they part is there twice."""
        return min(self.context_size, (self._scheduler.pool.count - 1) * BLOCK)

    def _cache_path(self, path: str | Path | None) -> Path:
        _check_reusable(self.model)
        chosen = self.prompt_cache if path is None else Path(path)
        if chosen is None:
            raise InvalidArgument("the engine has no prompt cache of its own; name a file")
        return chosen

    def _submit(self, job: Job) -> None:
        """Take a job in; after what was computed with other weights than now is forgotten."""
        with self._lock:  # who comes next waits until it is forgotten
            version = self._weights_version()
            if version != self._version:
                self._loop.between(self._scheduler.forget)
                self._version = version
        self._loop.submit(job)

    def _weights_version(self) -> int:
        """Grows with every change in place of a weight, as an optimiser makes it."""
        return sum(weight._version for weight in self._trainable)

    def _ask(self, job: Job) -> Any:
        """Let a job without an answer of its own be computed in turn with the others; its result."""
        self._submit(job)
        events = Events(job)
        try:
            return next(events)
        finally:
            events.close()

    def _restore(self, key: Key, ids: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> bool:
        """Take in one prompt of a file."""
        write = self._runner.write
        self._scheduler.restore(key, ids, lambda index, block: write([block], data[index : index + 1]))
        return True


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """What an engine leaves in a file, it leaves there even if nobody closes it."""
    for engine in list(_engines):
        try:
            engine.close()
        except PippinError as error:  # the prompt cache could not be written; there is nobody left to tell
            print(f"pippin: {error}", file=sys.stderr)


def affordable(model: LanguageModel, slots: int, cache_type: CacheType | Literal["auto"] = "auto") -> int:
    """Blocks for the full context in every slot, or what a quarter of the free memory holds if that is less."""
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
    else:
        free = devices.memory().available
    # one more, because a fork needs the block twice in which it parts from its parent
    whole = slots * blocks_for(model.context_size) + 1
    block = runner_class(model).block_bytes_of(model, cache_type)
    return max(slots, min(whole, free // 4 // block)) if block else whole  # without keys a block is a mere number


def _check_reusable(model: LanguageModel) -> None:
    """Raise where what was computed of a prompt cannot be kept.

    Raises:
        InvalidArgument: the model has recurrent layers.
    """
    if model.config.recurrent_layers:
        raise InvalidArgument(
            f"{model.name} has recurrent layers, whose states cannot be found again for a part of a prompt; leave the "
            "prompt cache out"
        )


class _Kept:
    """An engine, on its model; a copy of the model begins without."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


_sharing = threading.Lock()


def shared(model: LanguageModel) -> Engine:
    """The engine of a model that all sessions over it share, made at the first call; it goes with the model.

    Raises:
        NotEnoughMemory: there is no memory for the cache.
    """
    with _sharing:
        kept: _Kept = vars(model).setdefault("_engine", _Kept())  # on the model, so that the two go together
        if kept.engine is None or kept.engine._loop.closing:
            kept.engine = Engine(model)
        return kept.engine
