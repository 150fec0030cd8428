"""A web server that misbehaves to order, and a cache of its own for each test."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class Answer:
    """What one path answers."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # bytes after which the connection breaks, one for each request
    failures: list[int] = field(default_factory=list)  # statuses that come first, one for each request
    needs: Callable[[dict[str, str]], bool] = lambda headers: True  # else 401
    pace: float = 0.0  # seconds between blocks of 64 KiB


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    sent: int = 0


class Web:
    """Answers by path, and what was asked so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, Answer] = {}
        self.requests: list[Request] = []
        self.closing = threading.Event()

    def put(self, path: str, body: bytes = b"", **options) -> str:
        self.answers[path] = Answer(body, **options)
        return self.url + path

    @property
    def bytes_sent(self) -> int:
        return sum(request.sent for request in self.requests)


def _handler(web: Web) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            request = Request(self.path, {name.lower(): value for name, value in self.headers.items()})
            web.requests.append(request)
            answer = web.answers.get(self.path.partition("?")[0])
            status = 404 if answer is None else answer.failures.pop(0) if answer.failures else answer.status
            if answer and not answer.needs(request.headers):
                status = 401
            if answer is None or status >= 300:
                self.send_response(status)
                for name, value in (answer.headers if answer else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self._send(answer, request)

        do_HEAD = do_GET

        def _send(self, answer: Answer, request: Request) -> None:
            total, start = len(answer.body), 0
            if answer.ranges and (asked := request.headers.get("range")):
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                if start >= total:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{total}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            else:
                self.send_response(200)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(total - start))
            self.end_headers()
            end = min(total, start + answer.cuts.pop(0)) if answer.cuts else total
            try:
                while start < end and self.command == "GET":
                    block = answer.body[start : min(start + 65536, end)]
                    self.wfile.write(block)
                    start += len(block)
                    request.sent += len(block)
                    if answer.pace and web.closing.wait(answer.pace):
                        break
            except OSError:  # the client went away, or was killed
                pass
            self.close_connection = end < total or self.close_connection

    return Handler


@pytest.fixture
def web() -> Iterator[Web]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.daemon_threads = True
    server.block_on_close = False
    web = Web(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = _handler(web)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield web
    web.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no waiting between tries."""
    home = tmp_path / "cache"
    monkeypatch.setenv("PIPPIN_HOME", str(home))
    for name in ("PIPPIN_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pippin.core.store.download.BACKOFF", 0.001)
    return home
