"""POST /v1/completions: plain text completion.

Notable here:
- the prompt is read without a chat template, and control tokens in it are parsed; token ids are accepted too
- echo with logprobs scores the prompt itself, and with max_tokens 0 nothing is generated; evaluation harnesses compare
  answers in this way
- best_of follows OpenAI's definition: more texts are generated, the most likely are returned, all are counted
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from pippin.core.errors import ContextOverflow, InvalidRequest
from pippin.serve.api.common import errors, priority as priorities, provider_requests, sse
from pippin.serve.api.common.body import JSONRoute
from pippin.serve.api.common.fields import MOST_CHOICES
from pippin.serve.api.common.generation import (
    Event,
    GeneratedAnswer,
    GenerationJob,
    OpenStream,
    collect,
    fingerprint,
    merged,
    noted,
    opened,
    total,
)
from pippin.serve.api.common.logprobs import completion_logprobs
from pippin.serve.api.common.usage import usage
from pippin.serve.api.completions import types
from pippin.serve.settings import NO_ADAPTER
from pippin.session.providers.provider import ProviderRequest, TextDelta
from pippin.session.response import Usage
from pippin.session.transcript import Prompt, Transcript

if TYPE_CHECKING:
    from pippin.engine.request import Token
    from pippin.language.language_model import LanguageModel
    from pippin.serve.service import Service
    from pippin.session.providers.local import LocalModel

DEFAULT_TOKENS = 16


class CompletionText:
    """One text to generate: a prompt and its index among the answers."""

    def __init__(
        self, body: types.CompletionRequest, prompt: str | list[int], index: int, adapter: str | None, owner: str
    ) -> None:
        self.body, self.prompt, self.index, self._adapter, self._owner = body, prompt, index, adapter, owner
        self.echoed = ""
        self.echoed_tokens: list[Token] = []
        self.limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens

    def make(self, local: LocalModel) -> ProviderRequest:
        """The provider request; with echo and logprobs it costs one pass over the prompt."""
        body, model = self.body, local.model
        ids, text = read(model, self.prompt, self.limit)
        values = provider_requests.sampling(
            body,
            local,
            answers=max(body.n or 1, body.best_of or 1),
            seed=provider_requests.seed(body.seed, self.index),
            max_tokens=max(self.limit, 1),
            logprobs=0 if body.logprobs is None and body.best_of else body.logprobs,
        )
        provider_requests.check_vocabulary(values.get("logit_bias"), model.vocab_size)
        provider_request = ProviderRequest(
            Transcript(entries=(Prompt(text),)),
            schema=provider_requests.schema(body.response_format, "response_format"),
            options=provider_requests.options(values),
            ids=tuple(ids),
        )
        local.engine.check(ids, provider_request.options)
        if body.echo:
            self.echoed = text
            if body.logprobs is not None:
                self.echoed_tokens = local.engine.prompt_logprobs(
                    ids, body.logprobs, adapter=self._adapter, owner=self._owner
                )
        return provider_request


def read(model: LanguageModel, prompt: str | list[int], limit: int) -> tuple[list[int], str]:
    """The tokens of a prompt, and its text; an empty text stands for the beginning of a document.

    Raises:
        ContextOverflow: it cannot fit, judging by its length alone.
        InvalidRequest: a token that the model does not have.
    """
    tokenizer = model.tokenizer
    least = len(prompt) if isinstance(prompt, list) else len(prompt) // tokenizer.longest_token
    if least + limit > model.context_size:
        raise ContextOverflow(
            f"the prompt is at least {least:,} tokens; with max_tokens {limit:,} it does not fit the context of "
            f"{model.name}, {model.context_size:,}",
            context_size=model.context_size,
            token_count=least + limit,
        )
    if isinstance(prompt, list):
        if max(prompt) >= model.vocab_size:
            raise InvalidRequest(
                f"prompt: token {max(prompt)} is outside the vocabulary of {model.vocab_size:,}", param="prompt"
            )
        return prompt, tokenizer.decode(prompt)
    first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = first + tokenizer.encode(prompt, control=True)
    return ids or [tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids)], prompt


def prompts(given: Any) -> list[str | list[int]]:
    """The prompts as a list.

    >>> prompts("a"), prompts(["a", "b"]), prompts([1, 2]), prompts([[1], [2]])
    (['a'], ['a', 'b'], [[1, 2]], [[1], [2]])
    """
    if given is None or isinstance(given, str):
        return [given or ""]
    return [given] if isinstance(given[0], int) else list(given)


def check(body: types.CompletionRequest) -> None:
    """Validate the combination of fields.

    Raises:
        InvalidRequest: fields that contradict each other, or a suffix.
    """
    n, best_of = body.n or 1, body.best_of
    refusals = [
        (bool(body.suffix), "suffix", "no model here fills in the middle; leave it out"),
        (best_of is not None and best_of < n, "best_of", f"{best_of} is less than n, which is {n}"),
        (best_of is not None and best_of > n and bool(body.stream), "best_of", "cannot be streamed"),
        (body.stream_options is not None and not body.stream, "stream_options", "needs stream to be true"),
        (
            len(prompts(body.prompt)) * (best_of or n) > 2 * MOST_CHOICES,
            "n",
            f"prompts times answers are more than {2 * MOST_CHOICES}",
        ),
    ]
    for refused, param, why in refusals:
        if refused:
            raise InvalidRequest(f"{param}: {why}", param=param, code="invalid_value")


def router(service: Service) -> APIRouter:
    """The route over a service."""
    routes = APIRouter(route_class=JSONRoute, tags=["completions"])

    @routes.post(
        "/v1/completions",
        operation_id="createCompletion",
        summary="Continue a text",
        response_model=types.Completion,
        responses={200: {"content": types.STREAM}, **errors.responses(*errors.ALL)},
    )
    async def create(request: Request, body: types.CompletionRequest) -> Any:
        check(body)
        caller, adapter = request.state.caller, service.pool.resolve(body.model or "")[1]
        each = body.best_of or body.n or 1
        texts = [
            CompletionText(body, prompt, index, None if adapter == NO_ADAPTER else adapter, caller.id)
            for index, prompt in enumerate(prompt for prompt in prompts(body.prompt) for _ in range(each))
        ]
        priority, tier = priorities.priority_of(body, service.settings)
        name = body.model or ""
        jobs = [
            GenerationJob(service, name, caller, text.make, prompt_field="prompt", priority=priority) for text in texts
        ]
        head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.settings.default,
            **tier,
        }
        if not body.stream:
            answers = await collect(jobs)
            return JSONResponse(completion(head, body, texts, jobs, answers), headers=noted(jobs))
        events = await opened(merged(jobs))
        return sse.EventStreamResponse(frames(head, body, texts, jobs, events), events, noted(jobs))

    return routes


# --- complete texts ---------------------------------------------------------------------------------------------------


def completion(
    head: dict[str, Any],
    body: types.CompletionRequest,
    texts: list[CompletionText],
    jobs: list[GenerationJob],
    answers: list[GeneratedAnswer],
) -> dict[str, Any]:
    """All texts, as a completion object."""
    _forget_unasked(texts, answers)
    each = body.best_of or body.n or 1
    returned: list[int] = []
    for start in range(0, len(answers), each):
        best = sorted(range(start, start + each), key=lambda at: -likelihood(answers[at].tokens))
        returned += best[: body.n or 1] if body.best_of else range(start, start + each)
    choices = []
    for index, at in enumerate(returned):
        text, answer = texts[at], answers[at]
        choices.append(
            {
                "index": index,
                "text": text.echoed + answer.text,
                "logprobs": _logprobs(jobs[at], [*text.echoed_tokens, *answer.tokens], body),
                "finish_reason": answer.finish_reason or "stop",
            }
        )
    return {
        **head,
        "system_fingerprint": fingerprint(jobs[0].local),
        "choices": choices,
        "usage": usage(totals(answers, each)),
    }


def likelihood(tokens: Sequence[Token]) -> float:
    """The mean log-probability of a token; that of an empty text is minus infinity."""
    known = [token.logprob for token in tokens if token.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")


def totals(answers: Sequence[GeneratedAnswer], each: int) -> Usage:
    """The usage of several prompts with ``each`` answers."""
    used = Usage()
    for start in range(0, len(answers), each):
        used += total(answers[start : start + each])
    return used


def _forget_unasked(texts: Sequence[CompletionText], answers: Sequence[GeneratedAnswer]) -> None:
    """Drop the one token that was generated where none was requested."""
    for text, answer in zip(texts, answers, strict=True):
        if text.limit == 0:
            answer.texts, answer.tokens, answer.finish_reason = [], [], "length"
            answer.usage = replace(answer.usage, output_tokens=0)


def _logprobs(
    job: GenerationJob, tokens: Sequence[Token], body: types.CompletionRequest, start: int = 0
) -> dict[str, Any] | None:
    return None if body.logprobs is None else completion_logprobs(job.local.model.tokenizer, tokens, start)


# --- a stream ---------------------------------------------------------------------------------------------------------


async def frames(
    head: dict[str, Any],
    body: types.CompletionRequest,
    texts: list[CompletionText],
    jobs: list[GenerationJob],
    events: OpenStream[tuple[int, Event]],
) -> AsyncGenerator[str]:
    """The events of a stream: the deltas of each text and its finish reason, then the usage and the last frame."""
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    answers = [GeneratedAnswer(index) for index in range(len(jobs))]
    begun: dict[int, int] = {}  # characters sent of each text

    def chunk(choices: list[dict[str, Any]], used: Usage | None = None) -> str:
        more = {"usage": None if used is None else usage(used)} if with_usage else {}
        return sse.frame({**head, "system_fingerprint": mark, "choices": choices, **more})

    def choice(index: int, text: str, tokens: Sequence[Token], reason: str | None = None) -> dict[str, Any]:
        start, begun[index] = begun[index], begun[index] + len(text)
        logprobs = _logprobs(jobs[index], tokens, body, start) if tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    try:
        async for index, event in events:
            answers[index].add(event)
            mark, text = fingerprint(jobs[index].local), texts[index]
            if index not in begun:
                begun[index] = 0
                if body.echo:
                    yield chunk([choice(index, text.echoed, text.echoed_tokens)])
            if isinstance(event, TextDelta) and text.limit and (event.text or event.tokens):
                yield chunk([choice(index, event.text, event.tokens)])
        _forget_unasked(texts, answers)
        for answer in answers:
            yield chunk([choice(answer.index, "", (), answer.finish_reason or "stop")])
        if with_usage:
            yield chunk([], totals(answers, body.n or 1))
        yield sse.DONE
    except Exception as error:
        yield sse.broken(error)
