"""Graceful interruption: Ctrl-C and SIGTERM set a flag, which the trainer checks between steps.

Notable here:
- the first signal only sets the flag; the second one has its usual effect
- handlers are installed only in the main thread, where Python allows it, and the old ones are always restored
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from pippin.core import progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While this context is open, the first signal sets `requested` instead of ending the process.

    Attributes:
        requested: whether a signal was received.
    """

    def __init__(self, *, show_progress: bool = True) -> None:
        self.requested = False
        self._show = show_progress
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._old_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._restore()
            signal.raise_signal(number)
            return
        self.requested = True
        progress.note("finishing this step; Ctrl-C once more ends at once", show_progress=self._show)

    def _restore(self) -> None:
        for number, handler in self._old_handlers.items():
            # None: the old handler was not installed from Python, which cannot restore it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old_handlers = {}
