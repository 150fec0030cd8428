"""Oracles: files written, and weights decoded, by the `gguf` package; damaged files made by hypothesis."""

import struct
import tracemalloc
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import given, settings, strategies as st

from pippin.core.errors import CorruptedFile, ModelNotFound, PippinError, UnsupportedModel
from pippin.core.formats import gguf
from pippin.core.formats.gguf import open_gguf

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


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(kind: int, items: list[bytes]) -> bytes:
    """The value of an array, without the number that says that it is one."""
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def write_header(path: Path, pairs: dict[bytes, tuple[int, bytes]], tensors: bytes = b"", count: int = 0) -> Path:
    """A file of nothing but a header, byte for byte: the type and the bytes of each value."""
    content = b"".join(text(key) + struct.pack("<I", kind) + value for key, (kind, value) in pairs.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, len(pairs)) + content + tensors)
    return path


UINT8, INT8, UINT32, STRING, ARRAY = 0, 1, 4, 8, 9


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


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (UINT8, b"\x07", 7),
        (STRING, text(b"ab"), "ab"),
        (ARRAY, array(INT8, [b"\x01", b"\xff"]), [1, -1]),
        (ARRAY, array(STRING, [text(b"a"), text(b"")]), ["a", ""]),
        (ARRAY, array(STRING, [text(b""), text(b"a")]), ["", "a"]),
        (ARRAY, array(ARRAY, [array(UINT8, [b"\x05"]), array(STRING, [])]), [[5], []]),
    ],
)
def test_a_value_may_end_with_the_file_and_not_a_byte_behind_it(tmp_path, kind, value, found):
    path = write_header(tmp_path / "exact.gguf", {b"": (kind, value)})
    assert open_gguf(path).metadata == {"": found}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptedFile, match=r"past the end|cannot fit"):
        open_gguf(path)


def test_the_shortest_file_holds_nothing(tmp_path):
    file = open_gguf(path := write_header(tmp_path / "none.gguf", {}))
    assert (path.stat().st_size, file.path, file.metadata, file.tensors) == (24, path, {}, {})
    assert repr(file) == "GGUFFile('none.gguf', 0 tensors)"
    with pytest.raises(CorruptedFile, match=r"lacks 'general.architecture'"):
        _ = file.architecture


@pytest.mark.parametrize(("count", "fits"), [(3, True), (4, False)])
def test_a_pair_takes_thirteen_bytes_at_least(tmp_path, count, fits):
    path = write_header(tmp_path / "pairs.gguf", {bytes(at): (UINT8, b"\x07") for at in range(3)})
    content = bytearray(path.read_bytes()[: 24 + 3 * 13 + 3])  # the keys are of 0, 1 and 2 bytes
    content[16] = count
    path.write_bytes(content)
    with pytest.raises(CorruptedFile, match="cannot fit") if not fits else nullcontext():
        open_gguf(path)


@pytest.mark.parametrize(("depth", "allowed"), [(1, True), (4, True), (5, False)])
def test_arrays_lie_in_each_other_four_deep(tmp_path, depth, allowed):
    value, found = array(UINT8, [b"\x07"]), [7]
    for _ in range(depth - 1):
        value, found = array(ARRAY, [value]), [found]
    path = write_header(tmp_path / "deep.gguf", {b"deep": (ARRAY, value)})
    if allowed:
        assert open_gguf(path).metadata == {"deep": found}
    else:
        with pytest.raises(CorruptedFile, match="'deep' has a value of unknown type 9"):
            open_gguf(path)


@pytest.mark.parametrize(("most", "message"), [(5, None), (4, "'c' brings the arrays to 5 elements")])
def test_elements_of_all_arrays_are_counted_together(tmp_path, monkeypatch, most, message):
    monkeypatch.setattr(gguf, "_MAX_ELEMENTS", most)
    pairs = {
        b"a": (ARRAY, array(UINT8, [b"\x07"] * 2)),
        b"b": (ARRAY, array(STRING, [text(b"x")])),
        b"c": (ARRAY, array(UINT8, [b"\x07"] * 2)),
    }
    path = write_header(tmp_path / "many.gguf", pairs)
    with pytest.raises(CorruptedFile, match=message) if message else nullcontext():
        assert open_gguf(path).metadata == {"a": [7, 7], "b": ["x"], "c": [7, 7]}


def test_a_damaged_header_says_at_which_byte_and_where_the_bound_is(tmp_path, monkeypatch):
    path = write_header(tmp_path / "long.gguf", {b"key": (STRING, text(b"a" * (1 << 21)))})
    assert len(open_gguf(path).metadata["key"]) == 1 << 21
    monkeypatch.setattr(gguf, "_MAX_HEADER", 2 << 20)
    what = f"{path}: damaged header at byte 47: the value of 'key' of {1 << 21} bytes runs past the end"
    with pytest.raises(CorruptedFile) as error:
        open_gguf(path)
    assert str(error.value) == f"{what} (headers are limited to 2 MiB); download the file again"
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptedFile) as error:
        open_gguf(path)
    assert str(error.value) == f"{what}; download the file again"


def info(shape: tuple[int, ...], kind: int = 24, offset: int = 0) -> bytes:
    """A tensor named "t", of ggml's type I8 by default."""
    return text(b"t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


@pytest.mark.parametrize("alignment", [None, 8, 16, 256])
def test_the_data_begin_at_the_next_multiple_of_the_alignment(tmp_path, alignment):
    pairs = {} if alignment is None else {b"general.alignment": (UINT32, struct.pack("<I", alignment))}
    path = write_header(tmp_path / "aligned.gguf", pairs, info((2, 3), offset=alignment or 32), 1)
    step = alignment or 32
    start = next(at for at in range(0, 10_000, step) if at >= path.stat().st_size)
    content = path.read_bytes().ljust(start, b"\x00") + bytes(step) + bytes(range(6))
    path.write_bytes(content)
    file = open_gguf(path)
    assert file.tensors["t"].offset == start + step
    assert file.raw("t").tolist() == [[0, 1, 2], [3, 4, 5]]
    path.write_bytes(content[:-1])
    ends = start + step + 6
    with pytest.raises(CorruptedFile, match=f"'t' ends at byte {ends}, the file at {ends - 1}; download it again"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(UINT32, struct.pack("<I", n)) for n in (0, 4, 7, 9, 12, 48)]
    + [(INT8, b"\xf8"), (7, b"\x01"), (6, struct.pack("<f", 32.0)), (STRING, text(b"32"))],
)
def test_an_alignment_is_a_power_of_two_from_eight(tmp_path, kind, value):
    path = write_header(tmp_path / "odd.gguf", {b"general.alignment": (kind, value)})
    with pytest.raises(CorruptedFile, match="expected a power of two from 8"):
        open_gguf(path)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3), (3, 1, 2, 1)])
def test_one_to_four_dimensions_have_rows_of_the_last(tmp_path, shape):
    path = write_header(tmp_path / "shape.gguf", {}, info(shape), 1)
    path.write_bytes(path.read_bytes().ljust(-(-path.stat().st_size // 32) * 32, b"\x00") + bytes(range(6)))
    file = open_gguf(path)
    assert file.tensors["t"].shape == shape
    assert file.raw("t").shape == shape  # one byte an element
    assert file.raw("t").flatten().tolist() == list(range(6))


@pytest.mark.parametrize("shape", [(), (1,) * 5])
def test_no_and_five_dimensions_are_refused(tmp_path, shape):
    path = write_header(tmp_path / "shape.gguf", {}, info(shape) + bytes(64), 1)
    with pytest.raises(CorruptedFile, match=f"'t' has {len(shape)} dimensions"):
        open_gguf(path)


HUGE = b"\xff" * 8


@pytest.mark.parametrize(
    ("after", "new", "error", "message"),
    [
        (b"GGUF", b"\xfe\xff\xff\xff", UnsupportedModel, "GGUF version 4294967294"),
        (b"GGUF" + struct.pack("<I", 3), HUGE, CorruptedFile, f"{2**64 - 1} tensors and 1 metadata pairs cannot fit"),
        (b"GGUF" + struct.pack("<IQ", 3, 1), HUGE, CorruptedFile, f"1 tensors and {2**64 - 1} metadata pairs cannot"),
        (b"key", HUGE[:4], CorruptedFile, "'key' has a value of unknown type 4294967295"),
        (b"key" + struct.pack("<I", ARRAY), HUGE[:4], CorruptedFile, "'key' has a value of unknown type 4294967295"),
        (b"key" + struct.pack("<II", ARRAY, UINT8), HUGE, CorruptedFile, f"the arrays to {2**64 - 1} elements"),
        (b"t", HUGE[:4], CorruptedFile, "'t' has 4294967295 dimensions"),
        (b"t" + struct.pack("<I", 1), HUGE, CorruptedFile, "truncated: tensor 't' ends at byte 18446744073709551"),
        (b"t" + struct.pack("<IQ", 1, 6), HUGE[:4], UnsupportedModel, "'t' is of ggml type 4294967295"),
        (
            b"t" + struct.pack("<IQI", 1, 6, 24),
            b"\xe0" + HUGE[1:],
            CorruptedFile,
            "truncated: tensor 't' ends at byte 1",
        ),
    ],
)
def test_no_number_of_the_header_is_negative(tmp_path, after, new, error, message):
    path = write_header(tmp_path / "big.gguf", {b"key": (ARRAY, array(UINT8, [b"\x07"]))}, info((6,)) + bytes(64), 1)
    open_gguf(path)
    with pytest.raises(error, match=message):
        open_gguf(changed(path, tmp_path, place(path, after, 0), new))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (HUGE + bytes(20), f"byte 32: a tensor name of {2**64 - 1} bytes runs past the end"),
        (text(b"t" * 20) + b"\x01", "byte 52: a number of 4 bytes runs past the end"),
    ],
)
def test_what_runs_past_the_end_is_named(tmp_path, tensor, message):
    with pytest.raises(CorruptedFile, match=message):
        open_gguf(write_header(tmp_path / "cut.gguf", {}, tensor, 1))


def test_a_name_that_is_not_utf8_is_shown(tmp_path):
    path = write_header(tmp_path / "name.gguf", {b"\xff": (UINT8, b"\x07")})
    with pytest.raises(CorruptedFile, match=r"byte 33: a metadata key is not UTF-8: b'\\xff'"):
        open_gguf(path)
    path = write_header(tmp_path / "name.gguf", {b"key": (ARRAY, array(STRING, [text(b"ok"), text(b"\xfe")]))})
    with pytest.raises(CorruptedFile, match=r"a string of 'key' is not UTF-8: b'\\xfe'"):
        open_gguf(path)


@pytest.mark.parametrize("parts", [0, 1])
def test_a_model_in_one_part_is_whole(tmp_path, parts):
    path = write_header(tmp_path / "one.gguf", {b"split.count": (UINT8, bytes([parts]))})
    assert open_gguf(path).metadata == {"split.count": parts}


def test_release_forgets_the_whole_file_which_can_be_read_again(small, monkeypatch):
    file = open_gguf(small)
    before = file.dequantize("f32")
    file.release()
    assert torch.equal(file.dequantize("f32"), before)
    forgotten = []
    monkeypatch.setattr(gguf.memory, "forget", lambda *where: forgotten.append(where))
    file.release()
    start = file.raw("f32").data_ptr() - file.tensors["f32"].offset
    assert forgotten == [(start, small.stat().st_size)]


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


def split(folder: Path, *, architecture: str = "llama", tensors: int = 5, name: str = "big") -> list[Path]:
    """A model in several parts of two tensors, as the format's own library writes them."""
    folder.mkdir(exist_ok=True)
    writer = GGUFWriter(folder / f"{name}.gguf", architecture, split_max_tensors=2)
    writer.add_uint32("a.number", 7)
    for index in range(tensors):
        writer.add_tensor(f"t{index}", np.full((3, 32), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_a_model_in_parts_is_opened_by_any_of_them(tmp_path, opened):
    parts = split(tmp_path)
    assert len(parts) == 3
    file = open_gguf(parts[opened])
    assert (file.path, file.architecture, file.metadata["a.number"]) == (parts[0], "llama", 7)
    assert {name: file.dequantize(name)[1, 2].item() for name in file.tensors} == {f"t{i}": i for i in range(5)}
    file.release()
    assert file.raw("t4").shape == (3, 128)


def test_missing_parts_are_named(tmp_path):
    parts = split(tmp_path)
    parts[0].unlink()
    parts[2].unlink()
    with pytest.raises(
        ModelNotFound, match=r"of 3 parts .* missing: big-00001-of-00003.gguf, big-00003-of-00003.gguf$"
    ):
        open_gguf(parts[1])
    for part in (many := split(tmp_path / "many", tensors=20))[:-1]:
        part.unlink()
    with pytest.raises(ModelNotFound, match=r"of 10 parts .* and 4 more"):
        open_gguf(many[-1])


def test_parts_under_other_names_are_refused(tmp_path):
    other = split(tmp_path)[0].rename(tmp_path / "big.gguf")
    with pytest.raises(UnsupportedModel, match="one of 3 parts of a model, but its name is not NAME-00001-of-N"):
        open_gguf(other)


@pytest.mark.parametrize(
    ("part", "made", "message"),
    [
        (1, {"tensors": 6}, r"big-00002-of-00003.gguf: not of the model .* are \[1, 3, 6\], expected \[1, 3, 5\]"),
        (2, {"tensors": 7}, r"big-00003-of-00003.gguf: not of the model .* are \[2, 4, 7\]"),
    ],
)
def test_parts_of_different_models_are_refused(tmp_path, part, made, message):
    parts, other = split(tmp_path / "one"), split(tmp_path / "other", **made)
    other[part].replace(parts[part])
    with pytest.raises(CorruptedFile, match=message):
        open_gguf(parts[0])


def test_parts_that_are_swapped_or_repeat_a_tensor_are_refused(tmp_path):
    parts = split(tmp_path)
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(CorruptedFile, match=r"are \[0, 3, 5\], expected \[1, 3, 5\]"):
        open_gguf(parts[0])
    parts = split(tmp_path)
    parts[1].write_bytes(parts[1].read_bytes().replace(b"t3", b"t1"))
    with pytest.raises(CorruptedFile, match="tensor 't1' lies in an earlier part too"):
        open_gguf(parts[0])


def test_a_part_with_too_few_tensors_is_refused(tmp_path):
    parts, fewer = split(tmp_path / "one", tensors=6), split(tmp_path / "fewer", tensors=5)
    content = fewer[2].read_bytes()
    at = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    parts[2].write_bytes(content[:at] + struct.pack("<i", 6) + content[at + 4 :])
    with pytest.raises(CorruptedFile, match="the parts hold 5 tensors, but the model has 6"):
        open_gguf(parts[0])


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
