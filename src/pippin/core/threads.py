"""The number of threads that torch and the native kernels use."""

from __future__ import annotations

import os

from pippin.core import device, native


def use_threads(count: int | None = None) -> None:
    """Set the number of threads that torch and the native kernels use from now on.

    Args:
        count: from 1 to the number of cores that this process may use; None takes `OMP_NUM_THREADS`, or one thread per
            core where it is not set. (Torch's own default ignores the CPU limit of a container.)

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
