"""The library of native kernels: found or not, threads, instruction sets, and its errors as typed ones."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pippin.core import device, native
from pippin.core.errors import InvalidArgument, NotEnoughMemory, PippinError

ROOT = Path(__file__).resolve().parents[2]
with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")


@pytest.fixture(autouse=True)
def as_it_was():
    """Threads and instruction set are those of the whole process."""
    threads, instructions = native.threads(), native.instruction_set()
    yield
    if native.library() is not None:
        native.set_threads(threads)
        native.use_instruction_set(instructions)


def fresh(code: str, **variables: str) -> str:
    env = os.environ | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


# --- the interface ----------------------------------------------------------------------------------------------------

HEADER = (ROOT / "native" / "pippin.h").read_text()
CTYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "pippin_matrix": native.NativeMatrix,
    "pippin_expert": native.Expert,
    "pippin_router": native.NativeRouter,
}
STRUCTS = {
    "matrix": native.NativeMatrix,
    "expert": native.Expert,
    "router": native.NativeRouter,
    "latent": native.NativeLatent,
    "recurrent": native.NativeRecurrent,
    "given": native.NativeEmbeddings,
    "steering": native.NativeSteering,
    "observed": native.Observed,
    "layer": native.Layer,
    "config": native.NativeConfig,
    "change": native.Change,
    "share": native.SequenceShare,
    "batch": native.NativeBatch,
}


def fields_in_header(name: str) -> list[tuple[str, str]]:
    """Type and name of each field of a struct, read from the C header."""
    plain = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    body = re.search(rf"struct pippin_{name} \{{(.*?)\}} pippin_{name};", plain, re.DOTALL)[1]
    found = []
    for line in body.split(";"):
        if line.strip():
            kind, names = re.match(r"\s*(?:const\s+)?(\w+)\s+(.*)", line.strip(), re.DOTALL).groups()
            found += [
                ("pointer" if "*" in each else kind, each.replace("const ", "").strip(" *\n"))
                for each in names.split(",")
            ]
    return found


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_mirror_the_header(name):
    ours = [(field[0], field[1]) for field in STRUCTS[name]._fields_]
    theirs = fields_in_header(name)
    rename = {"from": "begin", "to": "end"} if name == "batch" else {"in": "inputs", "in_bias": "input_biases"}
    plain = [re.match(r"(\w+)(?:\[(\w+)\])?$", field).groups() for _, field in theirs]
    assert [field for field, _ in ours] == [rename.get(field, field) for field, _ in plain]
    for (_, kind), (expected, _), (_, count) in zip(ours, theirs, plain, strict=True):
        if count is not None:
            assert kind._length_ == (native.RECURRENT_INPUTS if count == "PIPPIN_INPUTS" else int(count))
            kind = kind._type_
        pointer = kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer)
        assert pointer if expected == "pointer" else kind is CTYPES[expected]


def test_numbers_mirror_the_header():
    numbers = {name: int(value) for name, value in re.findall(r"PIPPIN_(\w+)\s*(?:=\s*)?(\d+)", HEADER)}
    assert (numbers["ABI"], numbers["BLOCK"]) == (native.ABI, native.BLOCK)
    for name, number in native.GGML_FORMATS.items():
        assert numbers[name] == number
    assert {f"INT{bits}": n for bits, n in native.GROUP_FORMATS.items()}.items() <= numbers.items()
    assert {f"AFFINE{bits}": n for bits, n in native.AFFINE_FORMATS.items()}.items() <= numbers.items()
    short = {"CACHE_F32": "float32", "CACHE_BF16": "bfloat16", "CACHE_INT8": "int8"}
    assert {short[name]: numbers[name] for name in short} == native.CACHE_TYPES
    assert {name: numbers[name.upper()] for name in native.ACTIVATIONS} == native.ACTIVATIONS


def test_every_function_of_the_header_is_known():
    plain = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    functions = dict(re.findall(r"pippin_(\w+)\(([^)]*)\);", plain))
    assert functions.keys() == native._SIGNATURES.keys()
    for name, arguments in functions.items():
        count = 0 if arguments == "void" else arguments.count(",") + 1
        assert len(native._SIGNATURES[name]) - 1 == count, name


# --- is it there? -----------------------------------------------------------------------------------------------------


def test_the_library_is_there_or_the_reason_is():
    assert (native.library() is None) == bool(native.unavailable_reason())
    if native.library() is None:
        assert (native.threads(), native.instruction_set(), native.instruction_sets()) == (0, "", ())


def test_it_can_be_switched_off_and_nothing_needs_it():
    code = (
        "from pippin.core import native; print(native.library(), native.unavailable_reason());"
        "print(native.threads(), native.profile()); import sys; print('torch' in sys.modules)"
    )
    said, counted, torch = fresh(code, PIPPIN_NATIVE="0").splitlines()
    assert said == "None switched off by PIPPIN_NATIVE=0"
    assert counted == "0 KernelProfile(linear=0.0, attention=0.0, other=0.0, waiting=0.0)"
    assert torch == "False"


def test_a_missing_or_broken_library_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.delenv("PIPPIN_NATIVE", raising=False)

    def why(name: str) -> str:
        found, reason = native._load(tmp_path / name)
        assert found is None
        return reason

    assert "no C++ compiler when Pippin was installed" in why("absent.so")
    (tmp_path / "failed.log").write_text("error: ...")
    assert why("failed.so") == (
        f"they could not be compiled when Pippin was installed; {tmp_path / 'failed.log'} says why"
    )
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert "cannot be loaded" in why("broken.so")


@with_kernels
def test_a_library_of_another_version_is_refused(monkeypatch):
    native._load.cache_clear()
    try:
        there = native.ABI
        monkeypatch.setattr(native, "ABI", 99)
        assert native.library() is None
        assert f"of another version ({there}, not 99)" in native.unavailable_reason()
        for use in (lambda: native.set_threads(1), lambda: native.use_instruction_set("generic")):
            with pytest.raises(PippinError, match="another version"):
                use()
        with pytest.raises(PippinError, match="another version"):
            native.read_bandwidth(1 << 20)
    finally:
        monkeypatch.undo()
        native._load.cache_clear()
    assert native.library() is not None


# --- threads, instruction sets, figures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "expected"), [("1", 1), ("999", None), ("", None), ("x", None), ("0", None), ("²", None), ("1,2", 1)]
)
def test_threads_begin_with_what_the_environment_says(variable, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert native.default_threads() == (expected or device.threads())


def test_threads_begin_with_no_more_than_the_library_starts(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "threads", lambda: 384)
    assert native.default_threads() == 256


@with_kernels
def test_threads_are_set_within_the_cores_there_are():
    for count in range(1, device.threads() + 1):
        native.set_threads(count)
        assert native.threads() == count
    native.set_threads(1, pin=True)
    for count in (0, -1, device.threads() + 1):
        with pytest.raises(InvalidArgument, match=f"{count} threads were requested"):
            native.set_threads(count)


@with_kernels
def test_instruction_sets_are_those_of_this_processor():
    sets = native.instruction_sets()
    assert sets[-1] == "generic"
    assert native.instruction_set() == sets[0]
    needs = {"avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni", "avx2": "avx2", "neon": "neon"}
    for name, flag in needs.items():
        assert not (name in sets and flag not in device.instruction_sets())
    for name in sets:
        native.use_instruction_set(name)
        assert native.instruction_set() == name
    with pytest.raises(InvalidArgument, match="instruction set 'mmx' is not available; use one of: "):
        native.use_instruction_set("mmx")


@with_kernels
def test_the_bandwidth_is_one_that_memory_can_have():
    assert 1e9 < native.read_bandwidth(64 << 20, 1, 3) < 2e12
    for arguments in ((0, 1, 1), (1 << 20, 0, 1), (1 << 20, device.threads() + 1, 1), (1 << 20, 1, 0)):
        with pytest.raises(InvalidArgument):
            native.read_bandwidth(*arguments)


@with_kernels
def test_time_spent_only_grows():
    first, second = native.profile(), native.profile()
    assert all(0 <= a <= b for a, b in zip(first, second, strict=True))


# --- errors -----------------------------------------------------------------------------------------------------------


@with_kernels
def test_what_the_library_refuses_is_an_error_with_its_words():
    library = native.library()
    with pytest.raises(InvalidArgument, match=r"native kernels: .*33"):
        library.packed_bytes(native.GGML_FORMATS["Q4_0"], 0, 2, 33)
    with pytest.raises(InvalidArgument, match="native kernels: "):
        library.packed_bytes(12345, 0, 2, 32)
    with pytest.raises(InvalidArgument, match="native kernels: "):
        library.model_new(native.NativeConfig(), (native.Layer * 1)())


@with_kernels
@pytest.mark.parametrize(("status", "kind"), [(-1, InvalidArgument), (-2, NotEnoughMemory), (-3, PippinError)])
def test_a_status_becomes_its_error(status, kind):
    with pytest.raises(kind, match="native kernels: "):
        native.library().check(status)
    assert native.library().check(5) == 5
