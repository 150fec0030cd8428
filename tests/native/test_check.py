"""The program that runs under the sanitizers (tools/sanitize.sh), here without them: a C++ user of the C interface."""

import shutil
import subprocess
from pathlib import Path

import pytest

from pippin.core import native

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(native.library() is None or COMPILER is None, reason="no library, or no compiler")
def test_the_program_for_the_sanitizers_passes(tmp_path):
    library = native.library().path
    program = tmp_path / "check"
    source = ROOT / "native" / "sanitize" / "check.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command = [COMPILER, *flags, str(source), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{name}: ok\n" for name in native.instruction_sets())
