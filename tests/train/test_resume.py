"""A run that was killed, refused, or met a full disk."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from pippin.core.errors import CorruptedFile, DiskFull, InvalidArgument, ModelNotFound, ResumeMismatch
from pippin.train import AdamW, Checkpoints, Evaluation, Loss, Trainer, checkpoints, load_weights

from ._run import Cursor, Drifting, Net, Plain, trainer

RUN = Path(__file__).with_name("_run.py")


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def logged(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "evaluation" not in line]


def killed(folder, steps, every, *, after):
    """Start the run in a process of its own, and kill it at a random moment once ``after`` steps are in its log."""
    process = subprocess.Popen([sys.executable, str(RUN), str(folder), str(steps), str(every)])
    log = folder / "log.jsonl"
    ends = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("grad_norm") >= after):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < ends
        time.sleep(0.001)
    time.sleep(random.random() * 0.03)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="SIGKILL is POSIX's")
@pytest.mark.parametrize(("steps", "every"), [(40, 1), (120, 7)])
def test_a_run_killed_at_a_random_moment_goes_on_to_the_same_losses(tmp_path, steps, every):
    whole = trainer(None, steps=steps)
    training = whole.fit()
    killed(tmp_path, steps, every, after=random.randrange(5, 25))
    resumed = trainer(tmp_path, steps=steps, every=every)
    again = resumed.fit()
    assert again.losses == training.losses
    assert [line["loss"] for line in logged(tmp_path)] == training.losses
    assert [line["step"] for line in logged(tmp_path)] == list(range(1, steps + 1))
    assert again.evaluations == training.evaluations
    assert [step.metrics for step in again.steps] == [step.metrics for step in training.steps]
    same(weights(resumed.model), weights(whole.model))
    same(resumed.ema.averages, whole.ema.averages)
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("data", [Cursor, Plain])
def test_two_halves_are_a_whole(tmp_path, data):
    whole = trainer(None, data=data())
    losses = whole.fit().losses
    half = trainer(tmp_path, data=data())
    assert half.advance(17) == losses[:17]
    torch.rand(5)  # what the caller draws in between changes nothing
    other = trainer(tmp_path, data=data())
    assert other.fit().losses == losses
    assert other.advance(3) == []
    same(weights(other.model), weights(whole.model))


def test_a_finished_run_is_not_run_again(tmp_path):
    first = trainer(tmp_path).fit()
    again = trainer(tmp_path, data=[])
    with pytest.raises(ResumeMismatch, match="data: Cursor in the checkpoint and list in this run"):
        again.fit()
    assert trainer(tmp_path).fit().losses == first.losses


def test_a_run_can_be_made_longer(tmp_path):
    trainer(tmp_path, steps=10).fit()
    longer = trainer(tmp_path, steps=12)
    assert len(longer.fit().losses) == 12
    assert longer.step == 12


def test_the_last_few_and_the_best_are_kept(tmp_path):
    values = iter([3.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    evaluation = Evaluation(lambda model: {"loss": next(values)}, eval_every=5)
    run = trainer(tmp_path, evaluation=evaluation, checkpoints=Checkpoints(tmp_path, save_every=5, keep=2))
    at_best = {}
    run.advance(10)
    at_best.update(weights(run.model))
    averages = {name: tensor.clone() for name, tensor in run.ema.averages.items()}
    run.fit()
    kept = run.checkpoints
    assert list(kept.all()) == [10, 35, 40]
    assert kept.best_path().name == "step-00000010"
    model = Net()
    load_weights(kept.best_path(), model)
    same(weights(model), at_best)
    load_weights(kept.best_path(), model, averaged=True)
    same({name: p.detach() for name, p in model.named_parameters()}, averages)


def test_a_best_one_between_two_checkpoints_is_saved_and_none_without_measures(tmp_path):
    run = trainer(tmp_path / "a", checkpoints=Checkpoints(tmp_path / "a", save_every=40, keep=1))
    run.fit()
    best = min(run.result.evaluations, key=lambda entry: entry[1]["loss"])[0]
    assert set(run.checkpoints.all()) == {best, 40}
    other = trainer(tmp_path / "b", evaluation=None)
    other.fit()
    assert other.checkpoints.best_path() is None
    assert Checkpoints(tmp_path / "nowhere", save_every=1).newest_path() is None


def test_nothing_in_a_checkpoint_is_a_pickle_and_others_can_read_it(tmp_path):
    run = trainer(tmp_path)
    run.fit()
    newest = run.checkpoints.newest_path()
    assert {path.name for path in newest.iterdir()} == {
        *("model.safetensors", "optimizer.safetensors", "ema.safetensors", "objective.safetensors", "state.json")
    }
    same(load_file(newest / "model.safetensors"), weights(run.model))
    names = load_file(newest / "optimizer.safetensors")
    assert "layers.0.weight.momentum_buffer" in names
    assert "layers.0.bias.exp_avg_sq" in names


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.layers[0] = nn.Linear(4, 8)
        self.extra = nn.Linear(2, 2, bias=False)


def test_everything_that_differs_is_listed_and_the_model_untouched(tmp_path):
    trainer(tmp_path, steps=5).fit()
    model = Wider()
    before = weights(model)
    run = trainer(tmp_path, model=model, optimizer=AdamW(lr=0.5), seed=4, data=Plain(), ema=None)
    with pytest.raises(ResumeMismatch) as caught:
        run.fit()
    for line in (
        "tensor 'layers.0.weight' is (16, 4) float32 in the checkpoint and (8, 4) float32 in this run",
        "tensor 'layers.0.bias' is (16,)",
        "tensor 'extra.weight' is not in the checkpoint",
        "average 'layers.3.weight' of the checkpoint is not in this run",
        "AdamW(lr=0.5",
        "seed: 3 in the checkpoint and 4 in this run",
        "data: Cursor in the checkpoint and Plain in this run",
        "only one of the two has data with a position",
    ):
        assert line in str(caught.value)
    same(weights(model), before)


def test_a_cursor_that_the_data_refuses_and_data_that_is_too_short(tmp_path):
    trainer(tmp_path / "a", steps=5).fit()

    class Cursor:  # of the same name, with another state
        def __iter__(self):
            return iter([])

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            state["place"]

    Cursor.__qualname__ = "Cursor"
    with pytest.raises(ResumeMismatch, match="the position in the data cannot be restored: 'place'"):
        trainer(tmp_path / "a", steps=6, data=Cursor()).fit()
    batches = [{"x": torch.ones(2, 4), "y": torch.ones(2, 1)}] * 10
    trainer(tmp_path / "b", steps=5, data=batches).fit()
    with pytest.raises(ResumeMismatch, match="the data ends after 2 steps, and the checkpoint was written after 5"):
        trainer(tmp_path / "b", steps=6, data=batches[:4]).fit()


def test_without_resume_a_run_is_never_overwritten(tmp_path):
    fresh = Checkpoints(tmp_path, save_every=5, resume=False)
    trainer(tmp_path, steps=5, checkpoints=fresh).fit()
    with pytest.raises(InvalidArgument, match="step-00000005 exists already and resume is False"):
        trainer(tmp_path, steps=5, checkpoints=fresh).fit()


def full(real, after):
    """A disk that fills up with file number ``after``, as safetensors reports it, leaving half of the file."""
    calls = []

    def save(tensors, path, **rest):
        calls.append(path)
        if len(calls) == after:
            Path(path).write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(tensors, path, **rest)

    return save


@pytest.mark.parametrize("after", [4 * 2 + 1, 4 * 2 + 3])
def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path, monkeypatch, after):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full(checkpoints.save_file, after))
        run = trainer(tmp_path, steps=400, evaluation=None, every=5)
        with pytest.raises(DiskFull, match="the earlier checkpoints are complete"):
            run.fit()
    assert list(run.checkpoints.all()) == [5, 10]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} - {"tensorboard"} == {
        *("step-00000005", "step-00000010")
    }
    resumed = trainer(tmp_path, steps=400, evaluation=None, every=50)
    assert resumed.advance(5) == trainer(None, steps=400).advance(15)[10:]


def test_a_full_disk_is_seen_before_a_byte_is_written(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    run.advance(5)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DiskFull, match="10 B free"):
        run.advance(5)
    assert list(run.checkpoints.all()) == [5]


def test_a_damaged_checkpoint_is_named(tmp_path):
    run = trainer(tmp_path, steps=5)
    run.fit()
    newest = run.checkpoints.newest_path()
    os.truncate(newest / "model.safetensors", 100)
    with pytest.raises(CorruptedFile, match=r"model.safetensors: damaged .* resume from an older checkpoint"):
        trainer(tmp_path, steps=6).fit()
    (newest / "state.json").unlink()
    with pytest.raises(CorruptedFile, match=r"no state.json"):
        trainer(tmp_path, steps=6).fit()


def test_weights_of_another_model_and_averages_that_are_not_there(tmp_path):
    run = trainer(tmp_path, steps=5, ema=None)
    run.fit()
    newest = run.checkpoints.newest_path()
    with pytest.raises(ResumeMismatch, match=r"'extra.weight' is not in the checkpoint"):
        load_weights(newest, Wider())
    with pytest.raises(ModelNotFound, match="has no moving averages"):
        load_weights(newest, Net(), averaged=True)
    with pytest.raises(ModelNotFound, match="has no checkpoint"):
        load_weights(tmp_path / "none", Net())


def test_memory_that_is_no_tensor_is_refused(tmp_path):
    class Counting(Drifting):
        def state_dict(self):
            return {"count": 3}

    with pytest.raises(InvalidArgument, match="the objective's state 'count' is a int"):
        trainer(tmp_path, objective=Counting()).fit()


def test_tied_and_shared_tensors_come_back(tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        flat = torch.arange(6.0)
        model.register_buffer("left", flat[:3])
        model.register_buffer("right", flat[3:])
        return model

    def objective(model, batch, generator):
        return Loss((model(batch) + model.left * model.right).square().sum(), len(batch))

    def run(folder, steps):
        where = Checkpoints(folder, save_every=100)
        return Trainer(make(), objective, [torch.ones(2, 3)] * 8, steps=steps, checkpoints=where, show_progress=False)

    whole = run(tmp_path / "a", 8).fit().losses
    run(tmp_path / "b", 4).fit()
    assert run(tmp_path / "b", 8).fit().losses[:4] == run(tmp_path / "c", 4).fit().losses
    assert len(whole) == 8


@pytest.mark.parametrize(("every", "keep"), [(0, 1), (1, 0)])
def test_checkpoints_outside_their_range_are_refused(tmp_path, every, keep):
    with pytest.raises(InvalidArgument, match="must be at least 1, got 0"):
        Checkpoints(tmp_path, save_every=every, keep=keep)
