"""A real server on a real port, in a thread of this process, over models small enough for tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import torch
import uvicorn

from pippin.core.errors import ModelNotFound
from pippin.language import LanguageModel
from pippin.serve.app import create_app
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings
from pippin.serve.uvicorn_server import uvicorn_config
from pippin.session.providers.local import LocalModel
from pippin.session.providers.provider import ProviderEvent, ProviderRequest

KEY = "test"


class TinyEncoder:
    """An encoder whose vectors are letter counts: deterministic, and near for texts of the same letters."""

    name, max_tokens, width = "tiny-encoder", 512, 26

    def embed(self, texts: Sequence[str], *, normalize: bool = True) -> torch.Tensor:
        rows = torch.tensor([[1.0 + text.lower().count(chr(97 + i)) for i in range(26)] for text in texts])
        return torch.nn.functional.normalize(rows, dim=-1) if normalize else rows

    def token_count(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    @property
    def nbytes(self) -> int:
        return 1000


class SlowModel(LocalModel):
    """A local model that waits before it hands out each token."""

    def __init__(self, model: LanguageModel, seconds: float) -> None:
        super().__init__(model)
        self._seconds = seconds

    def stream(self, request: ProviderRequest) -> Iterator[ProviderEvent]:
        for event in super().stream(request):
            time.sleep(self._seconds)
            yield event


@dataclass
class Running:
    """A server that answers; ``url`` has no slash at its end."""

    url: str
    key: str
    service: Service
    app: Any
    uvicorn: uvicorn.Server
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def headers(self) -> dict[str, str]:
        """What a request needs."""
        return {"authorization": f"Bearer {self.key}"}

    def client(self, **options: Any) -> httpx2.Client:
        """A client with the key; use it in a `with`."""
        return httpx2.Client(**{"base_url": self.url, "headers": self.headers, "timeout": 60} | options)

    def connect(self) -> socket.socket:
        """A bare connection, for what no client would send."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive(), "the server did not stop"


def start(app: Any, key: str = KEY) -> Running:
    """Run an app in a thread and wait until it listens."""
    service: Service = app.state.service
    server = uvicorn.Server(uvicorn_config(app, service.settings))
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive(), "the server ended before it listened"
        assert time.monotonic() < end, "the server did not start within 60 s"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    return Running(f"http://127.0.0.1:{port}", key, service, app, server, thread)


def eventually(holds: Callable[[], bool], seconds: float = 20, what: str = "it") -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what} did not come true within {seconds} s"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def build_app(tiny) -> Callable[..., Any]:
    """Make an app over the tiny model, which answers to every name that the settings list ("tiny" if they list none).

    "tiny-encoder" is an encoder. ``load`` replaces the loader. With ``seconds_per_token`` the model writes slowly, for
    tests that must do something before it has ended.
    """

    def load(name: str) -> Any:
        if name == "missing":
            raise ModelNotFound("there is no model 'missing'")
        return tiny

    def build(*, load: Callable[[str], Any] = load, seconds_per_token: float = 0, **settings: Any) -> Any:
        if seconds_per_token:
            slow = SlowModel(tiny, seconds_per_token)
            load = lambda _: slow  # noqa: E731
        given = {"models": ("tiny", "tiny-encoder"), "api_keys": {"tester": KEY}, "port": 0} | settings
        chosen = ServerSettings(**given)
        service = Service(chosen, load=load, load_encoder=lambda _: TinyEncoder(), encoders={"tiny-encoder"})
        return create_app(chosen, service=service)

    return build


@pytest.fixture(scope="session")
def start_app() -> Callable[..., Running]:
    """`start`, for fixtures that keep a server of their own for longer than a test."""
    return start


@pytest.fixture
def make_server(build_app) -> Iterator[Callable[..., Running]]:
    """Start servers with settings of your own, ``make_server(max_num_seqs=2)``; they stop with the test."""
    running: list[Running] = []

    def make(**settings: Any) -> Running:
        running.append(start(build_app(**settings)))
        return running[-1]

    yield make
    for one in running:
        one.stop()


@pytest.fixture(scope="session")
def server(build_app) -> Iterator[Running]:
    """One server for all tests that change nothing about it: model "tiny", key "test"."""
    one = start(build_app())
    yield one
    one.stop()
