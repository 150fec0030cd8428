"""Bindings to the native C++ kernels: their library, loaded with ctypes, with Python types and errors.

Notable here:
- the library is optional: without it `library` returns None, `unavailable_reason` says why, and torch is used instead
- arguments are plain addresses: this module does not import torch and knows nothing of tensors
- the C interface is native/pippin.h; a library built from another version of it is rejected
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

ABI: Final = 10
BLOCK: Final = 16
"""Tokens per block of the KV cache."""

GGML_FORMATS: Final = {
    **{"F32": 0, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7},
    **{"Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30},
}
"""Format numbers of weights that are stored as in a GGUF file."""

GROUP_FORMATS: Final = {2: 102, 3: 103, 4: 104, 8: 108}
"""Format numbers of Pippin's own group-quantized formats, by bits per weight."""

AFFINE_FORMATS: Final = {bits: 200 + bits for bits in (2, 3, 4, 5, 6, 8)}
"""Format numbers of the formats with a float32 scale and minimum for each group, by bits per weight."""

CACHE_TYPES: Final = {"float32": 0, "bfloat16": 1, "int8": 2}
ACTIVATIONS: Final = {
    **{"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3},
    **{"relu2": 4, "gelu_sigmoid": 5, "xielu": 6},
}
TRACK_JOINS: Final = {"mean": 0, "delta": 1, "sum": 2}
NORMS: Final = {"rms": 0, "layer": 1}
QK_NORMS: Final = {None: 0, "head": 0, "full": 1, "rotated head": 2}
ROUTER_SCORES: Final = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
RECURRENCES: Final = {"convolution": 1, "delta rule": 2, "state space": 3, "gated unit": 4}
GATES: Final = {"plain": 0, "silu before": 1, "silu after": 2, "sigmoid after": 3, "activated": 4}
RECURRENT_INPUTS: Final = 8
CHANGES: Final = 11 + RECURRENT_INPUTS
"""Matrices of a layer that an adapter may change."""

FETCH: Final = ctypes.CFUNCTYPE(
    c_int32, c_void_p, c_int32, POINTER(c_int32), c_int32, POINTER(c_float), POINTER(c_int32)
)
"""`pippin_fetch`: context, layer, needed experts and their number, predictions, and room for the next wave."""

_FOLDER = Path(__file__).resolve().parents[1]
_SWITCH = "PIPPIN_NATIVE"
_MAX_THREADS = 256  # the library's limit


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
    """`pippin_expert`: one expert of a mixture, or a dense layer beside the experts."""

    _fields_ = (
        *((name, NativeMatrix) for name in ("gate", "up", "down")),
        *((name, c_void_p) for name in ("gate_bias", "up_bias", "down_bias")),
    )


class NativeRouter(ctypes.Structure):
    """`pippin_router`: how the tokens of a mixture choose their experts."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias", "input_norm", "expert_scale", "choice_bias")),
        *((name, c_int32) for name in ("scores", "normalize", "groups", "active_groups", "best_two")),
        *((name, c_float) for name in ("softcap", "scale", "jitter")),
    )


class NativeLatent(ctypes.Structure):
    """`pippin_latent`: latent attention."""

    _fields_ = (
        *((name, c_int32) for name in ("kv_rank", "rotated_dim", "plain_dim", "value_dim")),
        ("q_a", NativeMatrix),
        *((name, c_void_p) for name in ("q_a_bias", "q_a_norm", "kv_norm")),
        *((name, POINTER(NativeMatrix)) for name in ("keys", "values")),
        ("eps", c_float),
        ("reserved", c_int32),
    )


class NativeRecurrent(ctypes.Structure):
    """`pippin_recurrent`: a recurrence in place of attention, or beside it."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "taps", "heads", "groups", "key_dim", "value_dim")),
        *((name, c_int32) for name in ("gate", "activation", "tiled", "reserved", "norm_size", "decays")),
        *((name, c_float) for name in ("eps", "beta", "min_step", "max_step")),
        ("inputs", NativeMatrix * RECURRENT_INPUTS),  # `in`
        ("input_biases", c_void_p * RECURRENT_INPUTS),
        ("out", NativeMatrix),
        *((name, c_void_p) for name in ("out_bias", "conv", "conv_bias", "rate", "step_bias", "skip", "norm")),
        ("open", c_void_p * 2),
        ("open_bias", c_void_p * 2),
    )


class Layer(ctypes.Structure):
    """`pippin_layer`: one layer of a decoder."""

    _fields_ = (
        *((name, NativeMatrix) for name in ("q", "k", "v", "output", "gate", "up", "down", "attention_gate")),
        *((name, c_void_p) for name in ("q_bias", "k_bias", "v_bias", "output_bias")),
        *((name, c_void_p) for name in ("gate_bias", "up_bias", "down_bias", "attention_gate_bias")),
        *((name, c_void_p) for name in ("attention_norm", "feedforward_norm")),
        *((name, c_void_p) for name in ("post_attention_norm", "post_feedforward_norm")),
        *((name, c_void_p) for name in ("attention_norm_bias", "feedforward_norm_bias")),
        *((name, c_void_p) for name in ("post_attention_norm_bias", "post_feedforward_norm_bias")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "v_norm", "sinks")),
        *((name, c_int32) for name in ("source", "window", "rope", "activation")),
        *((name, c_int32) for name in ("experts", "active", "group", "kv_heads", "head_dim", "qk_norm", "parallel")),
        *((name, c_float) for name in ("softcap", "limit", "position_beta")),
        ("position_length", c_int64),
        ("xielu", c_float * 4),
        ("router", NativeRouter),
        ("expert", POINTER(Expert)),
        ("shared", Expert),
        ("shared_gate", c_void_p),
        *((name, c_void_p) for name in ("experts_norm", "post_experts_norm", "post_dense_norm")),
        ("input_gate", NativeMatrix),
        ("input_projection", NativeMatrix),
        ("input_norm", c_void_p),
        ("scalar", c_float),
        ("fetched", c_int32),
        ("latent", POINTER(NativeLatent)),
        ("recurrent", POINTER(NativeRecurrent)),
    )


class NativeConfig(ctypes.Structure):
    """`pippin_config`: sizes and weights that the layers of a decoder share."""

    _fields_ = (
        *((name, c_int64) for name in ("vocab", "width", "heads", "kv_heads", "head_dim", "layers")),
        *((name, c_float) for name in ("eps", "attention_scale", "embedding_scale")),
        *((name, c_int32) for name in ("rope_tables", "norm")),
        *((name, c_float) for name in ("residual_scale", "logit_scale", "logit_softcap")),
        ("embedding", NativeMatrix),
        ("head", NativeMatrix),
        *((name, c_void_p) for name in ("final_norm", "final_norm_bias", "head_bias", "embedding_norm")),
        ("position", NativeMatrix),
        ("rotary_dims", POINTER(c_int32)),
        ("layer_table", NativeMatrix),
        ("layer_projection", NativeMatrix),
        ("layer_input_norm", c_void_p),
        *((name, c_int32) for name in ("tracks", "track_depth", "track_join")),
    )


class Change(ctypes.Structure):
    """`pippin_change`: the low-rank update of one weight by an adapter."""

    _fields_ = (
        ("down", c_void_p),
        ("up", c_void_p),
        ("rank", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
    )


class SequenceShare(ctypes.Structure):
    """`pippin_share`: an adapter and the range of tokens that it applies to."""

    _fields_ = (("changes", POINTER(Change)), ("begin", c_int32), ("end", c_int32))


class NativeEmbeddings(ctypes.Structure):
    """`pippin_given`: rows in place of the embeddings of some tokens."""

    _fields_ = (("rows", c_void_p), ("begin", c_int32), ("count", c_int32))


class NativeSteering(ctypes.Structure):
    """`pippin_steering`: a change of hidden states and the range of tokens that it applies to."""

    _fields_ = (("scale", c_void_p), ("shift", c_void_p), ("begin", c_int32), ("end", c_int32))


class Observed(ctypes.Structure):
    """`pippin_observed`: where to add the attention that the tokens of one sequence receive."""

    _fields_ = (
        ("received", c_void_p),
        ("stride", c_int64),
        *((name, c_int32) for name in ("sequence", "max", "before", "reserved")),
    )


class Ragged(ctypes.Structure):
    """`pippin_ragged`: a sequence whose heads have lost tokens, each head others."""

    _fields_ = (("tables", c_void_p), ("lost", c_void_p), ("stride", c_int64))


class NativeBatch(ctypes.Structure):
    """`pippin_batch`: one forward pass over the new tokens of several sequences."""

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
        ("axes", c_int64),
        ("positions", c_void_p),
        ("visible", c_void_p),
        ("givens", c_int64),
        ("given", POINTER(NativeEmbeddings)),
        ("steerings", c_int64),
        ("steering", POINTER(NativeSteering)),
        ("experts", c_void_p),
        ("expert_columns", c_int64),
        ("before_norm", c_void_p),
        ("observations", c_int64),
        ("observed", POINTER(Observed)),
        ("states", c_void_p),
        ("new_states", c_void_p),
        ("ragged", c_void_p),
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
    """`pippin_flow_batch`: a batch of sequences for a flow block."""

    _fields_ = (
        *((name, c_int64) for name in ("samples", "branches", "tokens", "capacity")),
        *((name, c_void_p) for name in ("added", "heat", "cache")),
    )


# Result type, then argument types, of each function.
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
    "pack_affine": (c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "rows": (c_int, POINTER(NativeMatrix), c_void_p, c_int64, c_void_p),
    "matmul": (c_int, POINTER(NativeMatrix), c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64),
    "model_new": (c_void_p, POINTER(NativeConfig), POINTER(Layer)),
    "model_free": (None, c_void_p),
    "model_rope": (c_int, c_void_p, c_int, c_void_p, c_void_p, c_int64),
    "model_rope_axes": (c_int, c_void_p, c_int, c_void_p),
    "model_fetch": (c_int, c_void_p, c_void_p, c_void_p, c_int32),
    "model_expert": (c_int, c_void_p, c_int32, c_int32, POINTER(Expert)),
    "block_bytes": (c_int64, c_void_p, c_int),
    "forward": (c_int, c_void_p, c_void_p, c_int64, c_int, POINTER(NativeBatch)),
    "flow_read": (c_int, POINTER(Flow), POINTER(FlowBatch), c_void_p, c_int64, c_int64, c_void_p),
    "flow_invert": (c_int, POINTER(Flow), POINTER(FlowBatch), *(c_void_p,) * 3, c_int64, c_int64),
}


class Native:
    """The functions of the library; a failure raises an exception.

    Addresses are plain integers; the caller keeps the memory behind them alive during the call.
    """

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            OSError: the file does not exist or cannot be loaded.
            AttributeError: a function is missing.
        """
        handle = ctypes.CDLL(str(path))
        self.path = path
        self._c: dict[str, Any] = {}
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(handle, f"pippin_{name}")
            function.restype, function.argtypes = result, arguments
            self._c[name] = function
        self.forward = self._c["forward"]
        """`pippin_forward` without a wrapper, for the decoding loop; the caller passes its status to `check`."""

    def check(self, status: int) -> int:
        """Return a status that is not an error; raise the error otherwise.

        Raises:
            InvalidArgument: the library rejected an argument.
            NotEnoughMemory: it could not allocate memory.
            PippinError: it could not start its threads, or experts did not come.
        """
        if status >= 0:
            return status
        message = (self._c["error"]() or b"").decode(errors="replace") or f"status {status}"
        kind = {-1: InvalidArgument, -2: NotEnoughMemory}.get(status, PippinError)
        raise kind(f"native kernels: {message}")

    def packed_bytes(self, form: int, group: int, rows: int, columns: int) -> int:
        """Size of a packed matrix in bytes.

        Raises:
            InvalidArgument: the format does not support this shape.
        """
        return self.check(self._c["packed_bytes"](form, group, rows, columns))

    def pack_ggml(self, form: int, blocks: int, rows: int, columns: int, target: int) -> None:
        """Pack rows of ggml blocks."""
        self.check(self._c["pack_ggml"](form, blocks, rows, columns, target))

    def pack_dense(self, form: int, source: int, stride: int, rows: int, columns: int, target: int) -> None:
        """Pack a matrix of float32 or bfloat16 whose rows begin ``stride`` elements apart."""
        self.check(self._c["pack_dense"](form, source, stride, rows, columns, target))

    def pack_codes(self, form: int, group: int, codes: int, scales: int, rows: int, columns: int, target: int) -> None:
        """Pack quantization codes of one byte each with their half-precision scales."""
        self.check(self._c["pack_codes"](form, group, codes, scales, rows, columns, target))

    def pack_affine(
        self, form: int, group: int, codes: int, scales: int, minima: int, rows: int, columns: int, target: int
    ) -> None:
        """Pack quantization codes of one byte each with their float32 scales and minima."""
        self.check(self._c["pack_affine"](form, group, codes, scales, minima, rows, columns, target))

    def rows(self, weight: NativeMatrix, ids: int, count: int, target: int) -> None:
        """Write the rows with the int64 indices ``ids`` as float32."""
        self.check(self._c["rows"](weight, ids, count, target))

    def matmul(
        self, weight: NativeMatrix, x: int, x_stride: int, tokens: int, bias: int | None, y: int, stride: int
    ) -> None:
        """Write x W^T + bias for float32 ``x``."""
        self.check(self._c["matmul"](weight, x, x_stride, tokens, bias, y, stride))

    def model_new(self, config: NativeConfig, layers: ctypes.Array[Layer]) -> int:
        """Create a decoder and return its handle; `model_free` frees it."""
        handle: int | None = self._c["model_new"](config, layers)
        if handle is None:
            self.check(-1)
        assert handle is not None
        return handle

    def model_free(self, handle: int) -> None:
        """Free the decoder of a handle."""
        self._c["model_free"](handle)

    def model_rope(self, handle: int, table: int, cos: int, sin: int, positions: int) -> None:
        """Set the model's cos/sin tables for ``positions`` positions."""
        self.check(self._c["model_rope"](handle, table, cos, sin, positions))

    def model_rope_axes(self, handle: int, table: int, axes: int) -> None:
        """Set the axis of a position that each frequency of a table rotates by."""
        self.check(self._c["model_rope_axes"](handle, table, axes))

    def model_fetch(self, handle: int, fetch: Any, depth: int) -> None:
        """Let a `FETCH` bring the experts of mixtures, with predictions for the next ``depth`` ones; None for none."""
        self.check(self._c["model_fetch"](handle, fetch, None, depth))

    def model_expert(self, handle: int, layer: int, expert: int, place: Expert | None) -> None:
        """Set where an expert of a layer lies; None for nowhere."""
        self.check(self._c["model_expert"](handle, layer, expert, place))

    def block_bytes(self, handle: int, cache: int) -> int:
        """Size of one block of the KV cache in bytes."""
        return self.check(self._c["block_bytes"](handle, cache))

    def flow_read(self, flow: Flow, batch: FlowBatch, x: int, first: int, count: int, outputs: int) -> None:
        """Run a flow block over ``count`` known tokens; writes the prediction after each token to ``outputs``."""
        self.check(self._c["flow_read"](flow, batch, x, first, count, outputs))

    def flow_invert(
        self, flow: Flow, batch: FlowBatch, x: int, z: int, weights: int | None, first: int, stop: int
    ) -> None:
        """Invert a flow block: compute tokens ``first`` to ``stop`` of ``x`` from ``z``, one after another."""
        self.check(self._c["flow_invert"](flow, batch, x, z, weights, first, stop))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library that has no method here."""
        return self._c[name](*arguments)


class _Library(NamedTuple):
    native: Native | None
    unavailable_reason: str


@cache
def _load(path: Path) -> _Library:
    """Load the library once, or return the reason why that is not possible."""
    if os.environ.get(_SWITCH) == "0":
        return _Library(None, f"switched off by {_SWITCH}=0")
    if not path.is_file():
        log = path.with_suffix(".log")
        if log.is_file():
            return _Library(None, f"they could not be compiled when Pippin was installed; {log} says why")
        return _Library(None, "there was no C++ compiler when Pippin was installed; install one, then Pippin again")
    try:
        native = Native(path)
    except (OSError, AttributeError) as error:
        return _Library(None, f"{path} cannot be loaded: {error}; install Pippin again")
    if (abi := native.call("abi")) != ABI:
        return _Library(None, f"{path} is of another version ({abi}, not {ABI}); install Pippin again")
    native.call("set_threads", default_threads(), 0)
    return _Library(native, "")


def library() -> Native | None:
    """The library; None where it is not built, cannot be loaded, or is switched off by PIPPIN_NATIVE=0."""
    return _load(_FOLDER / "_native.so").native


def unavailable_reason() -> str:
    """Why `library` returns None, as readable text; empty where the library is available."""
    return _load(_FOLDER / "_native.so").unavailable_reason


def default_threads() -> int:
    """The initial number of threads: `OMP_NUM_THREADS`, at most one per core; one per core where it is not set."""
    cores = min(device.threads(), _MAX_THREADS)
    requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(cores, int(requested)) if requested.isdecimal() and int(requested) > 0 else cores


def set_threads(count: int, *, pin: bool = False) -> None:
    """Set the number of threads that every call uses from now on, including the caller's.

    Args:
        count: from 1 to the number of cores that this process may use.
        pin: pin each thread but the caller's to a core of its own; useful only where no other process uses the cores.

    Raises:
        InvalidArgument: a count outside its range.
        PippinError: there is no library, or the system cannot start more threads.
    """
    device.check_threads(count)
    native = _required()
    native.check(native.call("set_threads", count, int(pin)))


def threads() -> int:
    """The number of threads in use; 0 without the library."""
    native = library()
    return 0 if native is None else int(native.call("threads"))


def instruction_set() -> str:
    """The instruction set of the kernels in use, such as "avx512bf16"; empty without the library."""
    native = library()
    return "" if native is None else str(native.call("instruction_set").decode())


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that both the library and this machine support, best first."""
    native = library()
    return () if native is None else tuple(native.call("instruction_sets").decode().split(","))


def use_instruction_set(name: str) -> None:
    """Switch to the kernels of another instruction set, to test and to compare them.

    Raises:
        InvalidArgument: this machine does not support it, or its kernels were not compiled.
        PippinError: there is no library.
    """
    native = _required()
    if name not in instruction_sets():
        raise InvalidArgument(f"instruction set {name!r} is not available; use one of: {', '.join(instruction_sets())}")
    native.check(native.call("use_instruction_set", name.encode()))


@checked
def read_bandwidth(size: PositiveInt = 256 << 20, threads: int = 1, repeats: PositiveInt = 5) -> float:
    """Measure the memory read bandwidth in bytes per second: the best of ``repeats`` passes over ``size`` bytes.

    Raises:
        InvalidArgument: more threads than cores.
        NotEnoughMemory: ``size`` bytes cannot be allocated.
        PippinError: there is no library, or it failed.
    """
    device.check_threads(threads)
    native = _required()
    bandwidth = float(native.call("read_bandwidth", size, threads, repeats))
    if bandwidth < 0:
        native.check(int(bandwidth))  # a negative result is an error status
    return bandwidth


class KernelProfile(NamedTuple):
    """Seconds that this process spent in forward passes of native decoders, by kind of operation."""

    linear: float
    attention: float
    other: float
    waiting: float


def profile() -> KernelProfile:
    """The time of all forward passes so far, by kind of operation; zeros without the library."""
    seconds = (c_double * 4)()
    native = library()
    if native is not None:
        native.call("profile", seconds)
    return KernelProfile(*seconds)


def _required() -> Native:
    native = library()
    if native is None:
        raise PippinError(f"the native kernels are not available: {unavailable_reason()}")
    return native
