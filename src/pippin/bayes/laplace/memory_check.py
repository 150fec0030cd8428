"""Available memory, and an error before more of it is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from pippin.core.errors import NotEnoughMemory
from pippin.core.files import format_bytes


def available_memory(device: torch.device) -> int | None:
    """Bytes that are available on a device now; None where the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) * 1024 if found else None


def require_memory(nbytes: int, device: torch.device, what: str, instead: str) -> None:
    """Check that an allocation fits into the available memory.

    Args:
        nbytes: size of the allocation in bytes.
        device: device of the allocation.
        what: what it is for, for the message.
        instead: the alternative, for the message.

    Raises:
        NotEnoughMemory: less memory is available.
    """
    available = available_memory(device)
    if available is not None and nbytes > available:
        raise NotEnoughMemory(
            f"{what} needs {format_bytes(nbytes)} ({nbytes:,} bytes), {format_bytes(available)} are available on "
            f"{device}; {instead}"
        )
