"""Constraints on answers: a grammar, and its state while one answer is generated.

Notable here:
- a `Grammar` is a description that needs no model; `start` compiles it for a tokenizer and returns the `Constraint` of
  one request
- each request compiles its own matcher, which takes milliseconds: copies of a matcher share the states of its lexer, so
  that one request that reaches a limit of the engine would end all others
- each step costs one bitmask, written by llguidance into a buffer that is reused, and one masked fill
- after an inner error llguidance returns a mask that allows the end; so its state is checked after every call, and an
  error is raised instead
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32, UInt8
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from pippin.core.errors import DecodingFailure, EmptySchema, InvalidArgument, SchemaError, UnsupportedGuide
from pippin.engine.grammar import json_grammar, regex as regular
from pippin.engine.grammar.item_limits import ItemLimits, Limit
from pippin.engine.grammar.repeats import Repeats, is_needed
from pippin.engine.grammar.stack import MAX_SOURCE, with_stack
from pippin.engine.grammar.string_formats import VERBATIM_TERMINAL

LIMITS: Final = regular.LIMITS


@runtime_checkable
class GrammarTokenizer(Protocol):
    """The interface of a tokenizer for constraints: its vocabulary as bytes, in llguidance's format."""

    @property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The same object at every call."""


@dataclass(frozen=True)
class Grammar:
    r"""A set of texts, described by a Lark grammar in llguidance's dialect.

    Args:
        source: the grammar; its first rule is ``start``. The classmethods generate it for the usual cases.
        notes: what the grammar leaves out of the description that it was made of, a sentence each.
        item_limit: for texts that are JSON, how often an item may come in one list, by the item's text: a list ends
            after an item that came more often. None for no limit.

    >>> Grammar.choice(["yes", "no"]).source
    'start: TEXT\nTEXT: /(?:yes|no)/'
    """

    source: str
    notes: tuple[str, ...] = field(default=(), compare=False)
    item_limit: Limit | None = field(default=None, compare=False)

    @classmethod
    def json_schema(
        cls,
        schema: dict[str, Any] | bool,
        *,
        separators: tuple[str, str] = (", ", ": "),
        strict: bool = False,
        max_items: int | None = json_grammar.MAX_ITEMS,
    ) -> Grammar:
        """JSON texts that are valid under a JSON Schema (drafts 3 to 2020-12): all or a subset of them, and no others.

        Properties are in the order of their declaration and white space is only that of ``separators``, so that each
        value has one spelling and white space cannot repeat forever. docs/json-schema.md documents each keyword.

        Args:
            schema: the schema; ``$ref`` within it only.
            separators: between items and after keys, as in `json.dumps`; blanks only beside the comma and the colon.
            strict: refuse what is no keyword of JSON Schema and formats without a definition, which are otherwise
                ignored with a note in `notes`; and properties that no value can satisfy.
            max_items: maximum items of a list without ``maxItems``, and free names of an object without
                ``maxProperties``, so that an answer ends; at least 1, or None for any number. Also the levels of a
                value inside values of its own kind, of which 10 may be items or have free names. Notes say so.

        Raises:
            SchemaError: it is not a JSON Schema. UndefinedReference: a ``$ref`` points at nothing.
            UnsupportedGuide: it has a keyword that cannot be enforced. EmptySchema: no value is valid under it.
        """
        return cls(*json_grammar.write(schema, separators=separators, strict=strict, max_items=max_items))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """The texts that a regular expression matches from end to end.

        Raises:
            SchemaError: it is not a regular expression. UnsupportedGuide: it has look-around, back references or flags.
            EmptySchema: it matches nothing.
        """
        return cls._of_text(f"/{regular.whole(pattern)}/", f"the regular expression {pattern!r}")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts.

        Raises:
            EmptySchema: there are none. InvalidArgument: it is one text, not a list of them.
        """
        if isinstance(texts, str):
            raise InvalidArgument(f"a choice is a list of texts, got the text {texts!r}")
        if not texts:
            raise EmptySchema("a choice needs at least one text to choose")
        return cls._of_text(f"/{regular.alternatives(map(regular.literal, dict.fromkeys(texts)))}/", "the choice")

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """The texts of a Lark grammar, in llguidance's dialect, whose first rule is ``start``.

        Raises:
            SchemaError: the grammar is malformed. UnsupportedGuide: it is longer than 262,144 characters.
        """
        if len(source) > MAX_SOURCE:
            raise UnsupportedGuide(
                f"the grammar has {len(source):,} characters and may have {MAX_SOURCE:,}; "
                "write lists of texts as a choice"
            )
        if message := with_stack(source, lambda: LLMatcher.validate_grammar(source, limits=LIMITS)):
            raise SchemaError(f"the grammar is malformed: {message.strip()}")
        return cls(source)

    @classmethod
    def text(cls) -> Grammar:
        """Any text."""
        return cls("start: TEXT\nTEXT: /(?s:.*)/")

    @classmethod
    def _of_text(cls, terminal: str, what: str) -> Grammar:
        if regular.is_empty(terminal):
            raise EmptySchema(f"{what} matches no text")
        regular.check_cost(terminal)
        return cls(f"start: TEXT\nTEXT: {terminal}")

    @property
    def is_verbatim(self) -> bool:
        """Whether strings of the format "verbatim" are in it, so that it depends on a text; see `over`."""
        return VERBATIM_TERMINAL in self.source

    def over(self, parts: str) -> Grammar:
        r"""The grammar in which strings of the format "verbatim" are parts of a text; before, they are any strings.

        Args:
            parts: what a JSON string may have inside, as a terminal of llguidance, such as `%regex` with
                `substring_chunks`.

        >>> schema = {"type": "string", "format": "verbatim", "maxLength": 8}
        >>> order = Grammar.json_schema(schema).over('%regex {"substring_words": "my order 4711"}')
        >>> order.allows('"4711"'), order.allows('"4712"'), order.allows('"order 4711"')
        (True, False, False)
        """
        if not self.is_verbatim:
            return self
        rules = f'VERBATIM: "\\"" VERBATIM_PART "\\"" & ~/\\x{{22}}\\x{{22}}/\nVERBATIM_PART: {parts}'
        return replace(self, source=f"{self.source.replace(VERBATIM_TERMINAL, 'VERBATIM')}\n{rules}")

    def allows(self, text: str) -> bool:
        """Whether a text is in the set, in exactly this spelling.

        Raises:
            SchemaError: as `start`. UnsupportedGuide: also if a limit of the engine is reached.
        """
        constraint = self._start(regular.byte_tokenizer())
        return constraint.follow(list(text.encode())) and constraint.may_end

    def start(self, tokenizer: GrammarTokenizer) -> Constraint:
        """The constraint of one answer, compiled for its tokenizer.

        Raises:
            SchemaError: the grammar is malformed. UnsupportedGuide: it is too large for the engine's limits.
            EmptySchema: no text satisfies it.
        """
        return self._start(tokenizer.grammar_tokenizer)

    def _start(self, vocabulary: LLTokenizer) -> Constraint:
        began = time.perf_counter()
        matcher = _compile(self.source, vocabulary)
        guard: Repeats | ItemLimits | None = None
        if is_needed(self.source):
            guard = Repeats(self.source, vocabulary)
        elif self.item_limit is not None:
            guard = ItemLimits(vocabulary, self.item_limit)
        return Constraint(matcher, vocabulary, guard, compile_seconds=time.perf_counter() - began)


def _compile(source: str, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher at its start."""
    matcher = with_stack(source, lambda: LLMatcher(vocabulary, source, log_level=0, limits=LIMITS))
    if matcher.is_error():
        message = regular.first_line(matcher)
        if regular.reaches_limit(message):
            raise UnsupportedGuide(f"the grammar is too large for the engine: {message}")
        raise SchemaError(f"the grammar is malformed: {message}")
    return matcher


def _failure(what: str, message: str) -> DecodingFailure | UnsupportedGuide:
    """The error of a matcher that has failed: the grammar's own fault where a limit of the engine is reached."""
    if not regular.reaches_limit(message):
        return DecodingFailure(f"{what}: {message}")
    return UnsupportedGuide(
        f"{what}, since the engine's limits are reached: {message}; shorten maxLength or the counts of the pattern",
        guide="pattern",
    )


_MINUS_INFINITY: Final = np.float32(-np.inf).view(np.int32)


def _ban(
    values: Float32[np.ndarray, " size"], allowed: UInt8[np.ndarray, " size"], buffer: Int32[np.ndarray, " size"]
) -> None:
    """Set values to minus infinity where ``allowed`` is 0, in place; ``buffer`` and ``allowed`` are overwritten.

    It works on the bits of the values: torch and NumPy use a branch for each value, which a processor cannot predict,
    and take up to ten times as long.
    """
    signs = allowed.view(np.int8)
    np.negative(signs, out=signs)
    np.copyto(buffer, signs)  # all ones where 1, by the extension of the sign
    bits = values.view(np.int32)
    np.bitwise_and(bits, buffer, out=bits)
    np.invert(buffer, out=buffer)
    np.bitwise_and(buffer, _MINUS_INFINITY, out=buffer)
    np.bitwise_or(bits, buffer, out=bits)


class Constraint:
    """The state of one answer under a grammar; not shared between threads.

    Args:
        matcher: llguidance's state, at the beginning or a copy from the middle of an answer.
        vocabulary: the tokens that it was compiled for.
        repeats: what must not be repeated, where the grammar has such parts; at the same state.
        compile_seconds: seconds of compilation.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: LLTokenizer,
        repeats: Repeats | ItemLimits | None = None,
        *,
        compile_seconds: float = 0.0,
    ) -> None:
        self.compile_seconds = compile_seconds
        self._matcher, self._vocabulary, self._repeats = matcher, vocabulary, repeats
        self._words = np.zeros((vocabulary.vocab_size + 31) // 32, dtype=np.int32)
        self._buffer = np.empty(32 * len(self._words), dtype=np.int32)  # for `apply`, so that no step allocates memory
        self._mask_is_current = False  # whether ``_words`` is the mask of the present state
        self._accepted: list[int] = []
        self._end_unseen = False
        self._ends = frozenset(vocabulary.eos_tokens)

    def mask(self) -> Int32[np.ndarray, " words"]:
        """Which tokens may come next: bit i of word w stands for token 32 w + i. The buffer is reused by the next step.

        Raises:
            DecodingFailure: the grammar leaves no token.
            UnsupportedGuide: a limit of the engine is reached, which its compilation did not show.
            EmptySchema: no text satisfies the grammar; found at its first step.
        """
        if not self._mask_is_current:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            if self._matcher.is_error() or not self._words.any():
                message = regular.first_line(self._matcher)
                if not self._accepted and message.startswith("NoExtensionBias"):
                    raise EmptySchema("no text satisfies the grammar")
                raise _failure(f"the grammar leaves no token after {len(self._accepted)} tokens", message)
            if self._repeats is not None:
                self._repeats.restrict(self._words)
                if not self._words.any():
                    raise DecodingFailure(f"only repeats are left after {len(self._accepted)} tokens")
            self._mask_is_current = True
        return self._words

    def apply(self, logits: Float[Tensor, " vocab"]) -> None:
        """Set the logits of all tokens that may not come next to minus infinity, in place.

        Args:
            logits: for one position, on any device; entries beyond the tokenizer's vocabulary are padding and go too.

        Raises:
            DecodingFailure: as `mask`, or the maximum of the allowed logits is not finite.
        """
        allowed = np.unpackbits(self.mask().view(np.uint8), bitorder="little")
        size = min(self._vocabulary.vocab_size, logits.shape[-1])
        logits[size:] = -torch.inf
        if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous():
            values = logits.numpy()
            _ban(values[:size], allowed[:size], self._buffer[:size])
            best = float(values.max())
        else:
            banned = torch.from_numpy(allowed[:size]) == 0
            logits[:size].masked_fill_(banned.to(logits.device, non_blocking=True), -torch.inf)
            best = float(logits.max())
        if not math.isfinite(best):
            raise DecodingFailure(f"no token is left to choose: the best logit that the grammar allows is {best}")

    def allows(self, token_id: int) -> bool:
        """Whether this token may come next."""
        word, bit = divmod(token_id, 32)
        return 0 <= token_id < self._vocabulary.vocab_size and bool(int(self.mask()[word]) >> bit & 1)

    def accept(self, token_id: int) -> None:
        """Advance by one token that was chosen.

        Raises:
            DecodingFailure: the grammar does not allow it here, or the answer has ended.
        """
        if self.ended:
            raise DecodingFailure(f"token {token_id} comes after the end of the answer")
        self._end_unseen = self._matcher.is_stopped()  # then it accepts an end token without recording it
        if not self._matcher.consume_token(token_id) or self._matcher.is_error():
            raise DecodingFailure(f"the grammar does not allow token {token_id} after {len(self._accepted)} tokens")
        if self._repeats is not None and not self._repeats.accept(token_id):
            raise DecodingFailure(f"token {token_id} repeats a name or an item after {len(self._accepted)} tokens")
        self._accepted.append(token_id)
        self._mask_is_current = False

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Accept tokens up to the first that is not allowed; return whether all were accepted.

        Raises:
            UnsupportedGuide: a limit of the engine is reached.
        """
        count, message = regular.consume(self._matcher, token_ids)
        read = token_ids[:count]
        new = (
            count
            if self._repeats is None
            else next((i for i, t in enumerate(read) if not self._repeats.accept(t)), count)
        )
        if new < count:
            self._matcher.rollback(count - new)
        self._accepted.extend(token_ids[:new])
        self._mask_is_current = False
        if message:
            raise _failure(f"the grammar cannot go on after {len(self._accepted)} tokens", message)
        return not self._matcher.is_error() and new == len(token_ids)

    def reach(self, token_ids: Sequence[int]) -> int:
        """How many tokens, from the first on, would be accepted; the state does not change."""
        size = self._vocabulary.vocab_size  # the matcher fails on larger ids, which a padded model has
        known = list(takewhile(lambda token: token < size, token_ids))
        count = 0 if self.ended else int(self._matcher.validate_tokens(known))
        return count if self._repeats is None else self._repeats.reach(known[:count])

    @property
    def ended(self) -> bool:
        """Whether an end token was accepted."""
        return bool(self._accepted) and self._accepted[-1] in self._ends

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and only an end token can follow."""
        if self.ended or not self.may_end:
            return self.ended
        return self._matcher.is_stopped() or self._only_ends()

    def _only_ends(self) -> bool:
        tokens = np.flatnonzero(np.unpackbits(self.mask().view(np.uint8), bitorder="little"))
        return bool(np.isin(tokens, list(self._ends)).all())

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete; it may still go on."""
        return self.ended or (not self._matcher.is_error() and self._matcher.is_accepting())

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer itself would split the text; often none.

        They need no pass of the model, but must still be passed to `accept`.
        """
        if self.finished:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens if self._repeats is None else tokens[: self._repeats.reach(tokens)]

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens.

        Raises:
            InvalidArgument: fewer were accepted.
        """
        if not 0 <= count <= len(self._accepted):
            raise InvalidArgument(f"cannot take back {count} of {len(self._accepted)} tokens")
        seen = count - (count > 0 and self.ended and self._end_unseen)
        if seen and not self._matcher.rollback(seen):
            raise DecodingFailure(f"cannot take back {count} tokens: {regular.first_line(self._matcher)}")
        del self._accepted[len(self._accepted) - count :]
        if self._repeats is not None:
            self._repeats.rollback(count)
        self._mask_is_current = False

    def fork(self) -> Constraint:
        """A copy of the constraint in its present state, which goes its own way.

        It shares the states of the lexer: if one of the two reaches a limit of the engine, both have ended.
        """
        copied = None if self._repeats is None else self._repeats.fork()
        other = Constraint(self._matcher.deep_copy(), self._vocabulary, copied)
        other._accepted, other._end_unseen = list(self._accepted), self._end_unseen
        return other
