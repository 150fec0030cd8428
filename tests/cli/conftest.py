"""The installed `pippin` command, run as a user runs it: another process, its own streams, its exit code."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pippin.cli import main
from pippin.cli.common import options

COMMAND = Path(sys.executable).with_name("pippin")

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="session")
def command() -> Path:
    """Where the command is; tests install the package first, as CI does."""
    assert COMMAND.exists(), "the package is not installed: pip install -e ."
    return COMMAND


@pytest.fixture(scope="session")
def pippin(command) -> Run:
    """Run `pippin WORDS…` with bytes on stdin; streams come back as bytes."""

    def run(*words: object, stdin: bytes = b"", env: dict[str, str] | None = None, timeout: float = 120):
        return subprocess.run(
            [str(command), *map(str, words)],
            input=stdin,
            capture_output=True,
            timeout=timeout,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        )

    return run


@pytest.fixture
def refused(monkeypatch, capsys) -> Callable[..., str]:
    """Run words that must fail: one `error:` line, no traceback, nothing on stdout. Gives the line.

    In this process, which has imported everything: a process for each of them would take two seconds to start.
    """

    def run(*words: object, code: int, stdin: bytes = b"", env: dict[str, str] | None = None):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            found = main([str(word) for word in words])
        shown, message = capsys.readouterr()
        assert found == code, (found, message)
        assert shown == ""
        assert "Traceback" not in message
        assert message.startswith("error: ")
        assert message.count("\n") == 1
        return message.removeprefix("error: ").rstrip("\n")

    return run


@pytest.fixture
def in_process(monkeypatch, capsys, model):
    """Run words in this process with the model that is loaded already; gives exit code, stdout and stderr."""

    def run(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(options, "load", lambda *_: model)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


class Terminal:
    """A command in a real pseudo-terminal: type into it, wait for what it shows."""

    def __init__(self, *words: object, env: dict[str, str]) -> None:
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.execve(
                str(COMMAND),
                [str(COMMAND), *map(str, words)],
                os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1"} | env,
            )
        fcntl.ioctl(self.handle, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.shown = ""
        self.seen = 0

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Read until the text is shown after what was waited for before; what was shown up to there."""
        end = time.monotonic() + seconds
        while text not in self.shown[self.seen :]:
            ready, _, _ = select.select([self.handle], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} was not shown within {seconds} s; shown: {self.shown[self.seen :]!r}"
            assert self._read(), f"{text!r} was not shown before the end; shown: {self.shown[self.seen :]!r}"
        begin, self.seen = self.seen, self.shown.index(text, self.seen) + len(text)
        return self.shown[begin : self.seen]

    def type(self, keys: str) -> None:
        """Press keys: "\r" is Enter, "\x03" Ctrl-C, "\x04" Ctrl-D, "\x1b\r" Alt-Enter."""
        os.write(self.handle, keys.encode())

    def exit_code(self, seconds: float = 30) -> int:
        """Wait for the end of the command."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.handle)
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end, f"still running; shown: {self.shown[self.seen :]!r}"
            if select.select([self.handle], [], [], 0.05)[0]:
                self._read() or time.sleep(0.05)

    def kill(self) -> None:
        """End the command if it has not ended."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self.handle)

    def _read(self) -> bool:
        """Take in what is there; False at the end."""
        try:
            data = os.read(self.handle, 65536)
        except OSError:  # Linux says so when the other side has closed
            data = b""
        self.shown += _ESCAPES.sub("", data.decode(errors="replace"))
        return bool(data)


_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][AB0]|[=>78])")


@pytest.fixture
def terminal(command):
    """Open the command in a pseudo-terminal; it is ended with the test."""
    opened: list[Terminal] = []

    def open_(*words: object, env: dict[str, str] | None = None) -> Terminal:
        opened.append(Terminal(*words, env=env or {}))
        return opened[-1]

    yield open_
    for one in opened:
        one.kill()
