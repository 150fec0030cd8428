"""Text from a loaded model in one call: `model.generate("Once upon a time")`, without a session around it.

Notable here:
- a prompt is text to be continued, a list of messages for the model's chat template, or token ids
- several prompts are answered together, by the engine that all sessions over the model share; the order is kept
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from pippin.core.errors import InvalidArgument, Overloaded, UnsupportedCapability
from pippin.engine.engine import Engine
from pippin.engine.options import SamplingOptions
from pippin.engine.request import Finished, FinishReason, Request, Token
from pippin.engine.shared import shared_engine

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or messages ({"role": "user", "content": "..."})."""


@dataclass(frozen=True)
class Generation:
    """One generated text.

    Attributes:
        text: what was generated, without the prompt.
        token_ids: its tokens, without the end token.
        finish_reason: "stop" (end token or stop string), "length" (``max_tokens`` or the end of the context).
        prompt_tokens: length of the prompt, in tokens.
        logprobs: natural logarithm of each token's probability under the model; None unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[float, ...] | None = None


@overload
def generate(model: LanguageModel, prompt: str, /, *, adapter: str | None = None, **options: Any) -> Generation: ...
@overload
def generate(
    model: LanguageModel, prompt: Sequence[Prompt], /, *, adapter: str | None = None, **options: Any
) -> list[Generation]: ...
def generate(
    model: LanguageModel, prompt: str | Sequence[Any], /, *, adapter: str | None = None, **options: Any
) -> Generation | list[Generation]:
    """Generate text with a model.

    Args:
        model: what `pippin.load` returned; ``model.generate(...)`` is the same call.
        prompt: one text, or a list of prompts: texts, lists of messages, or lists of token ids.
        adapter: name of a loaded adapter to generate with; None for the base model.
        options: fields of `pippin.engine.SamplingOptions`: temperature (0 is greedy), top_k, top_p, min_p, seed,
            max_tokens, stop, logprobs and others.

    Returns:
        A `Generation` for a text, a list of them, in order, for a list of prompts.

    Raises:
        InvalidArgument: an empty prompt, an unknown option, or one out of its range.
        UnsupportedCapability: messages for a model without a chat template.
        ContextOverflow: a prompt and ``max_tokens`` do not fit the context.
        ModelNotFound: no adapter of this name is loaded.
    """
    is_single = isinstance(prompt, str)
    prompts: Sequence[Prompt] = [prompt] if isinstance(prompt, str) else prompt
    if not prompts:
        raise InvalidArgument("prompt is an empty list; give at least one prompt")
    sampling = _sampling_options(options)
    requests = [Request(prompt_ids(model, each), sampling, adapter=adapter) for each in prompts]
    generations = list(_answers(shared_engine(model), requests))
    return generations[0] if is_single else generations


def _answers(engine: Engine, requests: Sequence[Request]) -> Iterator[Generation]:
    """The answers in order, with as many requests running or queued as the engine admits."""
    running = deque[Iterator[Token | Finished]]()
    for request in requests:
        while True:
            try:
                running.append(engine.stream(request))
                break
            except Overloaded:
                if not running:
                    raise
                yield _collect(running.popleft())
    while running:
        yield _collect(running.popleft())


def _sampling_options(options: Mapping[str, Any]) -> SamplingOptions:
    try:
        return SamplingOptions(**options)
    except TypeError as error:
        known = ", ".join(SamplingOptions.__dataclass_fields__)
        raise InvalidArgument(f"{', '.join(options)}: {error}; the options are {known}") from error


def prompt_ids(model: LanguageModel, prompt: Prompt) -> Sequence[int]:
    """The tokens of a prompt.

    Raises:
        UnsupportedCapability: messages for a model without a chat template.
    """
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        if model.template is None:
            raise UnsupportedCapability(f"{model.name} has no chat template; give it a text to continue, not messages")
        return model.template.encode(prompt)  # type: ignore[arg-type]
    return prompt  # type: ignore[return-value]


def _collect(stream: Iterator[Token | Finished]) -> Generation:
    """Join all events of one request."""
    text, token_ids, logprobs = "", list[int](), list[float]()
    for event in stream:
        text += event.text
        if isinstance(event, Finished):
            found = tuple(logprobs) if len(logprobs) == len(token_ids) and logprobs else None
            return Generation(text, tuple(token_ids), event.finish_reason, event.prompt_tokens, found)
        token_ids.append(event.id)
        if event.logprob is not None:
            logprobs.append(event.logprob)
    raise AssertionError("the engine's last event is Finished")
