"""How fast this machine reads weights, measured once and kept in the cache folder.

Notable here:
- decoding is bound by the weights that each token reads, so that one rate for weights of a few bits and one for dense
  weights are enough to estimate the speed of a model that is not here
- both are rates of the kernels that models use, on matrices that do not fit into the caches of a processor; each
  product is timed on its own, and a fast one counts, so that other processes lower the rate little
- the file names the machine, its threads and its kernels; what was measured elsewhere is measured again
- a cache folder that does not exist is not created for it
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pippin.core.errors import PippinError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

FILE: Final = "machine_speed.json"
"""Name of the file in the cache folder."""

_ROWS, _COLUMNS = 4096, 2048
_BYTES: Final = 80_000_000  # of matrices that take turns
_ROUNDS: Final = 3
_RANK: Final = 0.25  # of the times, sorted: low, as another process may have the core, and no lucky exception


@dataclass(frozen=True)
class MachineSpeed:
    """What is known about the speed of this machine.

    Attributes:
        machine: the processor or accelerator, the threads and the kernels.
        quantized: bytes per second of weights of a few bits; 0 where models have dense weights alone.
        dense: bytes per second of dense weights.
        bytes_per_weight: of dense weights here.
        memory: bytes of free memory of the device.
        measured: tokens per second of the models that `pippin bench` has measured here, by catalog name.
    """

    machine: dict[str, Any]
    quantized: float
    dense: float
    bytes_per_weight: int
    memory: int
    measured: dict[str, float] = field(default_factory=dict)


def machine_speed() -> MachineSpeed:
    """The speed of this machine: as it was measured before, or measured now, which takes about a second.

    Raises:
        ImportError, OSError: torch cannot be loaded.
    """
    from pippin.core import device

    chosen = device.choose()
    machine = _fingerprint(chosen)
    known = _read(machine)
    if known is None:
        known = {"machine": machine, "rates": _measure(chosen), "measured": {}}
        _write(known)
    quantized, dense = known["rates"]
    return MachineSpeed(
        machine, quantized, dense, _bytes_per_weight(chosen), _free_memory(chosen), dict(known["measured"])
    )


def remember(model: str, tokens_per_second: float) -> None:
    """Keep the measured speed of a catalog model for `pippin models`.

    Args:
        model: its catalog name.
        tokens_per_second: of an answer, on the default device with the default number of threads.
    """
    now = machine_speed()
    measured = now.measured | {model: tokens_per_second}
    _write({"machine": now.machine, "rates": [now.quantized, now.dense], "measured": measured})


def _fingerprint(device: torch.device) -> dict[str, Any]:
    """What the rates depend on."""
    import pippin
    from pippin.core import device as devices, native

    return {
        "pippin": pippin.__version__,
        "cpu": devices.cpu_name(),
        "threads": native.default_threads(),
        "kernels": native.instruction_set(),
        "accelerators": [asdict(each) for each in devices.accelerators()],
        "device": str(device),
    }


def _path() -> Path:
    from pippin.core.store import store

    return store.home() / FILE


def _read(machine: dict[str, Any]) -> dict[str, Any] | None:
    """The content of the file; None where there is none for this machine."""
    try:
        known = json.loads(_path().read_bytes())
        rates, measured = [float(rate) for rate in known["rates"]], known["measured"]
        valid = known["machine"] == machine and len(rates) == 2 and rates[1] > 0
        valid = valid and all(isinstance(speed, float) and speed > 0 for speed in measured.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return {"machine": machine, "rates": rates, "measured": measured} if valid else None


def _write(known: dict[str, Any]) -> None:
    """Replace the file; without a folder that can be written, nothing is kept."""
    from pippin.core.files import atomic_write

    path = _path()
    if path.parent.is_dir():
        with suppress(OSError, PippinError), atomic_write(path) as file:
            file.write((json.dumps(known, indent=1) + "\n").encode())


def _bytes_per_weight(device: torch.device) -> int:
    from pippin.core import device as devices, native

    on_cpu = device.type == "cpu"
    return 2 if not on_cpu or native.library() is not None or devices.has_fast_bf16() else 4


def _free_memory(device: torch.device) -> int:
    from pippin.core import device as devices

    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return devices.memory().available


def _measure(device: torch.device) -> list[float]:
    """Bytes per second of quantized weights (0 where there are none) and of dense weights."""
    import torch

    from pippin.core import native
    from pippin.core.threads import use_threads
    from pippin.engine.measure import measure_speed
    from pippin.nn.quantization import NativeWeight

    use_threads()
    if device.type != "cpu" or native.library() is None:
        return [0.0, measure_speed.read_bandwidth(native.default_threads(), device=device)]
    blocks = torch.zeros(_ROWS, _COLUMNS // 32 * 20, dtype=torch.uint8)  # of Q4_1: 20 bytes for 32 weights
    dense = torch.zeros(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    return [
        _rate(lambda: NativeWeight.from_ggml(blocks, "Q4_1")),
        _rate(lambda: NativeWeight.from_dense(dense)),
    ]


def _rate(build: Callable[[], Any]) -> float:
    """Bytes per second of products of matrices with one vector."""
    import torch

    first = build()
    matrices = [first, *(build() for _ in range(_BYTES // first.nbytes))]
    vector = torch.ones(1, _COLUMNS)
    times = []
    for _ in range(_ROUNDS):
        for matrix in matrices:
            began = time.perf_counter()
            matrix.matmul(vector, None)
            times.append(time.perf_counter() - began)
    return float(first.nbytes / sorted(times)[int(_RANK * len(times))])
