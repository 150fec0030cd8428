"""A provider whose every token is decided by the test: slow, endless, broken or well-behaved."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from pippin.engine import Token
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings
from pippin.session.options import GenerationOptions
from pippin.session.providers.provider import Capabilities, Done, ProviderEvent, ProviderRequest, TextDelta
from pippin.session.response import Usage
from pippin.session.transcript import Prompt, Transcript


@dataclass
class Stub:
    """Answers with ``max_tokens`` numbered words; waits for ``gate`` before each, if there is one."""

    gate: threading.Semaphore | None = None
    seconds: float = 0.0
    deaf: bool = False  # does not hear that its turn is cancelled
    error: Exception | None = None
    error_at: int = 0
    name: str = "stub"
    nbytes: int = 100
    context_size: int = 1000
    engine: None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(template="template"))
    running: int = 0
    most: int = 0
    owners: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stream(self, turn: ProviderRequest) -> Iterator[ProviderEvent]:
        return self._events(turn, turn.options.max_tokens or 5)

    def token_count(self, turn: ProviderRequest) -> int:
        return 3

    def _events(self, turn: ProviderRequest, count: int) -> Iterator[ProviderEvent]:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.owners.append(turn.owner)
        written = 0
        try:
            for number in range(count):
                if self.gate is not None:
                    while not self.gate.acquire(timeout=0.005):
                        if turn.cancel.is_set() and not self.deaf:
                            break
                time.sleep(self.seconds)
                if turn.cancel.is_set() and not self.deaf:
                    break
                if self.error is not None and number == self.error_at:
                    raise self.error
                written += 1
                yield TextDelta(f"{number} ", (Token(number, f"{number} "),))
            yield Done("cancelled" if turn.cancel.is_set() else "stop", Usage(3, 1, written))
        finally:
            with self._lock:
                self.running -= 1


def make_service(stub: Stub | None = None, **settings) -> tuple[Service, Stub]:
    """A service whose only model is a stub."""
    stub = stub or Stub()
    service = Service(ServerSettings(**{"models": ("stub",)} | settings), load=lambda _: stub)
    return service, stub


def turn(tokens: int = 5, text: str = "hello"):
    """What builds a turn of so many tokens."""
    return lambda provider: ProviderRequest(
        Transcript(entries=(Prompt(text),)), options=GenerationOptions(max_tokens=tokens)
    )
