"""The process that a canary audit watches: it tells through a pipe which files it opens for writing, and does the work.

Notable here:
- what is told goes into a pipe and never to disk, and has left the process before the call it is about goes on: killing
  the process at any moment loses nothing
- the work gets its canaries through stdin, so that they stand neither in arguments nor in the environment
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHILDREN = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.system")
_SENDING = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo")


@dataclass(frozen=True)
class Work:
    """What the work gets.

    Args:
        prompts: texts with a canary each, to ask with.
        answers: texts with a canary each, to answer with.
        arguments: of `CanaryAudit.run`.
        tell: reports an event, as keyword arguments, to whoever drives the audit.
    """

    prompts: list[str]
    answers: list[str]
    arguments: dict[str, Any]
    tell: Callable[..., None]

    def tick(self) -> None:
        """Say that one more prompt is done; the audit may kill the process here."""
        self.tell(tick=1)


def main() -> None:
    """Do the work named by the arguments: the pipe's number, and MODULE:FUNCTION or FILE.py:FUNCTION."""
    pipe, target = int(sys.argv[1]), sys.argv[2]
    given = json.loads(sys.stdin.readline())

    def tell(**event: Any) -> None:
        os.write(pipe, json.dumps(event).encode()[:4000] + b"\n")  # one write of this length is never torn

    # let a crash leave a core, as far as the limits go: a check that cannot fail shows nothing
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    function = _find(target)
    sys.addaudithook(watcher(tell))
    function(Work(given["prompts"], given["answers"], given["arguments"], tell))
    tell(done=True)
    sys.stdin.readline()


def watcher(tell: Callable[..., None]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that reports writing, sending and starting processes."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            is_writing = bool(set(mode or "") & set("wax+")) or bool((flags or 0) & _WRITING)
            if is_writing and isinstance(path, str | bytes | os.PathLike):
                tell(wrote=os.path.abspath(os.fsdecode(path)))
        elif event in ("os.rename", "os.link", "os.symlink"):
            tell(wrote=os.path.abspath(os.fsdecode(arguments[1])))
        elif event in _SENDING:
            tell(sent=f"{event} {arguments[1] if event != 'socket.getaddrinfo' else arguments[0]}")
        elif event in _CHILDREN:
            tell(child=event)

    return watch


def _find(target: str) -> Callable[[Work], None]:
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)  # type: ignore[no-any-return]
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
