"""What a run leaves behind: figures, pictures, logs."""

import json
import math
import sys
import time

import pytest
import torch

from pippin.core.errors import InvalidArgument, MissingDependency
from pippin.train import Checkpoints, Evaluation, TrainingResult
from pippin.train.result import TrainingStep

from ._run import trainer


def made(losses):
    return TrainingResult(
        "a test",
        "tokens",
        [TrainingStep(i + 1, loss, 0.1, 1.0, 100.0, 0.5) for i, loss in enumerate(losses)],
        [(2, {"loss": 1.5, "accuracy": 0.25})],
    )


def test_the_report_says_losses_evaluation_and_speed():
    report = made([3.0, math.nan, 2.0]).report()
    figures = {row.name: (row.value, row.unit) for row in report.rows}
    assert figures == {
        "steps": (3, ""),
        "first loss": (3.0, ""),
        "last loss": (2.0, ""),
        "loss after step 2": (1.5, ""),
        "accuracy after step 2": (0.25, ""),
        "time": (1.5, "s"),
        "speed": (200.0, "tokens/s"),
    }
    assert report.title == "a test"
    assert json.loads(report.to_json())


def test_a_run_that_did_nothing_has_a_report_and_no_picture(tmp_path):
    assert [row.name for row in TrainingResult().report().rows] == ["steps", "time", "speed"]
    with pytest.raises(InvalidArgument, match="nothing to plot"):
        TrainingResult().plot(tmp_path / "a.png")


def test_a_saved_run_is_json_with_null_for_what_is_not_finite(tmp_path):
    made([3.0, math.nan]).save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    assert [step["loss"] for step in saved["steps"]] == [3.0, None]
    assert saved["evaluations"] == [[2, {"loss": 1.5, "accuracy": 0.25}]]
    assert math.isnan(TrainingStep.from_json(saved["steps"][1]).loss)


def test_the_picture_has_losses_their_mean_and_the_evaluations(tmp_path):
    made([3.0, math.nan, 2.0]).plot(tmp_path / "loss.svg")
    picture = (tmp_path / "loss.svg").read_text()
    for words in ("training loss", "training loss, smoothed", "evaluation", "a test"):
        assert f"<!-- {words} -->" in picture


def test_without_matplotlib_a_plot_names_its_extra_and_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pippin\[plot\]"):
        made([1.0]).plot(tmp_path / "a.png")
    assert trainer(tmp_path, steps=3).fit().stopped is None
    assert not (tmp_path / "loss.png").exists()


def test_tensorboard_has_every_step_once_after_a_restart(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer(tmp_path, every=4, evaluation=None).advance(7)
    time.sleep(1.1)  # TensorBoard reads its files in the order of their names, which hold whole seconds
    run = trainer(tmp_path, steps=40, every=4)
    run.fit()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == list(range(1, 41))
    assert [event.value for event in scalars] == pytest.approx(run.result.losses, rel=1e-6)
    assert {"train/lr", "train/grad_norm", "train/error", "evaluation/loss"} <= set(events.Tags()["scalars"])


def test_without_tensorboard_the_other_log_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = trainer(tmp_path, steps=4)
    run.fit()
    assert not (tmp_path / "tensorboard").exists()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 5


def test_a_log_that_a_kill_cut_short_is_cut_to_the_checkpoint(tmp_path):
    run = trainer(tmp_path, every=4, evaluation=None, checkpoints=Checkpoints(tmp_path, save_every=4))
    run.advance(6)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "lo')
    resumed = trainer(tmp_path, steps=40, evaluation=None, checkpoints=Checkpoints(tmp_path, save_every=4))
    resumed.advance(1)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0].keys() == {"step", "loss", "lr", "grad_norm", "units", "seconds", "metrics"}


def test_a_measure_that_is_not_finite_is_null_in_the_log_and_comes_back(tmp_path):
    measures = iter([math.nan, math.inf, 1.0, 2.0])

    def make(steps):
        return trainer(tmp_path, steps, evaluation=Evaluation(lambda model: {"loss": next(measures)}, eval_every=1))

    make(2).fit()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines][1] == {
        "step": 1,
        "evaluation": {"loss": None},
    }
    run = make(4)
    run.fit()
    assert math.isnan(run.result.evaluations[0][1]["loss"])
    assert run.result.evaluations[2:] == [(3, {"loss": 1.0}), (4, {"loss": 2.0})]
    assert run.best == {"step": 3, "value": 1.0}


def test_a_bar_says_the_loss_and_the_rate(monkeypatch):
    said = []
    from contextlib import contextmanager

    from pippin.core import progress

    @contextmanager
    def bar(total, description, *, unit, done, show_progress, advice):
        said.append((total, description, unit, done, show_progress))
        yield progress.Bar(lambda n: said.append(n), said.append)

    monkeypatch.setattr(progress, "bar", bar)
    training = trainer(None, steps=2, show_progress=True).fit()
    assert said[0] == (2, "training", "steps", 0, True)
    assert said[1].startswith(f"loss {training.losses[0]:.4g}, ")
    assert said[1].endswith(" rows/s")
    assert said[2] == 1
    assert torch.is_grad_enabled()
