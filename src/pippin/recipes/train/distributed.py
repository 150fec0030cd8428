"""A recipe on several processes: those that torchrun started, or workers of a Ray cluster.

Notable here:
- `run` of a recipe joins the processes that torchrun started by itself; nothing has to be passed
- on Ray a config travels as JSON values and is validated again by each worker
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pippin.core.checks import PositiveInt, checked

if TYPE_CHECKING:
    from pippin.train.distributed import DistributedProcesses


@contextmanager
def joined(processes: DistributedProcesses | None = None) -> Iterator[DistributedProcesses | None]:
    """The processes that share a run: those given, those that torchrun started, or None where this one is alone."""
    from pippin.train.distributed import DistributedProcesses, is_distributed

    if processes is not None or not is_distributed():
        yield processes
        return
    joined = DistributedProcesses("ddp")
    try:
        yield joined
    finally:
        joined.close()


def is_first() -> bool:
    """Whether this process is alone, or the first of those that torchrun started: the one that prints the result."""
    return os.environ.get("RANK", "0") == "0"


@checked
def run_on_ray(
    recipe: ModuleType, config: Any, *, num_workers: PositiveInt | None = None, show_progress: bool = True
) -> Any:
    """Run a recipe on workers of a Ray cluster, or of one that is started on this machine.

    Args:
        recipe: a module of this package whose `run` takes ``processes``: `full` or `lora`.
        config: its `Config`; paths in it must mean the same on every machine.
        num_workers: None for one on each core.
        show_progress: whether the first worker shows progress.

    Returns:
        What the recipe returned on the first worker.

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
    """One worker's part of the run."""
    from pydantic import TypeAdapter

    recipe = importlib.import_module(settings["recipe"])
    config = TypeAdapter(recipe.Config).validate_python(settings["config"])
    return recipe.run(config, show_progress=settings["show_progress"], processes=processes)
