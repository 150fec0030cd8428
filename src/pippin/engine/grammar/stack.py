"""A stack that is as deep as a grammar can need, for llguidance's compiler, which descends by recursion.

Notable here:
- the compiler goes one level deeper for each rule, terminal or reference that uses another, without a limit of its own;
  a stack that overflows would end the process, and stacks of threads differ between systems by a factor of sixteen
- so a grammar is compiled in a thread of its own, whose stack follows from the length of the source: a level takes at
  least 10 characters of source and at most about 10 kB of stack; only what is used of a stack takes memory
- later steps (masks, copies, the end of a matcher) need no more than half a megabyte
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from pippin.core.errors import Overloaded

T = TypeVar("T")

MAX_SOURCE: Final = 1 << 18
"""Characters of a Lark grammar that may be as deep as it is long; what Pippin generates is flat beyond that."""
_BASE: Final = 1 << 23
_PER_CHARACTER: Final = 2048
_SHORT: Final = 1 << 15  # longer sources are compiled one at a time, so that their stacks do not add up

_starting, _long = threading.Lock(), threading.Lock()


def with_stack(source: str, work: Callable[[], T]) -> T:
    """Run ``work``, which compiles ``source``, in a thread whose stack is deep enough.

    Raises:
        Overloaded: the system gives no thread with such a stack. Whatever ``work`` raises.

    >>> with_stack("start: TEXT", lambda: 1 + 1)
    2
    """
    if len(source) <= _SHORT:
        return _run(source, work)
    with _long:
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
    size = _BASE + _PER_CHARACTER * min(len(source), MAX_SOURCE)
    with _starting:  # the size is a setting of the whole process
        before = threading.stack_size(size)
        try:
            thread.start()
        except RuntimeError as error:
            raise Overloaded(f"no memory for a stack of {size >> 20} MB to compile a grammar on; try later") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
