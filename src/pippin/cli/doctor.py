"""`pippin doctor`: check the installation and the machine.

Notable here:
- required and optional libraries are read from the metadata of the installed package, so the list is never stale
- only what prevents an answer is a problem; a missing extra or model is a note with the command that installs it
- the recommended model is an estimate for this machine: `pippin.engine.measure.model_costs` says how
- the verdict comes first, extras for developers of Pippin last
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli.common import terminal
from pippin.core.files import format_bytes

if TYPE_CHECKING:
    from pippin.core.device import MachineInfo
    from pippin.engine.measure.model_costs import Recommendation

FOR_DEVELOPERS = ("test", "bench", "docs", "nightly", "dev")  # extras that users of Pippin do not need


@dataclass
class Diagnosis:
    """The findings of `pippin doctor`; `--json` prints the fields."""

    usable: bool
    problems: list[str]
    machine: MachineInfo | None  # None where torch cannot be loaded
    versions: dict[str, str]
    kernels: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, list[str]] = field(default_factory=dict)  # extra -> the distributions it lacks here
    cache: dict[str, Any] = field(default_factory=dict)
    default_model: dict[str, Any] = field(default_factory=dict)
    recommended_model: Recommendation | None = None  # None where nothing fits, or torch cannot be loaded


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether Pippin works on this machine.

    Exit code 0 if it does, 1 if not.
    """
    diagnosis = diagnose()
    if as_json:
        terminal.write(terminal.to_json(asdict(diagnosis)) + "\n")
    else:
        _print(diagnosis)
    if not diagnosis.usable:
        raise typer.Exit(1)


def diagnose() -> Diagnosis:
    """Check the libraries, the machine, the cache folder and the default model."""
    required, extras = libraries()
    problems = [f"{name} is missing; reinstall pippin" for name, version in required.items() if version is None]
    machine = None
    try:
        from pippin.core import device

        machine = device.machine_info()
    except (ImportError, OSError) as error:  # OSError: one of torch's own libraries does not load
        problems.append(f"torch cannot be loaded: {error}")
    cache = _cache()
    model = _default_model()
    if not cache["writable"]:
        problems.append(f"the cache folder {cache['folder']} cannot be written; set PIPPIN_HOME to another")
    elif not model["installed"] and cache["free"] < 2 * model["size"]:
        free, size = format_bytes(cache["free"]), format_bytes(model["size"])
        problems.append(f"{cache['folder']} has {free} free, and the default model needs twice its {size} to unpack")
    return Diagnosis(
        usable=not problems,
        problems=problems,
        machine=machine,
        kernels=_kernels(),
        versions={"python": platform.python_version()} | {name: v for name, v in required.items() if v is not None},
        extras=extras,
        cache=cache,
        default_model=model,
        recommended_model=None if machine is None else _recommended_model(cache["free"]),
    )


def libraries(distribution: str = "pippin") -> tuple[dict[str, str | None], dict[str, list[str]]]:
    """The requirements of a distribution with installed versions (None: missing), and what each extra lacks."""
    from importlib import metadata

    from packaging.requirements import Requirement

    required: dict[str, str | None] = {distribution: metadata.version(distribution)}
    extras: dict[str, list[str]] = {}
    names = metadata.metadata(distribution).get_all("Provides-Extra") or []
    for requirement in map(Requirement, metadata.requires(distribution) or []):
        version = _version(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required[requirement.name] = version
            continue
        for extra in names:
            if requirement.marker.evaluate({"extra": extra}):
                lacking = extras.setdefault(extra, [])
                if version is None or not requirement.specifier.contains(version, prereleases=True):
                    lacking.append(str(requirement).partition(";")[0].strip())
    return required, extras


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _kernels() -> dict[str, Any]:
    """The instruction sets of the native kernels, or why there are no kernels."""
    from pippin.core import native

    return {
        "instruction_set": native.instruction_set() or None,
        "available": list(native.instruction_sets()),
        "threads": native.threads(),
        "why_not": native.unavailable_reason() or None,
    }


def _cache() -> dict[str, Any]:
    """The cache folder; if it does not exist yet, its nearest existing parent is checked."""
    from pippin.core.store import store

    folder = store.home()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "folder": str(folder),
        "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(nearest).free,
    }


def _default_model() -> dict[str, Any]:
    from pippin.core.store import catalog, store

    entry = catalog.entries()[catalog.DEFAULT_MODEL]
    installed = any(here.name == entry.name for here in store.installed())
    return {"name": entry.name, "size": entry.size, "installed": installed}


def _recommended_model(disk: int) -> Recommendation | None:
    """The largest model that suits this machine."""
    from pippin.core.store import catalog, store
    from pippin.engine.measure.machine_speed import machine_speed
    from pippin.engine.measure.model_costs import recommend

    here = {found.name for found in store.installed()}
    return recommend(list(catalog.entries().values()), machine_speed(), disk, here)


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print("[green]Pippin works on this machine.[/]" if diagnosis.usable else "[red]Pippin cannot work yet.[/]")
    for problem in diagnosis.problems:
        console.print(f"[red bold]problem[/]  {escape(problem)}")
    for lines in (_lines(diagnosis), _extras(diagnosis)):
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, text in lines:
            table.add_row(name, escape(text))
        console.print()
        console.print(table)


def _lines(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    model, cache = diagnosis.default_model, diagnosis.cache
    core = ("pippin", "python", "torch")
    others = ", ".join(f"{name} {version}" for name, version in diagnosis.versions.items() if name not in core)
    state = "installed" if model["installed"] else f"not installed ({format_bytes(model['size'])}): pippin pull"
    return [
        ("default model", f"{model['name']}: {state}"),
        ("recommended", _recommendation_line(diagnosis.recommended_model)),
        ("cache", f"{_short(cache['folder'])}, {format_bytes(cache['free'])} free"),
        ("versions", ", ".join(f"{name} {diagnosis.versions.get(name, 'missing')}" for name in core)),
        ("libraries", others),
        *(_machine_lines(diagnosis.machine) if diagnosis.machine else ()),
        ("kernels", _kernels_line(diagnosis.kernels)),
    ]


def _extras(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """One line for each extra of users, and one for all extras of developers."""
    lines = []
    for extra, lacking in diagnosis.extras.items():
        if extra not in FOR_DEVELOPERS:
            how = f"lacks {', '.join(lacking)}: pip install 'pippin[{extra}]'" if lacking else "complete"
            lines.append((f"extra {extra}", how))
    states = (
        f"{extra} {f'lacks {len(lacking)}' if (lacking := diagnosis.extras[extra]) else 'complete'}"
        for extra in FOR_DEVELOPERS
        if extra in diagnosis.extras
    )
    return [*lines, ("for developers", ", ".join(states))]


def _machine_lines(machine: MachineInfo) -> list[tuple[str, str]]:
    gpus = ", ".join(f"{a.device} ({a.name})" for a in machine.accelerators)
    return [
        ("system", machine.system),
        ("CPU", f"{machine.cpu}, {machine.logical_cores} logical cores, {machine.threads} threads used"),
        ("instructions", " ".join(machine.instruction_sets) or "unknown"),
        ("bfloat16", "in hardware" if machine.fast_bf16 else "not in hardware; float32 is used"),
        ("accelerators", gpus or "none; models run on the CPU"),
        ("memory", f"{format_bytes(machine.memory_total)}, {format_bytes(machine.memory_available)} free"),
    ]


def _recommendation_line(found: Recommendation | None) -> str:
    if found is None:
        return "no other model: there is too little memory or disk, or it would be too slow"
    return f"{found.cost.name}: {found.command}; {found.reason}"


def _kernels_line(kernels: dict[str, Any]) -> str:
    if kernels["instruction_set"] is None:
        return f"none, torch is used: {kernels['why_not']}"
    threads = "1 thread" if kernels["threads"] == 1 else f"{kernels['threads']} threads"
    others = ", ".join(name for name in kernels["available"] if name != kernels["instruction_set"])
    return f"native, for {kernels['instruction_set']}{f' (also available: {others})' if others else ''}, {threads}"


def _short(folder: str) -> str:
    """The folder with the home folder abbreviated to `~`."""
    home = str(Path.home())
    return "~" + folder[len(home) :] if folder == home or folder.startswith(home + os.sep) else folder
