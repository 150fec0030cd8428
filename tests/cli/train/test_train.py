"""`pippin train` and `pippin shape` as a user runs them: what they print, and their exit codes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pippin.cli import main

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]
SMALL = ["--max-length", "32", "--batch-size", "4", "--lr", "0.01", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model and a text for it."""
    place = tmp_path_factory.mktemp("training")
    tiny.save(place / "model")
    (place / "text.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(600)))
    return place


def run(capsys, *words):
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def train(folder, out, *words, verb="full"):
    return ["train", verb, folder / "model", "--data", folder / "text.txt", "--out", out, *SMALL, *words]


def test_a_table_and_where_things_are(folder, tmp_path, capsys):
    code, out, err = run(capsys, *train(folder, tmp_path / "new", "--steps", 2))
    assert code == 0, err
    for words in ("first loss", "held-out loss after", "nats/token", "tokens/s"):
        assert words in out
    assert "2 steps" in err
    assert "log, checkpoints and loss curve in" in err


def test_json_is_one_object_and_silent(folder, tmp_path, capsys):
    code, out, err = run(capsys, *train(folder, tmp_path / "new", "--steps", 2, "--rank", 2, "--json", verb="lora"))
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert (made["steps"], made["rank"], made["stopped"]) == (2, 2, None)
    assert made["held_out_after"]["loss"] > 0


def test_ctrl_c_ends_with_its_exit_code_and_resume_continues(folder, tmp_path, capsys):
    words = ["--steps", 60, "--held-out", 0, "--json"]
    log = tmp_path / "cut" / "run" / "log.jsonl"

    def interrupt():
        end = time.monotonic() + 60
        while time.monotonic() < end and not (log.exists() and log.read_bytes().count(b"\n") >= 3):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    impatient = threading.Thread(target=interrupt)
    impatient.start()
    code, out, err = run(capsys, *train(folder, tmp_path / "cut", *words))
    impatient.join()
    assert (code, json.loads(out)["stopped"]) == (130, "interrupted")
    assert "--resume continues" in err
    code, out, _ = run(capsys, *train(folder, tmp_path / "cut", *words, "--resume"))
    assert (code, json.loads(out)["steps"]) == (0, 60)


def test_a_smaller_model_and_its_figures(folder, tmp_path, capsys):
    words = ["shape", "palettize", folder / "model", "--out", tmp_path / "small", "--bits", 2]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert "bits per weight, with tables" in out
    assert "saved in" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--precision", "int8"], "--precision"),
        (["--workers", "2"], "--workers is for --ray"),
        (["--strategy", "tracks"], "this is the only one: start N of them with torchrun --nproc-per-node N"),
        (["--field", "prompt"], "--field is 'prompt'"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_exit_code_2(folder, tmp_path, capsys, words, message):
    code, out, err = run(capsys, *train(folder, tmp_path / "new", *words))
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "new").exists()


def torchrun(words, *, processes):
    start = f"-W ignore -m torch.distributed.run --standalone --nproc-per-node {processes} -m pippin".split()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(word) for word in (sys.executable, *start, *words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.slow
def test_processes_that_torchrun_starts_make_the_run_of_one(folder, tmp_path, capsys):
    words = ["--steps", "3", "--held-out", "0", "--json"]
    one = json.loads(run(capsys, *train(folder, tmp_path / "one", *words))[1])
    done = torchrun([*train(folder, tmp_path / "two", *words), "--batch-size", 2], processes=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["last_loss"] == pytest.approx(one["last_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("processes", "preset", "message"),
    [
        (
            1,
            "nano-pt-moe",
            "error: strategy tracks divides a model's tracks between processes, and this is the only one",
        ),
        (2, "nano", "error: this llama decoder has no tracks to divide: strategy ddp divides the batch instead"),
    ],
)
def test_tracks_that_cannot_be_divided_are_refused_before_anything_is_written(
    folder, tmp_path, processes, preset, message
):
    words = train(folder, tmp_path / "new", "--steps", 1, "--strategy", "tracks", "--preset", preset)
    done = torchrun(words, processes=processes)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "new").exists()
