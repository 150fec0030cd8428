"""Hardware of this machine: processor, cores, instruction sets, memory, accelerators; and the choice of a device.

Notable here:
- cores are those this process may use: its affinity, then the quota of its control group (a container's limit)
- memory is the smaller of the machine's and the control group's, since exceeding the latter ends the process
- torch is imported only to query accelerators, so that the processor's properties are available in milliseconds
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# The instruction sets that matter to matrix products, by their names in /proc/cpuinfo.
_X86_SETS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
)
_ARM_SETS = {"asimd": "neon", "asimddp": "dotprod", "fphp": "fp16", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve"}
_APPLE_SETS = {"arm.AdvSIMD": "neon", "arm.FEAT_DotProd": "dotprod", "arm.FEAT_FP16": "fp16", "arm.FEAT_I8MM": "i8mm"}
_APPLE_SETS |= {"arm.FEAT_BF16": "bf16", "arm.FEAT_SME": "sme", "avx2_0": "avx2", "avx512f": "avx512f"}
_FAST_BF16_SETS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True)
class MemoryInfo:
    """Main memory in bytes: the total that this process may use, and how much of it is free now."""

    total: int
    available: int


@dataclass(frozen=True)
class Accelerator:
    """One GPU: its device name for `choose`, its product name, and its memory in bytes (0 if shared with the CPU)."""

    device: str
    name: str
    memory: int


@dataclass(frozen=True)
class MachineInfo:
    """The properties of a machine that `pippin doctor` and the evidence of claims report; memory in bytes."""

    system: str
    cpu: str
    logical_cores: int
    threads: int
    instruction_sets: tuple[str, ...]
    memory_total: int
    memory_available: int
    accelerators: tuple[Accelerator, ...]
    fast_bf16: bool


def choose(name: str | None = None) -> torch.device:
    """The torch device of a name, checked to exist; by default the best device of this machine.

    Args:
        name: "cpu", "cuda", "cuda:N" or "mps"; None or "auto" takes the first available of cuda, mps, cpu.

    Raises:
        InvalidArgument: an unknown name, or a device that this machine does not have.

    >>> choose("cpu")
    device(type='cpu')
    """
    import torch

    found = [a.device for a in accelerators()]
    if name is None or name == "auto":
        best = found[0] if found else "cpu"
        return torch.device(best)
    if re.fullmatch(r"cpu|mps|cuda(:\d{1,4})?", name) is None:
        raise InvalidArgument(f"device {name!r} is not known; use one of: {', '.join(['cpu', *found])}")
    wanted = "cuda:0" if name == "cuda" else name
    if wanted != "cpu" and wanted not in found:
        raise InvalidArgument(f"device {name!r} is not on this machine; use one of: {', '.join(['cpu', *found])}")
    return torch.device(wanted)


def machine_info() -> MachineInfo:
    """Collect what `pippin doctor` reports about the machine. Imports torch to list the accelerators."""
    memory_now = memory()
    return MachineInfo(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        logical_cores=os.cpu_count() or 1,
        threads=threads(),
        instruction_sets=instruction_sets(),
        memory_total=memory_now.total,
        memory_available=memory_now.available,
        accelerators=accelerators(),
        fast_bf16=has_fast_bf16(),
    )


def accelerators() -> tuple[Accelerator, ...]:
    """The GPUs that this torch can use, best first."""
    import torch

    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return tuple(Accelerator(f"cuda:{i}", p.name, p.total_memory) for i, p in enumerate(properties))
    if torch.backends.mps.is_available():
        return (Accelerator("mps", cpu_name(), 0),)
    return ()


def has_fast_bf16(device: torch.device | None = None) -> bool:
    """Whether a device multiplies bfloat16 matrices in hardware, at least as fast as float32.

    Args:
        device: None is the CPU, for which torch is not imported.
    """
    if device is None or device.type == "cpu":
        return not _FAST_BF16_SETS.isdisjoint(instruction_sets())
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_capability(device) >= (8, 0)
    return True


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets of this CPU that matter to matrix products, by their Linux names; empty where unknown."""
    if sys.platform == "darwin":
        return tuple(short for key, short in _APPLE_SETS.items() if _sysctl(f"hw.optional.{key}") == "1")
    return _parse_instruction_sets(_read(Path("/proc/cpuinfo")) or "")


def _parse_instruction_sets(cpuinfo: str) -> tuple[str, ...]:
    """The known sets in the text of /proc/cpuinfo: `flags` on x86, `Features` on Arm.

    >>> _parse_instruction_sets("flags : fpu sse avx2 avx512f avx512_bf16")
    ('avx2', 'avx512f', 'avx512_bf16')
    >>> _parse_instruction_sets("Features : fp asimd asimddp bf16")
    ('neon', 'dotprod', 'bf16')
    """
    line = re.search(r"^(flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    if line is None:
        return ()
    flags = line[2].split()
    known = {name: name for name in _X86_SETS} if line[1] == "flags" else _ARM_SETS
    return tuple(short for key, short in known.items() if key in flags)


@cache
def cpu_name() -> str:
    """The product name of the processor; the architecture where the system does not report one."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    line = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return line[1].strip() if line else platform.processor() or platform.machine()


def threads(root: Path = Path("/")) -> int:
    """The number of threads to compute with: usable physical cores within the control group's quota; at least 1.

    Two threads on one physical core share its vector units, so hyper-threads are not counted.

    Args:
        root: the folder that holds /proc and /sys; tests pass their own.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        siblings = (_read(root / f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") for i in allowed)
        cores = len({text.strip() if text else str(i) for i, text in zip(allowed, siblings, strict=True)})
    else:
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    quota = _cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def check_threads(count: int) -> None:
    """Check that there is a core for each of ``count`` threads.

    Raises:
        InvalidArgument: fewer than one thread, or more threads than cores.
    """
    cores = threads()
    if not 1 <= count <= cores:
        raise InvalidArgument(f"{count} threads were requested; this process may use 1 to {cores}, one per core")


def memory(root: Path = Path("/")) -> MemoryInfo:
    """Main memory that this process may use: the machine's, or its control group's limit where that is less.

    Args:
        root: the folder that holds /proc and /sys; tests pass their own.
    """
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for folder in _control_groups(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(folder / limit_name), _read(folder / used_name)
            if limit is not None and limit.strip().isdigit():
                total = min(total, int(limit))
                available = min(available, max(0, int(limit) - int(used or 0)))
    return MemoryInfo(total, available)


def peak_memory() -> int:
    """The peak resident set size of this process in bytes, shared pages included.

    On Linux it is read from /proc, because `getrusage` also counts the parent that the process was forked from.

    >>> peak_memory() > 1_000_000
    True
    """
    high_water = re.search(r"^VmHWM:\s*(\d+) kB$", _read(Path("/proc/self/status")) or "", re.MULTILINE)
    if high_water is not None:
        return int(high_water[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes elsewhere


def _cpu_quota(root: Path) -> float | None:
    """The CPU quota of the control groups, in processors; the smallest where several apply, None without a limit."""
    quotas = []
    for folder in _control_groups(root, "cpu"):
        older = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        words = (_read(folder / "cpu.max") or " ".join(older)).split()
        # Without a limit the quota reads "max" (version 2) or "-1" (version 1).
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, from its own up to the root, of versions 1 and 2."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _read(path: Path) -> str | None:
    """The text of a system file; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _sysctl(name: str) -> str | None:
    """One value of macOS's `sysctl`; None for an unknown name."""
    found = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def is_distributed() -> bool:
    """Whether this process was started as one of a group, by `torchrun` or Ray Train."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
