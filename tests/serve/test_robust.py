"""Many clients, clients that vanish, clients that are slow on purpose: nothing lost, nothing leaked, nothing stuck."""

import asyncio
import concurrent.futures
import gc
import json
import random
import socket
import struct
import threading
import time

import httpx2
import psutil
import pytest
import tiny_model

from .conftest import eventually

CHAT = "/v1/chat/completions"


def body(number, tokens, **changes):
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"number {number}"}],
        "max_tokens": tokens,
        "temperature": 0,
        "logit_bias": {"256": -100},
    } | changes


def request(asked):
    """A request as bytes."""
    content = json.dumps(asked).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer test\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
    ) + content


def is_idle(server):
    service = server.service
    engine = service.pool.loaded["tiny"].engine.stats() if "tiny" in service.pool.loaded else None
    return not (service.active or service.waiting or service._active_requests) and (
        engine is None or engine.active == engine.waiting == 0
    )


def test_64_clients_lose_nothing_and_mix_nothing_up(make_server):
    server = make_server(max_num_seqs=8, max_queued_requests=64)
    with server.client() as client:
        alone = {n: client.post(CHAT, json=body(n, 5 + n)).json()["choices"][0]["message"]["content"] for n in range(6)}

    def one(worker):
        found = []
        with server.client() as client:
            for turn in range(3):
                number = (worker + turn) % 6
                if (worker + turn) % 2:
                    message = client.post(CHAT, json=body(number, 5 + number)).json()["choices"][0]["message"]
                    found.append((number, message["content"]))
                    continue
                with client.stream("POST", CHAT, json=body(number, 5 + number, stream=True)) as stream:
                    lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
                assert lines[-1] == "[DONE]"
                deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
                found.append((number, "".join(deltas)))
        return found

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        found = [pair for pairs in pool.map(one, range(64)) for pair in pairs]
    assert len(found) == 64 * 3
    assert all(text == alone[number] for number, text in found)
    eventually(lambda: is_idle(server))


def test_clients_that_vanish_leave_nothing_behind(make_server):
    """Connections reset at random moments: in the head, in the body, in the queue, between tokens."""
    server = make_server(max_num_seqs=4, max_queued_requests=200)
    with server.client() as client:
        client.post(CHAT, json=body(0, 5))
    rng = random.Random(0)

    def vanish(number):
        data = request(body(number, 400, stream=bool(number % 2)))
        with server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no goodbye
            connection.sendall(data[: rng.randrange(len(data))] if number % 5 == 0 else data)
            time.sleep(rng.random() * 0.05)

    def round_(count):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(vanish, range(count)))
        eventually(lambda: is_idle(server), what="an idle server")
        gc.collect()
        return psutil.Process().memory_info().rss

    round_(100)
    before = round_(100)
    after = round_(200)
    assert after - before < 8 * 2**20
    assert not server.service._of_caller
    eventually(lambda: not server.uvicorn.server_state.connections)
    with server.client() as client:
        assert client.post(CHAT, json=body(0, 5)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_token(make_server, stream):
    server = make_server(max_num_seqs=1, max_queued_requests=0, seconds_per_token=0.01)
    with server.connect() as connection:
        connection.sendall(request(body(1, 1900, stream=stream)))
        eventually(lambda: server.service.active == 1)
        if stream:
            connection.recv(100)
    eventually(lambda: is_idle(server))
    written = server.service.metrics.tokens.labels("tiny", "output")._value.get()
    assert written < 1900


def test_a_client_that_reads_nothing_is_cut_off(make_server):
    """Many answers asked for on one connection, none of them read: system buffers fill up, then the timer runs."""
    server = make_server(write_timeout=0.5, max_num_seqs=2)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    with connection:
        page = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(3000 * page)
        eventually(lambda: server.uvicorn.server_state.total_requests > 0)
        eventually(lambda: not server.uvicorn.server_state.connections, 20, "a server without connections")
        assert 0 < server.uvicorn.server_state.total_requests < 3000
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_a_stream_that_nobody_reads_frees_its_slot(make_server):
    """Long before its answer is complete: the system's buffers do not hide that nobody reads."""
    tokens = 100_000
    long = tiny_model.build(max_position_embeddings=2 * tokens)
    server = make_server(load=lambda _: long, write_timeout=0.3, max_num_seqs=1, request_timeout=600)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    with connection:
        connection.sendall(request(body(1, tokens, stream=True)))
        eventually(lambda: server.service.active == 1)
        eventually(lambda: is_idle(server), 60)
    written = server.service.metrics.tokens.labels("tiny", "output")._value.get()
    assert 0 < written < tokens / 2


def test_a_slow_reader_holds_no_slot(make_server):
    """The answer is computed at its own pace and waits for the reader, who is a matter of the connection alone."""
    server = make_server(max_num_seqs=1, max_queued_requests=0, write_timeout=60)
    with server.connect() as connection:
        connection.sendall(request(body(1, 300, stream=True)))
        eventually(lambda: server.service.active == 1)
        eventually(lambda: is_idle(server))  # although nothing has been read
        with server.client() as client:
            assert client.post(CHAT, json=body(2, 3)).status_code == 200
        read = b""
        while b"[DONE]" not in read:
            read += connection.recv(65536)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /v1/mod", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"\r\n" * 10],
    ids=["nothing", "half a line", "half a head", "empty lines"],
)
def test_a_head_that_never_ends_is_cut_off(slow_server, sent):
    with slow_server.connect() as connection:
        connection.sendall(sent)
        began = time.monotonic()
        assert connection.recv(1000) == b""
        assert time.monotonic() - began > 0.1


def test_a_head_sent_drop_by_drop_is_cut_off(slow_server):
    with slow_server.connect() as connection, pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
        for _ in range(200):
            connection.sendall(b"GET / HTTP/1.1\r\nX: 1\r\n" if _ == 0 else b"X: 1\r\n")
            time.sleep(0.02)


def test_a_head_without_bounds_is_cut_off(slow_server):
    with slow_server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        try:
            for _ in range(200):
                connection.sendall(b"X-Long: " + b"a" * 4000 + b"\r\n")
            answer = connection.recv(1000)
        except OSError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_a_body_sent_drop_by_drop_is_refused(slow_server):
    with slow_server.connect() as connection:
        connection.sendall(request(body(1, 5))[:-10])
        answer = connection.recv(5000)
    assert answer.startswith(b"HTTP/1.1 408")
    assert is_idle(slow_server)


@pytest.fixture
def slow_server(make_server):
    return make_server(header_timeout=0.3, body_timeout=0.3)


def test_more_connections_than_allowed_are_told(make_server):
    server = make_server(max_connections=5)
    held = [server.connect() for _ in range(8)]
    held[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert held[-1].recv(1000).startswith(b"HTTP/1.1 503")
    for connection in held:
        connection.close()
    eventually(lambda: httpx2.get(f"{server.url}/health").status_code == 200)


def test_huge_bodies_take_no_memory(make_server):
    """Thirty clients that each try to send 200 MB."""
    server = make_server(max_body_bytes=1_000_000)
    before = psutil.Process().memory_info().rss
    most = [0]
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            most[0] = max(most[0], psutil.Process().memory_info().rss)
            time.sleep(0.005)

    def attack(_):
        with server.connect() as connection:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer test\r\n"
            connection.sendall(head + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
            try:
                for _ in range(3200):
                    connection.sendall(chunk)
            except OSError:
                return True
            return False

    watcher = threading.Thread(target=watch)
    watcher.start()
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        cut = list(pool.map(attack, range(30)))
    stop.set()
    watcher.join()
    assert all(cut)
    assert most[0] - before < 60 * 2**20
    with server.client() as client:
        assert client.post(CHAT, json=body(1, 3)).status_code == 200


async def test_an_overload_is_shed_and_not_died_of(make_server):
    """Far more than fits: every request is answered or told to come back, none is forgotten, and the server lives."""
    server = make_server(max_num_seqs=2, max_queued_requests=4)
    with server.client() as client:
        client.post(CHAT, json=body(0, 2))
    async with httpx2.AsyncClient(base_url=server.url, headers=server.headers, timeout=60) as client:
        found = await asyncio.gather(*(client.post(CHAT, json=body(n, 100)) for n in range(60)))
    statuses = [answer.status_code for answer in found]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 6
    assert all("retry-after" in answer.headers for answer in found if answer.status_code == 503)
    eventually(lambda: is_idle(server))
    with server.client() as client:
        assert client.post(CHAT, json=body(0, 2)).status_code == 200
