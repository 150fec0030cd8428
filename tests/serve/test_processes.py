"""`pippin serve` under torchrun: two processes answer as one, and stop together."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import tiny_model
from tests.language.parallel._processes import CONFIG

import pippin
from pippin.core.errors import InvalidArgument
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language import Decoder
from pippin.serve import processes
from pippin.serve.settings import ServerSettings

from .command import frames

TRACKS = replace(CONFIG, vocab_size=260, num_tracks=2, window=16, max_position_embeddings=2048)


@pytest.fixture(scope="module", params=["tracks", "matrices"])
def folder(request, tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "model"
    if request.param == "matrices":
        tiny.save(path)
    else:
        network = Decoder(TRACKS.decoder()).initialize(seed=0).eval()
        replace(tiny_model.build(), network=network).save(path)
    return path


@contextmanager
def serving(folder, log, *words):
    """`pippin serve` in two processes: torchrun's, and the address; None if it ended before."""
    run = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pippin"]
    command = [sys.executable, *run, "serve", f"tiny={folder}", "--port", "0", "--dtype", "float32", *words]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
        )
    try:
        while (address := re.search(r"Pippin serves at (\S+)", log.read_text())) is None and process.poll() is None:
            time.sleep(0.05)
        yield process, address and address[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answer_alone(folder, text, tokens):
    """What one process answers."""
    model = pippin.load(folder, device="cpu", dtype="float32")
    prompt = list(model.tokenizer.encode(text))
    options = SamplingOptions(max_tokens=tokens, temperature=1.0, seed=7, logit_bias={256: -100.0})
    with Engine(model) as engine:
        return "".join(event.text for event in engine.stream(Request(prompt, options)))


def test_two_processes_answer_as_one_and_stop_together(folder, tmp_path):
    asked = {"model": "tiny", "prompt": "secret words", "temperature": 1, "seed": 7, "logit_bias": {"256": -100}}
    with serving(folder, tmp_path / "log") as (process, url), httpx2.Client(base_url=url, timeout=120) as client:
        while client.get("/ready").status_code != 200:
            time.sleep(0.05)
        answers = [client.post("/v1/completions", json=asked | {"max_tokens": 12}) for _ in range(2)]
        with client.stream("POST", "/v1/completions", json=asked | {"max_tokens": 300, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert frames(lines)[-1] == "[DONE]"  # what runs is finished
        process.wait(60)
    texts = [each.json()["choices"][0]["text"] for each in answers]
    assert texts == [answer_alone(folder, "secret words", 12)] * 2
    assert len(set(texts[0])) > 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"models": ("one=a", "two=b")}, "several models"),
        ({"bits": 4}, "--bits"),
        ({"memory": 10**9, "speculate": "self"}, "--memory, --speculate"),
        ({"prompt_cache": Path("kept")}, "--prompt-cache"),
    ],
)
def test_what_a_divided_model_is_served_without(given, named):
    with pytest.raises(InvalidArgument, match=f"served without {named}"):
        processes.check(ServerSettings(**({"models": ("one=a",)} | given)))
    processes.check(ServerSettings(models=("one=a",), speculate="ngram"))


def test_an_argument_that_is_refused_ends_all_processes(folder, tmp_path):
    with serving(folder, tmp_path / "log", "--bits", "4") as (process, url):
        assert url is None
        assert process.wait(60) != 0
    assert "served without --bits" in (tmp_path / "log").read_text()
