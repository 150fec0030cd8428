"""`tools/venv.sh` says in one line what a machine lacks, and never asks pip for CUDA unasked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bin(tmp_path):
    """A folder of commands that stands before the system's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def command(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def setup(venv: Path, bin: Path, *extras: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(["tools/venv.sh", venv, *extras], cwd=ROOT, capture_output=True, text=True, env=env)


def test_an_old_python_is_named_with_the_way_out(tmp_path, bin):
    command(bin / "apt-get", "exit 0")
    old = command(bin / "old-python", 'test "$1" = --version && echo Python 3.9.2 && exit 0; exit 1')
    done = setup(tmp_path / "venv", bin, PYTHON=str(old))
    assert done.returncode == 1
    assert done.stderr == (
        "pippin: Python 3.11 or newer is needed, found: Python 3.9.2. "
        "Install it with: sudo apt-get install -y python3.11\n"
    )
    assert not (tmp_path / "venv").exists()


def test_no_python_at_all_is_said(tmp_path, bin):
    command(bin / "brew", "exit 0")
    done = setup(tmp_path / "venv", bin, PYTHON="no-such-python")
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_venv_module_is_named_with_its_package(tmp_path, bin):
    command(bin / "apt-get", "exit 0")
    lame = command(bin / "lame-python", f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"')
    done = setup(tmp_path / "venv", bin, PYTHON=str(lame))
    version = "{}.{}".format(*sys.version_info)
    assert done.returncode == 1
    assert done.stderr == (
        f"pippin: Python {version} lacks its venv module. "
        f"Install it with: sudo apt-get install -y python{version}-venv\n"
    )


def fake_venv(tmp_path: Path, pip: str) -> Path:
    """An environment whose pip only writes down its arguments."""
    forward = f'test "$1" = -c && exec {sys.executable} "$@"; echo "$@" >> {tmp_path}/pip-arguments; {pip}'
    command(tmp_path / "venv" / "bin" / "python", forward)
    return tmp_path / "venv"


@pytest.mark.parametrize(("variables", "constrained"), [({}, True), ({"CUDA": ""}, True), ({"CUDA": "1"}, False)])
def test_cuda_is_ruled_out_unless_asked_for(tmp_path, bin, variables, constrained):
    done = setup(fake_venv(tmp_path, "exit 0"), bin, "test,docs", **variables)
    asked, peers = (tmp_path / "pip-arguments").read_text().splitlines()
    assert done.returncode == 0
    assert ("--constraint tools/cpu-only.txt" in asked) == constrained
    assert asked.endswith("--editable .[test,docs]")
    assert peers.endswith("--no-deps --requirement tools/peers.txt")


def test_peers_come_with_the_tests_alone_and_may_be_missing(tmp_path, bin):
    done = setup(fake_venv(tmp_path, "exit 0"), bin, "docs")
    assert done.returncode == 0
    assert "peers" not in (tmp_path / "pip-arguments").read_text()
    done = setup(fake_venv(tmp_path, 'case "$*" in *peers*) exit 1 ;; esac'), bin, "docs,test")
    assert done.returncode == 0
    assert "laplace-torch could not be installed" in done.stderr


def test_a_failed_installation_fails_and_says_what_an_nvidia_name_means(tmp_path, bin):
    done = setup(fake_venv(tmp_path, "exit 1"), bin)
    assert done.returncode == 1
    assert "make CUDA=1" in done.stderr


def test_an_environment_that_works_is_kept(tmp_path, bin):
    venv = fake_venv(tmp_path, "exit 0")
    before = (venv / "bin" / "python").read_text()
    assert "making" not in setup(venv, bin, PYTHON="no-such-python").stderr
    assert (venv / "bin" / "python").read_text() == before


def test_a_missing_compiler_is_no_failure_and_named_with_its_package(tmp_path, bin):
    command(bin / "apt-get", "exit 0")
    done = setup(fake_venv(tmp_path, "exit 0"), bin, CXX="no-such-compiler")
    assert done.returncode == 0
    assert "pippin: note: no C++ compiler, so torch will do the work of the native kernels" in done.stderr
    assert "sudo apt-get install -y g++, then run this again" in done.stderr
    command(bin / "some-compiler", "exit 0")
    assert "C++" not in setup(tmp_path / "venv", bin, CXX="some-compiler -v").stderr
