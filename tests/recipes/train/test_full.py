"""Full fine-tuning called as a user calls it: what is saved, how a run continues, what is refused."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter

import pippin
from pippin.core.errors import InvalidArgument, InvalidRecord, ModelNotFound, PippinError
from pippin.language.likelihood import text_likelihood
from pippin.recipes.train.full import Config, run

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]
SMALL = {"max_length": 32, "batch_size": 4, "lr": 0.01, "device": "cpu"}


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


def config(folder, out, **given):
    return Config(**({"model": str(folder / "model"), "data": (folder / "text.txt",), "out": out} | SMALL | given))


def train(folder, out, **given):
    return run(config(folder, out, **given), show_progress=False)


def test_a_trained_model_opens_and_predicts_its_text_better(folder, tmp_path):
    out = tmp_path / "new"
    result = train(folder, out, steps=12, eval_every=6, save_every=4)
    assert len(result.training.steps) == 12
    assert result.held_out_after["loss"] < result.held_out_before["loss"] - 0.3
    trained = pippin.load(out, device="cpu", dtype="float32")
    before = pippin.load(folder / "model", device="cpu", dtype="float32")
    text = (folder / "text.txt").read_text()
    assert text_likelihood(trained, text, max_length=32).nats < 0.95 * text_likelihood(before, text, max_length=32).nats
    names = {path.name for path in (out / "run").iterdir()}
    assert {"log.jsonl", "loss.png", "step-00000008", "step-00000012"} <= names
    assert len(repr(result)) < 600
    assert result.summary()["last_loss"] == result.training.losses[-1]

    # the same run again would overwrite it; resumed, it finds nothing left to do
    with pytest.raises(InvalidArgument, match="holds a run; continue it with --resume"):
        train(folder, out, steps=12)
    again = train(folder, out, steps=12, eval_every=6, save_every=4, resume=True)
    assert again.training.losses == result.training.losses


def test_a_run_stopped_with_ctrl_c_continues_to_the_same_end(folder, tmp_path, capsys):
    given = {"steps": 60, "held_out": 0}
    whole = train(folder, tmp_path / "whole", **given)
    log = tmp_path / "cut" / "run" / "log.jsonl"

    def interrupt():
        end = time.monotonic() + 60
        while time.monotonic() < end and not (log.exists() and log.read_bytes().count(b"\n") >= 3):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    impatient = threading.Thread(target=interrupt)
    impatient.start()
    cut = run(config(folder, tmp_path / "cut", **given))
    impatient.join()
    assert "finishing this step" in capsys.readouterr().err
    assert cut.stopped == "interrupted"
    assert 3 <= len(cut.training.steps) < 60
    assert train(folder, tmp_path / "cut", **given, resume=True).training.losses == whole.training.losses


def test_conversations_train_a_model_of_another_architecture(folder, tmp_path):
    (folder / "held.jsonl").write_text(json.dumps({"question": "Say yes", "answer": "yes"}))
    result = train(
        folder,
        tmp_path / "new",
        data=(folder / "chat.jsonl",),
        fields={"prompt": "question", "completion": "answer"},
        preset="nano",
        steps=3,
        held_out=folder / "held.jsonl",
    )
    assert result.model == "nano with the tokenizer of model"
    assert result.fresh
    assert "held-out loss after" in str(result.report())
    trained = pippin.load(tmp_path / "new", device="cpu", dtype="float32")
    assert trained.config.hidden_size == 128
    assert trained.template is not None


def test_a_mixture_is_trained_with_the_losses_of_its_routers_and_runs(folder, tmp_path):
    result = train(folder, tmp_path / "new", preset="nano-moe", steps=4, balance=0.05)
    first = json.loads((tmp_path / "new" / "run" / "log.jsonl").read_text().splitlines()[0])
    assert first["metrics"]["balance"] >= 0.9
    assert result.training.losses[0] > 0
    trained = pippin.load(tmp_path / "new", device="cpu")
    assert (trained.config.family, trained.config.layers[0].feedforward.num_experts) == ("mixtral", 8)
    assert trained.generate("Say", max_tokens=3).token_ids
    other = train(folder, tmp_path / "other", preset="nano-moe", steps=4, balance=0.0, router_z=0.0)
    assert other.training.losses[0] < result.training.losses[0]  # the same weights, without what the routers cost


def test_tracks_are_trained_saved_and_answer(folder, tmp_path):
    alone = train(folder, tmp_path / "alone", preset="nano-pt-moe", steps=3)
    trained = pippin.load(tmp_path / "alone", device="cpu")
    assert (trained.config.family, trained.config.tracks.num_tracks) == ("pt_moe", 4)
    assert trained.generate("Say", max_tokens=3).token_ids
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pippin", "train", "full"]
    given = [folder / "model", "--preset", "nano-pt-moe", "--strategy", "tracks", "--data", folder / "text.txt"]
    given += ["--out", tmp_path / "two"]
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | {"steps": 3}).items()]
    command = [sys.executable, "-W", "ignore", "-m", *words, *given, *sizes]
    made = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    lines = (tmp_path / "two" / "run" / "log.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert losses == pytest.approx(alone.training.losses, rel=1e-5)
    one, two = (
        pippin.load(tmp_path / name, device="cpu", dtype="float32", pack=False).module.state_dict()
        for name in ("alone", "two")
    )
    assert max((two[name] - tensor).abs().max() for name, tensor in one.items()) < 1e-3


def test_fresh_weights_of_the_same_architecture_begin_elsewhere(folder, tmp_path):
    first = train(folder, tmp_path / "a", steps=1, held_out=0)
    fresh = train(folder, tmp_path / "b", steps=1, held_out=0, fresh=True, seed=3)
    assert (first.fresh, fresh.fresh, first.held_out_before) == (False, True, None)
    assert first.training.losses[0] != fresh.training.losses[0]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_length": 4096}, InvalidArgument, "max_length is 4096"),
        ({"preset": "huge"}, InvalidArgument, "preset must be 'nano', 'small', 'base', .* got 'huge'"),
        ({"held_out": Path("nowhere.txt")}, PippinError, "no file or folder nowhere.txt"),
        ({"data": ("bad.jsonl",)}, InvalidRecord, "bad.jsonl, line 2: not JSON"),
        ({"model": "nowhere"}, ModelNotFound, "nowhere"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    folder, tmp_path, monkeypatch, given, error, message
):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "fine"}\nnot fine\n')
    with pytest.raises(error, match=message):
        train(folder, tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"held_out": 1.5}, "held_out must be from 0 to below 1, got 1.5"),
        ({"loss_on": "user"}, "loss_on must be 'assistant' or 'all', got 'user'"),
        ({"route_caches": 1.5}, "route_caches must be from 0 to 1, got 1.5"),
        ({"inject": 1.0}, "inject must be from 0 to below 1"),
    ],
)
def test_settings_out_of_range_make_no_config(given, message):
    with pytest.raises(InvalidArgument, match=message):
        Config(model="m", data=("a",), out="o", **given)


def test_a_config_survives_its_way_to_another_process(tmp_path):
    sent = Config(
        model="m",
        data=("a", Path("b")),
        out=tmp_path,
        fields={"prompt": "question"},
        held_out=Path("test.jsonl"),
        inject=0.1,
        pretrain_data=("c",),
    )
    adapter = TypeAdapter(Config)
    back = adapter.validate_json(adapter.dump_json(sent))
    assert (back.fields, back.inject, Path(back.held_out)) == (sent.fields, 0.1, sent.held_out)
    assert [Path(path) for path in back.data] == [Path("a"), Path("b")]
    share = Config(model="m", data=("a",), out="o", held_out=0.2)
    assert adapter.validate_json(adapter.dump_json(share)) == share


def test_a_lone_path_is_one_file(folder, tmp_path):
    result = train(folder, tmp_path / "new", data=str(folder / "text.txt"), steps=1, held_out=0)
    assert len(result.training.steps) == 1
