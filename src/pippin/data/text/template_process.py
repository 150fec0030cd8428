"""Chat templates rendered in a process of their own, which may take so much time and memory and then ends.

Notable here:
- a template comes with a model, so it is a stranger's program: the sandbox keeps it from Python, but no check of its
  expressions bounds what they cost; the kernel does, by limits of a child process that holds nothing else
- the child is started once for each template (0.1 s) and answers each conversation over a socket (0.1 ms); where it
  ended, the next conversation starts another
- the time is processor time, counted by a timer of the child whose signal no expression can delay; so a machine under
  load fails no template, and a child whose parent was killed ends as well
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

from pippin.core.errors import CheckpointError, InvalidInput

MAX_SECONDS: Final = 5.0
"""Processor time of one rendering; a second more for each million characters of the conversation."""
MAX_BYTES: Final = 1 << 29
"""Address space of the child; 64 bytes more for each character of the conversation."""
_MAX_WAIT: Final = 60.0  # seconds until a child that gets no processor time is given up
_MAX_TEMPLATE: Final = 1 << 20  # characters; the longest known templates have 20,000
_REQUEST, _REPLY = struct.Struct("<Q"), struct.Struct("<cQ")
_DONE, _REFUSED, _FAILED = b"d", b"r", b"f"
_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "SYSTEMROOT")  # keys of the parent's services are not among them
_START = (
    "import sys; sys.path[:] = sys.argv[2:]\n"
    "from pippin.data.text.template_process import main; main(float(sys.argv[1]))"
)


class TemplateProcess:
    """A template in a child process; threads take turns.

    >>> TemplateProcess("{% for word in words %}<{{ word }}>{% endfor %}").render({"words": ["a", "b"]}, size=2)
    '<a><b>'
    """

    def __init__(self, source: str, *, max_seconds: float = MAX_SECONDS) -> None:
        """Compile the template.

        Args:
            source: the Jinja template.
            max_seconds: processor time of one rendering.

        Raises:
            CheckpointError: it is not valid Jinja, or takes too long to compile; the message names the location.
        """
        if len(source) > _MAX_TEMPLATE:
            raise CheckpointError(f"the chat template has {len(source):,} characters and may have {_MAX_TEMPLATE:,}")
        self.source, self.max_seconds = source, max_seconds
        self._lock = Lock()
        self._child: _Child | None = None
        with self._lock:
            self._start()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source,)

    def render(self, variables: dict[str, Any], size: int) -> str:
        """The output for these variables.

        Args:
            variables: plain JSON values.
            size: number of characters of text in them; the output may be a multiple of it.

        Raises:
            InvalidInput: the template refuses these variables, with its own message, or they are not JSON.
            CheckpointError: the template failed, or took more time or memory than it may.
        """
        try:
            request = json.dumps([variables, size]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"the messages cannot be written as JSON: {error}") from error
        with self._lock:
            child = self._child
            if child is None or child.owner != os.getpid() or not child.alive:
                child = self._start()
            status, text = self._ask(child, request)
        if status == _REFUSED:
            raise InvalidInput(f"the chat template refuses these messages: {text}")
        if status != _DONE:
            raise CheckpointError(f"the chat template failed: {text}")
        return text

    def _start(self) -> _Child:
        self._child = child = _Child(self.max_seconds)
        weakref.finalize(self, child.close)
        status, text = self._ask(child, self.source.encode("utf-8", "surrogatepass"))
        if status != _DONE:
            child.close()
            raise CheckpointError(f"the chat template cannot be compiled: {text}")
        return child

    def _ask(self, child: _Child, request: bytes) -> tuple[bytes, str]:
        try:
            return child.ask(request)
        except (OSError, EOFError) as error:
            child.close()
            self._child = None
            raise CheckpointError(
                f"the chat template took more than {self.max_seconds:g} s or {MAX_BYTES >> 20} MB and was ended; "
                "use a model with another template"
            ) from error


class _Child:
    """The process, and the parent's end of its socket."""

    def __init__(self, max_seconds: float) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        package = str(Path(__file__).parents[3])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, str(max_seconds), package, *filter(None, sys.path)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> tuple[bytes, str]:
        """Send a request; its status, and its text.

        Raises:
            OSError, EOFError: the child has ended, or gave no answer in time.
        """
        self._socket.settimeout(_MAX_WAIT)
        self._socket.sendall(_REQUEST.pack(len(request)))
        self._socket.sendall(request)
        deadline = time.monotonic() + _MAX_WAIT
        status, length = _REPLY.unpack(self._receive(_REPLY.size, deadline))
        if length > MAX_BYTES + 64 * len(request):  # more than the child can hold
            raise EOFError
        return status, self._receive(length, deadline).decode("utf-8", "surrogatepass")

    def _receive(self, length: int, deadline: float) -> bytes:
        pieces = []
        while length:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._socket.recv(min(length, 1 << 20))
            if not piece:
                raise EOFError
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        if self.owner == os.getpid():  # a fork has its own copy of the socket, and no right to the child
            self._process.kill()
            self._process.wait()


# --- the child --------------------------------------------------------------------------------------------------------


def main(max_seconds: float) -> None:
    """Compile the template that comes first, then render until the parent closes the socket."""
    import resource

    from pippin.data.text.jinja_sandbox import SandboxedTemplate, TemplateRejection

    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the parent, which may still need an answer
        signal.signal(number, signal.SIG_IGN)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    connection = socket.socket(fileno=os.dup(0))
    stream = connection.makefile("rb")
    template: SandboxedTemplate | None = None
    while head := stream.read(_REQUEST.size):
        data = stream.read(*_REQUEST.unpack(head))
        characters = len(data)
        signal.setitimer(signal.ITIMER_PROF, max_seconds + characters / 1e6)
        with suppress(ValueError, OSError):  # a system without such a limit, or with a lower one
            resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES + 64 * characters, hard))
        status, text = _DONE, ""
        try:
            if template is None:
                template = SandboxedTemplate(data.decode("utf-8", "surrogatepass"))
            else:
                text = template.render(*json.loads(data))
        except TemplateRejection as error:
            status, text = _REFUSED, str(error)
        except MemoryError:
            status, text = _FAILED, f"it took more than {MAX_BYTES >> 20} MB"
        except CheckpointError as error:
            status, text = _FAILED, str(error)
        reply = text.encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(_REPLY.pack(status, len(reply)))
        connection.sendall(reply)
