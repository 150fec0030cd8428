"""The privacy properties of this machine and process, as observed, and hardening of the process.

Notable here:
- each line of the report is derived from facts checked on this machine; what cannot be determined is unknown
- the status of a guarantee is "kept", "best effort" or "not kept"; nothing is reported as "secure"
- `harden` disables core dumps, access to the process's memory by other processes, and swapping

Source of the table's rows: the requirements that the "Private Cloud Compute" security guide states (2024), and what a
plain process can do about each of them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

Status = Literal["kept", "best effort", "not kept"]
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4


@dataclass(frozen=True)
class PrivacyFindings:
    """The observed facts; None if this system does not report one.

    Args:
        system: operating system and kernel.
        swap: bytes of swap in use or ready; encrypted swap counts too, since that cannot be seen from here.
        core_dumps: where a crash would write the process's memory; empty if core dumps are disabled.
        dumpable: whether other processes of the same user may read this one's memory.
        locked_memory: bytes of this process that cannot be swapped.
        tpm: devices of a trusted platform module.
        confidential_cpu: kind of encrypted virtual machine that this one reports: "SEV-SNP", "TDX" or another.
        confidential_gpu: state of confidential computing on the GPU, as reported by the driver.
        virtual: whether the machine is virtual, so that a host can read its memory.
        container: the kind of container that the process is in; empty for none.
        root: whether this process runs as root.
        network: interfaces beside the loopback, by name.
        telemetry: environment variables that make a dependency send or trace data.
    """

    system: str
    swap: int | None = None
    core_dumps: str | None = None
    dumpable: bool | None = None
    locked_memory: int | None = None
    tpm: tuple[str, ...] | None = None
    confidential_cpu: str | None = None
    confidential_gpu: str | None = None
    virtual: bool | None = None
    container: str | None = None
    root: bool | None = None
    network: tuple[str, ...] | None = None
    telemetry: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrivacyLine:
    """A promise, and whether this machine keeps it.

    Attributes:
        promise: the promise, as a sentence.
        status: "kept", "best effort" or "not kept".
        because: the reason for the status.
    """

    promise: str
    status: Status
    because: str


@dataclass(frozen=True)
class PrivacyReport:
    """The facts observed on this machine, and the status of each promise that follows from them.

    >>> print(judge(PrivacyFindings("Linux", swap=0, core_dumps="", network=())).lines[1])
    PrivacyLine(promise='nothing is sent to the network', status='kept', because='no network interface but the
    loopback is here')
    """

    findings: PrivacyFindings
    lines: tuple[PrivacyLine, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(line.status) for line in self.lines)
        return "\n".join(f"{line.status:{width}}  {line.promise}: {line.because}" for line in self.lines)


def privacy_report(root: Path = Path("/")) -> PrivacyReport:
    """Examine this machine and this process, and judge each promise.

    Args:
        root: root folder of the system files, such as /proc; a test gives its own.
    """
    return judge(detect(root))


# --- looking ----------------------------------------------------------------------------------------------------------


def detect(root: Path = Path("/")) -> PrivacyFindings:
    """The facts of this machine and this process."""
    variables = ("OTEL_EXPORTER_OTLP_ENDPOINT", "LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2")
    facts = PrivacyFindings(
        f"{platform.system()} {platform.release()}",
        root=os.geteuid() == 0 if hasattr(os, "geteuid") else None,
        network=_network(),
        telemetry=tuple(name for name in variables if os.environ.get(name)),
    )
    if not sys.platform.startswith("linux"):
        return facts
    status = _read(root / "proc/self/status") or ""
    return replace(
        facts,
        swap=_swap(root),
        core_dumps=_core_dumps(root),
        dumpable=_prctl(_PR_GET_DUMPABLE) == 1,
        locked_memory=1024 * int(found[1]) if (found := re.search(r"VmLck:\s+(\d+)", status)) else None,
        tpm=tuple(sorted(path.name for path in (root / "dev").glob("tpm*"))),
        confidential_cpu=_confidential_cpu(root),
        confidential_gpu=_confidential_gpu(),
        virtual="hypervisor" in (_read(root / "proc/cpuinfo") or "").split(),
        container=_container(root),
    )


def _swap(root: Path) -> int | None:
    text = _read(root / "proc/swaps")
    return None if text is None else 1024 * sum(int(line.split()[2]) for line in text.splitlines()[1:])


def _core_dumps(root: Path) -> str | None:
    """Where a core dump would go: the kernel's pattern, or empty if the limit is 0 or dumping is disabled."""
    import resource

    pattern = (_read(root / "proc/sys/kernel/core_pattern") or "").strip()
    if not pattern:
        return None
    # a pipe gets the core whatever the limit says, unless the process may not be dumped at all
    limited = resource.getrlimit(resource.RLIMIT_CORE)[0] == 0 and not pattern.startswith("|")
    return "" if limited or _prctl(_PR_GET_DUMPABLE) != 1 else pattern


def _confidential_cpu(root: Path) -> str:
    """The kind of encrypted virtual machine, by its device files, which exist only inside such a guest."""
    for kind, path in (("SEV-SNP", "dev/sev-guest"), ("TDX", "dev/tdx_guest"), ("TDX", "dev/tdx-guest")):
        if (root / path).exists():
            return kind
    flags = (_read(root / "proc/cpuinfo") or "").split()
    return "TDX" if "tdx_guest" in flags else ""


def _confidential_gpu() -> str:
    """The state of confidential computing as the driver's tool reports it; empty without that tool."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, "conf-compute", "-f"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(done.stdout.split()) if done.returncode == 0 else "not supported"


def _container(root: Path) -> str:
    for kind, path in (("docker", ".dockerenv"), ("podman", "run/.containerenv")):
        if (root / path).exists():
            return kind
    groups = _read(root / "proc/1/cgroup") or ""
    found = re.search(r"docker|kubepods|lxc|containerd", groups)
    return found[0] if found else ""


def _network() -> tuple[str, ...] | None:
    import socket

    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    return tuple(name for name in names if not name.startswith("lo"))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _prctl(option: int, argument: int = 0) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0))


# --- judging ----------------------------------------------------------------------------------------------------------


def judge(findings: PrivacyFindings) -> PrivacyReport:
    """Derive the status of each promise from the facts."""
    rules = (_disk, _sending, _memory, _operator, _proof, _singling_out, _side_channels)
    return PrivacyReport(findings, tuple(rule(findings) for rule in rules))


def _disk(facts: PrivacyFindings) -> PrivacyLine:
    what = "Pippin writes no prompt and no answer to disk or log"
    own = "its code does not, which canaries test"
    if facts.core_dumps:
        return PrivacyLine(what, "best effort", f"{own}; but a crash may leave memory at {facts.core_dumps!r}")
    if facts.swap:
        return PrivacyLine(
            what, "best effort", f"{own}; but {facts.swap / 2**20:.0f} MiB of swap may take memory to disk"
        )
    if facts.core_dumps is None or facts.swap is None:
        return PrivacyLine(what, "best effort", f"{own}; swap and core dumps cannot be seen on {facts.system}")
    return PrivacyLine(what, "kept", f"{own}; there is no swap, and a crash leaves no core")


def _sending(facts: PrivacyFindings) -> PrivacyLine:
    what = "nothing is sent to the network"
    if facts.telemetry:
        return PrivacyLine(
            what, "not kept", f"{', '.join(facts.telemetry)} may make a library of yours send what it sees"
        )
    if facts.network == ():
        return PrivacyLine(what, "kept", "no network interface but the loopback is here")
    seen = "interfaces cannot be listed" if facts.network is None else f"{', '.join(facts.network)} could be used"
    return PrivacyLine(what, "best effort", f"a local session opens no connection, which tests hold it to; {seen}")


def _memory(facts: PrivacyFindings) -> PrivacyLine:
    what = "memory is wiped after a request"
    notes = ["buffers that Pippin owns are overwritten, Python's and torch's copies are not"]
    notes.append("unknown swap" if facts.swap is None else "swap is on" if facts.swap else "swap is off")
    if facts.dumpable is not None:
        notes.append(f"processes of the same user {'can' if facts.dumpable else 'cannot'} read it")
    return PrivacyLine(what, "best effort", "; ".join(notes))


def _operator(facts: PrivacyFindings) -> PrivacyLine:
    what = "the operator of the machine cannot read data"
    if facts.confidential_cpu:
        because = f"this guest says that it is a {facts.confidential_cpu} machine, which Pippin does not verify"
        gpu = facts.confidential_gpu
        return PrivacyLine(
            what, "best effort", f"{because}; confidential GPU: {gpu or 'none found'}; root inside can read all"
        )
    host = ", and the host of this virtual machine," if facts.virtual else ""
    inside = f" (from outside the {facts.container} container too)" if facts.container else ""
    return PrivacyLine(what, "not kept", f"root{host} can read all of it{inside}; no encrypted memory was found")


def _proof(facts: PrivacyFindings) -> PrivacyLine:
    what = "a client can verify what runs"
    tpm = f"a TPM is here ({', '.join(facts.tpm)}) and is not used" if facts.tpm else "no TPM was found"
    because = f"quotes are signed by a key in a file, which proves nothing against its owner; {tpm}"
    return PrivacyLine(what, "not kept", because)


def _singling_out(facts: PrivacyFindings) -> PrivacyLine:
    because = "requests come straight from their sender, with a key and an address; there is no relay in between"
    return PrivacyLine("the operator cannot single out a user", "not kept", because)


def _side_channels(facts: PrivacyFindings) -> PrivacyLine:
    because = "lengths of sealed messages are rounded; timing, caches, power and physical access are not covered"
    return PrivacyLine("side channels tell nothing", "not kept", because)


# --- hardening --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hardening:
    """Which protections of this process took effect; false where the system refused one."""

    no_core_dumps: bool
    not_readable: bool
    not_swapped: bool


def harden() -> Hardening:
    """Disable core dumps, access to this process's memory by others of the same user, and swapping of its memory.

    The protections last until the process ends; child processes inherit the one against core dumps. Memory is locked
    only if there is swap. A protection that the system refuses is False in the result.
    """
    return Hardening(
        no_core_dumps=_try(_no_cores),
        not_readable=_try(lambda: _prctl(_PR_SET_DUMPABLE, 0) == 0),
        not_swapped=_try(lambda: _swap(Path("/")) == 0 or _lock_memory()),
    )


def _no_cores() -> bool:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return True


def _lock_memory() -> bool:
    """Lock each page as it is first used; only where there is no limit, at which later memory would be refused."""
    import resource

    if os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        return False
    return bool(ctypes.CDLL(None).mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) == 0)


def _try(action: Callable[[], bool]) -> bool:
    try:
        return action()
    except (OSError, AttributeError, ValueError, ImportError):
        return False
