"""The build of the native kernels; all else about the package is in pyproject.toml.

Notable here:
- a plain shared library, loaded with ctypes: it depends on no Python, so one wheel serves every version of it
- native/kernels.cpp is compiled once for each instruction set of this architecture, the other sources once; which of
  them a machine can run is found out when it is loaded
- without a C++ compiler, or where the sources do not compile, the installation goes on and torch does the work;
  `pippin doctor` says so, and src/pippin/_native.log keeps what the compiler said
- only what changed is compiled again, side by side: `python setup.py build_ext --inplace` is the developer's command

CXX, CXXFLAGS and LDFLAGS are followed as everywhere: a cross compiler or a sanitizer needs nothing else.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "native"
LOG = "_native.log"  # beside the library, where there is none

# No -ffast-math: infinities are meant, and sums keep their order. Fused multiply-add only where it is written.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"]
WARNINGS = ["-Wall", "-Wextra"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
X86 = {"avx512bf16": [*AVX512, "-mavx512bf16"], "avx512vnni": AVX512, "avx2": AVX2, "generic": []}
ARM = {"neon": ["-march=armv8.2-a+dotprod+fp16"], "generic": []}
VARIANTS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}


class BuildFailed(Exception):
    """What the compiler said."""


def compiler() -> list[str] | None:
    """The command of the C++ compiler; None if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return None


def run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        BuildFailed: it fails, or cannot be started.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildFailed(f"{shlex.join(command)}\n{done.stderr}")
    return done.stdout


def variants(cxx: list[str]) -> dict[str, list[str]]:
    """Instruction sets to compile for, with their flags: those of the target that this compiler knows."""
    machine = run([*cxx, "-dumpmachine"]).strip().partition("-")[0]
    found = {}
    for name, flags in VARIANTS.get(machine, {"generic": []}).items():
        try:
            run([*cxx, *flags, "-fsyntax-only", "-x", "c++", os.devnull])
        except BuildFailed:
            continue  # a compiler from before this instruction set
        found[name] = flags
    return found


def build(target: Path, work: Path) -> None:
    """Build the library; what did not change is not compiled again.

    Args:
        target: the library's path; replaced in one step, since processes may have it open.
        work: folder of the object files, which may be shared by builds with other flags and at the same time.

    Raises:
        BuildFailed: with what the compiler said.
    """
    cxx = compiler()
    if cxx is None:
        raise BuildFailed("no C++ compiler: neither $CXX nor c++, g++ or clang++ is there")
    known = variants(cxx)
    flags = [
        *FLAGS,
        *WARNINGS,
        *(f"-DPIPPIN_HAVE_{name.upper()}=1" for name in known),
        *shlex.split(os.environ.get("CXXFLAGS", "")),
    ]
    jobs = [(source, flags, source.stem) for source in sorted(NATIVE.glob("*.cpp")) if source.stem != "kernels"]
    for name, special in known.items():
        own = [*flags, *special, f"-DPIPPIN_ISA_{name.upper()}=1"]
        jobs.append((NATIVE / "kernels.cpp", own, f"kernels_{name}"))
    work.mkdir(parents=True, exist_ok=True)
    version = run([*cxx, "--version"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: compile_one(cxx, version, *job, work), jobs))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    link = [*cxx, "-shared", "-pthread", *shlex.split(os.environ.get("CXXFLAGS", "")), *map(str, objects)]
    run([*link, "-o", str(temporary), *shlex.split(os.environ.get("LDFLAGS", ""))])
    os.replace(temporary, target)


def compile_one(cxx: list[str], version: str, source: Path, flags: list[str], name: str, work: Path) -> Path:
    """Compile a source unless its object is newer than all that it was made from; return the object."""
    key = hashlib.sha256("\n".join([*cxx, version, *flags]).encode()).hexdigest()[:12]
    target = work / f"{name}-{key}.o"
    if is_current(target):
        return target
    temporary = target.with_suffix(f".{os.getpid()}")
    started = time.time_ns()
    run([*cxx, *flags, "-MMD", "-MF", f"{temporary}.d", "-c", str(source), "-o", str(temporary)])
    os.utime(temporary, ns=(started, started))  # what is edited from now on is newer
    os.replace(f"{temporary}.d", target.with_suffix(".d"))
    os.replace(temporary, target)
    return target


def is_current(target: Path) -> bool:
    """Whether an object is newer than every file that the compiler read for it."""
    listed = target.with_suffix(".d")
    if not target.is_file() or not listed.is_file():
        return False
    _, _, names = listed.read_text().replace("\\\n", " ").partition(":")
    made = target.stat().st_mtime_ns
    return all(Path(name).is_file() and Path(name).stat().st_mtime_ns < made for name in shlex.split(names))


class BuildNative(build_ext):
    """Builds the one extension, which is no extension of Python's."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without Python's version in it."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Build the library where setuptools wants it, or leave the reason there."""
        target = Path(self.get_ext_fullpath(ext.name))
        log = target.with_name(LOG)
        log.unlink(missing_ok=True)
        work = ROOT / "build" / "native"
        try:
            build(target, work if os.access(ROOT, os.W_OK) else Path(self.build_temp))
        except BuildFailed as error:
            target.unlink(missing_ok=True)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{error}\n", encoding="utf-8")
            sys.stderr.write(f"{error}\npippin: the native kernels could not be built; torch will do their work\n")

    def copy_extensions_to_source(self) -> None:
        """Replace what is there in one step: a process that runs with the old library keeps it."""
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            place = ROOT / "src" / "pippin"
            for name, other in ((built.name, LOG), (LOG, built.name)):
                if built.with_name(name).is_file():
                    temporary = place / f"{name}.{os.getpid()}"
                    shutil.copyfile(built.with_name(name), temporary)
                    os.replace(temporary, place / name)
                    (place / other).unlink(missing_ok=True)


class Wheel(bdist_wheel):
    """A wheel for this kind of machine and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tags of Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if self.distribution.has_ext_modules() else (python, abi, platform)


setup(
    # without a compiler the wheel is one for any machine
    ext_modules=[Extension("pippin._native", sources=[], optional=True)] if compiler() else [],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
