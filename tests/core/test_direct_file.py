"""Direct reads: the bytes, their count beside the system's, the end of a file, and file systems that have none."""

import errno
import mmap
import os
import random
from pathlib import Path

import pytest

from pippin.core.direct_file import BLOCK, DirectFile, room_for
from pippin.core.errors import CorruptedFile, ModelNotFound

CONTENT = random.Random(0).randbytes(5 * BLOCK + 123)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "weights").write_bytes(CONTENT)
    return tmp_path / "weights"


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 1), (0, BLOCK), (1, BLOCK), (BLOCK - 1, 2), (3 * BLOCK, 2 * BLOCK + 123), (7, len(CONTENT) - 7)],
)
def test_the_bytes_are_those_of_the_file(path, offset, nbytes):
    with DirectFile(path) as file:
        assert bytes(file.read(offset, nbytes, mmap.mmap(-1, room_for(nbytes)))) == CONTENT[offset : offset + nbytes]
        blocks = -(-(offset + nbytes) // BLOCK) - offset // BLOCK
        assert file.bytes_read == blocks * BLOCK


def counted():
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "read_bytes" in line)


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not count")
def test_the_system_counts_the_same(path):
    with DirectFile(path) as file, path.open("rb") as other:
        os.fsync(other.fileno())
        before = counted()
        for offset in (0, 100, 2 * BLOCK):
            file.read(offset, 2 * BLOCK, mmap.mmap(-1, room_for(2 * BLOCK)))
        if not file.direct or counted() == before:
            pytest.skip("this file system has no direct reads, or is none of a disk")
        assert counted() - before == file.bytes_read == 7 * BLOCK


def test_a_file_that_is_too_short_is_told(path):
    with DirectFile(path) as file:
        for offset in (len(CONTENT) - 5, 6 * BLOCK):
            with pytest.raises(CorruptedFile, match="download it again"):
                file.read(offset, 6, mmap.mmap(-1, room_for(6)))


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_without_direct_reads_the_bytes_are_the_same(path, monkeypatch, where):
    real = getattr(os, where)

    def refuse(*arguments):
        direct = arguments[1] & os.O_DIRECT if where == "open" else file is not None and file.direct
        if direct:
            raise OSError(errno.EINVAL, "no direct reads")
        return real(*arguments)

    file = None
    monkeypatch.setattr(os, where, refuse)
    file = DirectFile(path)
    assert bytes(file.read(10, BLOCK, mmap.mmap(-1, room_for(BLOCK)))) == CONTENT[10 : 10 + BLOCK]
    assert not file.direct
    file.close()


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ModelNotFound, match="no file"):
        DirectFile(tmp_path / "missing")
