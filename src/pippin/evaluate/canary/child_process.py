"""The process that a canary audit observes: it does the work and reports which files it opens for writing.

Notable here:
- reports go through a pipe, never to disk, and are sent before the reported call proceeds, so that killing the process
  at any moment loses none
- the work receives its canaries through stdin, so that they are in neither its arguments nor its environment
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
class AuditedWork:
    """The argument of the audited function.

    Attributes:
        prompts: texts with one canary each, to use as prompts.
        answers: texts with one canary each, to use as answers.
        arguments: ``arguments`` of `CanaryAudit.run`.
        report: sends an event, given as keyword arguments, to ``on_event`` of `CanaryAudit.run`.
    """

    prompts: list[str]
    answers: list[str]
    arguments: dict[str, Any]
    report: Callable[..., None]

    def tick(self) -> None:
        """Report that one more prompt is done; the audit may kill the process here."""
        self.report(tick=1)


def main() -> None:
    """Run the function named on the command line: file descriptor of the pipe, MODULE:FUNCTION or FILE.py:FUNCTION."""
    pipe, target = int(sys.argv[1]), sys.argv[2]
    given = json.loads(sys.stdin.readline())

    def report(**event: Any) -> None:
        os.write(pipe, json.dumps(event).encode()[:4000] + b"\n")  # a write of at most PIPE_BUF bytes is atomic

    # allow core dumps as far as the hard limit goes, so that the audit can find what a crash would leave
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    function = _find(target)
    sys.addaudithook(audit_hook(report))
    function(AuditedWork(given["prompts"], given["answers"], given["arguments"], report))
    report(done=True)
    sys.stdin.readline()


def audit_hook(report: Callable[..., None]) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook for `sys.addaudithook` that reports opening files for writing, sending, and starting processes."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            is_writing = bool(set(mode or "") & set("wax+")) or bool((flags or 0) & _WRITING)
            if is_writing and isinstance(path, str | bytes | os.PathLike):
                report(wrote=os.path.abspath(os.fsdecode(path)))
        elif event in ("os.rename", "os.link", "os.symlink"):
            report(wrote=os.path.abspath(os.fsdecode(arguments[1])))
        elif event in _SENDING:
            report(sent=f"{event} {arguments[1] if event != 'socket.getaddrinfo' else arguments[0]}")
        elif event in _CHILDREN:
            report(child=event)

    return hook


def _find(target: str) -> Callable[[AuditedWork], None]:
    source, _, name = target.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)  # type: ignore[no-any-return]
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
