"""Files whole or absent, checked against real failures: an exception, a full device, a killed process."""

import errno
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pippin.core import files
from pippin.core.errors import DiskFull, InvalidInput

FULL_DEVICE = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL_DEVICE.exists(), reason="the system has no /dev/full")


def test_a_block_that_ends_replaces_the_older_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with files.atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_raises_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), files.atomic_write(path) as file:
        print(file.write(b"new") / 0)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_utf8(tmp_path):
    with files.atomic_write(tmp_path / "a", mode="w") as file:
        file.write("é")
    assert (tmp_path / "a").read_bytes() == "é".encode()


def test_a_disk_that_fills_up_at_the_sync_is_disk_full(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=r"filled up while writing .*/a"), files.atomic_write(tmp_path / "a") as file:
        file.write(b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_while_writing_leaves_the_older_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    script = (
        "import os, signal, sys; from pathlib import Path; from pippin.core import files\n"
        "with files.atomic_write(Path(sys.argv[1])) as file:\n"
        "    file.write(b'new' * 100_000); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, path], check=False)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"


@needs_full_device
def test_copying_to_a_full_device_is_disk_full():
    with pytest.raises(DiskFull, match="filled up while writing /dev/full"):
        files.copy_hashed(io.BytesIO(b"x" * 100_000), FULL_DEVICE)


def test_other_os_errors_pass(tmp_path):
    with pytest.raises(PermissionError), files.disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_too_little_space_names_both_numbers(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    files.require_free_space(tmp_path, 5_000_000)
    with pytest.raises(DiskFull, match=re.escape("5.0 MB free, and 98.4 MB are needed; free 93.4 MB")):
        files.require_free_space(tmp_path / "not" / "yet", 98_362_432)


def test_free_space_is_that_of_the_disk(tmp_path):
    with pytest.raises(DiskFull):
        files.require_free_space(tmp_path, shutil.disk_usage(tmp_path).total + 1)


@given(st.binary(max_size=5000), st.integers(1, 700))
def test_hashes_are_hashlibs_whatever_the_blocks(tmp_path_factory, content, block):
    folder = tmp_path_factory.mktemp("hash")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK", block)
        found = files.copy_hashed(io.BytesIO(content), folder / "a", advance=seen.append)
        again = files.sha256_of(folder / "a", advance=seen.append)
    assert found == again == hashlib.sha256(content).hexdigest()
    assert (folder / "a").read_bytes() == content
    assert sum(seen) == 2 * len(content)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (92_871_040, "92.9 MB"), (5 * 10**15, "5000.0 TB")],
)
def test_sizes_for_people(nbytes, text):
    assert files.format_bytes(nbytes) == text


def test_a_place_that_cannot_be_a_folder_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInput, match="cannot be created"):
            files.make_folder(place)
    assert (tmp_path / "file").read_text() == "mine"
    assert files.make_folder(tmp_path / "a" / "b").is_dir()
    assert files.make_folder(tmp_path / "a").is_dir()
