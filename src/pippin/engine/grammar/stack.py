"""A stack that is as deep as a grammar can need, for llguidance's compiler, which descends by recursion.

Notable here:
- the compiler goes one level deeper for each rule, terminal or reference that uses another, without a limit of its own;
  a stack that overflows would end the process, and stacks of threads differ between systems by a factor of sixteen
- so a grammar is compiled in another thread, whose stack follows from the length of the source: a level takes at
  least 10 characters of source and at most about 10 kB of stack; only what is used of a stack takes memory
- later steps (masks, copies, the end of a matcher) need no more than half a megabyte
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

from pippin.core.errors import Overloaded

T = TypeVar("T")

MAX_SOURCE: Final = 1 << 18
"""Characters of a Lark grammar that may be as deep as it is long; what Pippin generates is flat beyond that."""
_BASE: Final = 1 << 23
_PER_CHARACTER: Final = 2048
_BRIEF: Final = 1 << 12  # up to so many characters, threads that stay are used: starting one takes longer than the work
_SHORT: Final = 1 << 15  # longer sources are compiled one at a time, so that their stacks do not add up


class _Threads:
    """The threads that stay, and the locks; a forked process has to begin anew."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget threads and locks of a process that this one was forked from."""
        self.starting, self.long = threading.Lock(), threading.Lock()
        self.brief = ThreadPoolExecutor(max_workers=4, thread_name_prefix="grammar")


_threads = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.renew)


def with_stack(source: str, work: Callable[[], T]) -> T:
    """Run ``work``, which compiles ``source``, in a thread whose stack is deep enough.

    Raises:
        Overloaded: the system gives no thread with such a stack. Whatever ``work`` raises.

    >>> with_stack("start: TEXT", lambda: 1 + 1)
    2
    """
    if len(source) <= _BRIEF:
        with _stack_size(_BRIEF):
            result = _threads.brief.submit(work)
        return result.result()
    if len(source) <= _SHORT:
        return _run(source, work)
    with _threads.long:
        return _run(source, work)


def _run(source: str, work: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _stack_size(len(source)):
        thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def _stack_size(length: int) -> Iterator[None]:
    """Start threads with a stack for sources of so many characters.

    Raises:
        Overloaded: the system gives no thread with such a stack.
    """
    size = _BASE + _PER_CHARACTER * min(length, MAX_SOURCE)
    with _threads.starting:  # the size is a setting of the whole process
        before = threading.stack_size(size)
        try:
            yield
        except RuntimeError as error:
            raise Overloaded(f"no memory for a stack of {size >> 20} MB to compile a grammar on; try later") from error
        finally:
            threading.stack_size(before)
