"""Two processes beside one: the same logits, losses and checkpoints, and no more collectives than promised."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.language.parallel import _processes
from tests.language.parallel._processes import CONFIG, STEPS

from pippin.core.errors import InvalidArgument, ResumeMismatch
from pippin.engine import Engine
from pippin.language.decoder import Decoder
from pippin.language.parallel.divide_model import _check_divisible
from pippin.language.parallel.track_processes import TrackProcesses
from pippin.language.presets import preset
from pippin.nn.parallel.collectives import Collectives

ROOT = Path(__file__).parents[3]


def start(*words, processes=2):
    """Processes as a user starts them."""
    run = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tools", ROOT / "src")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, *run, _processes.__file__, *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_without_agent(*words):
    """Two processes whom nobody watches: torchrun would end the survivor before it may have met the gap."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tools", ROOT / "src")))
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "ignore", _processes.__file__, *map(str, words)]
    return [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


def answer(process):
    out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return answer(start("parts", tmp_path_factory.mktemp("parts")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process, two that begin anew, and two that go on where one stopped."""
    root = tmp_path_factory.mktemp("runs")
    alone, logits = _processes.train(None, root / "alone")
    shutil.copytree(root / "alone" / "step-00000003", root / "resumed" / "step-00000003")
    anew = answer(start("train", root / "anew"))
    resumed = answer(start("train", root / "resumed"))
    return root, alone, anew | {"logits alone": logits}, resumed


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return answer(start("serve", tmp_path_factory.mktemp("served")))


@pytest.mark.parametrize("kind", ["tracks", "nano-moe"])
def test_an_engine_of_two_processes_answers_as_one(served, kind):
    with Engine(_processes.language_model(kind), cache_tokens=1024) as engine:
        alone = _processes.answers(engine)
    for found in (served[kind], served[f"{kind} again"]):  # after passes that were refused, too
        for ours, theirs in zip(found, alone, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            assert [logprob for _, logprob in ours] == pytest.approx([logprob for _, logprob in theirs], abs=1e-4)
            assert len(dict(theirs)) > 2  # or any engine would agree


@pytest.mark.parametrize("kind", ["tracks", "nano-moe"])
def test_what_several_processes_refuse_is_what_one_refuses(served, kind):
    with Engine(_processes.language_model(kind), cache_tokens=1024) as engine:
        alone = _processes.refused(engine)
    found = served[f"{kind} refused"]
    assert found.keys() == alone.keys() == {"block", "outputs", "mask", "width", "request"}
    for name in ("block", "outputs", "mask", "width"):
        assert found[name].split(":")[0] == alone[name].split(":")[0]
    assert found["block"].startswith("InvalidArgument: ")
    assert found["mask"].startswith("IndexError: ")  # in the pass
    expected = "name layers, and a process has those of some tracks only" if kind == "tracks" else alone["request"]
    assert expected in found["request"]


@pytest.mark.parametrize("kind", ["killed", "memory", "uneven"])
def test_a_process_that_is_lost_is_an_error_of_every_request(kind, tmp_path):
    first, second = start_without_agent(kind, tmp_path)
    try:
        errors = answer(first)
        _, said = second.communicate(timeout=300)
    finally:
        first.kill()
        second.kill()
    for error in errors:
        assert "one of the 2 processes that compute this model together has ended or does not answer" in error
    assert len(errors) == 2
    if kind == "killed":
        assert second.returncode == -signal.SIGKILL
    else:
        assert second.returncode != 0
        assert ("too little here" if kind == "memory" else "follows rank 0, which has ended") in said


def test_cached_prompts_of_several_processes_are_not_saved(served):
    assert served["save"] == "cached prompts of a model in several processes can be neither saved nor loaded"


@pytest.mark.parametrize("join", ["mean", "delta", "sum"])
def test_parts_of_tracks_compute_the_whole_decoder(parts, join):
    (at_once, in_turn), count, size = parts[join]
    assert max(at_once, in_turn) < 1e-5
    assert count == CONFIG.num_hidden_layers // CONFIG.block_depth == CONFIG.collectives().parallel_tracks
    assert size == count * 2 * 24 * CONFIG.hidden_size * 4  # float32 states of a track, of all tokens


@pytest.mark.parametrize("name", ["nano", "nano-moe"])
def test_parts_of_matrices_compute_the_whole_decoder(parts, name):
    (at_once, in_turn), count, size = parts[name]
    config = preset(name, 50)
    assert max(at_once, in_turn) < 1e-5
    assert count == 2 * len(config.layers)
    assert size == count * 2 * 24 * config.hidden_size * 4


def test_processes_that_cannot_divide_the_tracks(parts):
    assert parts["error"].startswith("2 processes cannot divide 3 tracks; their number must divide")


def test_two_processes_have_the_losses_of_one(runs):
    _, alone, anew, _ = runs
    assert anew["losses"] == pytest.approx(alone.losses, rel=1e-5)
    assert anew["norms"] == pytest.approx([step.grad_norm for step in alone.steps], rel=1e-4)
    for (step, metrics), (own_step, own) in zip(alone.evaluations, anew["evaluations"], strict=True):
        assert own_step == step
        assert own == pytest.approx(metrics, rel=1e-5)


def test_the_whole_decoder_is_trained_where_each_process_trained_a_part(runs):
    *_, anew, _ = runs
    assert anew["logits"] == pytest.approx(anew["logits alone"], abs=1e-3)


def test_two_processes_write_the_checkpoint_of_one(runs):
    same_checkpoint(runs[0] / "anew", runs[0] / "alone")


def test_two_processes_go_on_where_one_stopped(runs):
    root, alone, _, resumed = runs
    assert resumed["losses"][-3:] == pytest.approx(alone.losses[3:], rel=1e-5)
    same_checkpoint(root / "resumed", root / "alone")


def test_one_process_goes_on_where_two_stopped(runs, tmp_path):
    root, alone, *_ = runs
    shutil.copytree(root / "anew" / "step-00000003", tmp_path / "step-00000003")
    assert _processes.train(None, tmp_path)[0].losses[-3:] == pytest.approx(alone.losses[3:], rel=1e-5)


def same_checkpoint(one, other):
    """Weights, optimizer states and averages agree to rounding."""
    for file in ("model", "optimizer", "ema"):
        ours, theirs = (load_file(folder / f"step-{STEPS:08d}" / f"{file}.safetensors") for folder in (one, other))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert (tensor - theirs[name]).abs().max() < 1e-5, name


def test_a_checkpoint_of_another_join_is_of_another_model(runs, tmp_path):
    """The weights would fit."""
    shutil.copytree(runs[0] / "alone" / "step-00000006", tmp_path / "step-00000006")
    with pytest.raises(
        ResumeMismatch,
        match=r"the model's tracks: Tracks\(.*join='mean'\) in the checkpoint and Tracks\(.*join='delta'\) in this run",
    ):
        _processes.train(None, tmp_path, config=replace(CONFIG, join="delta"))


def test_a_process_alone_is_told_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for alone in (TrackProcesses, Collectives):
        with pytest.raises(InvalidArgument, match="torchrun --nproc-per-node N"):
            alone()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG.decoder(), "a decoder with tracks is divided by them; see share_tracks"),
        (preset("nano-gru", 50), "does not divide recurrent layers and layers without attention"),
        (replace(preset("nano", 50), qk_norm="full"), "does not divide norms over all heads"),
        (replace(preset("small", 50), num_key_value_heads=3), "2 processes cannot divide num_key_value_heads 3"),
    ],
)
def test_what_tensor_parallelism_does_not_divide(config, message):
    with pytest.raises(InvalidArgument, match=message):
        _check_divisible(config, 2)


def test_other_models_have_no_tracks():
    from pippin.language.parallel.divide_model import share_tracks

    nobody = object.__new__(Collectives)
    with pytest.raises(InvalidArgument, match="this llama decoder has no tracks to share; tensor_parallel divides"):
        share_tracks(Decoder(preset("nano", 50)), nobody)
