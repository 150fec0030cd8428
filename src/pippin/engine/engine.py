"""Requests in, token events out: prefill in chunks, then one token at a time.

Notable here:
- everything is checked before the first token is computed: an impossible request costs nothing
- a prompt is computed in chunks whose boundaries do not depend on what is cached, and only whole chunks are reused;
  so a warm start gives the same logits, bit for bit, as a cold one
- what a grammar forces is fed in one pass, without asking the model
- order of the hooks on the logits: repetition, frequency and presence penalty, logit bias, constraint, then
  temperature, top-k, top-p, min-p, draw
- what one answer needs besides logits is a `Writer`, which the batching engine uses too: there is one way to generate
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import ContextOverflow, InvalidArgument
from pippin.engine import scoring
from pippin.engine.cache import DenseCache
from pippin.engine.constraint import Constraint, Grammar
from pippin.engine.sampling import Sampler, SamplingOptions
from pippin.engine.text import TextStream
from pippin.language.load import LanguageModel
from pippin.nn.lora import Adapter

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One token of the answer.

    ``text`` is what may be shown since the token before; it lags behind an incomplete character or stop string.
    ``logprob`` and ``top_logprobs`` (natural logarithms, likeliest first) are those of the model before penalty,
    constraint and temperature; None unless asked for.
    """

    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last event: why the answer ended, what it cost, and text that had been held back.

    ``reason`` is "stop" (end token, stop string or complete grammar), "length" (``max_tokens`` or the context's end)
    or "cancelled". Times are in seconds from the start of the request; ``first_token_seconds`` is 0 without a token.
    """

    reason: FinishReason
    text: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    prompt_seconds: float
    first_token_seconds: float
    total_seconds: float


@dataclass
class Prefix:
    """A cache that outlives its request, the prompt tokens whose whole chunks it holds, and with which adapter."""

    ids: list[int] = field(default_factory=list)
    cache: DenseCache | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Request:
    """What is asked.

    Args:
        prompt: token ids, at least one.
        options: how to choose tokens and when to stop.
        grammar: what the answer must look like; None for free text.
        prefix: a cache to begin from and to leave for the next request; None for a cache of its own.
        cancel: once set, the request ends before its next token.
        adapter: name of a loaded adapter to answer with; None for the plain model.
        owner: whose request it is; an engine of many shares what it has computed only among requests of one owner.
    """

    prompt: Sequence[int]
    options: SamplingOptions = SamplingOptions()
    grammar: Grammar | None = None
    prefix: Prefix | None = None
    cancel: Event | None = None
    adapter: str | None = None
    owner: str = ""


class Engine:
    """Runs one model, one request at a time.

    Args:
        model: what `pippin.load` returned.
        chunk: prompt tokens computed in one pass; None for 256 on a CPU, 1,024 on an accelerator.
    """

    def __init__(self, model: LanguageModel, *, chunk: int | None = None) -> None:
        if chunk is not None and chunk < 1:
            raise InvalidArgument(f"chunk must be at least 1 token, got {chunk}")
        self.model, self.context_size = model, model.context_size
        self.chunk = chunk or (256 if model.device.type == "cpu" else 1024)

    def stream(self, request: Request) -> Iterator[Token | Finished]:
        """Answer a request, token by token; the last event is `Finished`.

        Closing the iterator ends the request.

        Raises:
            InvalidArgument: an empty prompt, or an id outside the vocabulary (in ``logit_bias`` too).
            ContextOverflow: prompt and ``max_tokens`` do not fit the context, or the prompt leaves no room at all.
            ModelNotFound: no adapter of this name is loaded.
            DecodingFailure: (while iterating) no token can be chosen.
        """
        self.check(request.prompt, request.options)
        adapter = self.model.adapter(request.adapter)
        writer = Writer(self.model, request, self.model.context_size)
        return self._events(request, adapter, writer)

    def check(self, prompt: Sequence[int], options: SamplingOptions) -> None:
        """Raise what `stream` raises for this prompt, without starting.

        Raises:
            InvalidArgument: an empty prompt, or an id outside the vocabulary (in ``logit_bias`` too).
            ContextOverflow: prompt and answer do not fit.
        """
        check(self.model, prompt, options, self.model.context_size)

    def prefill(self, prompt: Sequence[int], prefix: Prefix, *, adapter: str | None = None, owner: str = "") -> int:
        """Compute the whole chunks of ``prompt`` into ``prefix``: a request that begins with them starts sooner.

        Returns how many tokens that are. ``owner`` is not used: a prefix belongs to whoever has it.

        Raises:
            ModelNotFound: no adapter of this name is loaded.
        """
        whole = len(prompt) // self.chunk * self.chunk
        if whole:
            low_rank = self.model.adapter(adapter)
            cache, start = self._cache([*prompt[:whole], 0], whole + 1, prefix, low_rank)
            for at in range(start, whole, self.chunk):
                self._forward(prompt[at : at + self.chunk], cache, low_rank)
            prefix.ids = list(prompt[:whole])
        return whole

    def score(
        self,
        prompt: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        prefix: Prefix | None = None,
        adapter: str | None = None,
        owner: str = "",
    ) -> list[float]:
        """How likely each continuation is after the prompt: the sum of the natural logarithms of its probabilities.

        The prompt is computed once; the continuations go through the model together. No penalty, bias or temperature
        applies, and an end token counts only where a continuation holds it.

        Args:
            prompt: token ids, at least one.
            continuations: token ids of each, at least one.
            prefix: a cache to begin from and to leave for the next request.
            adapter: name of the loaded adapter to score with.
            owner: not used here; for whom `BatchEngine` computes.

        Raises:
            InvalidArgument: an empty prompt or continuation, or an id outside the vocabulary.
            ContextOverflow: the prompt and its longest continuation do not fit.
            ModelNotFound: no adapter of this name is loaded.
        """
        scoring.check(self.model, prompt, continuations, self.model.context_size)
        if not continuations:
            return []
        low_rank = self.model.adapter(adapter)
        prefix, groups = prefix or Prefix(), scoring.groups(continuations, self.chunk)
        room = len(prompt) + scoring.room(groups)
        cache, start = self._cache(prompt, room, prefix, low_rank)
        for at in range(start, len(prompt), self.chunk):
            logits = self._forward(prompt[at : at + self.chunk], cache, low_rank)
            prefix.ids = list(prompt[: min(at + self.chunk, len(prompt)) // self.chunk * self.chunk])
        parts = scoring.scores(self.model.module, cache, logits, groups, low_rank)
        return [score for part in parts for score in part]

    def _events(self, request: Request, adapter: Adapter | None, writer: Writer) -> Iterator[Token | Finished]:
        """Prefill, then decode until something ends the answer."""
        prompt, prefix = list(request.prompt), request.prefix or Prefix()
        cancelled = request.cancel.is_set if request.cancel is not None else bool
        cache, writer.cached = self._cache(prompt, len(prompt) + writer.limit, prefix, adapter)
        for at in range(writer.cached, len(prompt), self.chunk):
            if cancelled():
                yield writer.finished("cancelled")
                return
            logits = self._forward(prompt[at : at + self.chunk], cache, adapter)
            if at + self.chunk <= len(prompt):
                prefix.ids = prompt[: at + self.chunk]
        writer.prompt_done()
        while True:
            if cancelled():
                yield writer.finished("cancelled")
                return
            tokens = writer.take(logits)
            yield from tokens
            if writer.reason is not None:
                yield writer.finished(writer.reason)
                return
            logits = self._forward([token.id for token in tokens], cache, adapter)

    def _cache(
        self, prompt: Sequence[int], capacity: int, prefix: Prefix, adapter: Adapter | None
    ) -> tuple[DenseCache, int]:
        """A cache of at least ``capacity`` tokens that begins like ``prompt``, and how many tokens of it are kept.

        Only whole chunks are kept, and at least the last token of the prompt is computed again: it gives the logits.
        """
        same = common_prefix(prefix.ids, prompt) if prefix.adapter is adapter else 0
        keep = min(same, len(prompt) - 1) // self.chunk * self.chunk
        old = prefix.cache
        if old is None or old.capacity < capacity:
            model = self.model
            prefix.cache = DenseCache(model.config, capacity, dtype=model.dtype, device=model.device)
            if old is not None:
                prefix.cache.copy_prefix(old, keep)
        elif old is not None:
            old.truncate(keep)
        prefix.ids, prefix.adapter = prefix.ids[:keep], adapter
        assert prefix.cache is not None
        return prefix.cache, keep

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], cache: DenseCache, adapter: Adapter | None) -> Float[Tensor, vocab]:
        """Logits after the last of ``ids``, float32 on the CPU."""
        batch = torch.tensor([ids], device=self.model.device)
        shares = None if adapter is None else [(adapter, slice(None))]
        logits: Tensor = self.model.module(batch, cache=cache, last=1, adapters=shares)
        return logits[0, -1].float().cpu()


def check(model: LanguageModel, prompt: Sequence[int], options: SamplingOptions, size: int) -> None:
    """Raise what cannot be asked of a model that has room for ``size`` tokens.

    Raises:
        InvalidArgument: an empty prompt, or an id outside the vocabulary (in ``logit_bias`` too).
        ContextOverflow: prompt and answer do not fit.
    """
    if not len(prompt):
        raise InvalidArgument("the prompt is empty; give at least one token")
    need = len(prompt) + (options.max_tokens or 1)
    if need > size:
        answer = f"max_tokens {options.max_tokens}" if options.max_tokens else "at least one token of answer"
        holder = f"the context of {model.name}" if size >= model.context_size else "the engine's cache (cache_tokens)"
        raise ContextOverflow(
            f"a prompt of {len(prompt):,} tokens and {answer} need {need:,} tokens, {holder} holds {size:,}; shorten "
            "the prompt, lower max_tokens or take another model",
            context_size=size,
            token_count=need,
        )
    scoring.check_ids(model, prompt)
    if options.logit_bias:
        scoring.check_ids(model, list(options.logit_bias))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


class Writer:
    """One answer on its way: takes logits, chooses tokens, knows when to stop and what it cost.

    Args:
        model: whose logits it will be given.
        request: what is asked; it was checked.
        size: tokens that prompt and answer may take together.

    Raises:
        SchemaError, UnsupportedGuide, EmptySchema: the grammar cannot be used.
    """

    def __init__(self, model: LanguageModel, request: Request, size: int) -> None:
        self.began = time.perf_counter()
        self.model, self.options = model, request.options
        self.prompt_tokens = len(request.prompt)
        room = size - self.prompt_tokens
        self.limit = min(self.options.max_tokens or room, room)
        self.constraint: Constraint | None = None
        if request.grammar is not None:
            self.constraint = request.grammar.start(model.tokenizer)
        self.text = TextStream(self.options.stop)
        self.sampler = Sampler(self.options, torch.tensor(request.prompt), model.config.vocab_size)
        self.reason: FinishReason | None = None
        self.count = self.cached = 0
        self.prompt_seconds = self.first_token_seconds = 0.0

    def prompt_done(self) -> None:
        """The prompt is computed."""
        self.prompt_seconds = time.perf_counter() - self.began

    @torch.inference_mode()
    def take(self, logits: Float[Tensor, vocab]) -> list[Token]:
        """The next token and those that the grammar forces after it; none at the end of the answer.

        When nothing can follow, ``reason`` says why.

        Args:
            logits: float32, on the CPU; changed in place.

        Raises:
            DecodingFailure: no token can be chosen.
        """
        tokens = self._choose(logits)
        self.count += len(tokens)
        if not tokens or self.text.stopped or (self.constraint is not None and self.constraint.finished):
            self.reason = "stop"
        elif self.count >= self.limit:
            self.reason = "length"
        return tokens

    def _choose(self, logits: Float[Tensor, vocab]) -> list[Token]:
        logprobs = None if self.options.logprobs is None else logits.log_softmax(-1)
        self.sampler.penalise(logits)
        if self.constraint is not None:
            self.constraint.apply(logits)
        chosen = self.sampler.choose(logits)
        self.first_token_seconds = self.first_token_seconds or time.perf_counter() - self.began
        if chosen in self.model.tokenizer.eos_ids:
            return []
        tokens = [self._token(chosen, logprobs)]
        if self.constraint is None:
            return tokens
        self.constraint.accept(chosen)
        if logprobs is not None:
            return tokens  # forced tokens are not asked of the model, so there would be no probabilities to report
        for forced in self.constraint.forced()[: self.limit - self.count - 1]:
            if forced in self.model.tokenizer.eos_ids:
                break
            self.constraint.accept(forced)
            self.sampler.note(forced)
            tokens.append(self._token(forced, None))
        return tokens

    def _token(self, id: int, logprobs: Float[Tensor, vocab] | None) -> Token:
        text = self.text.push(self.model.tokenizer.token_bytes(id))
        if logprobs is None:
            return Token(id, text)
        best, ids = logprobs.topk(self.options.logprobs or 0)
        return Token(id, text, float(logprobs[id]), tuple(zip(ids.tolist(), best.tolist(), strict=True)))

    def finished(self, reason: FinishReason) -> Finished:
        """The last event of the answer."""
        return Finished(
            reason,
            self.text.finish(),
            self.prompt_tokens,
            self.cached,
            self.count,
            self.prompt_seconds,
            self.first_token_seconds,
            time.perf_counter() - self.began,
        )
