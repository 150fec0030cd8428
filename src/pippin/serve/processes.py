"""A server whose model several processes compute together: rank 0 serves, the others follow.

    torchrun --nproc-per-node 2 -m pippin serve MODEL

Notable here:
- each process loads the model and keeps its part (`pippin.language.divide`): some tracks, or some of every matrix
- followers end when the engine of rank 0 is closed, so they leave signals to rank 0, which finishes what runs
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pippin.core.errors import InvalidArgument
from pippin.serve.settings import ServerSettings

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel


def check(settings: ServerSettings) -> None:
    """Check that settings are possible where a model is divided.

    Raises:
        InvalidArgument: they are not.
    """
    without = {
        "several models": len(settings.references) > 1 or settings.any_installed,
        "--adapter": bool(settings.adapters),
        "--bits": settings.bits is not None,
        "--cache": settings.cache is not None,
        "--kv-sharing-ratio": settings.kv_sharing_ratio is not None,
        "--memory": settings.memory is not None,
        "--neuron-predictor": settings.neuron_predictor is not None,
        "--prompt-cache": settings.prompt_cache is not None,
        "--prompt-router": settings.prompt_router is not None,
        "--speculate": settings.speculate not in (None, "ngram"),
    }
    if found := [name for name, there in without.items() if there]:
        raise InvalidArgument(f"a model that several processes compute is served without {', '.join(found)}")


@contextmanager
def joined() -> Iterator[int]:
    """Connect this process to the others that torchrun started; its rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def is_joined() -> bool:
    """Whether several processes compute one model."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def part_of(model: LanguageModel) -> LanguageModel:
    """The part of a model that this process computes.

    Args:
        model: loaded with ``pack=False``.
    """
    from pippin.language.parallel.divide_model import divide
    from pippin.nn.parallel.collectives import Collectives

    return divide(model, Collectives())


def follow_server(read: Callable[[], LanguageModel]) -> None:
    """Compute this process's part of the passes of rank 0's server until that ends.

    Args:
        read: reads this process's part of the model.
    """
    from pippin.engine.runners.leading_runner import follow

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(read())
