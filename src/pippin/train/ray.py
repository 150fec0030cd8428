"""The same run on a Ray cluster, or on several processes of this machine: Ray Train starts them, `Parallel` joins them.

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
from typing import Any

from pippin.core.errors import InvalidArgument, MissingDependency, PippinError, TrainingError
from pippin.train.parallel import Parallel

_STORE = 200 * 2**20  # bytes of Ray's own store; only settings and results pass through it


def on_ray(
    function: Callable[[dict[str, Any], Parallel], Any],
    settings: Mapping[str, Any],
    *,
    workers: int,
    cpus: float = 1.0,
    gpus: float = 0.0,
    kind: str = "copies",
) -> Any:
    """Run a training function on several workers at once.

    Args:
        function: called on every worker with the settings and the worker's `Parallel`; importable there.
        settings: JSON values; paths in them must mean the same on every machine.
        workers: how many.
        cpus: cores that each worker has to itself.
        gpus: devices that each worker has to itself; with 1 the workers talk over NCCL, with 0 over Gloo.
        kind: of `Parallel`.

    Returns:
        What the function returned on the first worker, a JSON value.

    Raises:
        InvalidArgument: fewer than one worker, or more than a cluster on this machine could ever start.
        MissingDependency: Ray Train is not installed.
        TrainingError: a worker failed.
    """
    if workers < 1:
        raise InvalidArgument(f"workers must be 1 or more, got {workers}")
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise MissingDependency("training on Ray needs it: pip install 'pippin[ray]'") from error

    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {}
    if address is None:
        needed = max(1, round(workers * cpus))
        local = {"include_dashboard": False, "num_cpus": needed + 1, "object_store_memory": _STORE}
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)

    def work(given: dict[str, Any]) -> Any:
        return function(given["settings"], Parallel(given["kind"]))

    try:
        with tempfile.TemporaryDirectory() as place:
            trainer = TorchTrainer(
                work,
                train_loop_config={"settings": dict(settings), "kind": kind},
                torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
                scaling_config=ScalingConfig(
                    num_workers=workers,
                    use_gpu=gpus > 0,
                    resources_per_worker={"CPU": cpus, **({"GPU": gpus} if gpus else {})},
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
