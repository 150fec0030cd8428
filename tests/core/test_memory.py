"""Memory that is given back: what the system says of this process is the oracle."""

import mmap
import subprocess
import sys

import numpy as np
import psutil
import pytest

from pippin.core import memory

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def resident() -> int:
    return psutil.Process().memory_info().rss


@linux
def test_pages_of_a_mapped_file_are_forgotten_and_read_again(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    mapped = np.memmap(tmp_path / "file", mode="r")
    before = resident()
    assert int(mapped.sum()) == int(content.sum())
    assert resident() - before > 60 << 20
    memory.forget(mapped.ctypes.data, mapped.nbytes)
    assert resident() - before < 8 << 20
    assert np.array_equal(mapped, content)


@linux
@pytest.mark.parametrize("offset", [0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE])
def test_only_whole_pages_of_the_span_are_forgotten(offset):
    memory_ = mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = np.frombuffer(memory_, dtype=np.uint8)
    view[:] = 7
    length = 2 * mmap.PAGESIZE + 5
    memory.forget(view.ctypes.data + offset, length)
    pages = range(4 * mmap.PAGESIZE)
    whole = [p for p in pages if offset <= p // mmap.PAGESIZE * mmap.PAGESIZE]
    gone = [p for p in whole if (p // mmap.PAGESIZE + 1) * mmap.PAGESIZE <= offset + length]
    expected = np.full(len(view), 7, np.uint8)
    expected[gone] = 0  # nobody has written these pages to a file, so they come back empty
    assert np.array_equal(view, expected)
    memory.forget(view.ctypes.data, 1)  # less than a page
    assert view[0] == expected[0]


_TRIMMED = """
import psutil, torch
from pippin.core import memory
whole = torch.ones(100, 100) @ torch.ones(100, 100)
before = psutil.Process().memory_info().rss
memory.trim()
print(before - psutil.Process().memory_info().rss, bool((torch.ones(100, 100) @ torch.ones(100, 100) == whole).all()))
"""


@linux
def test_code_that_does_not_run_is_given_back():
    # in a new process: here, others may have given it back already, or use it right now
    printed = subprocess.run([sys.executable, "-c", _TRIMMED], capture_output=True, text=True, check=True).stdout
    given_back, runs_again = printed.split()
    assert int(given_back) > 20 << 20
    assert runs_again == "True"


def test_libraries_with_pages_of_their_own_are_left_alone(tmp_path):
    table = tmp_path / "smaps"
    entry = "{} 00000000 fe:00 77   {}\nSize: 8 kB\nAnonymous:   {} kB\nVmFlags: rd\n"
    table.write_text(
        entry.format("1000-3000 r-xp", "/lib/a.so.1", 0)
        + entry.format("3000-5000 r--p", "/lib/a.so.1", 4)  # relocated
        + entry.format("5000-7000 rw-p", "/lib/a.so.1", 0)
        + entry.format("7000-9000 r-xp", "[vdso]", 0)
        + entry.format("9000-b000 r--p", "/usr/share/data", 0)
        + entry.format("b000-c000 r--p", "/lib/b.so", 0)
    )
    assert list(memory._clean_code(table)) == [(0x1000, 0x2000), (0xB000, 0x1000)]
    assert list(memory._clean_code(tmp_path / "nowhere")) == []


def test_systems_that_know_no_such_hints_do_nothing(monkeypatch):
    monkeypatch.setattr(memory, "_c", object)
    memory.trim()
    memory.forget(0, 1 << 20)
