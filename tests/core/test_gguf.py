"""Oracles: files written, and weights decoded, by the `gguf` package; damaged files made by hypothesis."""

import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import given, settings, strategies as st

from pippin.core.errors import CorruptedFile, ModelNotFound, PippinError, UnsupportedModel
from pippin.core.gguf import open_gguf

VALUES = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)


def write_small(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int64("a.int64", -(2**40))
    writer.add_float32("a.float32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_array("a.strings", ["", "é", "a" * 20])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor("f32", VALUES)
    writer.add_tensor("q8", quantize(VALUES, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", VALUES[0])
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_small(path)
    return path


def changed(small: Path, folder: Path, at: int, new: bytes) -> Path:
    data = bytearray(small.read_bytes())
    data[at : at + len(new)] = new
    path = folder / "changed.gguf"
    path.write_bytes(data)
    return path


def test_metadata_come_back_as_they_were_written(small):
    file = open_gguf(small)
    assert file.architecture == "llama"
    values = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert values == {
        "a.uint8": 200,
        "a.int64": -(2**40),
        "a.float32": 0.5,
        "a.bool": True,
        "a.strings": ["", "é", "a" * 20],
        "a.numbers": [1, -2, 3],
    }


def test_tensors_have_torch_order_and_the_written_values(small):
    file = open_gguf(small)
    assert {name: (tensor.shape, tensor.type) for name, tensor in file.tensors.items()} == {
        "f32": ((6, 64), "F32"),
        "q8": ((6, 64), "Q8_0"),
        "vector": ((64,), "F32"),
    }
    assert torch.equal(file.dequantize("f32"), torch.from_numpy(VALUES))
    assert torch.equal(file.dequantize("vector", torch.bfloat16), torch.from_numpy(VALUES[0]).bfloat16())
    assert (file.dequantize("q8") - torch.from_numpy(VALUES)).abs().max() < 0.02


def test_raw_is_a_view_of_the_file_and_writing_to_it_leaves_the_file_alone(small):
    before = small.read_bytes()
    file = open_gguf(small)
    raw = file.raw("q8")
    assert raw.shape == (6, 68)
    assert raw.data_ptr() == file.raw("q8").data_ptr()
    assert np.array_equal(raw.numpy(), quantize(VALUES, GGMLQuantizationType.Q8_0))
    raw.zero_()
    assert small.read_bytes() == before


def test_get_checks_the_kind(small):
    file = open_gguf(small)
    assert file.get("a.uint8", int) == 200
    assert file.get("a.uint8", float) == 200.0
    assert file.get("absent", int, 7) == 7
    with pytest.raises(CorruptedFile, match="lacks 'absent'"):
        file.get("absent", int)
    with pytest.raises(CorruptedFile, match=r"'a\.bool' is True, expected int"):
        file.get("a.bool", int)
    with pytest.raises(CorruptedFile, match=r"'a\.strings' is .* expected str"):
        file.get("a.strings", str)


def test_version_2_is_read_like_version_3(small, tmp_path):
    assert open_gguf(changed(small, tmp_path, 4, struct.pack("<I", 2))).metadata == open_gguf(small).metadata


@pytest.mark.parametrize(
    ("at", "new", "error", "message"),
    [
        (0, b"GGML", CorruptedFile, "not a GGUF file: it begins with b'GGML'"),
        (4, struct.pack("<I", 1), UnsupportedModel, "GGUF version 1"),
        (4, struct.pack(">I", 3), UnsupportedModel, "big-endian"),
        (8, struct.pack("<Q", 2**60), CorruptedFile, f"{2**60} tensors and .* cannot fit"),
        (16, struct.pack("<Q", 2**62), CorruptedFile, "metadata pairs cannot fit"),
        (24, struct.pack("<Q", 2**63), CorruptedFile, "byte 32: a metadata key of .* runs past the end"),
    ],
)
def test_a_damaged_header_says_what_and_where(small, tmp_path, at, new, error, message):
    with pytest.raises(error, match=message):
        open_gguf(changed(small, tmp_path, at, new))


def place(small: Path, text: bytes, offset: int) -> int:
    return small.read_bytes().index(text) + len(text) + offset


@pytest.mark.parametrize(
    ("after", "offset", "new", "error", "message"),
    [
        (b"a.strings", 8, struct.pack("<Q", 2**61), CorruptedFile, "the arrays to 2305843009213693952 elements"),
        (
            b"a.strings",
            8,
            struct.pack("<Q", 8000),
            CorruptedFile,
            "8000 strings of 'a.strings' of 64000 bytes runs past",
        ),
        (b"a.numbers", 8, struct.pack("<Q", 8000), CorruptedFile, "8000 numbers of 'a.numbers'"),
        (b"a.strings", 16, struct.pack("<Q", 2**63), CorruptedFile, "strings of 'a.strings' run past the end"),
        (b"a.bool", 0, struct.pack("<I", 77), CorruptedFile, "'a.bool' has a value of unknown type 77"),
        (b"vector", 0, struct.pack("<I", 9), CorruptedFile, "'vector' has 9 dimensions"),
        (b"vector", 4, struct.pack("<Q", 0), CorruptedFile, r"'vector' of shape \(0,\) is empty"),
        (b"vector", 4, struct.pack("<Q", 2**62), CorruptedFile, "truncated: tensor 'vector' ends at byte"),
        (b"vector", 12, struct.pack("<I", 99), UnsupportedModel, "'vector' is of ggml type 99"),
        (b"vector", 16, struct.pack("<Q", 1), CorruptedFile, "offset 1 is not a multiple of 32"),
        (b"q8", 4, struct.pack("<Q", 63), CorruptedFile, "rows of 63 weights are not whole Q8_0 blocks"),
    ],
)
def test_a_damaged_field_is_named(small, tmp_path, after, offset, new, error, message):
    with pytest.raises(error, match=message):
        open_gguf(changed(small, tmp_path, place(small, after, offset), new))


def test_names_that_appear_twice_are_refused(small, tmp_path):
    path = tmp_path / "twice.gguf"
    path.write_bytes(small.read_bytes().replace(b"a.int64", b"a.uint8"))
    with pytest.raises(CorruptedFile, match=r"metadata key 'a\.uint8' appears twice"):
        open_gguf(path)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("aaa", VALUES)
    writer.add_tensor("bbb", VALUES)
    finish(writer)
    path.write_bytes(path.read_bytes().replace(b"bbb", b"aaa"))
    with pytest.raises(CorruptedFile, match="tensor 'aaa' appears twice"):
        open_gguf(path)


def test_a_split_model_is_refused_with_the_way_out(tmp_path):
    writer = GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("f32", VALUES)
    finish(writer)
    with pytest.raises(UnsupportedModel, match=r"one of 3 parts .* 'llama-gguf-split --merge'"):
        open_gguf(tmp_path / "part.gguf")


def test_an_alignment_that_is_none_is_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_custom_alignment(4)
    writer.add_tensor("f32", VALUES)
    finish(writer)
    with pytest.raises(CorruptedFile, match=r"general\.alignment is 4"):
        open_gguf(tmp_path / "odd.gguf")


def test_missing_and_empty_files_and_names(small, tmp_path):
    with pytest.raises(ModelNotFound, match=r"nowhere\.gguf"):
        open_gguf(tmp_path / "nowhere.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CorruptedFile, match="0 bytes is too short"):
        open_gguf(tmp_path / "empty.gguf")
    with pytest.raises(CorruptedFile, match="no tensor named 'absent' among its 3"):
        open_gguf(small).raw("absent")


def open_whole(path: Path) -> None:
    file = open_gguf(path)
    for name in file.tensors:
        file.raw(name)
        file.dequantize(name)


@given(data=st.data())
@settings(max_examples=600, deadline=2000)
def test_no_damage_does_more_than_a_typed_error(data, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzz.gguf"
    if not (folder / "whole.gguf").exists():
        write_small(folder / "whole.gguf")
    content = bytearray((folder / "whole.gguf").read_bytes())
    header = content.index(VALUES.tobytes()[:16])
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, header))
        patch = data.draw(
            st.binary(min_size=1, max_size=8) | st.integers(0, 2**64 - 1).map(lambda n: struct.pack("<Q", n))
        )
        content[at : at + len(patch)] = patch
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    tracemalloc.start()
    with suppress(PippinError):
        open_whole(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_every_truncation_is_noticed(small, tmp_path):
    content = small.read_bytes()
    last = max(tensor.offset + tensor.nbytes for tensor in open_gguf(small).tensors.values())
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 700, 7), *range(700, last, 97), last - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CorruptedFile):
            open_gguf(path)


def test_the_default_model_agrees_with_the_reference(default_model_path):
    file = open_gguf(default_model_path)
    reference = {tensor.name: tensor for tensor in GGUFReader(default_model_path).tensors}
    assert list(file.tensors) == list(reference)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        theirs = torch.from_numpy(np.array(dequantize(reference[name].data, reference[name].tensor_type)))
        assert torch.equal(file.dequantize(name), theirs)
        assert torch.equal(file.dequantize(name, torch.bfloat16), theirs.bfloat16())
