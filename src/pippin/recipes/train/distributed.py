"""Distributed recipes: on processes started by torchrun, or on workers of a Ray cluster.

Notable here:
- `run` of a recipe joins the process group of torchrun automatically
- on Ray, a config is sent as JSON values and validated again by each worker
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.train.distributed import DistributedProcesses

Strategy = Literal["ddp", "tracks"]
_ALONE = (
    "strategy tracks divides a model's tracks between processes, and this is the only one: start N of them with "
    "torchrun --nproc-per-node N -m pippin train full ..., or with --ray --workers N; without the strategy, one "
    "process trains all tracks"
)


@contextmanager
def joined(
    processes: DistributedProcesses | None = None, strategy: Strategy = "ddp"
) -> Iterator[DistributedProcesses | None]:
    """The processes of a run: those given, those started by torchrun, or None for a single process.

    Raises:
        InvalidArgument: a single process is asked to share tracks with others.
    """
    import torch.distributed as dist

    from pippin.core.device import is_distributed
    from pippin.train.distributed import DistributedProcesses

    if strategy == "tracks":
        if (dist.get_world_size() if processes is not None else int(os.environ.get("WORLD_SIZE", 1))) < 2:
            raise InvalidArgument(_ALONE)
        from pippin.language.parallel.track_processes import TrackProcesses

        joined: DistributedProcesses = TrackProcesses()
    elif processes is not None or not is_distributed():
        yield processes
        return
    else:
        joined = DistributedProcesses("ddp")
    try:
        yield joined
    finally:
        joined.close()


def is_first() -> bool:
    """Whether this process prints the result: it is the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


@checked
def run_on_ray(
    recipe: ModuleType, config: Any, *, num_workers: PositiveInt | None = None, show_progress: bool = True
) -> Any:
    """Run a recipe on workers of a Ray cluster; without a cluster, a local one is started.

    Args:
        recipe: a module of this package whose `run` has the argument ``processes``: `full` or `lora`.
        config: its `Config`; paths in it must be valid on every machine.
        num_workers: number of workers; None for one per core.
        show_progress: whether the first worker shows progress.

    Returns:
        The result of the recipe on the first worker.

    Raises:
        MissingDependency: Ray is not installed.
        TrainingError: a worker failed.
    """
    from pydantic import TypeAdapter

    from pippin.core.device import threads
    from pippin.train.ray import run_on_ray as run_function_on_ray

    settings = {
        "recipe": recipe.__name__,
        "config": TypeAdapter(type(config)).dump_python(config, mode="json"),
        "show_progress": show_progress,
    }
    return run_function_on_ray(_work, settings, num_workers=threads() if num_workers is None else num_workers)


def _work(settings: dict[str, Any], processes: DistributedProcesses) -> Any:
    """Run the recipe on one worker."""
    from pydantic import TypeAdapter

    recipe = importlib.import_module(settings["recipe"])
    config = TypeAdapter(recipe.Config).validate_python(settings["config"])
    return recipe.run(config, show_progress=settings["show_progress"], processes=processes)
