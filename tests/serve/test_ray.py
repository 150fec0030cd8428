"""Two replicas on one machine, one of them killed under load: nothing is lost that had not begun to stream."""

import concurrent.futures
import json
import os
import signal
import time

import psutil
import pytest

from .command import Process, ask, frames

pytestmark = pytest.mark.nightly
URL = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    """`pippin serve --ray --replicas 2` over a tiny model."""
    folder = tmp_path_factory.mktemp("ray")
    tiny.save(folder / "model")
    words = (
        "--ray",
        "--replicas",
        2,
        "--max-num-seqs",
        4,
        "--requests-per-minute",
        1000,
        "--no-page",
        "--drain-timeout",
        1,
    )
    process = Process(folder / "model", folder, *words)
    yield process
    process.process.send_signal(signal.SIGTERM)
    try:
        assert process.exit_code(60) == 0
    finally:
        process.close()


def replicas(server):
    """Process ids of the replicas."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child.pid for child in children if child.cmdline()[:1] and "ServeReplica" in child.cmdline()[0]]


def test_a_replica_that_is_killed_loses_nothing_that_had_not_begun(server):
    with server.client() as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.post(URL, json={}).status_code == 400
        assert client.post(URL, json={}, headers={"authorization": "Bearer wrong"}).status_code == 401

        def one(number):
            id = f"r{number}"
            answer = client.post(URL, json=ask(12, f"number {number % 8}", stream=False), headers={"x-request-id": id})
            return answer.status_code, answer.headers["x-request-id"] == id, answer.json()

        alone = [one(number)[2]["choices"][0]["message"]["content"] for number in range(8)]
        before = replicas(server)
        assert len(before) == 2
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            waiting = [pool.submit(one, number) for number in range(120)]
            while sum(future.done() for future in waiting) < 20:
                time.sleep(0.005)
            os.kill(before[0], signal.SIGKILL)
            found = [future.result() for future in waiting]
        assert [status for status, _, _ in found] == [200] * 120
        for number, (_, same_id, body) in enumerate(found):
            assert same_id
            assert body["choices"][0]["message"]["content"] == alone[number % 8]
            assert body["usage"]["completion_tokens"] == 12

        figures = client.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in figures.splitlines() if not line.startswith("#"))
        assert float(lines['pippin_tokens_total{kind="output",model="tiny"}']) == (120 + 8) * 12
        assert float(lines[f'pippin_http_requests_total{{route="{URL}",status="200"}}']) == 128
        assert any('"replica lost"' in line for line in server.log)  # so the kill did hit requests on their way


def test_a_stream_that_had_begun_ends_with_an_error_event(server):
    with server.client() as client, client.stream("POST", URL, json=ask(1900)) as answer:
        lines = answer.iter_lines()
        next(lines)
        for pid in replicas(server):
            os.kill(pid, signal.SIGKILL)
        read = frames(lines)
    assert "replica" in json.loads(next(frame for frame in read if '"error"' in frame))["error"]["message"]
