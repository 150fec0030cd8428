"""Reasoning before the answer: where it begins and ends, and its budget.

Notable here:
- reasoning has no grammar and no stop strings; both begin with the answer
- once the budget is spent, the engine itself writes the tokens of the end tag; so a model stays in the form that it was
  trained on, and the budget is held to the token
- a tag may be one control token or several tokens of text; a token that contains more than the rest of the tag is
  replaced by the rest of the tag where a grammar begins behind it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pippin.core.checks import PositiveInt, checked
from pippin.engine.detokenizer import Detokenizer


@checked
@dataclass(frozen=True)
class Thinking:
    """How a model reasons before it answers.

    Args:
        begin: tag at which the reasoning begins.
        end: tag at which it ends.
        after: text that the model writes between the tag and the answer.
        begun: whether the prompt ends with the first tag; otherwise an answer that begins with it is reasoning first,
            unless a grammar holds it.
        max_tokens: the thinking budget; None for none. It leaves room for the tag and one token of the answer.
    """

    begin: str
    end: str
    after: str = ""
    begun: bool = True
    max_tokens: PositiveInt | None = None


class ThinkingPhase:
    """The part of one answer that is reasoning.

    Args:
        thinking: tags and budget.
        encode: token ids of a text, with control tokens as tokens.
        room: tokens that reasoning and answer may take together.
        exact: nothing but ``after`` may stand between the tag and the answer, since a grammar begins there.

    Attributes:
        over: whether the answer has begun.
        num_tokens: tokens of the reasoning so far.
        reasoning, answer: what the last token added to each.
        withheld: where the last token has shown that there is no reasoning, the text before it.
    """

    def __init__(self, thinking: Thinking, encode: Callable[[str], list[int]], room: int, *, exact: bool) -> None:
        self.thinking, self._encode, self._exact = thinking, encode, exact
        self._closing = encode(thinking.end + thinking.after)
        self._most = None
        if thinking.max_tokens is not None:
            self._most = max(1, min(thinking.max_tokens, room - len(self._closing) - 1))
        self._text = Detokenizer((thinking.end,))
        self._begun, self._before = thinking.begun, Detokenizer()
        self.over, self.num_tokens = False, 0
        self.reasoning = self.answer = ""
        self.withheld: str | None = None

    def push(self, token: int, data: bytes) -> list[int]:
        """Add a sampled token; return the tokens to append: itself or what stands for it, and those that must follow.

        Args:
            token: its id.
            data: its bytes, a control token spelled.
        """
        self.reasoning = self.answer = ""
        if not self._begun and not self._begins(data):
            return [token]
        pending = self._text.pending
        self.num_tokens += 1
        self.reasoning = self._text.push(data)
        if self._text.stopped:
            return self._ended(token, pending)
        if self._most is not None and self.num_tokens >= self._most:
            return [token, *self._close()]
        return [token]

    def close(self) -> list[int]:
        """End the reasoning before the next token; return the tokens of the tag."""
        self.reasoning = self.answer = ""
        return self._close()

    def _close(self) -> list[int]:
        self.reasoning += self._text.finish()
        self.over = True
        return self._closing

    def finish(self) -> tuple[str, str]:
        """Text that is withheld at the end of an answer: of the reasoning, and of the answer."""
        if self.over:
            return "", ""
        return (self._text.finish(), "") if self._begun else ("", self._before.text + self._before.finish())

    def _begins(self, data: bytes) -> bool:
        """Whether the first tag is complete; an answer that does not begin with it has no reasoning."""
        earlier = self._before.text
        self._before.push(data)
        text, tag = self._before.text, self.thinking.begin
        if text.lstrip().startswith(tag):
            self._begun = True
            self.num_tokens += 1
            self.reasoning = self._text.push(text.lstrip()[len(tag) :].encode())
        elif not tag.startswith(text.lstrip()):
            self.over, self.withheld = True, earlier
        return False

    def _ended(self, token: int, pending: str) -> list[int]:
        """The tag is complete."""
        self.over = True
        rest = self._text.rest
        if self._exact and rest:
            return self._encode(self.thinking.end[len(pending) :] + self.thinking.after)
        self.answer = rest
        return [token, *self._encode(self.thinking.after)] if self._exact and self.thinking.after else [token]
