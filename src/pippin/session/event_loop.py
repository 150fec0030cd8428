"""A background event loop for work that must be cancellable at any moment: connections, MCP servers.

Notable here:
- one loop for the whole process, started on first use; a thread that waits for a socket cannot be cancelled, a task can
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None  # with the process that it runs in: a fork has no threads


def event_loop() -> asyncio.AbstractEventLoop:
    """The background loop."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            made = asyncio.new_event_loop()
            threading.Thread(target=made.run_forever, name="pippin connections", daemon=True).start()
            _running = (os.getpid(), made)
        return _running[1]


def run_coroutine(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the loop; cancelling the future cancels its task.

    >>> async def add(a, b):
    ...     return a + b
    >>> run_coroutine(add(1, 2)).result()
    3
    """
    return asyncio.run_coroutine_threadsafe(work, event_loop())
