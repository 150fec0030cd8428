"""Distributed training on Ray: Ray Train starts the workers, and `train.distributed` connects them.

Notable here:
- the training function is ordinary code with ``Trainer(processes=...)`` and does not depend on Ray
- the cluster at ``RAY_ADDRESS`` is used; without it, a local one is started on this machine and shut down afterwards
- an error of a worker is raised as a `TrainingError` with the worker's message
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

_OBJECT_STORE = 200 * 2**20  # bytes of Ray's object store, which holds only settings and results


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
    """Run a training function on several Ray workers.

    Args:
        function: called on every worker with the settings and the worker's `DistributedProcesses`; it must be
            importable there.
        settings: JSON values; paths in them must be valid on every machine.
        num_workers: number of workers.
        cpus_per_worker: cores reserved for each worker.
        gpus_per_worker: GPUs reserved for each worker; above 0 the backend is NCCL, else Gloo.
        strategy: as in `DistributedProcesses`.

    Returns:
        The result of the function on the first worker, a JSON value.

    Raises:
        InvalidArgument: fewer than one worker.
        MissingDependency: Ray Train is not installed.
        TrainingError: a worker failed.
    """
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise MissingDependency("training on Ray needs Ray Train: pip install 'pippin[ray]'") from error

    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {}
    if address is None:
        num_cpus = max(1, round(num_workers * cpus_per_worker)) + 1
        local = {"include_dashboard": False, "num_cpus": num_cpus, "object_store_memory": _OBJECT_STORE}
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)

    def train(config: dict[str, Any]) -> Any:
        return function(config["settings"], DistributedProcesses(config["strategy"]))

    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = TorchTrainer(
                train,
                train_loop_config={"settings": dict(settings), "strategy": strategy},
                torch_config=TorchConfig(backend="nccl" if gpus_per_worker else "gloo"),
                scaling_config=ScalingConfig(
                    num_workers=num_workers,
                    use_gpu=gpus_per_worker > 0,
                    resources_per_worker={
                        "CPU": cpus_per_worker,
                        **({"GPU": gpus_per_worker} if gpus_per_worker else {}),
                    },
                ),
                run_config=RunConfig(storage_path=folder, name="pippin"),
            )
            try:
                result = trainer.fit()
            except TrainingFailedError as error:
                raise _reason(error) from error
        return result.return_value  # type: ignore[attr-defined]  # exists in version 2 of Ray Train
    finally:
        if started:
            ray.shutdown()


def _reason(error: Exception) -> PippinError:
    """The error of the failed worker with the lowest rank."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank, failure in sorted(failures.items()):
        lines = str(getattr(failure, "cause", failure)).strip().splitlines()
        return TrainingError(f"worker {rank} failed: {lines[-1] if lines else type(failure).__name__}")
    return TrainingError(f"training on Ray failed: {error}")
