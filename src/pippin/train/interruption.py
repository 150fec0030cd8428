"""Ctrl-C and SIGTERM as a question that the loop answers between steps.

Notable here:
- the first signal is remembered, the second one does what it would have done without us
- handlers are put in only in the main thread, where Python allows it, and the old ones are always put back
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from pippin.core import progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While this context is open, a signal sets `asked` instead of ending the process.

    Attributes:
        requested: whether a signal has come.
    """

    def __init__(self, *, show_progress: bool = True) -> None:
        self.requested = False
        self._show = show_progress
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._restore()
            signal.raise_signal(number)
            return
        self.requested = True
        progress.note("finishing this step; Ctrl-C once more ends at once", show_progress=self._show)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: the old handler was not Python's, and Python cannot put it back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
