"""`pippin train full`: from files to a folder that opens like any model, once more from there, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import pippin
from pippin.cli import main, training
from pippin.core.errors import InvalidArgument

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]
SMALL = ["--length", "32", "--rows", "4", "--lr", "0.01"]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model and two kinds of data for it."""
    place = tmp_path_factory.mktemp("training")
    tiny.save(place / "model")
    config = json.loads((place / "model" / "tokenizer_config.json").read_text())
    config["chat_template"] = tiny.template.source
    (place / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "text.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(600)))
    talk = [{"question": f"Say {word}", "answer": word} for word in WORDS]
    (place / "chat.jsonl").write_text("\n".join(map(json.dumps, talk)))
    return place


def run(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def full(folder, out, *words, data="text.txt"):
    return ["train", "full", folder / "model", "--data", folder / data, "--out", out, *SMALL, *words]


def test_a_trained_model_opens_and_knows_its_text_better(folder, tmp_path, capsys):
    code, out, _ = run(capsys, *full(folder, tmp_path / "new", "--steps", 12, "--json", "--every", 6))
    made = json.loads(out)
    assert code == 0
    assert made["steps"] == 12
    assert made["held_out_after"]["loss"] < made["held_out_before"]["loss"] - 0.3
    trained = pippin.load(tmp_path / "new", device="cpu", dtype="float32")
    before = pippin.load(folder / "model", device="cpu", dtype="float32")
    from pippin.language.likelihood import likelihood

    text = (folder / "text.txt").read_text()
    assert likelihood(trained, text, length=32).nats < 0.95 * likelihood(before, text, length=32).nats
    names = {path.name for path in (tmp_path / "new" / "run").iterdir()}
    assert {"log.jsonl", "loss.png", "step-00000012"} <= names

    # the same command again would overwrite the run; with --resume it finds nothing left to do
    code, _, err = run(capsys, *full(folder, tmp_path / "new", "--steps", 12))
    assert code == 2
    assert "holds a run" in err
    assert "--resume" in err
    code, out, _ = run(capsys, *full(folder, tmp_path / "new", "--steps", 12, "--resume", "--json", "--every", 6))
    assert code == 0
    assert json.loads(out)["last_loss"] == made["last_loss"]


def test_a_run_stopped_with_ctrl_c_goes_on_to_the_same_end(folder, tmp_path, capsys):
    words = ["--steps", 60, "--held-out", 0, "--json"]
    whole = json.loads(run(capsys, *full(folder, tmp_path / "whole", *words))[1])
    log = tmp_path / "cut" / "run" / "log.jsonl"

    def interrupt():
        while not (log.exists() and log.read_bytes().count(b"\n") >= 3):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    impatient = threading.Thread(target=interrupt)
    impatient.start()
    code, out, err = run(capsys, *full(folder, tmp_path / "cut", *words))
    impatient.join()
    stopped = json.loads(out)
    assert (code, stopped["stopped"]) == (130, "interrupted")
    assert 3 <= stopped["steps"] < 60
    assert "--resume goes on" in err
    code, out, _ = run(capsys, *full(folder, tmp_path / "cut", *words, "--resume"))
    assert code == 0
    assert json.loads(out)["last_loss"] == whole["last_loss"]


def test_conversations_train_a_fresh_model_of_another_form(folder, tmp_path, capsys):
    fields = ["--field", "prompt=question", "--field", "completion=answer"]
    words = [*fields, "--preset", "nano", "--steps", 3, "--held-out", folder / "held.jsonl"]
    (folder / "held.jsonl").write_text(json.dumps({"question": "Say yes", "answer": "yes"}))
    code, out, err = run(capsys, *full(folder, tmp_path / "new", *words, data="chat.jsonl"))
    assert code == 0, err
    assert "held-out loss after" in out
    assert "nano with the tokenizer of model: 0.8 million parameters, 3 steps" in err
    trained = pippin.load(tmp_path / "new", device="cpu", dtype="float32")
    assert trained.config.width == 128
    assert trained.template is not None


def test_a_fresh_model_of_the_same_form_begins_elsewhere(folder, tmp_path, capsys):
    words = ["--steps", 1, "--held-out", 0, "--json"]
    first, fresh = (
        json.loads(run(capsys, *full(folder, tmp_path / str(n), *words, *more))[1])
        for n, more in enumerate(([], ["--fresh", "--seed", 3]))
    )
    assert (first["fresh"], fresh["fresh"]) == (False, True)
    assert first["held_out_before"] is None
    assert first["first_loss"] != fresh["first_loss"]


@pytest.mark.slow
def test_processes_that_torchrun_starts_make_the_run_of_one(folder, tmp_path, capsys):
    words = ["--steps", "3", "--held-out", "0", "--json"]
    one = json.loads(run(capsys, *full(folder, tmp_path / "one", *words))[1])
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pippin"]
    given = [*map(str, full(folder, tmp_path / "two", *words)), "--rows", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, *given], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)
    assert two["last_loss"] == pytest.approx(one["last_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--length", "4096"], 2, "--length is 4096"),
        (["--rows", "0"], 2, "--rows must be at least 1, got 0"),
        (["--steps", "0"], 2, "--steps must be at least 1, got 0"),
        (["--lr", "0"], 2, "--lr must be above 0"),
        (["--epochs", "-1"], 2, "--epochs must be above 0"),
        (["--precision", "int8"], 2, "--precision is 'int8'"),
        (["--preset", "huge"], 2, "no preset 'huge'; choose nano, small, base"),
        (["--held-out", "1.5"], 2, "--held-out is 1.5"),
        (["--held-out", "nowhere.txt"], 2, "no file or folder nowhere.txt"),
        (["--field", "prompt"], 2, "--field is 'prompt'"),
        (["--learn", "user"], 2, "--learn is 'user'"),
        (["--workers", "2"], 2, "--workers is for --ray"),
        (["--data", "bad.jsonl"], 2, "bad.jsonl, line 2: not JSON"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    folder, tmp_path, capsys, monkeypatch, words, code, message
):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "fine"}\nnot fine\n')
    found, out, err = run(capsys, *full(folder, tmp_path / "new", *words))
    assert (found, out) == (code, "")
    assert message in err
    assert not (tmp_path / "new").exists()


def test_a_plan_survives_its_way_to_another_process(tmp_path):
    old = {"inject": 0.1, "pretrain": [Path("c")]}
    plan = training.Plan([Path("a"), Path("b")], tmp_path, 32, 4, 1e-3, fields=["prompt=question"], held_out="0", **old)
    again = training.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.names == {"prompt": "question"}
    with pytest.raises(InvalidArgument, match="--accumulate"):
        training.Plan([], tmp_path, 32, 4, 1e-3, accumulate=0)
