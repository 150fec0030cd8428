"""Traces: what they hold, and files that are none."""

import numpy as np
import pytest

from pippin.claims.worlds.expert_traces import zipf_trace
from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.engine.experts import ExpertTrace

SIZES = np.full((2, 3), 10)


def test_a_trace_is_what_was_given():
    trace = ExpertTrace.of([[[2, 0, 2], []], [[1], [0, 1, 2]]], SIZES, tokens=[7, 1])
    assert (trace.num_passes, trace.num_layers, trace.num_experts) == (2, 2, 3)
    assert [[trace.needed(n, layer).tolist() for layer in range(2)] for n in range(2)] == [
        [[0, 2], []],
        [[1], [0, 1, 2]],
    ]


def test_a_file_brings_the_same_trace_back(tmp_path):
    trace = zipf_trace(0, passes=3, layers=2, experts=5, active=2)
    trace.save(tmp_path / "trace.npz")
    found = ExpertTrace.load(tmp_path / "trace.npz")
    for name in ("model", "sizes", "tokens", "experts", "offsets", "predicted"):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": np.array([0, 3], dtype=np.int32)}, "expert 3 is none of the 3"),
        ({"offsets": np.array([0, 1])}, "3 offsets, not 2"),
        ({"offsets": np.array([0, 2, 1])}, "must rise from 0 to 2"),
        ({"sizes": np.zeros((2, 3), dtype=np.int64)}, "positive"),
        ({"predicted": np.zeros((2, 1, 2, 3), dtype=np.float16)}, "passes, depth, layers, experts"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    parts = {
        "model": "m",
        "sizes": SIZES,
        "tokens": np.array([1]),
        "experts": np.array([0, 1], dtype=np.int32),
        "offsets": np.array([0, 1, 2]),
    }
    ExpertTrace(**parts)
    with pytest.raises(InvalidArgument, match=message):
        ExpertTrace(**{**parts, **change})


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "trace.npz").write_bytes(content)
    with pytest.raises(CorruptedFile, match="no trace"):
        ExpertTrace.load(tmp_path / "trace.npz")


def test_an_archive_with_objects_is_not_unpickled(tmp_path):
    np.savez(tmp_path / "trace.npz", version=1, model=np.array([{"a": 1}], dtype=object), sizes=SIZES)
    with pytest.raises(CorruptedFile, match="no trace"):
        ExpertTrace.load(tmp_path / "trace.npz")


def test_a_later_version_is_told(tmp_path):
    np.savez(tmp_path / "trace.npz", version=2, model="m", sizes=SIZES)
    with pytest.raises(CorruptedFile, match="later version"):
        ExpertTrace.load(tmp_path / "trace.npz")
