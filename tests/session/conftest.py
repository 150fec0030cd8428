"""Every test of sessions runs without a network: whoever reaches for more than this machine is stopped and told.

The guard is an audit hook of the interpreter, below every Python library: `socket.connect`, `sendto`, `sendmsg` and the
look-up of names are seen whoever calls them. Loopback and Unix sockets are let through, since the tests of providers
and tools talk to servers of their own there.
"""

import ipaddress
import sys
from collections.abc import Iterator
from typing import Literal

import pytest

_LOCAL_NAMES = {"localhost", "", None, b"localhost"}


class NetworkReached(AssertionError):
    """A session reached for the network."""


class Guard:
    """Refuses what goes beyond this machine while it is on; ``refused`` is what was tried."""

    def __init__(self) -> None:
        self.on = False
        self.refused: list[str] = []
        sys.addaudithook(self.hook)  # for good: such a hook cannot be taken out again

    def hook(self, event: str, arguments: tuple) -> None:
        """Called by the interpreter before each audited operation."""
        if not self.on or not event.startswith("socket."):
            return
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            host = _host(arguments[1])
        elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
            host = arguments[0]
        else:
            return
        if not _is_local(host):
            self.refused.append(f"{event} {host!r}")
            raise NetworkReached(f"{event}: a session must not reach {host!r}")


def _host(address: object) -> object:
    """The host of a socket's address; a Unix socket's, or that of a connected one, is none."""
    return address[0] if isinstance(address, tuple) else None


def _is_local(host: object) -> bool:
    if host in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session")
def guard() -> Guard:
    """The guard of this process."""
    return Guard()


@pytest.fixture(autouse=True)
def network(guard, request) -> Iterator[Guard]:
    """No test of this folder reaches the network, not even one that swallows the guard's error."""
    guard.refused.clear()
    guard.on = True
    try:
        yield guard
    finally:
        guard.on = False
    assert not guard.refused, f"{request.node.name} reached for the network: {', '.join(guard.refused)}"


# --- a model of its own for a test ------------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny):
    """An engine over the tiny model."""
    from pippin.engine import Engine

    with Engine(tiny) as made:
        yield made


@pytest.fixture
def provider(tiny, engine):
    """The tiny model as a provider, with that engine."""
    from pippin.session import LocalModel

    return LocalModel(tiny, engine=engine)


@pytest.fixture(scope="session")
def look():
    """A tool."""
    import pippin

    @pippin.tool
    def look(where: Literal["up", "down"]) -> str:
        """Look somewhere."""
        return f"nothing {where} there, and that is all that can be said of it"

    return look
