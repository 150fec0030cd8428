"""Ray Train on this machine: two workers have the losses of one process, and a worker's error is the run's."""

import pytest

from pippin.core.errors import InvalidArgument, TrainingError
from pippin.train.ray import on_ray

from . import _processes

pytestmark = pytest.mark.slow


def train(settings, parallel):
    if settings["steps"] == 0:
        raise ValueError("nothing to do here")
    return _processes.train(parallel, settings["folder"], settings["steps"]).losses


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_two_workers_have_the_losses_of_one_process(tmp_path):
    found = on_ray(train, {"folder": str(tmp_path / "ray"), "steps": 3}, workers=2, cpus=0.5)
    assert found == pytest.approx(_processes.train(None, tmp_path / "alone", 3).losses, rel=1e-5)
    assert (tmp_path / "ray" / "step-00000003" / "model.safetensors").is_file()


def test_no_workers_is_an_error():
    with pytest.raises(InvalidArgument, match="workers must be 1 or more, got 0"):
        on_ray(train, {}, workers=0)
