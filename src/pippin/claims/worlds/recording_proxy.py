"""A server on a local port, and a proxy in front of it that records every byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve an ASGI application on a free local port; yields the port.

    Raises:
        MissingDependency: uvicorn is not installed.
    """
    from pippin.core.errors import MissingDependency

    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependency("a server needs uvicorn: pip install 'pippin[serve]'") from error
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


class RecordingProxy:
    """Forwards bytes to a port and records them; ``meddle`` may change the response.

    Args:
        port: local port to forward to.
    """

    def __init__(self, port: int) -> None:
        self.sent, self.received = bytearray(), bytearray()
        self.meddle: Callable[[bytes], bytes] = lambda data: data
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pumps: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def saw(self, text: str, length: int = 6) -> bool:
        """Whether any ``length`` consecutive characters of a text were on the wire, in either direction."""
        pieces = {text[at : at + length].encode() for at in range(len(text) - length + 1)}
        return any(piece in wire for piece in pieces for wire in (bytes(self.sent), bytes(self.received)))

    def __enter__(self) -> RecordingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._thread, *self._pumps):
            thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for one, other, record in ((near, far, self.sent), (far, near, self.received)):
                    self._pumps.append(threading.Thread(target=self._pump, args=(one, other, record), daemon=True))
                    self._pumps[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                record += data
                target.sendall(self.meddle(data) if record is self.received else data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
