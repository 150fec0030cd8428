"""Sessions of the text tasks: one per preset, with cached instructions.

Notable here:
- a preset is instructions and worked examples; they stay in the prefix cache, only the text is new
- sessions are pooled: tasks of several threads never wait for one another's session
- log-probabilities need a provider that can score texts (the local engine can); others raise an error
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.core.errors import ContextOverflow, UnsupportedCapability
from pippin.kits.text.lexicon import Lexicon
from pippin.kits.text.spans import check_text
from pippin.language.task_adapters import Task
from pippin.session import chat_format
from pippin.session.options import GenerationOptions
from pippin.session.providers.local import LocalModel
from pippin.session.session import Session
from pippin.session.text_prompts import Preset, end_of_turn
from pippin.session.transcript import Transcript
from pippin.session.types.schema import Schema

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel
    from pippin.session.guardrails import Guardrails
    from pippin.session.providers.provider import Provider
    from pippin.session.response import ResponseStream


@dataclass
class SessionPool:
    """One model, and its sessions by preset."""

    provider: Provider
    options: GenerationOptions = GenerationOptions()
    guardrails: Guardrails | None = None
    adapter: str | None = "auto"
    _free: dict[Preset, deque[Session]] = field(default_factory=dict)
    _lexicon: Lexicon | None = None

    def __post_init__(self) -> None:
        # a task has one result for a text: what a model recommends is for conversations
        greedy: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0}
        unnamed = {name: value for name, value in greedy.items() if getattr(self.options, name) is None}
        self.options = replace(self.options, **unnamed)

    @classmethod
    def open(
        cls,
        model: str | Path | LanguageModel | Provider | Session,
        options: GenerationOptions,
        guardrails: Guardrails | None,
    ) -> SessionPool:
        """A pool for a model reference, a loaded model, a provider, or the model of a session."""
        session = model if isinstance(model, Session) else Session(model)
        guardrails = session.guardrails if guardrails is None else guardrails
        # a text to work on is quoted, not a request
        guardrails = None if guardrails is None else guardrails.for_transforming()
        return cls(session.provider, options, guardrails, session.adapter)

    def check_input(self, text: Any) -> str:
        """The text itself, if it is valid and the guardrails allow it.

        Raises:
            InvalidInput: it is not a text, or empty. GuardrailViolation: a rule blocks it.
        """
        check_text(text)
        if self.guardrails is not None:
            self.guardrails.enforce(text, role="input")
        return str(text)

    @contextmanager
    def session(self, preset: Preset) -> Iterator[Session]:
        """A session at the beginning of this preset, for one request."""
        free = self._free.setdefault(preset, deque())
        try:
            session = free.popleft()
        except IndexError:
            session = Session(
                self.provider,
                transcript=preset.transcript,
                guardrails=self.guardrails,
                task=preset.task,
                adapter=self.adapter,
            )
        try:
            yield session
        finally:
            session.transcript = preset.transcript
            free.append(session)

    def ask(
        self, preset: Preset, prompt: str, *, generating: Any = None, max_tokens: int | None = None, **more: Any
    ) -> Any:
        """The content of one answer; ``max_tokens`` is its maximum length, ``more`` are other options."""
        with self.session(preset) as session:
            return session.respond(prompt, generating=generating, options=self._options(max_tokens, more)).content

    @contextmanager
    def stream(
        self, preset: Preset, prompt: str, *, generating: Any = None, max_tokens: int | None = None, **more: Any
    ) -> Iterator[ResponseStream[Any]]:
        """One answer in snapshots."""
        with (
            self.session(preset) as session,
            session.stream(prompt, generating=generating, options=self._options(max_tokens, more)) as stream,
        ):
            yield stream

    def _options(self, max_tokens: int | None, more: dict[str, Any]) -> GenerationOptions:
        limits = [limit for limit in (max_tokens, self.options.max_tokens) if limit is not None]
        return replace(self.options, max_tokens=min(limits, default=None), **more)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def token_count(self, text: str) -> int:
        """Tokens of a text; if the provider cannot count, a third of its characters, which is rather too many."""
        try:
            return self.provider.token_count(text)
        except UnsupportedCapability:
            return len(text) // 3 + 1

    def max_text_tokens(
        self, preset: Preset, max_tokens: int, frame: str = "", schema: Schema[Any] | None = None
    ) -> int:
        """Maximum tokens of a text under a preset, with the request and ``max_tokens`` tokens of answer.

        A provider with an unknown context size is assumed to have 8,192 tokens.
        """
        parts = [preset.instructions, frame, *(part for pair in preset.examples for part in pair)]
        used = sum(self.token_count(part) + 8 for part in parts) + (
            self.token_count(schema.prompt_text()) if schema else 0
        )
        return (self.provider.context_size or 8192) - used - max_tokens - 16

    def check_fits(self, text: str, room: int) -> None:
        """Refuse a text that is too long for a task that reads it whole.

        Raises:
            ContextOverflow: it is; the message has the maximum length.
        """
        size = self.provider.context_size or 8192
        count = self.token_count(text) if len(text) < 200 * size else len(text) // 200
        if count > room:
            raise ContextOverflow(
                f"the text has at least {count:,} tokens; with its instructions and answer, {self.provider.name} takes "
                f"at most {max(room, 0):,} tokens of text (its context holds {size:,}); shorten it or cut it up",
                context_size=size,
                token_count=count,
            )

    # --- log-probabilities --------------------------------------------------------------------------------------------

    @property
    def local_model(self) -> LocalModel:
        """The provider, if it can score texts.

        Raises:
            UnsupportedCapability: it cannot.
        """
        if not isinstance(self.provider, LocalModel):
            raise UnsupportedCapability(
                f"{self.provider.name} does not report how likely a given text is, which this task is computed from; "
                "take a local model, or for a label without a probability: "
                "Session(…).respond(text, generating=Choice(labels))"
            )
        return self.provider

    @property
    def can_score(self) -> bool:
        """Whether `local_model` is available."""
        return isinstance(self.provider, LocalModel)

    def score_text(self, before: str, continuations: Sequence[str]) -> Sequence[float]:
        """Log-probability of each continuation of a plain text, outside any conversation."""
        local = self.local_model
        tokenizer = local.model.tokenizer
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_ids[0]
        encoded = [tokenizer.encode(text) for text in continuations]
        return local.engine.score([start, *tokenizer.encode(before)], encoded)

    def score_answers(
        self, transcript: Transcript, answers: Sequence[str], *, task: Task | None = None
    ) -> Sequence[float]:
        """Log-probability of each text as the whole answer to a conversation: its tokens and the end of the turn."""
        model = self.local_model.model
        adapter = self.adapter
        if adapter == "auto":
            adapter = None if task is None else self.provider.task_adapter(task)
        end = end_of_turn(model)
        prompt = chat_format.encode(model, transcript)
        self.check_answer_fits(len(prompt))
        encoded = [[*model.tokenizer.encode(answer), *end] for answer in answers]
        return self.local_model.engine.score(prompt, encoded, adapter=adapter)

    def check_answer_fits(self, count: int) -> None:
        """Raise `ContextOverflow` for a prompt that fills the context."""
        size = self.local_model.model.context_size
        if count >= size:
            raise ContextOverflow(
                f"text and instructions have {count:,} tokens, the context of {self.provider.name} holds {size:,}; "
                f"shorten the text by {count - size + 1:,} tokens or more",
                context_size=size,
                token_count=count,
            )

    @property
    def lexicon(self) -> Lexicon:
        """The words in the model's vocabulary."""
        if self._lexicon is None:
            model = self.local_model.model
            self._lexicon = Lexicon.of(model.tokenizer, model.config.vocab_size)
        return self._lexicon
