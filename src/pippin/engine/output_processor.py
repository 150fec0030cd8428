"""From logits to tokens and text for one request, and the reason why its answer ends.

Notable here:
- a request is checked before its first token is computed, so that one that cannot be answered costs nothing
- order of the hooks on the logits: repetition, frequency and presence penalty, logit bias, constraint, then
  temperature, top-k, top-p, min-p, sampling
- tokens that a grammar forces are appended without a pass of the model
- reasoning comes before all that: a grammar, stop strings and log-probabilities begin with the answer
- speculative decoding only changes how many rows of logits come at once: each row goes through the same hooks in the
  same order, and the rows behind the first rejected draft token are ignored
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import ContextOverflow, InvalidArgument
from pippin.engine.decoding.detokenizer import Detokenizer
from pippin.engine.decoding.sampling import Sampler
from pippin.engine.decoding.thinking import AnswerTags, ThinkingPhase
from pippin.engine.decoding.token_ids import check_token_ids, common_prefix
from pippin.engine.grammar.constraint import Constraint
from pippin.engine.options import SamplingOptions
from pippin.engine.request import Finished, FinishReason, Request, Token
from pippin.engine.speculation.drafts import CachePosition, Draft
from pippin.language.language_model import LanguageModel


def check(model: LanguageModel, prompt: Sequence[int], options: SamplingOptions, context_size: int) -> None:
    """Raise for a request that cannot be answered with ``context_size`` tokens.

    Raises:
        InvalidArgument: an empty prompt, or an id outside the vocabulary (in ``logit_bias`` too).
        ContextOverflow: prompt and answer do not fit.
    """
    if not len(prompt):
        raise InvalidArgument("the prompt is empty; give at least one token")
    need = len(prompt) + (options.max_tokens or 1)
    if need > context_size:
        answer = f"max_tokens {options.max_tokens}" if options.max_tokens else "at least one token of answer"
        holder = (
            f"the context of {model.name}"
            if context_size >= model.context_size
            else "the engine's cache (cache_tokens)"
        )
        raise ContextOverflow(
            f"a prompt of {len(prompt):,} tokens and {answer} need {need:,} tokens, {holder} holds {context_size:,}; "
            "shorten "
            "the prompt, lower max_tokens or take another model",
            context_size=context_size,
            token_count=need,
        )
    check_token_ids(model, prompt)
    if options.logit_bias:
        check_token_ids(model, list(options.logit_bias))


class OutputProcessor:
    """The answer to one request: samples its tokens, detokenizes them, and knows when to stop.

    Args:
        model: the model whose logits are processed.
        request: the request, after `check`.
        context_size: tokens that prompt and answer may take together.

    Attributes:
        max_tokens: longest answer, in tokens.
        num_tokens: tokens of the answer so far.
        num_cached_tokens: tokens of the prompt that were not computed for this request; set by the scheduler.
        finish_reason: why the answer ended; None while it goes on.
        end_token, end_logprob: the end token that ended it, and its log-probability if they are reported.
        drafted, accepted: draft tokens of speculative decoding, and those of them that were accepted.

    Raises:
        SchemaError, UnsupportedGuide, EmptySchema: the grammar cannot be used.
        InvalidArgument, VocabularyMismatch: the speculation cannot be used with this model.
    """

    def __init__(self, model: LanguageModel, request: Request, context_size: int) -> None:
        self.began = time.perf_counter()
        self.model, self.options = model, request.options
        self.prompt_tokens = len(request.prompt)
        max_tokens = context_size - self.prompt_tokens
        self.max_tokens = min(self.options.max_tokens or max_tokens, max_tokens)
        self._speculation = (
            None if request.speculation is None else request.speculation.begin(model, request.options, request.owner)
        )
        self.constraint: Constraint | None = None
        if request.grammar is not None:
            self.constraint = request.grammar.start(model.tokenizer)
        self._thinking: ThinkingPhase | None = None
        self._after_thinking: Constraint | None = None
        if (thinking := request.thinking) is not None and (thinking.begun or self.constraint is None):
            encode, exact = partial(model.tokenizer.encode, control=True), self.constraint is not None
            self._thinking = ThinkingPhase(thinking, encode, self.max_tokens, exact=exact)
            self.constraint, self._after_thinking = None, self.constraint
        self.text = Detokenizer(self.options.stop)
        self._tags = AnswerTags(*(("", "") if thinking is None else thinking.around))
        self._spell = model.tokenizer.token_bytes if request.skip_special_tokens else model.tokenizer.spelled_bytes
        prompt, extras = request.prompt, request.extras()
        if extras is not None:
            prompt = [key for key in extras.keys(prompt) if key >= 0]
        self.sampler = Sampler(self.options, prompt, model.vocab_size)
        self.finish_reason: FinishReason | None = None
        self.end_token: int | None = None
        self.end_logprob: float | None = None
        self.num_tokens = self.num_cached_tokens = self.drafted = self.accepted = 0
        self.prompt_seconds = self.first_token_seconds = 0.0

    def prompt_done(self) -> None:
        """Record the time at which the prompt was computed."""
        self.prompt_seconds = time.perf_counter() - self.began

    @property
    def drafts_with_target(self) -> bool:
        """Whether `propose` needs the position of the sequence in the model's own cache."""
        return self._speculation is not None and self._speculation.drafts_with_target

    def propose(self, token_ids: Sequence[int], max_tokens: int, position: CachePosition | None = None) -> Draft | None:
        """Draft tokens, to be verified in one pass with the last token; None if there is no draft.

        Args:
            token_ids: prompt and answer so far; from one call to the next, tokens are only appended.
            max_tokens: longest draft; a draft is shorter at the end of the answer, or after drafts were rejected.
            position: position of the sequence in the target model's own cache, which self-speculation needs. Its block
                table holds ``len(token_ids) + max_tokens`` tokens.

        Raises:
            DecodingFailure: the constraint leaves no token.
        """
        if self._speculation is None:
            return None
        max_tokens = min(max_tokens, self.max_tokens - self.num_tokens - 1)
        return (
            None
            if max_tokens < 1
            else self._speculation.propose(token_ids, max_tokens, self.sampler, self.constraint, position)
        )

    @torch.inference_mode()
    def process(
        self,
        logits: Float[Tensor, "rows vocab"],
        draft: Draft | None = None,
        hidden: Float[Tensor, "rows width"] | None = None,
    ) -> list[Token]:
        """The next tokens: one, those that the grammar forces after it, and the accepted ones of the draft.

        Empty at the end of the answer; ``finish_reason`` then says why.

        Args:
            logits: after the last token, and after each token of the draft; float32, on the CPU; changed in place.
            draft: the return value of `propose` for this pass.
            hidden: hidden states of the same rows, returned with the tokens; None for none.

        Raises:
            DecodingFailure: no token can be chosen.
        """
        tokens = self._step(logits[0], draft, 0, hidden)
        if draft is None:
            return tokens
        drafted, row = draft.tokens, 0
        while self.finish_reason is None and len(tokens) <= len(drafted):
            if any(token.id != drafted[at] for at, token in enumerate(tokens[row:], row)):
                break
            row = len(tokens)
            tokens += self._step(logits[row], draft, row, hidden)
        self._count(draft, tokens)
        return tokens

    def _count(self, draft: Draft, tokens: Sequence[Token]) -> None:
        """Count how many tokens of a draft were accepted."""
        accepted = common_prefix(draft.tokens, [token.id for token in tokens])
        self.drafted += len(draft.tokens)
        self.accepted += accepted
        if self._speculation is not None:
            self._speculation.update(len(draft.tokens), accepted)

    def _step(
        self, logits: Float[Tensor, vocab], draft: Draft | None, row: int, hidden: Float[Tensor, "rows width"] | None
    ) -> list[Token]:
        """The tokens that one row of logits gives; sets ``finish_reason`` at the end of the answer."""
        tokens = self._choose(logits, draft, row)
        if tokens and hidden is not None:
            tokens[0] = replace(tokens[0], hidden=hidden[row])
        self.num_tokens += len(tokens)
        if not tokens or self.text.stopped or (self.constraint is not None and self.constraint.finished):
            self.finish_reason = "stop"
        elif self.num_tokens >= self.max_tokens:
            self.finish_reason = "length"
        return tokens

    def _choose(self, logits: Float[Tensor, vocab], draft: Draft | None, row: int) -> list[Token]:
        mode = None if self.options.logprobs is None else self.options.logprobs_mode
        logprobs = None if mode in (None, "processed") else self._logprobs(logits, constrained=mode == "constrained")
        self.sampler.penalize(logits)
        if self.constraint is not None:
            self.constraint.apply(logits)
        if mode == "processed":
            logprobs = self.sampler.probabilities(logits).log().float()
        if self._speculation is None or draft is None or row >= len(draft.tokens):
            chosen = self.sampler.sample(logits)
        else:
            chosen = self._speculation.choose(logits, draft, row, self.sampler)
        self.first_token_seconds = self.first_token_seconds or time.perf_counter() - self.began
        if self._thinking is not None and not self._thinking.over:
            return self._think(self._thinking, chosen, logprobs)
        if chosen in self.model.tokenizer.eos_ids:
            self.end_token = chosen
            self.end_logprob = None if logprobs is None else float(logprobs[chosen])
            return []
        tokens = [self._token(chosen, logprobs)]
        if self.constraint is None:
            return tokens
        self.constraint.accept(chosen)
        if mode in ("raw", "processed"):
            return tokens  # forced tokens are not computed by the model, so there would be no probabilities to report
        for forced in self.constraint.forced()[: self.max_tokens - self.num_tokens - 1]:
            if forced in self.model.tokenizer.eos_ids:
                break
            self.constraint.accept(forced)
            self.sampler.observe(forced)
            token = self._token(forced, None)
            tokens.append(token if mode is None else replace(token, logprob=0.0))  # the only one that is allowed
        return tokens

    def _logprobs(self, logits: Float[Tensor, vocab], *, constrained: bool) -> Float[Tensor, vocab]:
        """The model's own log-probabilities, among the tokens that the constraint allows if ``constrained``."""
        if constrained and self.constraint is not None:
            logits = logits.clone()
            self.constraint.apply(logits)
        return logits.log_softmax(-1)

    def _think(self, phase: ThinkingPhase, chosen: int, logprobs: Float[Tensor, vocab] | None) -> list[Token]:
        """The tokens that a token of the reasoning gives: itself, or those that end the reasoning."""
        if chosen in self.model.tokenizer.eos_ids:
            if self._after_thinking is None:
                self.end_token = chosen
                return []
            ids = phase.close()  # the answer is yet to come
        else:
            ids = phase.push(chosen, self.model.tokenizer.spelled_bytes(chosen))
        if phase.withheld is not None:  # the answer has begun without reasoning
            withheld, first = self._read(phase.withheld.encode()), self._token(chosen, logprobs)
            return [replace(first, text=withheld + first.text)]
        for id in ids[ids[:1] == [chosen] :]:
            self.sampler.observe(id)
        tokens = [Token(id, "", reasoning="") for id in ids[: max(1, self.max_tokens - self.num_tokens)]]
        tokens[0] = replace(tokens[0], reasoning=phase.reasoning)
        if phase.over and phase.led:
            self._tags.open()
        if phase.answer:
            tokens[-1] = Token(tokens[-1].id, self._read(phase.answer.encode()))
        if phase.over:
            self.constraint, self._after_thinking = self._after_thinking, None
        return tokens

    def _read(self, data: bytes) -> str:
        """The text that these bytes of the answer add to what can be shown."""
        return self.text.push(self._tags.push(data))

    def _token(self, id: int, logprobs: Float[Tensor, vocab] | None) -> Token:
        text = self._read(self._spell(id))
        if logprobs is None:
            return Token(id, text)
        best, ids = logprobs.topk(self.options.logprobs or 0)
        return Token(id, text, float(logprobs[id]), tuple(zip(ids.tolist(), best.tolist(), strict=True)))

    def finished(self, finish_reason: FinishReason) -> Finished:
        """The last event of the answer."""
        phase = self._thinking
        reasoning, text = ("", "") if phase is None else phase.finish()
        return Finished(
            finish_reason,
            self._read(text.encode()) + self.text.push(self._tags.finish()) + self.text.finish(),
            self.prompt_tokens,
            self.num_cached_tokens,
            self.num_tokens,
            self.prompt_seconds,
            self.first_token_seconds,
            time.perf_counter() - self.began,
            self.drafted,
            self.accepted,
            "token" if self._speculation is None else self._speculation.exact,
            self.end_token,
            self.end_logprob,
            reasoning_tokens=0 if phase is None else phase.num_tokens,
            reasoning=reasoning,
        )
