"""One answer on its way: from logits to tokens, text, and the reason to stop.

Notable here:
- everything is checked before the first token is computed: an impossible request costs nothing
- order of the hooks on the logits: repetition, frequency and presence penalty, logit bias, constraint, then
  temperature, top-k, top-p, min-p, draw
- what a grammar forces is written without asking the model
- speculation changes nothing but the number of rows that are taken at once: each row goes through the same hooks in
  the same order, and the rows behind the first token that differs from the draft are not looked at
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import ContextOverflow, InvalidArgument
from pippin.engine.constraint import Constraint
from pippin.engine.request import Finished, FinishReason, Request, Token
from pippin.engine.sampling import Sampler, SamplingOptions
from pippin.engine.speculation.drafts import Draft, Place
from pippin.engine.text import TextStream
from pippin.language.load import LanguageModel


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
    check_ids(model, prompt)
    if options.logit_bias:
        check_ids(model, list(options.logit_bias))


def check_ids(model: LanguageModel, ids: Sequence[int]) -> None:
    """Raise for a token id that the model does not have.

    Raises:
        InvalidArgument: an id outside the vocabulary.
    """
    low, high = min(ids), max(ids)
    if low < 0 or high >= model.config.vocab_size:
        raise InvalidArgument(
            f"token id {low if low < 0 else high} is outside the vocabulary of {model.config.vocab_size:,}"
        )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    low, high = 0, min(len(one), len(other))
    first, second = list(one[:high]), list(other[:high])
    if first == second:
        return high
    while low + 1 < high:  # the first ``low`` are alike, the first ``high`` are not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Writer:
    """One answer on its way: takes logits, chooses tokens, knows when to stop and what it cost.

    Args:
        model: whose logits it will be given.
        request: what is asked; it was checked.
        size: tokens that prompt and answer may take together.

    Attributes:
        limit: longest answer, in tokens.
        count: tokens of the answer so far.
        cached: tokens of the prompt that were not computed for this request; set by the scheduler.
        reason: why the answer ended; None while it goes on.
        drafted, accepted: tokens that speculation proposed, and those of them that became part of the answer.

    Raises:
        SchemaError, UnsupportedGuide, EmptySchema: the grammar cannot be used.
        InvalidArgument, VocabularyMismatch: the speculation cannot be used with this model.
    """

    def __init__(self, model: LanguageModel, request: Request, size: int) -> None:
        self.began = time.perf_counter()
        self.model, self.options = model, request.options
        self.prompt_tokens = len(request.prompt)
        room = size - self.prompt_tokens
        self.limit = min(self.options.max_tokens or room, room)
        self._guess = None if request.speculation is None else request.speculation.begin(model, request)
        self.constraint: Constraint | None = None
        if request.grammar is not None:
            self.constraint = request.grammar.start(model.tokenizer)
        self.text = TextStream(self.options.stop)
        self.sampler = Sampler(self.options, request.prompt, model.config.vocab_size)
        self.reason: FinishReason | None = None
        self.count = self.cached = self.drafted = self.accepted = 0
        self.prompt_seconds = self.first_token_seconds = 0.0

    def prompt_done(self) -> None:
        """The prompt is computed."""
        self.prompt_seconds = time.perf_counter() - self.began

    @property
    def drafts_here(self) -> bool:
        """Whether `propose` needs to know the sequence's place in the model's own cache."""
        return self._guess is not None and self._guess.here

    def propose(self, ids: Sequence[int], room: int, place: Place | None = None) -> Draft | None:
        """Guess what comes next, to be computed with the last token in one pass; None where nothing is guessed.

        Args:
            ids: prompt and answer so far; it only ever grows from one call to the next.
            room: at most so many tokens; fewer where ``max_tokens`` leaves fewer, or where drafts did not pay.
            place: where the sequence lies in the target's own cache, which self-speculation needs. Its table has room
                for ``len(ids) + room`` tokens.

        Raises:
            DecodingFailure: the constraint leaves no token.
        """
        if self._guess is None:
            return None
        room = min(room, self.limit - self.count - 1)
        return None if room < 1 else self._guess.propose(ids, room, self.sampler, self.constraint, place)

    @torch.inference_mode()
    def take(self, logits: Float[Tensor, "rows vocab"], draft: Draft | None = None) -> list[Token]:
        """The tokens that follow: one, what the grammar forces after it, and what holds of the draft.

        None at the end of the answer. When nothing can follow, ``reason`` says why.

        Args:
            logits: after the last token, and after each token of the draft; float32, on the CPU; changed in place.
            draft: what `propose` gave for this pass.

        Raises:
            DecodingFailure: no token can be chosen.
        """
        tokens = self._step(logits[0], draft, 0)
        if draft is None:
            return tokens
        guessed, row = draft.tokens, 0
        while self.reason is None and len(tokens) <= len(guessed):
            if any(token.id != guessed[at] for at, token in enumerate(tokens[row:], row)):
                break
            row = len(tokens)
            tokens += self._step(logits[row], draft, row)
        self._count(draft, tokens)
        return tokens

    def _count(self, draft: Draft, tokens: Sequence[Token]) -> None:
        """Remember how many tokens of a draft became part of the answer."""
        held = common_prefix(draft.tokens, [token.id for token in tokens])
        self.drafted += len(draft.tokens)
        self.accepted += held
        if self._guess is not None:
            self._guess.learn(len(draft.tokens), held)

    def _step(self, logits: Float[Tensor, vocab], draft: Draft | None, row: int) -> list[Token]:
        """What follows from one row of logits; sets ``reason`` where that is the end."""
        tokens = self._choose(logits, draft, row)
        self.count += len(tokens)
        if not tokens or self.text.stopped or (self.constraint is not None and self.constraint.finished):
            self.reason = "stop"
        elif self.count >= self.limit:
            self.reason = "length"
        return tokens

    def _choose(self, logits: Float[Tensor, vocab], draft: Draft | None, row: int) -> list[Token]:
        logprobs = None if self.options.logprobs is None else logits.log_softmax(-1)
        self.sampler.penalise(logits)
        if self.constraint is not None:
            self.constraint.apply(logits)
        if self._guess is None or draft is None or row >= len(draft.tokens):
            chosen = self.sampler.choose(logits)
        else:
            chosen = self._guess.choose(logits, draft, row, self.sampler)
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
            self.drafted,
            self.accepted,
            "token" if self._guess is None else self._guess.exact,
        )
