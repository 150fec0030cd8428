"""Reasoning before the answer: where it begins and ends, and its budget.

Notable here:
- reasoning has no grammar and no stop strings; both begin with the answer
- once the budget is spent, the engine itself writes the tokens of the end tag; so a model stays in the form that it was
  trained on, and the budget is held to the token
- a tag may be one control token or several tokens of text; a token that contains more than the rest of the tag is
  replaced by the rest of the tag where a grammar begins behind it
- some models put tags around the answer too; the closing one counts at the end of the answer alone, so that an answer
  may contain it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pippin.core.checks import PositiveInt, checked
from pippin.engine.decoding.detokenizer import Detokenizer


@checked
@dataclass(frozen=True)
class Thinking:
    """How a model reasons before it answers.

    Args:
        begin: tag at which the reasoning begins.
        end: tag at which it ends.
        after: text that the model writes between the tag and the answer.
        around: tags around the answer that are no part of it; empty for none.
        begun: whether the prompt ends with the first tag; otherwise an answer that begins with it is reasoning first,
            unless a grammar holds it.
        max_tokens: the thinking budget; None for none. It leaves room for the tag and one token of the answer.
    """

    begin: str
    end: str
    after: str = ""
    around: tuple[str, str] = ("", "")
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
        led: whether the engine wrote the text between the tag and the answer.
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
        self.over, self.led, self.num_tokens = False, False, 0
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
        self.over = self.led = True
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
        self.over, self.led = True, self._exact
        rest = self._text.rest
        if self._exact and rest:
            return self._encode(self.thinking.end[len(pending) :] + self.thinking.after)
        self.answer = rest
        return [token, *self._encode(self.thinking.after)] if self._exact and self.thinking.after else [token]


class AnswerTags:
    """Takes the tags around an answer out of its bytes.

    Args:
        begin: tag with which the answer begins, behind white space; without it, the answer has no tags.
        end: tag with which it ends, before white space.

    >>> tags = AnswerTags("<response>", "</response>")
    >>> [tags.push(part) for part in (b"\\n<resp", b"onse>4 </b> </resp", b"onse>", b"\\n")], tags.finish()
    ([b'', b'4 </b> ', b'', b''], b'')
    """

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin.encode(), end.encode()
        self._opened: bool | None = None if begin else False
        self._pending = b""

    def open(self) -> None:
        """The answer begins behind the first tag, which the engine wrote itself."""
        self._opened = bool(self._begin)

    def push(self, data: bytes) -> bytes:
        """Add the bytes of a token; return those that are known to be the answer's."""
        self._pending += data
        if self._opened is None:
            start = self._pending.lstrip()
            if start.startswith(self._begin):
                self._opened, self._pending = True, start[len(self._begin) :]
            elif not self._begin.startswith(start):
                self._opened = False
        if self._opened is None:
            return b""
        at = self._closing() if self._opened else len(self._pending)
        ready, self._pending = self._pending[:at], self._pending[at:]
        return ready

    def finish(self) -> bytes:
        """The bytes that are withheld at the end of the answer, without its last tag."""
        closed = self._opened and self._pending.startswith(self._end)
        return b"" if closed else self._pending

    def _closing(self) -> int:
        """Where the last tag may begin."""
        text, tag = self._pending, self._end
        at = text.find(tag[:1])
        while at >= 0:
            if tag.startswith(text[at:]) or (text.startswith(tag, at) and not text[at + len(tag) :].strip()):
                return at
            at = text.find(tag[:1], at + 1)
        return len(text)
