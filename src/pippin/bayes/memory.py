"""How much memory there is, and the error that says so before it is asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from pippin.core.errors import NotEnoughMemory
from pippin.core.files import format_bytes


def available(device: torch.device) -> int | None:
    """Bytes that can be had on a device now; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) * 1024 if found else None


def require(nbytes: int, device: torch.device, what: str, instead: str) -> None:
    """See that so many bytes can be had.

    Args:
        nbytes: how many.
        device: where.
        what: what they are for, for the message.
        instead: what to do without them.

    Raises:
        NotEnoughMemory: they cannot.
    """
    there = available(device)
    if there is not None and nbytes > there:
        raise NotEnoughMemory(
            f"{what} needs {format_bytes(nbytes)} ({nbytes:,} bytes), {format_bytes(there)} are available on {device}; "
            f"{instead}"
        )
