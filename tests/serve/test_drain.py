"""`pippin serve` as a process of its own: its address, its log, and how it stops."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from pippin.cli import main
from pippin.serve import uvicorn_server

from .command import KEY, Process, ask, frames


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    tiny.save(path)
    return path


@pytest.fixture(scope="module")
def patient(tiny, tmp_path_factory):
    """The same model with a context so long that no answer that fills it is done before a test is."""
    path = tmp_path_factory.mktemp("patient") / "model"
    tiny.save(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    return path


@pytest.fixture
def serve(folder, tmp_path):
    started = []

    def start(*words, model=folder):
        started.append(Process(model, tmp_path, *words))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_the_first_signal_finishes_what_runs_and_sends_the_rest_away(serve, patient):
    server = serve(model=patient)
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=ask(8000)) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        with server.client() as other:
            while (ready := other.get("/ready")).status_code == 200:
                time.sleep(0.01)
            refused = other.post("/v1/chat/completions", json=ask(5))
        read = frames(lines)
    assert (ready.status_code, refused.status_code) == (503, 503)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "overloaded"
    assert read[-1] == "[DONE]"
    assert json.loads(read[-2])["choices"][0]["finish_reason"] == "length"
    assert server.exit_code() == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{server.url}/health")
    log = server.lines()
    (stopping,) = [line for line in log if line["event"] == "stopping"]
    assert stopping["all_answered"] is True
    (served,) = [line for line in log if line.get("output_tokens")]
    assert served["output_tokens"] == 8000
    assert (served["key"], served["model"], served["status"]) == ("tester", "tiny", 200)
    assert "secret" not in "".join(server.log)
    assert KEY not in "".join(server.log)


def test_what_takes_longer_than_the_drain_is_told_so(serve, patient):
    server = serve("--drain-timeout", 0.2, model=patient)
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=ask(500_000)) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        read = frames(lines)
    assert json.loads(read[-1])["error"]["code"] == "overloaded"
    assert server.exit_code() == 0
    (stopping,) = [line for line in server.lines() if line["event"] == "stopping"]
    assert stopping["all_answered"] is False


def test_the_second_signal_ends_at_once(serve, patient):
    server = serve("--drain-timeout", 60, model=patient)
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=ask(500_000)) as stream:
        next(stream.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 30  # half of the time that it would have waited


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "set --api-key-file, listen on 127.0.0.1, or set --open-to-all to let"),
        (["--max-num-seqs", "0"], 2, "--max-num-seqs must be from 1 to 256, got 0"),
        (["--port", "70000"], 2, "--port must be from 0 to 65535, got 70000"),
        (["--memory", "much"], 2, "--memory: 'much' is not a size; write it like 500MB or 8GiB"),
        (["--replicas", "2"], 2, "--replicas is 2, which needs --ray"),
        (["--replicas", "3-1"], 2, "--replicas must be a number"),
        (["--adapter", "pirate"], 2, "--adapter is 'pirate'; write it as NAME=FOLDER"),
        (["--adapter", "pirate=/nowhere"], 3, "--adapter pirate: there is no folder /nowhere"),
        (["--api-key-file", "nowhere"], 2, "there is no key file 'nowhere'"),
        (["--stateless", "--log-prompts"], 2, "choose one of them"),
        (["--stateless", "--prompt-cache", "kept"], 2, "--prompt-cache keeps prompts and stateless promises not to"),
        (["--speculate", "no-such-draft"], 3, "there is no model or data set 'no-such-draft'"),
        (["no-such-model"], 3, "there is no model or data set 'no-such-model'"),
    ],
)
def test_what_is_wrong_is_one_line(words, code, message, capsys):
    assert main(["serve", *words]) == code
    output, error = capsys.readouterr()
    assert output == ""
    assert message in error
    assert error.count("\n") == 1


def test_whoever_reads_the_address_can_connect_at_once(folder, monkeypatch, capsys):
    connected = []

    def run(app, listener, service):
        with socket.create_connection(listener.getsockname()):
            connected.append(capsys.readouterr().out)
        service.close()

    monkeypatch.setattr(uvicorn_server, "run", run)
    assert main(["serve", f"tiny={folder}", "--port", "0"]) == 0
    assert connected[0].startswith("Pippin serves at http://127.0.0.1:")


def test_a_port_that_is_taken_is_one_line(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", f"tiny={folder}", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another host or port\n"
    )


STUCK = """
import threading

import tiny_model

from pippin.serve import uvicorn_server
from pippin.serve.app import create_app
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings
from pippin.session.providers.local import LocalModel

LocalModel.stream = lambda self, request: threading.Event().wait()
uvicorn_server._LINGER = uvicorn_server._CLOSING = 0.2
settings = ServerSettings(models=("tiny",), port=0, drain_timeout=0.2)
service = Service(settings, load=lambda _: tiny_model.build())
listener = uvicorn_server.listen(settings)
listener.listen()
print(uvicorn_server.url_of(listener), flush=True)
uvicorn_server.run(create_app(settings, service=service), listener, service)
"""


def test_a_worker_that_is_stuck_does_not_keep_the_process():
    """Its thread hears nothing, and Python would wait for it at its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "tools")},
    )
    try:
        url = process.stdout.readline().strip()
        while httpx2.get(f"{url}/ready").status_code != 200:
            time.sleep(0.05)
        body = json.dumps(ask(5)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            while not httpx2.get(f"{url}/v1/stats").json()["active"]:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    (forced,) = [json.loads(line) for line in log.splitlines() if "ended by force" in line]
    assert any(name.startswith("request") for name in forced["stuck"]), forced
