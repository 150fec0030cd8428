"""The canary audit catches a process that leaks, in every encoding and on every way out; and finds nothing in one that
does not."""

import base64
import gzip
import os
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument, TimedOut
from pippin.evaluate.canary import scan
from pippin.evaluate.canary.audit import CanaryAudit

LEAKS = Path(__file__).with_name("leaks.py")


@pytest.fixture
def audit():
    return CanaryAudit(3, paths=[])


def run(audit, work, arguments=None, **options):
    return audit.run(f"{LEAKS}:{work}", arguments, timeout=60, **options)


def test_work_that_keeps_to_memory_leaves_nothing_on_disk(audit):
    found = run(audit, "nothing")
    assert found.hits == ()
    assert found.exit_code == 0
    assert (found.sent, found.children) == ((), ())
    if os.geteuid() == 0:
        assert found.memory["utf-8"] >= 6  # it holds them, and the search sees them there


@pytest.mark.parametrize(
    ("encoding", "shift", "found_as"),
    [
        ("utf-8", 0, "utf-8"),
        ("utf-16", 0, "utf-16"),
        ("utf-32", 0, "utf-32"),
        ("base64", 0, "base64"),
        ("base64", 1, "base64"),
        ("base64", 2, "base64"),
        ("hex", 0, "hex"),
        ("json escapes", 0, "json escapes"),
        ("percent", 0, "percent"),
        ("gzip", 0, "gzip, utf-8"),
        ("zlib", 0, "zlib, utf-8"),
        ("zip", 0, "zip, utf-8"),
        ("twice", 0, "gzip, gzip, base64"),
    ],
)
def test_a_leak_is_caught_in_each_encoding(audit, encoding, shift, found_as):
    found = run(audit, "encoded", {"encoding": encoding, "shift": shift})
    assert {hit.where for hit in found.hits} == {"work/leak.bin"}
    assert found_as in [hit.encoding for hit in found.hits]
    assert [Path(path).name for path in found.written] == ["leak.bin"]


def test_a_file_outside_the_folders_is_found_because_it_was_opened(audit, tmp_path):
    path = tmp_path / "far" / "leak.bin"
    path.parent.mkdir()
    found = run(audit, "encoded", {"encoding": "utf-8", "shift": 0, "path": str(path)})
    assert [hit.where for hit in found.hits] == [str(path)]


def test_a_file_that_nobody_saw_being_opened_is_found_in_the_folders(tmp_path):
    audit = CanaryAudit(1, paths=[tmp_path])
    (tmp_path / "old").write_text(audit.prompts[0])
    os.utime(tmp_path / "old", (0, 0))

    def behind_its_back(event):
        (tmp_path / "new").write_text(audit.prompts[0])

    found = run(audit, "asks", on_event=behind_its_back)
    assert {Path(hit.where).name for hit in found.hits} == {"new", "old"}  # the old one's status changed just now


@pytest.mark.parametrize("work", ["log", "crash"])
def test_what_is_printed_counts(audit, work):
    found = run(audit, work)
    assert [(hit.where, hit.encoding) for hit in found.hits] == [("stderr.log", "utf-8")]
    assert found.exit_code == (1 if work == "crash" else 0)
    assert (found.memory is None) == (work == "crash")


def test_a_core_counts_and_hardening_leaves_none(audit):
    pattern = Path("/proc/sys/kernel/core_pattern")
    hardened = run(audit, "core", {"harden": True})
    assert hardened.hits == ()
    assert hardened.exit_code < 0
    if pattern.exists() and not pattern.read_text().startswith("|"):
        bare = run(audit, "core", {"harden": False})
        assert [hit.where.startswith("work/core") for hit in bare.hits] == [True]


def test_a_process_that_is_killed_in_its_work_is_searched_as_it_stood(audit):
    found = run(audit, "step_by_step", kill_at=2)
    assert found.exit_code == -9
    assert [hit.where for hit in found.hits] == ["work/progress.txt"]
    assert run(audit, "step_by_step", kill_at=1).hits == ()


def test_a_file_without_a_name_is_found_while_it_is_open(audit):
    found = run(audit, "nameless", end="kill")
    assert [hit.encoding for hit in found.hits] == ["utf-8"]
    assert "/fd/" in found.hits[0].where


def test_a_file_name_is_a_trace_too(audit):
    found = run(audit, "named")
    assert [hit.encoding for hit in found.hits] == ["file name"]


def test_sending_and_starting_processes_is_told(audit):
    found = run(audit, "elsewhere")
    assert found.children == ("subprocess.Popen",)
    assert any("socket.connect ('127.0.0.1', 9)" in each for each in found.sent)
    assert any("getaddrinfo localhost" in each for each in found.sent)


def test_the_audit_drives_the_work(audit):
    seen = []
    run(audit, "asks", on_event=seen.append)
    assert seen == [{"port": 4711}]


def test_bounds():
    with pytest.raises(InvalidArgument):
        CanaryAudit(0)
    with pytest.raises(TimedOut):
        CanaryAudit(50, paths=[]).run(f"{LEAKS}:step_by_step", timeout=1)


def test_a_process_that_does_not_end_is_told_like_work_that_does_not(audit):
    with pytest.raises(TimedOut, match="does not end"):
        audit.run(f"{LEAKS}:lingers", timeout=6)


def test_canaries_are_all_different_and_long():
    audit = CanaryAudit(50)
    texts = {*audit.answers, *(prompt.split()[-1].rstrip("?") for prompt in audit.prompts)}
    assert len(texts) == 100
    assert {len(text) - len(audit.anchor) for text in texts} == {32}


@settings(max_examples=200, deadline=None)
@given(before=st.binary(max_size=40), after=st.binary(max_size=40), copies=st.integers(0, 3))
def test_base64_is_found_wherever_it_begins(before, after, copies):
    anchor = "c0123456789abcdef"
    data = b"|".join([base64.b64encode(before + anchor.encode() + after)] * copies)
    assert scan.count(data, anchor)["base64"] == copies


@pytest.mark.parametrize("size", [scan._BLOCK - 5, scan._BLOCK, scan._BLOCK + 5])
def test_memory_is_read_in_blocks_without_losing_what_lies_across(tmp_path, size):
    anchor = "c0123456789abcdef"
    (tmp_path / "memory").write_bytes(bytes(size) + anchor.encode() + bytes(100))
    with open(tmp_path / "memory", "rb", buffering=0) as file:
        found = scan._search_region(file, 0, size + 117, anchor)
    assert found == {"utf-8": 1}


def test_broken_members_are_passed_over():
    whole = gzip.compress(b"c0123456789abcdef" + random.Random(0).randbytes(9000))
    assert scan.search(whole[: len(whole) // 2], "c0123456789abcdef")["gzip, utf-8"] > 0  # as far as it goes
    assert not scan.search(b"PK\x03\x04 nothing" + b"\x1f\x8b\x08 nothing" + zlib.compress(b"x")[:3], "c01")
