"""A local session needs no network: it works where there is none, and the guard of this folder would notice."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import textwrap

import httpx2
import pytest

from pippin.core.errors import ProviderError

FAR = "198.51.100.1"  # kept for documentation: nobody has this address


# --- the guard can fail -----------------------------------------------------------------------------------------------


def connect():
    with socket.socket() as one:
        one.settimeout(0.2)
        one.connect((FAR, 80))


def connect_6():
    with socket.socket(socket.AF_INET6) as one:
        one.connect(("2001:db8::1", 80))


def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"x", (FAR, 53))


def send_message():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendmsg([b"x"], [], 0, (FAR, 53))


def look_up():
    socket.getaddrinfo("example.invalid", 80)


def look_up_simply():
    socket.gethostbyname("example.invalid")


def by_asyncio():
    async def work():
        await asyncio.wait_for(asyncio.open_connection(FAR, 80), 1)

    asyncio.run(work())


def by_http():
    httpx2.get(f"http://{FAR}/", timeout=0.2)


@pytest.mark.parametrize(
    "reach", [connect, connect_6, send, send_message, look_up, look_up_simply, by_asyncio, by_http]
)
def test_the_guard_stops_and_remembers(network, reach):
    with pytest.raises(AssertionError, match="must not reach"):
        reach()
    assert network.refused
    network.refused.clear()  # or the fixture would fail this test


def test_swallowing_the_error_does_not_help(network):
    with contextlib.suppress(AssertionError):
        connect()
    assert network.refused == [f"socket.connect {FAR!r}"]
    network.refused.clear()


def test_this_machine_may_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
    if hasattr(socket, "AF_UNIX"):
        with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as one:
            one.connect("/nowhere.sock")
    socket.getaddrinfo("localhost", 80)


# --- a session where there is no network at all -----------------------------------------------------------------------

WORK = """
    import asyncio, json, os, sys
    import pippin
    from pydantic import BaseModel
    from pippin.session import GenerationOptions, Session, Transcript

    class Mood(BaseModel):
        happy: bool

    @pippin.tool
    def look(up: bool) -> str:
        "Look somewhere."
        return "nothing there"

    short = GenerationOptions(max_tokens=8)
    model = pippin.load(sys.argv[1])
    session = Session(model, instructions="Be brief.", tools=[look])
    session.prewarm("The ")
    session.respond("Hello", options=GenerationOptions(max_tokens=8, tool_calling="disallowed"))
    session.respond("Happy?", generating=Mood, options=GenerationOptions(tool_calling="disallowed"))
    session.respond("Look.", options=GenerationOptions(
        tool_calling="required", parallel_tool_calls=False, max_tokens=60))
    plain = Session(model)
    for snapshot in plain.stream("Count", options=short):
        pass
    asyncio.run(plain.arespond("And on", options=short))
    plain.token_count("words")
    copy = Transcript.from_json(plain.transcript.to_json())
    Session(model, transcript=copy).respond("Go on", options=short)
    print(json.dumps([len(session.transcript), len(copy)]))
"""
PROBE = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"


def isolated(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a network namespace of its own, which has no interface that is up."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets us make no network namespace")
    command = [unshare, "-rn", sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_a_namespace_of_its_own_has_no_network():
    assert "Network is unreachable" in isolated("-c", PROBE).stderr


def test_a_session_works_without_any_network(default_model_path):
    done = isolated("-c", textwrap.dedent(WORK), str(default_model_path))
    assert done.returncode == 0, done.stderr
    instructions_and_turns, plain = (int(number) for number in done.stdout.strip("[]\n").split(","))
    assert instructions_and_turns >= 7
    assert plain == 4


def test_a_remote_model_is_what_needs_one(network):
    """Not a local session: the same call with a provider behind an address is stopped by the guard."""
    from pippin.session import Session
    from pippin.session.providers.remote import RemoteModel

    with RemoteModel(f"http://{FAR}/v1", model="m", max_retries=0, timeout=0.5) as remote, pytest.raises(ProviderError):
        Session(remote).respond("Hello")
    assert network.refused
    network.refused.clear()
