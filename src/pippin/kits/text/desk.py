"""Where the text tasks meet the model: a session for each preset, its instructions computed once.

Notable here:
- a preset is instructions and worked examples; they stay computed between requests, only the text is new
- sessions are lent out: tasks of several threads never wait for one another's session
- what the model can score (the local engine can) is asked for log-probabilities; what cannot says so
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
from pippin.session import prompting
from pippin.session.local import LocalModel
from pippin.session.options import GenerationOptions
from pippin.session.schema import Schema
from pippin.session.session import Session
from pippin.session.transcript import Answer, Instructions, Prompt, Transcript

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel
    from pippin.session.guardrails import Guardrails
    from pippin.session.provider import Provider
    from pippin.session.response import Stream


@dataclass(frozen=True)
class Preset:
    """What the model is told before it reads the text: instructions, and pairs of a text and a good answer to it."""

    instructions: str
    examples: tuple[tuple[str, str], ...] = ()

    @property
    def transcript(self) -> Transcript:
        """The beginning of every conversation under this preset."""
        turns = [turn for text, answer in self.examples for turn in (Prompt(text), Answer(answer))]
        return Transcript(entries=(Instructions(self.instructions), *turns))


@dataclass
class Desk:
    """One model, and its sessions by preset."""

    provider: Provider
    options: GenerationOptions = GenerationOptions()
    guardrails: Guardrails | None = None
    _free: dict[Preset, deque[Session]] = field(default_factory=dict)
    _lexicon: Lexicon | None = None

    @classmethod
    def at(
        cls,
        model: str | Path | LanguageModel | Provider | Session,
        options: GenerationOptions,
        guardrails: Guardrails | None,
    ) -> Desk:
        """A desk with the model of a reference, a loaded model, a provider, or that of a session."""
        session = model if isinstance(model, Session) else Session(model)
        guardrails = session.guardrails if guardrails is None else guardrails
        # a text to be worked on is quoted, not said
        return cls(session.provider, options, None if guardrails is None else guardrails.for_transforming())

    def admit(self, text: Any) -> str:
        """The text itself, if it can be worked on and the guardrails let it in.

        Raises:
            InvalidInput: it is no text, or empty. GuardrailViolation: a rule blocks it.
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
            session = Session(self.provider, transcript=preset.transcript, guardrails=self.guardrails)
        try:
            yield session
        finally:
            session.transcript = preset.transcript
            free.append(session)

    def ask(self, preset: Preset, prompt: str, *, generating: Any = None, most: int | None = None, **more: Any) -> Any:
        """The content of one answer; ``most`` is the most tokens that it may have, ``more`` are other options."""
        with self.session(preset) as session:
            return session.respond(prompt, generating=generating, options=self._options(most, more)).content

    @contextmanager
    def stream(
        self, preset: Preset, prompt: str, *, generating: Any = None, most: int | None = None, **more: Any
    ) -> Iterator[Stream[Any]]:
        """One answer in snapshots."""
        with (
            self.session(preset) as session,
            session.stream(prompt, generating=generating, options=self._options(most, more)) as stream,
        ):
            yield stream

    def _options(self, most: int | None, more: dict[str, Any]) -> GenerationOptions:
        limits = [limit for limit in (most, self.options.max_tokens) if limit is not None]
        return replace(self.options, max_tokens=min(limits, default=None), **more)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def tokens(self, text: str) -> int:
        """Tokens of a text; where the provider cannot count, a third of its characters, which is rather too many."""
        try:
            return self.provider.token_count(text)
        except UnsupportedCapability:
            return len(text) // 3 + 1

    def room(self, preset: Preset, most: int, frame: str = "", schema: Schema[Any] | None = None) -> int:
        """Tokens that a text may have under a preset, with the words around it and ``most`` tokens of answer.

        A provider that does not tell the size of its context is taken to have 8,192 tokens.
        """
        parts = [preset.instructions, frame, *(part for pair in preset.examples for part in pair)]
        told = sum(self.tokens(part) + 8 for part in parts) + (self.tokens(schema.prompt_text()) if schema else 0)
        return (self.provider.context_size or 8192) - told - most - 16

    def check_fits(self, text: str, room: int) -> None:
        """Refuse a text that is too long for a task that reads it whole.

        Raises:
            ContextOverflow: it is; the message says how long it may be.
        """
        size = self.provider.context_size or 8192
        count = self.tokens(text) if len(text) < 200 * size else len(text) // 200
        if count > room:
            raise ContextOverflow(
                f"the text has at least {count:,} tokens; with its instructions and answer, {self.provider.name} takes "
                f"at most {max(room, 0):,} tokens of text (its context holds {size:,}); shorten it or cut it up",
                context_size=size,
                token_count=count,
            )

    # --- log-probabilities --------------------------------------------------------------------------------------------

    @property
    def local(self) -> LocalModel:
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
        """Whether `local` answers."""
        return isinstance(self.provider, LocalModel)

    def score_text(self, before: str, continuations: Sequence[str]) -> Sequence[float]:
        """Log-probability of each continuation of a plain text, outside any conversation."""
        local = self.local
        tokenizer = local.model.tokenizer
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_ids[0]
        encoded = [tokenizer.encode(text) for text in continuations]
        return local.engine.score([start, *tokenizer.encode(before)], encoded)

    def score_answers(self, transcript: Transcript, answers: Sequence[str]) -> Sequence[float]:
        """Log-probability of each text as the whole answer to a conversation: its tokens and the end of the turn."""
        model = self.local.model
        end = _end_of_turn(model)
        prompt = prompting.encode(model, transcript)
        self.check_answer_fits(len(prompt))
        encoded = [[*model.tokenizer.encode(answer), *end] for answer in answers]
        return self.local.engine.score(prompt, encoded)

    def check_answer_fits(self, count: int) -> None:
        """Raise `ContextOverflow` for a prompt that fills the context."""
        size = self.local.model.context_size
        if count >= size:
            raise ContextOverflow(
                f"text and instructions have {count:,} tokens, the context of {self.provider.name} holds {size:,}; "
                f"shorten the text by {count - size + 1:,} tokens or more",
                context_size=size,
                token_count=count,
            )

    @property
    def lexicon(self) -> Lexicon:
        """The words that the model's vocabulary holds."""
        if self._lexicon is None:
            model = self.local.model
            self._lexicon = Lexicon.of(model.tokenizer, model.config.vocab_size)
        return self._lexicon


def _end_of_turn(model: LanguageModel) -> list[int]:
    """What ends an answer: the token that the chat template writes there, a line break for a base model."""
    if model.template is None:
        return model.tokenizer.encode("\n")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    written = model.template.encode(turns, add_generation_prompt=False)
    ends = [id for id in written if id in model.tokenizer.eos_ids]
    return ends[-1:] or [model.tokenizer.eos_ids[0]]
