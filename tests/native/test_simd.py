"""The vector types of every instruction set against plain C++, and the kernels of other processors by emulation.

Notable here:
- a program is compiled for each instruction set that this machine has, and run; for AArch64 too where a cross compiler
  and an emulator are installed (on Debian: g++-aarch64-linux-gnu, qemu-user-static)
"""

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pippin.core import native

from .matrices import FORMATS, block_of, exact_activations, random_matrix, rounding_bound

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "native"
COMPILER = shutil.which("c++") or shutil.which("g++")
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
COMMON = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
FLAGS = {
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "avx512vnni": AVX512,
    "avx2": AVX2,
    "neon": ["-march=armv8.2-a+dotprod+fp16"],
    "generic": [],
}
HERE_NOW = [name for name in FLAGS if name in native.instruction_sets()] or ["generic"]


needs_cross = pytest.mark.skipif(
    CROSS is None or EMULATOR is None, reason="no cross compiler and emulator for AArch64 are installed"
)


def compile_and_run(command: list[str], folder: Path, run_with: list[str]) -> str:
    target = folder / "check"
    subprocess.run([*command, str(HERE / "simd_check.cpp"), "-o", str(target)], check=True)
    done = subprocess.run([*run_with, str(target)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", HERE_NOW)
def test_vectors_compute_what_plain_loops_do(name, tmp_path):
    assert compile_and_run([COMPILER, *COMMON, *FLAGS[name], f"-DPIPPIN_ISA_{name.upper()}"], tmp_path, []) == ""


@needs_cross
@pytest.mark.parametrize("name", ["neon", "generic"])
def test_vectors_of_aarch64(name, tmp_path):
    command = [CROSS, *COMMON, *FLAGS[name], f"-DPIPPIN_ISA_{name.upper()}", "-static"]
    assert compile_and_run(command, tmp_path, [EMULATOR]) == ""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The library with a program around it, for AArch64."""
    folder, objects = tmp_path_factory.mktemp("aarch64"), []
    jobs = [(path, path.stem, ["-DPIPPIN_HAVE_NEON"]) for path in SOURCES.glob("*.cpp") if path.stem != "kernels"]
    jobs += [
        (SOURCES / "kernels.cpp", name, [*FLAGS[name], f"-DPIPPIN_ISA_{name.upper()}"]) for name in ("neon", "generic")
    ]
    for source, name, flags in [*jobs, (HERE / "kernels_run.cpp", "run", [])]:
        objects.append(str(folder / f"{name}.o"))
        subprocess.run([CROSS, *COMMON, "-O1", *flags, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run([CROSS, "-static", "-pthread", *objects, "-o", str(folder / "run")], check=True)
    return folder / "run"


@needs_cross
@pytest.mark.skipif(native.library() is None, reason=f"native kernels: {native.unavailable_reason()}")
@pytest.mark.parametrize("name", ["neon", "generic"])
def test_kernels_of_aarch64(name, emulated):
    rng = np.random.default_rng(17)
    cases = [random_matrix(rng, form, 21, 2 * block_of(form) if block_of(form) > 1 else 33) for form in FORMATS]
    inputs = [exact_activations(rng, case.name, 5, case.matrix.columns) for case in cases]
    sent = b""
    for case, x in zip(cases, inputs, strict=True):
        m, parts = case.matrix, [part.tobytes() for part in (*case.source, np.zeros(0))][:2]
        sent += struct.pack("<7qd", m.format, m.group, m.rows, m.columns, len(x), *map(len, parts), m.zero)
        sent += b"".join(parts) + x.tobytes()
    command = [EMULATOR, "-cpu", "max", str(emulated), name]
    done = subprocess.run(command, input=sent, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    answers = np.frombuffer(done.stdout, np.float32)
    for case, x in zip(cases, inputs, strict=True):
        values, y, answers = np.split(answers, [case.values.size, case.values.size + 5 * 21])
        assert np.array_equal(values.reshape(case.values.shape), case.values)
        exact = x.astype(np.float64) @ case.values.astype(np.float64).T
        assert (np.abs(y.reshape(5, 21) - exact) <= rounding_bound(case, x)).all()
    assert answers.size == 0
