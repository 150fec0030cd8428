"""From tokens to text as they come: whole characters only, and nothing of a stop string.

Notable here:
- a token may end in the middle of a character; its bytes wait for the rest
- text that may be the beginning of a stop string is held back until it is known not to be
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text that is safe to show.

    >>> stream = TextStream(stop=["END"])
    >>> [stream.push(part) for part in (b"caf\\xc3", b"\\xa9 E", b"N", b"x EN", b"D!")]
    ['caf', 'é ', '', 'ENx ', '']
    >>> stream.stopped
    True
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stop = tuple(stop)
        self.stopped = False
        self.text = ""
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """Take the bytes of one token; return the text that can be shown now."""
        return "" if self.stopped else self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what was held back; a character that never became whole is shown as U+FFFD."""
        if self.stopped:
            return ""
        rest = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        self.text += held
        return rest + held

    def _release(self, new: str) -> str:
        held = self._held + new
        cuts = [at for at in (held.find(stop) for stop in self.stop) if at >= 0]
        if cuts:
            self.stopped = True
            ready, self._held = held[: min(cuts)], ""
        else:
            keep = max((_overlap(held, stop) for stop in self.stop), default=0)
            ready, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += ready
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
