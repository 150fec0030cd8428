"""Requests in, token events out: prefill in chunks, then one token at a time.

Notable here:
- everything is checked before the first token is computed: an impossible request costs nothing
- a prompt is computed in chunks whose boundaries do not depend on what is cached, and only whole chunks are reused;
  so a warm start gives the same logits, bit for bit, as a cold one
- what a grammar forces is fed in one pass, without asking the model
- order of the hooks on the logits: repetition penalty, constraint, then temperature, top-k, top-p, min-p, draw
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
from pippin.engine.cache import DenseCache
from pippin.engine.constraint import Constraint, Grammar
from pippin.engine.sampling import Sampler, SamplingOptions
from pippin.engine.text import TextStream
from pippin.language.load import LanguageModel

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
    """A cache that outlives its request, and the prompt tokens whose whole chunks it holds."""

    ids: list[int] = field(default_factory=list)
    cache: DenseCache | None = None


@dataclass(frozen=True)
class Request:
    """What is asked.

    Args:
        prompt: token ids, at least one.
        options: how to choose tokens and when to stop.
        grammar: what the answer must look like; None for free text.
        prefix: a cache to begin from and to leave for the next request; None for a cache of its own.
        cancel: once set, the request ends before its next token.
    """

    prompt: Sequence[int]
    options: SamplingOptions = SamplingOptions()
    grammar: Grammar | None = None
    prefix: Prefix | None = None
    cancel: Event | None = None


class Engine:
    """Runs one model, one request at a time.

    Args:
        model: what `pippin.load` returned.
        chunk: prompt tokens computed in one pass; None for 256 on a CPU, 1,024 on an accelerator.
    """

    def __init__(self, model: LanguageModel, *, chunk: int | None = None) -> None:
        if chunk is not None and chunk < 1:
            raise InvalidArgument(f"chunk must be at least 1 token, got {chunk}")
        self.model = model
        self.chunk = chunk or (256 if model.device.type == "cpu" else 1024)

    def stream(self, request: Request) -> Iterator[Token | Finished]:
        """Answer a request, token by token; the last event is `Finished`.

        Closing the iterator ends the request.

        Raises:
            InvalidArgument: an empty prompt or an id outside the vocabulary.
            ContextOverflow: prompt and ``max_tokens`` do not fit the context, or the prompt leaves no room at all.
            DecodingFailure: (while iterating) no token can be chosen.
        """
        self.check(request.prompt, request.options)
        constraint = None
        if request.grammar is not None:
            constraint = request.grammar.start(self.model.tokenizer)
        return _Run(self, request, constraint).events()

    def check(self, prompt: Sequence[int], options: SamplingOptions) -> None:
        """Raise what `stream` raises for this prompt, without starting.

        Raises:
            InvalidArgument: an empty prompt or an id outside the vocabulary.
            ContextOverflow: prompt and answer do not fit.
        """
        if not len(prompt):
            raise InvalidArgument("the prompt is empty; give at least one token")
        size, need = self.model.context_size, len(prompt) + (options.max_tokens or 1)
        if need > size:
            answer = f"max_tokens {options.max_tokens}" if options.max_tokens else "at least one token of answer"
            raise ContextOverflow(
                f"a prompt of {len(prompt):,} tokens and {answer} need {need:,} tokens, the context of "
                f"{self.model.name} holds {size:,}; shorten the prompt, lower max_tokens or take another model",
                context_size=size,
                token_count=need,
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.model.config.vocab_size:
            raise InvalidArgument(
                f"token id {low if low < 0 else high} is outside the vocabulary of {self.model.config.vocab_size:,}"
            )

    def prefill(self, prompt: Sequence[int], prefix: Prefix) -> int:
        """Compute the whole chunks of ``prompt`` into ``prefix``: a request that begins with them starts sooner.

        Returns how many tokens that are.
        """
        whole = len(prompt) // self.chunk * self.chunk
        if whole:
            cache, start = self._cache([*prompt[:whole], 0], whole + 1, prefix)
            for at in range(start, whole, self.chunk):
                self._forward(prompt[at : at + self.chunk], cache)
            prefix.ids = list(prompt[:whole])
        return whole

    def _cache(self, prompt: Sequence[int], capacity: int, prefix: Prefix) -> tuple[DenseCache, int]:
        """A cache of at least ``capacity`` tokens that begins like ``prompt``, and how many tokens of it are kept.

        Only whole chunks are kept, and at least the last token of the prompt is computed again: it gives the logits.
        """
        keep = min(common_prefix(prefix.ids, prompt), len(prompt) - 1) // self.chunk * self.chunk
        old = prefix.cache
        if old is None or old.capacity < capacity:
            model = self.model
            prefix.cache = DenseCache(model.config, capacity, dtype=model.dtype, device=model.device)
            if old is not None:
                prefix.cache.copy_prefix(old, keep)
        elif old is not None:
            old.truncate(keep)
        prefix.ids = prefix.ids[:keep]
        assert prefix.cache is not None
        return prefix.cache, keep

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], cache: DenseCache) -> Float[Tensor, vocab]:
        """Logits after the last of ``ids``, float32 on the CPU."""
        batch = torch.tensor([ids], device=self.model.device)
        logits: Tensor = self.model.module(batch, cache=cache, last=1)
        return logits[0, -1].float().cpu()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


class _Run:
    """One request on its way."""

    def __init__(self, engine: Engine, request: Request, constraint: Constraint | None) -> None:
        self.began = time.perf_counter()
        self.engine, self.constraint, self.options = engine, constraint, request.options
        self.prompt = list(request.prompt)
        room = engine.model.context_size - len(self.prompt)
        self.limit = min(self.options.max_tokens or room, room)
        self.prefix = request.prefix or Prefix()
        self.cache, self.cached = engine._cache(self.prompt, len(self.prompt) + self.limit, self.prefix)
        self.cancelled = request.cancel.is_set if request.cancel is not None else bool
        self.text = TextStream(self.options.stop)
        self.sampler = Sampler(self.options, torch.tensor(self.prompt), engine.model.config.vocab_size)
        self.count = 0
        self.prompt_seconds = self.first_token_seconds = 0.0

    def events(self) -> Iterator[Token | Finished]:
        """Prefill, then decode until something ends the answer."""
        logits = self._prefill()
        if logits is None:
            yield self._finished("cancelled")
            return
        reason: FinishReason = "length"
        while self.count < self.limit:
            if self.cancelled():
                reason = "cancelled"
                break
            tokens = self._choose(logits)
            self.count += len(tokens)
            yield from tokens
            if not tokens or self.text.stopped or (self.constraint is not None and self.constraint.finished):
                reason = "stop"
                break
            if self.count < self.limit:
                logits = self.engine._forward([token.id for token in tokens], self.cache)
        yield self._finished(reason)

    def _prefill(self) -> Tensor | None:
        """Compute the prompt; return the logits of its last token, or None if cancelled on the way."""
        size, logits = self.engine.chunk, None
        for at in range(self.cached, len(self.prompt), size):
            if self.cancelled():
                return None
            logits = self.engine._forward(self.prompt[at : at + size], self.cache)
            if at + size <= len(self.prompt):
                self.prefix.ids = self.prompt[: at + size]
        self.prompt_seconds = time.perf_counter() - self.began
        return logits

    @torch.inference_mode()
    def _choose(self, logits: Float[Tensor, vocab]) -> list[Token]:
        """The next token and those that the grammar forces after it; empty at the end of the answer."""
        logprobs = None if self.options.logprobs is None else logits.log_softmax(-1)
        self.sampler.penalise(logits)
        if self.constraint is not None:
            self.constraint.apply(logits)
        chosen = self.sampler.choose(logits)
        self.first_token_seconds = self.first_token_seconds or time.perf_counter() - self.began
        if chosen in self.engine.model.tokenizer.eos_ids:
            return []
        tokens = [self._token(chosen, logprobs)]
        if self.constraint is None:
            return tokens
        self.constraint.accept(chosen)
        if (
            logprobs is None
        ):  # the model is not asked about forced tokens, so it has no probabilities to report for them
            for forced in self.constraint.forced()[: self.limit - self.count - 1]:
                if forced in self.engine.model.tokenizer.eos_ids:
                    break
                self.constraint.accept(forced)
                self.sampler.note(forced)
                tokens.append(self._token(forced, None))
        return tokens

    def _token(self, id: int, logprobs: Float[Tensor, vocab] | None) -> Token:
        text = self.text.push(self.engine.model.tokenizer.token_bytes(id))
        if logprobs is None:
            return Token(id, text)
        best, ids = logprobs.topk(self.options.logprobs or 0)
        return Token(id, text, float(logprobs[id]), tuple(zip(ids.tolist(), best.tolist(), strict=True)))

    def _finished(self, reason: FinishReason) -> Finished:
        total = time.perf_counter() - self.began
        return Finished(
            reason,
            self.text.finish(),
            len(self.prompt),
            self.cached,
            self.count,
            self.prompt_seconds,
            self.first_token_seconds,
            total,
        )
