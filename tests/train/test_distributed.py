"""Two processes beside one: the same losses, the same checkpoints, and an end that all of them hear of."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pippin.core.device import is_distributed
from pippin.core.errors import InvalidArgument
from pippin.train.distributed import DistributedProcesses

from . import _processes

STEPS, BETWEEN = 6, 3
SCRIPT = Path(_processes.__file__)


def start(kind, folder, steps=STEPS, *until):
    """Two processes, as a user starts them."""
    words = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words, kind, str(folder), str(steps), *map(str, until)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_without_agent(*words):
    """Two processes whom nobody watches: torchrun would end the survivor before it may have met the gap."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, words)]
    return [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in (0, 1)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process, then at once: copies; shards of which one ends after three steps; shards that go on for one."""
    root = tmp_path_factory.mktemp("runs")
    alone = _processes.train(None, root / "alone", STEPS).losses
    between = root / "alone" / f"step-{BETWEEN:08d}"
    shutil.copytree(between, root / "resumed" / between.name)
    survivor, gone = start_without_agent("fsdp", root / "ended", STEPS, BETWEEN)
    started = {
        "ddp": start("ddp", root / "ddp"),
        "ended": survivor,
        "resumed": start("fsdp", root / "resumed"),
    }
    found = {}
    for name, process in started.items():
        try:
            out, said = process.communicate(timeout=120)
        finally:
            process.kill()
        found[name] = (process.returncode, out, said)
    assert gone.wait(timeout=60) == 7
    return root, alone, found


def losses(run):
    code, out, said = run
    assert code == 0, said
    return json.loads(out.splitlines()[-1])


def same_checkpoint(one, other, step=STEPS):
    """Weights, optimizer states and averages agree to rounding."""
    for file in ("model", "optimizer", "ema"):
        ours, theirs = (load_file(folder / f"step-{step:08d}" / f"{file}.safetensors") for folder in (one, other))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(
                tensor, theirs[name], rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_two_copies_have_the_losses_and_the_checkpoint_of_one_process(runs):
    root, alone, found = runs
    assert losses(found["ddp"]) == pytest.approx(alone, rel=1e-5)
    same_checkpoint(root / "ddp", root / "alone")


def test_shards_go_on_from_the_checkpoint_of_one_process(runs):
    root, alone, found = runs
    assert losses(found["resumed"])[-BETWEEN:] == pytest.approx(alone[BETWEEN:], rel=1e-5)
    same_checkpoint(root / "resumed", root / "alone")


def test_one_process_goes_on_from_the_checkpoint_of_shards(runs):
    root, alone, _ = runs
    assert _processes.train(None, root / "ended", STEPS).losses[BETWEEN:] == pytest.approx(alone[BETWEEN:], rel=1e-5)
    same_checkpoint(root / "ended", root / "alone")


def test_a_process_that_ends_takes_the_others_with_it(runs):
    code, _, said = runs[2]["ended"]
    assert code != 0
    assert "lost the others: one of them has ended" in said


def test_only_the_first_process_writes_the_log(runs):
    root = runs[0]
    lines = [json.loads(line) for line in (root / "ddp" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))


def test_a_process_that_was_started_alone_is_told_how(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not is_distributed()
    with pytest.raises(InvalidArgument, match="torchrun --nproc-per-node"):
        DistributedProcesses()
    with pytest.raises(InvalidArgument, match="strategy must be 'ddp' or 'fsdp', got 'pieces'"):
        DistributedProcesses("pieces")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_device_has_the_losses_of_the_processor(kind, tmp_path, monkeypatch):
    alone = _processes.train(None, tmp_path / "alone", 3).losses
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    parallel = DistributedProcesses(kind)
    try:
        assert parallel.device == "cuda:0"
        assert _processes.train(parallel, tmp_path / kind, 3).losses == pytest.approx(alone, rel=1e-3)
    finally:
        parallel.close()
