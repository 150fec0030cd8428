"""The build of the kernels: from small sources in place of the real ones, in a folder of its own."""

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

# not imported: then pip would find another distutils than its own, in every test of this process
pytestmark = pytest.mark.skipif(find_spec("setuptools") is None, reason="setuptools is not installed")
ROOT = Path(__file__).resolve().parents[2]
COMPILER = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
with_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
EXPORTED = 'extern "C" __attribute__((visibility("default"))) int'


@pytest.fixture
def project(tmp_path):
    """The project's own build files around two sources, of which one is compiled for each instruction set."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "src" / "pippin").mkdir(parents=True)
    (tmp_path / "src" / "pippin" / "__init__.py").write_text("")
    native = tmp_path / "native"
    native.mkdir()
    (native / "answer.h").write_text("#define ANSWER 1\n")
    (native / "library.cpp").write_text(f'#include "answer.h"\n{EXPORTED} answer() {{ return ANSWER; }}\n')
    (native / "kernels.cpp").write_text(
        "#if defined(PIPPIN_ISA_AVX512BF16)\n#define NAME avx512bf16\n#elif defined(PIPPIN_ISA_AVX512VNNI)\n"
        "#define NAME avx512vnni\n#elif defined(PIPPIN_ISA_AVX2)\n#define NAME avx2\n#elif defined(PIPPIN_ISA_NEON)\n"
        "#define NAME neon\n#elif defined(PIPPIN_ISA_GENERIC)\n#define NAME generic\n#endif\n"
        f"{EXPORTED} NAME() {{ return 1; }}\n"
    )
    return tmp_path


def run(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("CXX", "CXXFLAGS", "LDFLAGS")} | variables
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env=env, check=True)


def in_place(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(project, "build_ext", "--inplace", **variables)


def library(project: Path) -> Path:
    return project / "src" / "pippin" / "_native.so"


def answer(path: Path) -> int:
    """What the library answers, asked by a process of its own: this one would keep the first that it loads."""
    code = f"import ctypes; print(ctypes.CDLL({str(path)!r}).answer())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@with_compiler
def test_sources_are_compiled_once_and_kernels_for_each_instruction_set(project):
    done = in_place(project)
    assert (done.stdout, done.stderr) == ("", "")
    handle = ctypes.CDLL(str(library(project)))
    assert handle.answer() == 1
    here = os.uname().machine
    for name in {"x86_64": ("avx512bf16", "avx512vnni", "avx2"), "aarch64": ("neon",)}.get(here, ()):
        assert getattr(handle, name)() == 1
    assert handle.generic() == 1
    assert [path.name for path in library(project).parent.glob("_native*")] == ["_native.so"]


@with_compiler
def test_only_what_changed_is_compiled_again(project):
    in_place(project)

    def made() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (project / "build" / "native").glob("*.o")}

    first, built = made(), library(project).stat().st_mtime_ns
    in_place(project)
    assert made() == first
    (project / "native" / "answer.h").write_text("#ifdef OTHER\n#define ANSWER 3\n#else\n#define ANSWER 2\n#endif\n")
    in_place(project)
    assert answer(library(project)) == 2
    changed = {name for name, time in made().items() if time != first[name]}
    assert {name.partition("-")[0] for name in changed} == {"library"}
    assert library(project).stat().st_mtime_ns > built
    in_place(project, CXXFLAGS="-DOTHER=1")  # other flags are other objects, and the first ones stay
    assert (len(made()), answer(library(project))) == (2 * len(first), 3)
    in_place(project)  # and are what the library is made of again
    assert (len(made()), answer(library(project))) == (2 * len(first), 2)


@with_compiler
def test_sources_that_do_not_compile_are_no_failure_and_the_reason_is_kept(project):
    in_place(project)
    (project / "native" / "answer.h").write_text("#define ANSWER (no_such_name)\n")
    done = in_place(project)
    assert done.stderr.endswith("pippin: the native kernels could not be built; torch will do their work\n")
    assert "no_such_name" in library(project).with_suffix(".log").read_text()
    assert not library(project).exists()
    (project / "native" / "answer.h").write_text("#define ANSWER 3\n")
    in_place(project)
    assert answer(library(project)) == 3
    assert not library(project).with_suffix(".log").exists()


@with_compiler
def test_a_compiler_that_knows_fewer_instruction_sets_builds_the_others(project, tmp_path):
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mavx*|*-march*) exit 1;; esac\nexec {COMPILER} "$@"\n')
    old.chmod(0o755)
    in_place(project, CXX=str(old))
    handle = ctypes.CDLL(str(library(project)))
    assert handle.generic() == handle.answer() == 1
    assert not hasattr(handle, "avx2")
    assert not hasattr(handle, "neon")


def names(folder: Path) -> tuple[str, set[str]]:
    (wheel,) = folder.glob("*.whl")
    return wheel.name, set(zipfile.ZipFile(wheel).namelist())


@with_compiler
def test_a_wheel_is_for_this_kind_of_machine_and_any_python(project):
    run(project, "bdist_wheel")
    name, held = names(project / "dist")
    assert "-py3-none-" in name
    assert not name.endswith("-any.whl")
    assert "pippin/_native.so" in held
    assert not any("native/" in each for each in held)


def test_without_a_compiler_a_wheel_is_for_any_machine(project):
    run(project, "bdist_wheel", CXX="no-such-compiler")
    name, held = names(project / "dist")
    assert name.endswith("-py3-none-any.whl")
    assert "pippin/__init__.py" in held
    assert not any("_native" in each for each in held)


def test_the_sources_travel_with_a_source_distribution_and_nothing_that_was_built(project):
    library(project).write_bytes(b"built here")
    run(project, "sdist", "--formats=zip", CXX="no-such-compiler")
    (archive,) = (project / "dist").glob("*.zip")
    held = {name.partition("/")[2] for name in zipfile.ZipFile(archive).namelist()}
    assert {"setup.py", "native/library.cpp", "native/kernels.cpp", "native/answer.h"} <= held
    assert "src/pippin/_native.so" not in held


def loaded_at_once(path: Path) -> list[str]:
    """Functions that run when the library is loaded and come from the sources compiled for several processors."""
    listed = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in listed.splitlines() if "_GLOBAL__sub_I" in line and "kernels" in line]


@with_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_nothing_of_a_variant_runs_when_the_library_is_loaded(project):
    """An initializer of a variant would run on every machine, those without its instructions included."""
    real = ROOT / "src" / "pippin" / "_native.so"
    if real.exists():
        assert loaded_at_once(real) == []
    source = project / "native" / "kernels.cpp"
    source.write_text("#include <cstdlib>\n" + source.read_text() + "static const volatile int at = std::rand();\n")
    in_place(project)
    assert loaded_at_once(library(project))  # such an initializer would be seen
