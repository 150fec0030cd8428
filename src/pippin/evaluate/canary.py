"""A canary audit: work is done with random texts in its prompts and answers, then every trace of them is looked for.

Notable here:
- every file that the process opens for writing is noted as it happens; folders are searched for what changed, too, for
  what a library wrote without Python
- whatever the process printed counts as a log on disk; so do cores, and files that were deleted while still open
- what stands in memory is counted and reported, for nobody can promise that it does not

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

from pippin.core import store
from pippin.core.errors import InvalidArgument, TimedOut
from pippin.evaluate import canary_scan

_SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/var/crash", "/var/lib/systemd/coredump")


@dataclass(frozen=True)
class Hit:
    """A trace on disk."""

    where: str
    encoding: str
    count: int


@dataclass(frozen=True)
class Findings:
    """What an audit found.

    Args:
        hits: traces on disk; there must be none.
        written: every file that the process opened for writing.
        scanned: files that were searched.
        memory: traces in the living process's memory by encoding; None where it could not be read or had ended.
        sent: attempts to reach something through a socket.
        children: other processes that it started, into which the audit does not see.
        code: how it ended; below zero is the signal.
    """

    hits: tuple[Hit, ...]
    written: tuple[str, ...]
    scanned: int
    memory: Mapping[str, int] | None
    sent: tuple[str, ...]
    children: tuple[str, ...]
    code: int


@dataclass
class _Heard:
    """What the process has told so far."""

    written: dict[str, None] = field(default_factory=dict)
    sent: dict[str, None] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)
    events: Queue[dict[str, Any]] = field(default_factory=Queue)

    def listen(self, pipe: IO[bytes]) -> None:
        """Take in everything until the process ends."""
        with pipe:
            for line in pipe:
                self._take(json.loads(line))
        self.events.put({"ended": True})

    def _take(self, event: dict[str, Any]) -> None:
        for name, kept in (("wrote", self.written), ("sent", self.sent), ("child", self.children)):
            if name in event:
                kept[event[name]] = None
                return
        self.events.put(event)


class CanaryAudit:
    """Canaries, and the search for them.

    Args:
        count: prompts and answers with a canary each.
        folders: searched for changed files, beside the process's own home, working and temporary folder; None takes
            the machine's temporary folders, those for cores, and Pippin's cache.

    Each canary is 128 random bits behind an anchor of 64 that all of them share.

    Raises:
        InvalidArgument: a count below 1.
    """

    def __init__(self, count: int = 200, *, folders: Sequence[Path] | None = None) -> None:
        if count < 1:
            raise InvalidArgument(f"count must be at least 1, got {count}")
        self.anchor = f"c{secrets.token_hex(8)}"
        self.prompts = [f"What is {self._canary()}?" for _ in range(count)]
        self.answers = [self._canary() for _ in range(count)]
        self.folders = (*map(Path, _SHARED), store.home()) if folders is None else tuple(folders)

    def _canary(self) -> str:
        return self.anchor + secrets.token_hex(16)

    def run(
        self,
        target: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        end: Literal["exit", "kill"] = "exit",
        kill_at: int | None = None,
        drive: Callable[[dict[str, Any]], None] | None = None,
        timeout: float = 300.0,
    ) -> Findings:
        """Do the work in a process of its own, and search.

        Args:
            target: the work, a function of `pippin.evaluate.canary_child.Work`: MODULE:FUNCTION or FILE.py:FUNCTION.
            arguments: for the work; plain data.
            end: when the work is done, let the process end, or kill it (SIGKILL).
            kill_at: kill it when so many prompts are done, in the midst of the work.
            drive: called with each event that the work tells, in this process.
            timeout: seconds for all of the work.

        Raises:
            TimedOut: the work took longer.
        """
        start = time.time() - 1  # a file system may count in whole seconds
        with tempfile.TemporaryDirectory(prefix="pippin-audit-") as name:
            folder = Path(name)
            process, heard, listener = self._start(target, arguments or {}, folder)
            try:
                memory, open_hits = self._follow(process, heard, end, kill_at, drive, time.monotonic() + timeout)
            finally:
                if process.poll() is None:
                    process.kill()
                _close(process.stdin)
                process.wait()
                listener.join()
            hits, scanned = self._search(folder, [Path(path) for path in heard.written], start)
        return Findings(
            hits=(*hits, *open_hits),
            written=tuple(heard.written),
            scanned=scanned,
            memory=memory,
            sent=tuple(heard.sent),
            children=tuple(heard.children),
            code=process.returncode,
        )

    def _start(
        self, target: str, arguments: Mapping[str, Any], folder: Path
    ) -> tuple[subprocess.Popen[bytes], _Heard, threading.Thread]:
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
                [sys.executable, "-m", "pippin.evaluate.canary_child", str(writing), target],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=folder / "work",
                env=environment,
                pass_fds=[writing],
            )
        os.close(writing)
        heard = _Heard()
        listener = threading.Thread(target=heard.listen, args=(os.fdopen(reading, "rb"),), daemon=True)
        listener.start()
        given = {"prompts": self.prompts, "answers": self.answers, "arguments": dict(arguments)}
        assert process.stdin is not None
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()
        return process, heard, listener

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        heard: _Heard,
        end: str,
        kill_at: int | None,
        drive: Callable[[dict[str, Any]], None] | None,
        deadline: float,
    ) -> tuple[Mapping[str, int] | None, list[Hit]]:
        """Wait for the end of the work; what stood in memory and in nameless files just before it."""
        ticks = 0
        while True:
            try:
                event = heard.events.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                raise TimedOut("the audited work took too long; give it more seconds (timeout) or less to do") from None
            ticks += event.get("tick", 0)
            is_killed = kill_at is not None and ticks >= kill_at
            if event.get("done") or event.get("ended") or is_killed:
                break
            if drive is not None and "tick" not in event:
                drive(event)
        memory = canary_scan.search_memory(process.pid, self.anchor) if process.poll() is None else None
        hits = [hit for path in canary_scan.deleted_but_open(process.pid) for hit in self._hits(path)]
        if is_killed or end == "kill":
            process.send_signal(signal.SIGKILL)
        else:
            _close(process.stdin)
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimedOut("the audited process does not end; give it more seconds (timeout)") from None
        return memory, hits

    def _search(self, own: Path, written: Sequence[Path], start: float) -> tuple[list[Hit], int]:
        paths = dict.fromkeys(own.rglob("*"))
        paths |= dict.fromkeys(written)
        paths |= dict.fromkeys(canary_scan.changed([f for f in self.folders if f.is_dir()], start))
        return [hit for path in paths for hit in self._hits(path, own)], len(paths)

    def _hits(self, path: Path, own: Path | None = None) -> list[Hit]:
        where = str(path.relative_to(own)) if own is not None and path.is_relative_to(own) else str(path)
        return [Hit(where, name, count) for name, count in canary_scan.search_file(path, self.anchor).items()]


def _close(stdin: IO[bytes] | None) -> None:
    """Say that there is no more, to a process that may not have read what there was."""
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError):
        stdin.close()
