"""The same run on a Ray cluster or on local processes: Ray Train starts them, `train.distributed` joins them.

Notable here:
- what is run is an ordinary function that trains with ``Trainer(parallel=...)``; nothing in it knows of Ray
- a cluster that is already there (``RAY_ADDRESS``) is used; otherwise one is started on this machine, and ended again
- an error of a worker comes back as the error of the run, with the worker's own message
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pippin.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import MissingDependency, PippinError, TrainingError
from pippin.train.distributed import DistributedProcesses

_STORE = 200 * 2**20  # bytes of Ray's own store; only settings and results pass through it


@checked
def run_on_ray(
    function: Callable[[dict[str, Any], DistributedProcesses], Any],
    settings: Mapping[str, Any],
    *,
    num_workers: PositiveInt,
    cpus_per_worker: PositiveFloat = 1.0,
    gpus_per_worker: NonNegativeFloat = 0.0,
    strategy: Literal["ddp", "fsdp"] = "ddp",
) -> Any:
    """Run a training function on several workers at once.

    Args:
        function: called on every worker with the settings and the worker's `DistributedProcesses`; importable there.
        settings: JSON values; paths in them must mean the same on every machine.
        num_workers: how many.
        cpus_per_worker: cores that each worker has to itself.
        gpus_per_worker: devices that each worker has to itself; with 1 the workers talk over NCCL, with 0 over Gloo.
        strategy: of `DistributedProcesses`.

    Returns:
        What the function returned on the first worker, a JSON value.

    Raises:
        InvalidArgument: fewer than one worker, or more than a cluster on this machine could ever start.
        MissingDependency: Ray Train is not installed.
        TrainingError: a worker failed.
    """
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise MissingDependency("training on Ray needs it: pip install 'pippin[ray]'") from error

    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {}
    if address is None:
        needed = max(1, round(num_workers * cpus_per_worker))
        local = {"include_dashboard": False, "num_cpus": needed + 1, "object_store_memory": _STORE}
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)

    def work(given: dict[str, Any]) -> Any:
        return function(given["settings"], DistributedProcesses(given["kind"]))

    try:
        with tempfile.TemporaryDirectory() as place:
            trainer = TorchTrainer(
                work,
                train_loop_config={"settings": dict(settings), "kind": strategy},
                torch_config=TorchConfig(backend="nccl" if gpus_per_worker else "gloo"),
                scaling_config=ScalingConfig(
                    num_workers=num_workers,
                    use_gpu=gpus_per_worker > 0,
                    resources_per_worker={
                        "CPU": cpus_per_worker,
                        **({"GPU": gpus_per_worker} if gpus_per_worker else {}),
                    },
                ),
                run_config=RunConfig(storage_path=place, name="pippin"),
            )
            try:
                outcome = trainer.fit()
            except TrainingFailedError as error:
                raise _reason(error) from error
        return outcome.return_value  # type: ignore[attr-defined]  # the class of Ray Train's second version has it
    finally:
        if started:
            ray.shutdown()


def _reason(error: Exception) -> PippinError:
    """What a worker raised, as far as it can be told."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank, failure in sorted(failures.items()):
        said = str(getattr(failure, "cause", failure)).strip().splitlines()
        return TrainingError(f"worker {rank} failed: {said[-1] if said else type(failure).__name__}")
    return TrainingError(f"training on Ray failed: {error}")
