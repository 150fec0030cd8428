"""A canary audit: run some work on prompts and answers that contain random texts, then search for every trace of them.

Notable here:
- every file that the process opens for writing from Python is recorded; folders are also searched for changed files,
  which finds what a native library wrote
- standard output and error count as logs on disk; core dumps and files that were deleted while still open are searched
- traces in memory are counted and reported but are not failures, as the process needs the texts while it works

Method: canaries as the check on "no user data is kept", which "Private Cloud Compute" states as a requirement (2024).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any, Literal

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import TimedOut
from pippin.core.store import store
from pippin.evaluate.canary import scan

_SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/var/crash", "/var/lib/systemd/coredump")


@dataclass(frozen=True)
class Hit:
    """A trace on disk: the file, the encoding that the canary was found in, and how often."""

    where: str
    encoding: str
    count: int


@dataclass(frozen=True)
class Findings:
    """The result of an audit.

    Attributes:
        hits: traces on disk; an audit is passed when there are none.
        written: every file that the process opened for writing.
        scanned: number of files that were searched.
        memory: number of traces in the memory of the running process, by encoding; None where the memory could not be
            read or the process had ended.
        sent: attempts to connect or send through a socket.
        children: other processes that it started, which the audit cannot observe.
        exit_code: exit code of the process; a negative number is minus the signal that ended it.
    """

    hits: tuple[Hit, ...]
    written: tuple[str, ...]
    scanned: int
    memory: Mapping[str, int] | None
    sent: tuple[str, ...]
    children: tuple[str, ...]
    exit_code: int


@dataclass
class _Events:
    """What the process has reported so far."""

    written: dict[str, None] = field(default_factory=dict)
    sent: dict[str, None] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)
    queue: Queue[dict[str, Any]] = field(default_factory=Queue)

    def listen(self, pipe: IO[bytes]) -> None:
        """Read events until the process closes the pipe."""
        with pipe:
            for line in pipe:
                self._add(json.loads(line))
        self.queue.put({"ended": True})

    def _add(self, event: dict[str, Any]) -> None:
        for name, recorded in (("wrote", self.written), ("sent", self.sent), ("child", self.children)):
            if name in event:
                recorded[event[name]] = None
                return
        self.queue.put(event)


class CanaryAudit:
    """A set of canaries, and the search for them.

    Each canary is an anchor of 64 random bits, common to all canaries of the audit, followed by 128 random bits.

    Args:
        count: number of prompts, and of answers, with one canary each.
        paths: folders to search for changed files, beside the process's own home, working and temporary folder; None
            takes the machine's temporary folders, those for core dumps, and Pippin's cache.
    """

    @checked
    def __init__(self, count: PositiveInt = 200, *, paths: Sequence[Path] | None = None) -> None:
        self.anchor = f"c{secrets.token_hex(8)}"
        self.prompts = [f"What is {self._canary()}?" for _ in range(count)]
        self.answers = [self._canary() for _ in range(count)]
        self.folders = (*map(Path, _SHARED), store.home()) if paths is None else tuple(paths)

    def _canary(self) -> str:
        return self.anchor + secrets.token_hex(16)

    def run(
        self,
        target: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        end: Literal["exit", "kill"] = "exit",
        kill_at: int | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        timeout: float = 300.0,
    ) -> Findings:
        """Do the work in a separate process, then search for canaries.

        Args:
            target: the work as MODULE:FUNCTION or FILE.py:FUNCTION; the function takes a
                `pippin.evaluate.canary.child_process.AuditedWork`.
            arguments: arguments for the work, as JSON values.
            end: when the work is done, "exit" lets the process end, "kill" sends it SIGKILL.
            kill_at: kill the process after this number of prompts, in the middle of the work; None does not.
            on_event: called in this process with each event that the work reports.
            timeout: seconds for all of the work.

        Raises:
            TimedOut: the work took longer.
        """
        start = time.time() - 1  # a file system may count in whole seconds
        with tempfile.TemporaryDirectory(prefix="pippin-audit-") as name:
            folder = Path(name)
            process, events, listener = self._start(target, arguments or {}, folder)
            try:
                memory, open_hits = self._follow(process, events, end, kill_at, on_event, time.monotonic() + timeout)
            finally:
                if process.poll() is None:
                    process.kill()
                _close(process.stdin)
                process.wait()
                listener.join()
            hits, scanned = self._search(folder, [Path(path) for path in events.written], start)
        return Findings(
            hits=(*hits, *open_hits),
            written=tuple(events.written),
            scanned=scanned,
            memory=memory,
            sent=tuple(events.sent),
            children=tuple(events.children),
            exit_code=process.returncode,
        )

    def _start(
        self, target: str, arguments: Mapping[str, Any], folder: Path
    ) -> tuple[subprocess.Popen[bytes], _Events, threading.Thread]:
        for part in ("home", "tmp", "work"):
            (folder / part).mkdir()
        environment = os.environ | {
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PIPPIN_HOME": str(store.home()),
            **{
                f"XDG_{kind}_HOME": str(folder / "home" / kind.lower()) for kind in ("CACHE", "STATE", "DATA", "CONFIG")
            },
        }
        reading, writing = os.pipe()
        with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "pippin.evaluate.canary.child_process", str(writing), target],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=folder / "work",
                env=environment,
                pass_fds=[writing],
            )
        os.close(writing)
        events = _Events()
        listener = threading.Thread(target=events.listen, args=(os.fdopen(reading, "rb"),), daemon=True)
        listener.start()
        given = {"prompts": self.prompts, "answers": self.answers, "arguments": dict(arguments)}
        assert process.stdin is not None
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()
        return process, events, listener

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        events: _Events,
        end: str,
        kill_at: int | None,
        on_event: Callable[[dict[str, Any]], None] | None,
        deadline: float,
    ) -> tuple[Mapping[str, int] | None, list[Hit]]:
        """Wait for the end of the work; search memory and deleted files just before the process ends."""
        ticks = 0
        while True:
            try:
                event = events.queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                raise TimedOut("the audited work took too long; raise timeout (seconds) or give less work") from None
            ticks += event.get("tick", 0)
            is_killed = kill_at is not None and ticks >= kill_at
            if event.get("done") or event.get("ended") or is_killed:
                break
            if on_event is not None and "tick" not in event:
                on_event(event)
        memory = scan.search_memory(process.pid, self.anchor) if process.poll() is None else None
        hits = [hit for path in scan.deleted_but_open(process.pid) for hit in self._hits(path)]
        if is_killed or end == "kill":
            process.send_signal(signal.SIGKILL)
        else:
            _close(process.stdin)
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimedOut("the audited process does not end; raise timeout (seconds)") from None
        return memory, hits

    def _search(self, own: Path, written: Sequence[Path], start: float) -> tuple[list[Hit], int]:
        paths = dict.fromkeys(own.rglob("*"))
        paths |= dict.fromkeys(written)
        paths |= dict.fromkeys(scan.changed([f for f in self.folders if f.is_dir()], start))
        return [hit for path in paths for hit in self._hits(path, own)], len(paths)

    def _hits(self, path: Path, own: Path | None = None) -> list[Hit]:
        where = str(path.relative_to(own)) if own is not None and path.is_relative_to(own) else str(path)
        return [Hit(where, name, count) for name, count in scan.search_file(path, self.anchor).items()]


def _close(stdin: IO[bytes] | None) -> None:
    """Close the pipe to a process that may have ended without reading all of it."""
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError):
        stdin.close()
