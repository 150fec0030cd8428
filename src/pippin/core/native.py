"""The native kernels: their library, loaded with ctypes, and its functions with types and errors of Python's.

Notable here:
- the library is optional: where it is not, `library` returns None, `unavailable_reason` says why, and torch does the
  work
- plain addresses go in and out: nothing here knows of tensors, and torch is not imported
- the C interface is native/pippin.h; a library that was built from another version of it is refused
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from pippin.core import device
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, NotEnoughMemory, PippinError

ABI: Final = 2
BLOCK: Final = 16
"""Tokens of one block of the cache."""

GGML_FORMATS: Final = {
    **{"F32": 0, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7},
    **{"Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30},
}
"""Numbers of the formats that are kept as a GGUF file stores them."""

GROUP_FORMATS: Final = {2: 102, 3: 103, 4: 104, 8: 108}
"""Numbers of our own formats, by their bits."""

CACHE_TYPES: Final = {"float32": 0, "bfloat16": 1, "int8": 2}
ACTIVATIONS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}

_FOLDER = Path(__file__).resolve().parents[1]
_SWITCH = "PIPPIN_NATIVE"
_MOST_THREADS = 256  # that the library starts


class NativeMatrix(ctypes.Structure):
    """`pippin_matrix`: a packed weight."""

    _fields_ = (
        ("format", c_int32),
        ("group", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("zero", c_float),
        ("reserved", c_int32),
        ("data", c_void_p),
    )


class Expert(ctypes.Structure):
    """`pippin_expert`: one expert of a mixture."""

    _fields_ = (("gate", NativeMatrix), ("up", NativeMatrix), ("down", NativeMatrix))


class Layer(ctypes.Structure):
    """`pippin_layer`: one layer of a decoder."""

    _fields_ = (
        *((name, NativeMatrix) for name in ("q", "k", "v", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("q_bias", "k_bias", "v_bias", "output_bias")),
        *((name, c_void_p) for name in ("attention_norm", "feedforward_norm")),
        *((name, c_void_p) for name in ("post_attention_norm", "post_feedforward_norm", "q_norm", "k_norm")),
        *((name, c_int32) for name in ("source", "window", "rope", "activation")),
        *((name, c_int32) for name in ("experts", "active", "renormalize", "reserved")),
        ("router", c_void_p),
        ("expert", POINTER(Expert)),
    )


class NativeConfig(ctypes.Structure):
    """`pippin_config`: what is common to the layers of a decoder."""

    _fields_ = (
        *((name, c_int64) for name in ("vocab", "width", "heads", "kv_heads", "head_dim", "layers")),
        *((name, c_float) for name in ("eps", "attention_scale", "embedding_scale")),
        ("rope_tables", c_int32),
        ("embedding", NativeMatrix),
        ("head", NativeMatrix),
        ("final_norm", c_void_p),
    )


class Change(ctypes.Structure):
    """`pippin_change`: what an adapter changes of one weight."""

    _fields_ = (
        ("down", c_void_p),
        ("up", c_void_p),
        ("rank", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
    )


class SequenceShare(ctypes.Structure):
    """`pippin_share`: an adapter and its tokens."""

    _fields_ = (("changes", POINTER(Change)), ("begin", c_int32), ("end", c_int32))


class NativeBatch(ctypes.Structure):
    """`pippin_batch`: one pass over the new tokens of several sequences."""

    _fields_ = (
        ("tokens", c_int64),
        ("ids", c_void_p),
        ("sequences", c_int64),
        ("starts", c_void_p),
        ("held", c_void_p),
        ("tables", c_void_p),
        ("table_starts", c_void_p),
        ("outputs", c_int64),
        ("rows", c_void_p),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("begin", c_int32),  # `from` and `to`
        ("end", c_int32),
        ("residual", c_void_p),
        ("shares", c_int64),
        ("share", POINTER(SequenceShare)),
    )


class FlowLayer(ctypes.Structure):
    """`pippin_flow_layer`: one layer of a flow block."""

    _fields_ = (
        *((name, NativeMatrix) for name in ("read", "write", "up", "down")),
        *((name, c_void_p) for name in ("read_bias", "write_bias", "up_bias", "down_bias")),
        *((name, c_void_p) for name in ("norm", "norm_bias", "feed_norm", "feed_norm_bias")),
    )


class Flow(ctypes.Structure):
    """`pippin_flow`: a flow block."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "width", "heads", "inner", "hidden")),
        ("eps", c_float),
        ("reserved", c_int32),
        ("inputs", NativeMatrix),  # `in` and `out`
        ("outputs", NativeMatrix),
        ("in_bias", c_void_p),
        ("out_bias", c_void_p),
        ("layer", POINTER(FlowLayer)),
    )


class FlowBatch(ctypes.Structure):
    """`pippin_flow_batch`: a batch that a flow block reads."""

    _fields_ = (
        *((name, c_int64) for name in ("samples", "branches", "tokens", "capacity")),
        *((name, c_void_p) for name in ("added", "heat", "cache")),
    )


# What each function takes and gives.
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "abi": (c_int,),
    "error": (c_char_p,),
    "instruction_set": (c_char_p,),
    "instruction_sets": (c_char_p,),
    "use_instruction_set": (c_int, c_char_p),
    "set_threads": (c_int, c_int, c_int),
    "threads": (c_int,),
    "read_bandwidth": (c_double, c_int64, c_int, c_int),
    "profile": (None, POINTER(c_double)),
    "packed_bytes": (c_int64, c_int, c_int, c_int64, c_int64),
    "pack_ggml": (c_int, c_int, c_void_p, c_int64, c_int64, c_void_p),
    "pack_dense": (c_int, c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "pack_codes": (c_int, c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "rows": (c_int, POINTER(NativeMatrix), c_void_p, c_int64, c_void_p),
    "matmul": (c_int, POINTER(NativeMatrix), c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64),
    "model_new": (c_void_p, POINTER(NativeConfig), POINTER(Layer)),
    "model_free": (None, c_void_p),
    "model_rope": (c_int, c_void_p, c_int, c_void_p, c_void_p, c_int64),
    "block_bytes": (c_int64, c_void_p, c_int),
    "forward": (c_int, c_void_p, c_void_p, c_int64, c_int, POINTER(NativeBatch)),
    "flow_read": (c_int, POINTER(Flow), POINTER(FlowBatch), c_void_p, c_int64, c_int64, c_void_p),
    "flow_invert": (c_int, POINTER(Flow), POINTER(FlowBatch), *(c_void_p,) * 3, c_int64, c_int64),
}


class Native:
    """The functions of the library; what fails raises.

    Addresses are plain integers; whoever passes one keeps what lies there alive for the time of the call.
    """

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            OSError: it is not there, or cannot be loaded.
            AttributeError: it lacks a function.
        """
        handle = ctypes.CDLL(str(path))
        self.path = path
        self._c: dict[str, Any] = {}
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(handle, f"pippin_{name}")
            function.restype, function.argtypes = result, arguments
            self._c[name] = function
        self.forward = self._c["forward"]
        """`pippin_forward` as it is, for the one caller that cannot spare a microsecond; see `check`."""

    def check(self, status: int) -> int:
        """Raise what a status means; give it back where it is no error.

        Raises:
            InvalidArgument: the library refused an argument.
            NotEnoughMemory: it got no memory.
            PippinError: it could not start its threads.
        """
        if status >= 0:
            return status
        said = (self._c["error"]() or b"").decode(errors="replace") or f"status {status}"
        kind = {-1: InvalidArgument, -2: NotEnoughMemory}.get(status, PippinError)
        raise kind(f"native kernels: {said}")

    def packed_bytes(self, form: int, group: int, rows: int, columns: int) -> int:
        """Bytes of a packed matrix.

        Raises:
            InvalidArgument: the format cannot hold such a matrix.
        """
        return self.check(self._c["packed_bytes"](form, group, rows, columns))

    def pack_ggml(self, form: int, blocks: int, rows: int, columns: int, target: int) -> None:
        """Pack rows of ggml's blocks."""
        self.check(self._c["pack_ggml"](form, blocks, rows, columns, target))

    def pack_dense(self, form: int, source: int, stride: int, rows: int, columns: int, target: int) -> None:
        """Pack a matrix of float32 or bfloat16 whose rows begin ``stride`` elements apart."""
        self.check(self._c["pack_dense"](form, source, stride, rows, columns, target))

    def pack_codes(self, form: int, group: int, codes: int, scales: int, rows: int, columns: int, target: int) -> None:
        """Pack codes of one byte each and their half-precision scales."""
        self.check(self._c["pack_codes"](form, group, codes, scales, rows, columns, target))

    def rows(self, weight: NativeMatrix, ids: int, count: int, target: int) -> None:
        """Write the rows named by int64 ``ids`` as float32."""
        self.check(self._c["rows"](weight, ids, count, target))

    def matmul(
        self, weight: NativeMatrix, x: int, x_stride: int, tokens: int, bias: int | None, y: int, stride: int
    ) -> None:
        """Write x W^T + bias for float32 ``x``."""
        self.check(self._c["matmul"](weight, x, x_stride, tokens, bias, y, stride))

    def model_new(self, config: NativeConfig, layers: ctypes.Array[Layer]) -> int:
        """Describe a decoder; the handle is freed by `model_free`."""
        handle: int | None = self._c["model_new"](config, layers)
        if handle is None:
            self.check(-1)
        assert handle is not None
        return handle

    def model_free(self, handle: int) -> None:
        """Free what `model_new` made."""
        self._c["model_free"](handle)

    def model_rope(self, handle: int, table: int, cos: int, sin: int, positions: int) -> None:
        """Give the model the cosines and sines of so many positions."""
        self.check(self._c["model_rope"](handle, table, cos, sin, positions))

    def block_bytes(self, handle: int, cache: int) -> int:
        """Bytes of one block of the cache."""
        return self.check(self._c["block_bytes"](handle, cache))

    def flow_read(self, flow: Flow, batch: FlowBatch, x: int, first: int, count: int, outputs: int) -> None:
        """A forward pass over tokens; writes the prediction after each to ``outputs``."""
        self.check(self._c["flow_read"](flow, batch, x, first, count, outputs))

    def flow_invert(
        self, flow: Flow, batch: FlowBatch, x: int, z: int, weights: int | None, first: int, stop: int
    ) -> None:
        """Compute tokens one after another."""
        self.check(self._c["flow_invert"](flow, batch, x, z, weights, first, stop))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one of the functions that this module offers by a name of its own."""
        return self._c[name](*arguments)


class _Found(NamedTuple):
    native: Native | None
    why_not: str


@cache
def _find(path: Path) -> _Found:
    """Load the library once; or say why there is none."""
    if os.environ.get(_SWITCH) == "0":
        return _Found(None, f"switched off by {_SWITCH}=0")
    if not path.is_file():
        log = path.with_suffix(".log")
        if log.is_file():
            return _Found(None, f"they could not be compiled when Pippin was installed; {log} says why")
        return _Found(None, "there was no C++ compiler when Pippin was installed; install one, then Pippin again")
    try:
        native = Native(path)
    except (OSError, AttributeError) as error:
        return _Found(None, f"{path} cannot be loaded: {error}; install Pippin again")
    if (abi := native.call("abi")) != ABI:
        return _Found(None, f"{path} is of another version ({abi}, not {ABI}); install Pippin again")
    native.call("set_threads", default_threads(), 0)
    return _Found(native, "")


def library() -> Native | None:
    """The library; None where it is not built, cannot be loaded, or is switched off by PIPPIN_NATIVE=0."""
    return _find(_FOLDER / "_native.so").native


def unavailable_reason() -> str:
    """Why `library` gives None, for people; empty where it does not."""
    return _find(_FOLDER / "_native.so").why_not


def default_threads() -> int:
    """Threads to begin with: `OMP_NUM_THREADS` as for torch, but no more than there are cores; else all cores."""
    cores = min(device.threads(), _MOST_THREADS)
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(cores, int(wanted)) if wanted.isdecimal() and int(wanted) > 0 else cores


def set_threads(count: int, *, pin: bool = False) -> None:
    """How many threads every call uses from now on, the caller's included.

    Args:
        count: from 1 to the cores that this process may use.
        pin: tie each thread but the caller's to a core of its own; only good where nobody else uses the cores.

    Raises:
        InvalidArgument: a count outside its range.
        PippinError: there is no library, or the system starts no more threads.
    """
    device.check_threads(count)
    native = _required()
    native.check(native.call("set_threads", count, int(pin)))


def threads() -> int:
    """Threads in use; 0 without the library."""
    native = library()
    return 0 if native is None else int(native.call("threads"))


def instruction_set() -> str:
    """What the kernels in use were compiled for, such as "avx512bf16"; empty without the library."""
    native = library()
    return "" if native is None else str(native.call("instruction_set").decode())


def instruction_sets() -> tuple[str, ...]:
    """What this machine could use, best first."""
    native = library()
    return () if native is None else tuple(native.call("instruction_sets").decode().split(","))


def use_instruction_set(name: str) -> None:
    """Compute with other kernels from now on, to test and to compare them.

    Raises:
        InvalidArgument: this machine cannot run them, or they were not compiled.
        PippinError: there is no library.
    """
    native = _required()
    if name not in instruction_sets():
        raise InvalidArgument(f"instruction set {name!r} is not here; there are: {', '.join(instruction_sets())}")
    native.check(native.call("use_instruction_set", name.encode()))


@checked
def read_bandwidth(size: PositiveInt = 256 << 20, threads: int = 1, repeats: PositiveInt = 5) -> float:
    """Bytes per second that so many threads read from memory, the best of several passes over ``size`` bytes.

    Raises:
        InvalidArgument: more threads than cores.
        NotEnoughMemory: there is no memory of that size.
        PippinError: there is no library, or it failed.
    """
    device.check_threads(threads)
    native = _required()
    found = float(native.call("read_bandwidth", size, threads, repeats))
    if found < 0:
        native.check(int(found))
    return found


class KernelProfile(NamedTuple):
    """Seconds of this process inside passes of native decoders, by what they were spent on."""

    linear: float
    attention: float
    other: float
    waiting: float


def profile() -> KernelProfile:
    """Where the time of all passes so far went; zeros without the library."""
    seconds = (c_double * 4)()
    native = library()
    if native is not None:
        native.call("profile", seconds)
    return KernelProfile(*seconds)


def _required() -> Native:
    native = library()
    if native is None:
        raise PippinError(f"the native kernels are not here: {unavailable_reason()}")
    return native
