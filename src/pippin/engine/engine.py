"""The engine: one thread answers many requests at once; requests join and leave between two passes.

Notable here:
- a step is one pass over the new tokens of all requests, packed end to end: the `Scheduler` plans it, a `Runner`
  computes it, and each request's `OutputProcessor` samples its next token
- computed blocks are reused by later requests of the same owner, adapter and weights (prefix caching)
- an error of one request reaches its caller only; an error of a pass reaches the callers of that pass, and the engine
  continues with an empty cache
- layers with a sliding window have block tables of their own, and give back the blocks that no token sees any more
- recurrent layers have a state instead of keys and values, which can be used only at the end of the text that it was
  computed from: snapshots are cached at block boundaries
- with a batch-invariant runner, a request's answer is bit-identical whatever the batch, the chunks of its prompt, the
  preemptions and the cache; with torch it is the same except where two logits differ by less than rounding errors
- nothing polls: callers wait for events, and can be interrupted; the thread ends when there are no requests
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument, PippinError, UnsupportedModel
from pippin.engine import output_processor
from pippin.engine.cache import prompt_cache as files
from pippin.engine.cache.prefix_tree import CachedSequence, CacheKey
from pippin.engine.cache_size import engine_size
from pippin.engine.engine_stats import EngineStats
from pippin.engine.experts.expert_store import ExpertStore
from pippin.engine.experts.memory_share import MemoryShare, close_store, open_store
from pippin.engine.experts.prompt_experts import ExpertChoice, PromptExperts
from pippin.engine.kv_eviction import cache_file
from pippin.engine.kv_eviction.bounded_cache import BoundedCache, make_bounded
from pippin.engine.kv_eviction.policy import CachePolicy
from pippin.engine.loop import EngineLoop
from pippin.engine.model_runner import BLOCK_SIZE, KVCacheDtype, KVCacheDtypeChoice
from pippin.engine.options import SamplingOptions
from pippin.engine.output_processor import OutputProcessor
from pippin.engine.prompt_extras import PromptExtras
from pippin.engine.recommended_sampling import recommended, resolved
from pippin.engine.request import Finished, Request, Token
from pippin.engine.runners.native_experts import ExpertSource
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.select import make_runner
from pippin.engine.scheduling import continuation_scores
from pippin.engine.scheduling.continuation_scores import Scores
from pippin.engine.scheduling.request_state import EventStream, RequestState
from pippin.engine.scheduling.scheduler import Scheduler
from pippin.language.language_model import LanguageModel

if TYPE_CHECKING:
    from pippin.engine.neurons.neuron_share import PlacedNeurons


class Engine:
    """Runs one model for many requests at once; every method may be called from any thread.

    Sampling state belongs to the request: its random numbers, penalties and grammar depend on no other request.

    Args:
        model: a model that `pippin.load` returned.
        max_num_seqs: requests that run at the same time; fewer do where a budget of the model has no room for so many.
        max_waiting: requests that may wait in the queue; one more raises `Overloaded`.
        max_num_batched_tokens: prompt tokens computed in one pass, None for 256 on a CPU, 1,024 on an accelerator, and
            up to 2,048 with experts in storage; a quarter of it while a request is decoding.
        cache_tokens: capacity of the cache in tokens, at least 16 for each of ``max_num_seqs``; unused blocks take no
            memory. None for the full context of each sequence, or for a quarter of the free memory (of what a budget of
            the model leaves) if that is less. No request may be longer.
        kv_cache_dtype: precision of keys and values; "auto" for the one that suits the model.
        enable_prefix_caching: whether computed blocks, and states of recurrent layers, are cached for later requests.
        experts: how prompts choose the experts of a mixture, for requests that name none; not for scores. None for all.
        prompt_cache: a file from which the prefix cache is loaded, if it exists, and to which it is saved when the
            engine is closed; None for neither.

    Attributes:
        context_size: tokens that prompt and answer may take together.
        kv_cache_dtype: precision of keys and values.
        expert_store: brings the experts that are in storage; None where all are in memory.
        neuron_store: brings the neurons that are in storage; None where all are in memory.
        recommended_sampling: fields of `SamplingOptions` that the model recommends to requests that name none.

    Raises:
        InvalidArgument: a number outside its range, fewer ``cache_tokens`` than sequences need, or ``experts`` for
            another model.
        UnsupportedModel: prompts cannot choose experts of this model.
        NotEnoughMemory: there is no memory for the cache, or a budget of the model leaves less for it.
        InvalidInput, CorruptedFile, PromptCacheMismatch: the prompt cache, or the recommended sampling, cannot be used.
    """

    @checked
    def __init__(
        self,
        model: LanguageModel,
        *,
        max_num_seqs: PositiveInt = 8,
        max_waiting: NonNegativeInt = 64,
        max_num_batched_tokens: PositiveInt | None = None,
        cache_tokens: int | None = None,
        kv_cache_dtype: KVCacheDtypeChoice = "auto",
        enable_prefix_caching: bool = True,
        experts: PromptExperts | None = None,
        prompt_cache: str | Path | None = None,
    ) -> None:
        if cache_tokens is not None and cache_tokens < max_num_seqs * BLOCK_SIZE:
            raise InvalidArgument(
                f"cache_tokens must be at least {max_num_seqs * BLOCK_SIZE}, one block of {BLOCK_SIZE} for each of "
                f"{max_num_seqs} sequences, got {cache_tokens}"
            )
        if model.placement is not None and any(other.holds(model) for other in list(_engines)):
            raise InvalidArgument(f"the memory of {model.name} is that of another engine; close it first")
        if experts is not None:
            experts.check(model)
        size = engine_size(
            model,
            max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            cache_tokens=cache_tokens,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.model, self.max_waiting, self.experts = model, max_waiting, experts
        self.recommended_sampling = recommended(model.source)
        self.max_num_batched_tokens = size.max_num_batched_tokens
        self.prompt_cache = None if prompt_cache is None else Path(prompt_cache)
        if self.prompt_cache is not None:
            files.check_writable(self.prompt_cache)
        self._runner = make_runner(model, size.num_blocks, kv_cache_dtype, model.cache_layout.cache_groups)
        self.kv_cache_dtype: KVCacheDtype = self._runner.kv_cache_dtype
        self._scheduler = Scheduler(
            size.max_num_seqs,
            size.max_num_batched_tokens,
            size.num_blocks,
            self._runner.copy,
            enable_prefix_caching=enable_prefix_caching,
            windows=self._runner.windows,
            max_snapshots=size.max_snapshots,
            max_scored_rows=size.max_scored_rows,
            original_max_position_embeddings=model.cache_layout.original_max_position_embeddings,
        )
        self.context_size = min(model.context_size, self._scheduler.blocks.capacity(size.num_blocks))
        self.expert_store, self._placed_neurons = self._open_store(), self._place_neurons()
        self.neuron_store = None if self._placed_neurons is None else self._placed_neurons.store
        # weights that training may change; a change invalidates cached keys and values
        self._trainable = [weight for weight in model.network.parameters() if weight.requires_grad]
        self._version = self._weights_version()
        self._loop = EngineLoop(self._runner, self._scheduler, max_waiting)
        self._closed = False
        self._lock = threading.Lock()
        _engines.add(self)
        if self.prompt_cache is not None and self.prompt_cache.exists():
            try:
                self.load_prompt_cache()
            except BaseException:
                self.prompt_cache = None  # a file that could not be used is not overwritten
                self.close()
                raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, request: Request) -> Iterator[Token | Finished]:
        """Answer a request token by token; the last event is `Finished`.

        Closing the iterator, or deleting it, ends the request within one step.

        Raises:
            InvalidArgument: an empty prompt, an id outside the vocabulary (in ``logit_bias`` too), a speculation that
                this model does not support, or embeddings, positions, steering or experts that do not fit.
            UnsupportedModel: the prompt cannot choose experts of this model.
            ContextOverflow: prompt and ``max_tokens`` do not fit the context or ``cache_tokens``.
            ModelNotFound: no adapter of this name is loaded.
            Overloaded: the queue is full, or the engine is closed.
            SchemaError, UnsupportedGuide, EmptySchema: the grammar cannot be used.
            DecodingFailure: (while iterating) no token can be chosen.
            GenerationError: (while iterating) the step that the request took part in failed.
        """
        if request.experts is None and self.experts is not None:
            request = replace(request, experts=self.experts)
        size = self._context_for(request)
        output_processor.check(self.model, request.prompt, request.options, size)
        extras = self._extras(request)
        policy = self._policy(request)
        options = resolved(request.options, self.recommended_sampling, self.model.vocab_size)
        request = replace(request, options=options)
        adapter = self.model.adapter(request.adapter)
        self._loop.refuse_if_full()
        speculation = request.speculation
        state = RequestState(
            request.prompt,
            adapter,
            output=OutputProcessor(self.model, request, size),
            owner=request.owner,
            priority=request.priority,
            max_draft_tokens=0 if speculation is None else speculation.num_speculative_tokens,
            extras=extras,
        )
        if request.cancel is not None:
            state.cancelled = request.cancel.is_set
        state.cache = request.cache
        if policy is not None:  # what reads the prompt waits until the request is sure to be taken
            state.choice = ExpertChoice(policy, self.model, request.prompt)
        self._submit(state)
        return EventStream(state)

    def bounded_cache(self, policy: CachePolicy) -> BoundedCache:
        """A cache for one long sequence, within a budget; give it to one `Request` after the other.

        Args:
            policy: what stays, such as `pippin.engine.kv_eviction.SnapKV(budget=1024)`.

        Raises:
            UnsupportedModel: this model has states, heads of several sizes, or positions that depend on the length.
            NotEnoughMemory: the engine's cache has less room than the budget.
        """
        return make_bounded(policy, self.model, self._runner)

    def save_caches(
        self, path: Path, caches: Mapping[str, BoundedCache], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> int:
        """Write bounded caches to a file; see `pippin.engine.kv_eviction.cache_file.save`."""
        return cache_file.save(path, caches, self.model, self._runner, tensors=tensors, values=values)

    def load_caches(self, path: Path) -> cache_file.Loaded:
        """Read bounded caches of a file; see `pippin.engine.kv_eviction.cache_file.load`."""
        loaded = cache_file.load(path, self.model, self._runner)
        keyed = {
            name: (tensors, numbers, None if key is None else self._with_version(key))
            for name, (tensors, numbers, key) in loaded.states.items()
        }
        return loaded._replace(states=keyed)

    def _context_for(self, request: Request) -> int:
        """Tokens that prompt and answer may take together."""
        if request.cache is None:
            return self.context_size
        if not request.cache.belongs_to(self._runner):
            raise InvalidArgument("this cache belongs to another engine; make one with bounded_cache")
        if request.speculation is not None or request.experts is not None or request.extras() is not None:
            raise InvalidArgument(
                "in a bounded cache there are no drafts, embeddings, positions, steering, masks or choices of experts, "
                "or hidden states; leave them out"
            )
        # where there is no limit, an answer is no longer than the trained context
        return request.cache.max_tokens or len(request.prompt) + self.model.context_size

    def _extras(self, request: Request) -> PromptExtras | None:
        """What a request has beside tokens, after a check."""
        extras = request.extras()
        if extras is None:
            return None
        config = self.model.config
        layered = extras.steering is not None or extras.experts is not None
        if layered and self.model.module.collectives is not None and config.tracks is not None:
            raise InvalidArgument(
                "steering and masks of experts name layers, and a process has those of some tracks only; leave them "
                "out, or answer in one process"
            )
        mixtures = [layer.experts or layer.feedforward for layer in config.layers]
        experts = [(spec.num_experts, spec.num_experts_per_tok) for spec in mixtures]
        extras.check(config.hidden_size, self.model.module, experts)
        if request.speculation is not None and request.speculation.draft != "ngram":
            raise InvalidArgument(
                "a draft model knows nothing of embeddings, positions, steering or masks of experts; leave speculation "
                "out, or take 'ngram'"
            )
        return extras

    def _policy(self, request: Request) -> PromptExperts | None:
        """How a prompt chooses experts, after a check; None where it chooses none."""
        if not isinstance(request.experts, PromptExperts):
            return None
        request.experts.check(self.model)
        if request.speculation is not None or request.embeddings:
            raise InvalidArgument(
                "where the prompt chooses experts there are neither drafts nor embeddings; leave them out"
            )
        return request.experts

    def check(self, prompt: Sequence[int], options: SamplingOptions) -> None:
        """Check a prompt; raise the errors that `stream` would raise.

        Raises:
            InvalidArgument: an empty prompt, or an id outside the vocabulary (in ``logit_bias`` too).
            ContextOverflow: prompt and answer do not fit.
        """
        output_processor.check(self.model, prompt, options, self.context_size)

    def holds(self, model: LanguageModel) -> bool:
        """Whether it is open and computes a model."""
        return self.model is model and not self._closed

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return not self._loop.closing

    def fetch_experts(self, source: ExpertSource) -> None:
        """Let a source bring the experts of a mixture, or look on; before the first request.

        Where experts are in storage, the source has to get them from `expert_store`.

        Raises:
            UnsupportedModel: the native kernels do not compute the model.
        """
        if not isinstance(self._runner, NativeRunner):
            raise UnsupportedModel(f"{self.model.name} is not packed for the native kernels; load it on a CPU")
        self._runner.fetch_experts(source)

    def prefill(
        self,
        prompt: Sequence[int],
        *,
        adapter: str | None = None,
        owner: str = "",
        cache: BoundedCache | None = None,
    ) -> int:
        """Compute a prompt, so that a request that begins with it starts sooner; return the number of its tokens.

        Args:
            prompt: token ids.
            adapter: name of the loaded adapter to compute it with.
            owner: owner of the request; see `Request`.
            cache: of `bounded_cache`, to keep it there; see `Request`.

        Raises:
            InvalidArgument, ContextOverflow, ModelNotFound, Overloaded: as `stream`.
        """
        if not prompt:
            return 0
        size = self.context_size if cache is None else self._context_for(Request(prompt, cache=cache))
        continuation_scores.check(self.model, prompt, (), size)
        state = RequestState(prompt, self.model.adapter(adapter), owner=owner)
        state.cache = cache
        return int(self._ask(state))

    def score(
        self,
        prompt: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        adapter: str | None = None,
        owner: str = "",
    ) -> list[float]:
        """Log-probability of each continuation after the prompt: the sum over its tokens, natural logarithms.

        The prompt is computed once, and the continuations share its blocks and passes. No penalty, bias or
        temperature applies, and an end token counts only if a continuation contains it.

        Args:
            prompt: token ids, at least one.
            continuations: token ids of each, at least one.
            adapter: name of the loaded adapter to score with.
            owner: owner of the request; see `Request`.

        Raises:
            InvalidArgument: an empty prompt or continuation, or an id outside the vocabulary.
            ContextOverflow: the prompt and its longest continuation do not fit.
            ModelNotFound: no adapter of this name is loaded.
            Overloaded: the queue is full, or the engine is closed.
        """
        continuation_scores.check(self.model, prompt, continuations, self._fork_size)
        if not continuations:
            return []
        scores = Scores(continuations)
        self._ask(RequestState(prompt, self.model.adapter(adapter), scores=scores, owner=owner))
        return scores.sums

    def prompt_logprobs(
        self, token_ids: Sequence[int], num_logprobs: int = 0, *, adapter: str | None = None, owner: str = ""
    ) -> list[Token]:
        """The tokens of a text, each with its log-probability given those before it (natural); the first has none.

        Args:
            token_ids: at least one.
            num_logprobs: number of likeliest tokens to report with each.
            adapter: name of the loaded adapter to score with.
            owner: owner of the request; see `Request`.

        Raises:
            InvalidArgument, ContextOverflow, ModelNotFound, Overloaded: as `score`.
        """
        rest = [token_ids[1:]] if len(token_ids) > 1 else []
        continuation_scores.check(self.model, token_ids[:1], rest, self._fork_size)
        low_rank = self.model.adapter(adapter)
        scores = Scores(rest, num_logprobs)
        if rest:
            self._ask(RequestState(token_ids[:1], low_rank, scores=scores, owner=owner))
        return [Token(token_ids[0], ""), *(token for tokens in scores.tokens for token in tokens)]

    def stats(self) -> EngineStats:
        """Counters since the start, and the present use of blocks and memory."""
        scheduler, pool, loop = self._scheduler, self._scheduler.pool, self._loop
        active = len(scheduler.running)
        used = 0 if self._closed else pool.num_blocks - pool.num_free
        return EngineStats(
            max_num_seqs=scheduler.max_num_seqs,
            active=active,
            waiting=max(0, len(loop.requests) - active),
            preempted=scheduler.num_preempted,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            prefix_hits=scheduler.prefix_hits,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_blocks - used,
            blocks_cached=0 if self._closed else len(pool.idle),
            cache_tokens_used=used * BLOCK_SIZE // len(self._runner.windows),
            cache_tokens_capacity=pool.num_blocks * BLOCK_SIZE // len(self._runner.windows),
            cache_bytes_used=used * self._runner.block_bytes,
            state_bytes_used=self._state_bytes(),
            **self._storage_counts(),
            **loop.counts,
        )

    def save_prompt_cache(self, path: str | Path | None = None) -> int:
        """Write the prefix cache to a file, for `load_prompt_cache` of an engine with the same model.

        Requests wait while it is written.

        Args:
            path: the file; None for the engine's own ``prompt_cache``.

        Returns the bytes of the file.

        Raises:
            InvalidArgument: no path here, and none given to the engine.
            DiskFull: the disk has no room for it. InvalidInput: nothing may be written there.
            Overloaded: the engine is closed.
        """
        target = self._cache_path(path)
        return self._loop.call_between_steps(
            lambda: files.save(target, self.model, self._runner, self._current_sequences())
        )

    def load_prompt_cache(self, path: str | Path | None = None) -> int:
        """Load a file of `save_prompt_cache`, as far as there are blocks; return the number of prompts in the file.

        Args:
            path: the file; None for the engine's own ``prompt_cache``.

        Raises:
            InvalidArgument: no path here, and none given to the engine.
            InvalidInput, CorruptedFile: the file cannot be read, or is damaged; the cache is then unchanged.
            PromptCacheMismatch: it was written for another model, or with another precision of the cache.
            Overloaded: the engine is closed.
        """
        source = self._cache_path(path)

        def load() -> int:
            loaded = list(map(self._restore, files.load(source, self.model, self._runner)))
            return len(loaded)

        return self._loop.call_between_steps(load)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Refuse new requests, end running ones, and free the memory. A second call has no effect.

        Args:
            drain: finish the running and waiting requests first; otherwise they are cancelled.
            timeout: seconds after which the remaining ones are cancelled; None waits for all.

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
                files.save(self.prompt_cache, self.model, self._runner, self._current_sequences())
            if self.expert_store is not None and self.model.placement is not None:
                close_store(self.model.placement, self.expert_store)
            if self._placed_neurons is not None:
                self._placed_neurons.close()
        finally:
            self._scheduler.reset()
            self._runner.close()

    def _open_store(self) -> ExpertStore | None:
        """The store of experts that are not in memory; None where all are."""
        placement = self.model.placement
        if placement is None or placement.experts is None:
            return None
        if not isinstance(self._runner, NativeRunner):
            raise UnsupportedModel(f"{self.model.name}: only the native kernels compute with experts in storage")
        share = MemoryShare(placement, self.model.config, self._runner.block_bytes // BLOCK_SIZE)
        return open_store(placement, self._runner, share)

    def _place_neurons(self) -> PlacedNeurons | None:
        """The neurons that are not in memory; None where all are."""
        placement = self.model.placement
        if placement is None or placement.neurons is None:
            return None
        from pippin.engine.neurons.neuron_share import PlacedNeurons  # with the runner in torch, which is large
        from pippin.engine.runners.torch_runner import TorchRunner

        assert isinstance(self._runner, TorchRunner)
        share = MemoryShare(placement, self.model.config, self._runner.block_bytes // BLOCK_SIZE)
        return PlacedNeurons(placement, self._runner, share)

    # --- for callers ----------------------------------------------------------------------------------------------

    def _storage_counts(self) -> dict[str, Any]:
        """What experts or neurons in storage cost so far."""
        if self.neuron_store is not None:
            found = self.neuron_store.stats
            return {
                "neuron_hits": int(found.hits.sum()),
                "neuron_misses": int((found.needed - found.hits).sum()),
                "neuron_bytes_read": int(found.bytes_read.sum()),
                "neuron_bytes_used": found.resident_bytes,
                "neuron_stall_seconds": found.stall_seconds,
            }
        if self.expert_store is None:
            return {}
        stats = self.expert_store.stats
        return {
            "expert_hits": int(stats.hits.sum()),
            "expert_misses": int(stats.misses.sum()),
            "expert_bytes_read": self.expert_store.bytes_read,
            "expert_bytes_used": self.expert_store.nbytes,
        }

    def _state_bytes(self) -> int:
        """Memory of the recurrent states of all running sequences."""
        if not self.model.cache_layout.recurrent_layers:
            return 0
        sequences = [
            sequence for state in self._scheduler.running.copy() for sequence in (state, *state.branches.copy())
        ]
        held = sum(bool(sequence.states) for sequence in sequences) + self._scheduler.tree.num_snapshots
        return held * self.model.cache_layout.state_bytes

    @property
    def _fork_size(self) -> int:
        """Maximum tokens of a prompt and a continuation: the block in which they diverge is allocated twice."""
        pool = self._scheduler.pool
        return min(self.context_size, self._scheduler.blocks.capacity(pool.num_blocks - len(self._runner.windows)))

    def _cache_path(self, path: str | Path | None) -> Path:
        chosen = self.prompt_cache if path is None else Path(path)
        if chosen is None:
            raise InvalidArgument("the engine has no prompt cache of its own; name a file")
        return chosen

    def _submit(self, state: RequestState) -> None:
        """Queue a request; clear the prefix cache first if the weights have changed."""
        with self._lock:  # the next caller waits until it is cleared
            version = self._weights_version()
            if version != self._version:
                self._loop.call_between_steps(self._scheduler.clear_prefix_cache)
                self._version = version
        # running requests hold blocks of older weights, which are not cleared; the version keeps them apart
        state.key = self._with_version(state.key)
        if state.cache is not None:
            state.cache.begin(state.token_ids, state.key)
        try:
            self._loop.submit(state)
        except BaseException:
            if state.cache is not None:
                state.cache.end()
            raise

    def _weights_version(self) -> int:
        """A number that grows with every in-place change of a weight, such as an optimizer step."""
        return sum(weight._version for weight in self._trainable)

    def _with_version(self, key: CacheKey) -> CacheKey:
        """The key, with the present version of the weights, those of its adapter included."""
        layers = () if key.adapter is None else key.adapter.changes.values()
        matrices = (matrix for layer in layers for update in layer for matrix in (update.down, update.up))
        # tensors made in inference mode have no version, and cannot be trained
        own = sum(matrix._version for matrix in matrices if not matrix.is_inference())
        return key._replace(weights_version=self._weights_version() + own)

    def _current_sequences(self) -> Iterator[CachedSequence]:
        """The cached prompts that were computed with the present weights."""
        return (one for one in self._scheduler.tree.sequences() if one[0] == self._with_version(one[0]))

    def _ask(self, state: RequestState) -> Any:
        """Queue a request that has one event (a score or a prefill), and wait for its result."""
        self._submit(state)
        events = EventStream(state)
        try:
            return next(events)
        finally:
            events.close()

    def _restore(self, loaded: files.LoadedSequence) -> None:
        """Put one prompt of a file into the prefix cache."""
        key, ids, rows, data, states = loaded
        write = self._runner.write
        self._scheduler.restore(
            self._with_version(key), ids, rows, states, lambda old, block: write([block], data[old][None])
        )


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Save the prompt caches of engines that are still open."""
    for engine in list(_engines):
        try:
            engine.close()
        except PippinError as error:  # the prompt cache could not be written, and no caller is left to raise it to
            print(f"pippin: {error}", file=sys.stderr)
