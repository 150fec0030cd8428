"""Ray Train on this machine: two workers have the losses of one process, and a worker's error is the run's."""

import os
from pathlib import Path

import pytest

from pippin.core.errors import InvalidArgument, TrainingError
from pippin.train.ray import run_on_ray

from . import _processes

# Ray warns of what Ray itself does
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
pytestmark = quiet


def train(settings, parallel):
    if settings["steps"] == 0:
        raise ValueError("nothing to do here")
    return _processes.train(parallel, settings["folder"], settings["steps"]).losses


def train_tracks(settings, parallel):
    from tests.language.parallel import _processes as tracks
    from torch.distributed import get_world_size

    from pippin.recipes.train.distributed import joined

    with joined(parallel, "tracks") as processes:
        result, _ = tracks.train(processes, settings["folder"], 3)
        return {"losses": result.losses, "processes": get_world_size()}


@pytest.fixture(scope="module")
def cluster():
    """One for all tests: `run_on_ray` would start one each time."""
    import ray

    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (root, root / "tools", root / "src")))
    environment = {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    ray.init(
        include_dashboard=False,
        num_cpus=3,
        object_store_memory=2 * 10**8,
        log_to_driver=False,
        runtime_env=environment,
    )
    yield
    ray.shutdown()


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_two_workers_have_the_losses_of_one_process(tmp_path):
    found = run_on_ray(train, {"folder": str(tmp_path / "ray"), "steps": 3}, num_workers=2, cpus_per_worker=0.5)
    assert found == pytest.approx(_processes.train(None, tmp_path / "alone", 3).losses, rel=1e-5)
    assert (tmp_path / "ray" / "step-00000003" / "model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_two_workers_share_tracks(tmp_path):
    from tests.language.parallel import _processes as tracks

    found = run_on_ray(train_tracks, {"folder": str(tmp_path / "ray")}, num_workers=2, cpus_per_worker=0.5)
    assert found["processes"] == 2
    assert found["losses"] == pytest.approx(tracks.train(None, tmp_path / "alone", 3)[0].losses, rel=1e-5)
    assert (tmp_path / "ray" / "step-00000003" / "model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_the_recipe_shares_tracks_between_workers(tmp_path):
    from safetensors.torch import load_file
    from tests.language.parallel._processes import language_model

    from pippin.recipes.train import full
    from pippin.recipes.train.distributed import run_on_ray as run_recipe_on_ray

    language_model("tracks").save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The rain in Spain stays mainly in the plain.\n" * 40)

    def config(out, strategy):
        words = {"model": str(tmp_path / "model"), "data": (tmp_path / "text.txt",), "device": "cpu"}
        return full.Config(**words, out=tmp_path / out, strategy=strategy, steps=3, max_length=32, batch_size=2)

    found = run_recipe_on_ray(full, config("ray", "tracks"), num_workers=2, show_progress=False)
    alone = full.run(config("alone", "ddp"), show_progress=False)
    assert found.training.losses == pytest.approx(alone.training.losses, rel=1e-4)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ray", "alone"))
    assert all((ours[name] - theirs[name]).abs().max() < 1e-3 for name in theirs)


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_the_error_of_a_worker_is_that_of_the_run(tmp_path):
    with pytest.raises(TrainingError, match="nothing to do here"):
        run_on_ray(train, {"folder": str(tmp_path), "steps": 0}, num_workers=1, cpus_per_worker=0.5)


def test_no_workers_is_an_error():
    with pytest.raises(InvalidArgument, match="num_workers must be at least 1, got 0"):
        run_on_ray(train, {}, num_workers=0)
