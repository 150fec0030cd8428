"""How many threads torch and the native kernels compute with."""

from __future__ import annotations

import os

from pippin.core import device, native


def use_threads(count: int | None = None) -> None:
    """How many threads torch and the native kernels use from now on.

    Args:
        count: from 1 to the cores that this process may use; None for as many as `OMP_NUM_THREADS` says, or one on each
            core. (Torch by itself counts the machine's cores, not those that a container may use.)

    Raises:
        InvalidArgument: a count outside its range.
    """
    import torch

    cores = device.threads()
    if count is not None:
        device.check_threads(count)
    if count is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(count or cores)
    if native.library() is not None:
        native.set_threads(count or native.default_threads())
