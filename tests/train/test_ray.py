"""Ray Train on this machine: two workers have the losses of one process, and a worker's error is the run's."""

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


@pytest.fixture(scope="module")
def cluster():
    """One for both tests: `run_on_ray` would start one each time."""
    import ray

    ray.init(include_dashboard=False, num_cpus=3, object_store_memory=2 * 10**8, log_to_driver=False)
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
def test_the_error_of_a_worker_is_that_of_the_run(tmp_path):
    with pytest.raises(TrainingError, match="nothing to do here"):
        run_on_ray(train, {"folder": str(tmp_path), "steps": 0}, num_workers=1, cpus_per_worker=0.5)


def test_no_workers_is_an_error():
    with pytest.raises(InvalidArgument, match="num_workers must be at least 1, got 0"):
        run_on_ray(train, {}, num_workers=0)
