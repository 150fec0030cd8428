"""Random decoders, their reference in float64, and the same decoders behind the C interface.

Notable here:
- the reference is written from the formulas, one sequence and one head at a time: it shares no code with the kernels
  or with pippin's own decoder
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import numpy as np

from pippin.core import native

ROLES = ("q", "k", "v", "output", "gate", "up", "down")


@dataclass
class Layer:
    """Weights of one layer; matrices (outputs, inputs) in float32."""

    matrices: dict[str, np.ndarray]
    vectors: dict[str, np.ndarray]  # norms and biases by their names in the C struct
    source: int = -1
    window: int = 0
    rope: int = -1
    activation: str = "silu"
    experts: list[dict[str, np.ndarray]] = field(default_factory=list)
    active: int = 0
    renormalize: bool = True
    router: np.ndarray | None = None


@dataclass
class Weights:
    """A decoder."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: list[Layer]
    embedding: np.ndarray
    head: np.ndarray
    final_norm: np.ndarray
    thetas: tuple[float, ...] = (10_000.0,)
    eps: float = 1e-6
    scale: float | None = None
    embedding_scale: float = 1.0

    @property
    def attention_scale(self) -> float:
        """The multiplier of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def own(self) -> list[int]:
        """Layers with keys of their own."""
        return [i for i, layer in enumerate(self.layers) if layer.source < 0]


@dataclass
class Change:
    """A low-rank change of one matrix."""

    down: np.ndarray
    up: np.ndarray


def random_decoder(seed: int, *, width=32, heads=4, kv_heads=2, head_dim=8, size=64, vocab=50, layers=None, **options):
    """A decoder of random weights; ``layers``: one dict of options for each layer (see `_random_layer`)."""
    rng = np.random.default_rng(seed)
    shape = (width, heads, kv_heads, head_dim, size)
    made = [_random_layer(rng, shape, **spec) for spec in (layers or [{}, {}])]
    embedding = rng.normal(size=(vocab, width)).astype(np.float32)
    head = rng.normal(size=(vocab, width)).astype(np.float32) / math.sqrt(width)
    norm = rng.normal(1, 0.2, size=width)
    return Weights(heads, kv_heads, head_dim, made, embedding, head.astype(np.float32), _single(norm), **options)


def _single(x) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float32)


def _random_layer(rng, shape, *, biases=False, qk_norm=False, post_norms=False, gated=True, experts=0, **options):
    width, heads, kv_heads, head_dim, size = shape

    def matrix(rows: int, columns: int) -> np.ndarray:
        return _single(rng.normal(size=(rows, columns)) / math.sqrt(columns))

    def block() -> dict[str, np.ndarray]:
        made = {"up": matrix(size, width), "down": matrix(width, size)}
        return {"gate": matrix(size, width), **made} if gated else made

    matrices = {"q": matrix(heads * head_dim, width), "output": matrix(width, heads * head_dim)}
    if options.get("source", -1) < 0:
        matrices |= {name: matrix(kv_heads * head_dim, width) for name in "kv"}
    if not experts:
        matrices |= block()
    norms = ["attention_norm", "feedforward_norm"]
    norms += ["post_attention_norm", "post_feedforward_norm"] if post_norms else []
    vectors = {name: _single(rng.normal(1, 0.2, size=width)) for name in norms}
    if qk_norm:
        vectors |= {name: _single(rng.normal(1, 0.2, size=head_dim)) for name in ("q_norm", "k_norm")}
    if biases:
        for name in ("q", "k", "v", "output"):
            if name in matrices:
                vectors[f"{name}_bias"] = _single(rng.normal(size=len(matrices[name])))
    layer = Layer(matrices, vectors, **options)
    if experts:
        layer.experts = [block() for _ in range(experts)]
        layer.router = _single(rng.normal(size=(experts, width)))
    return layer


def random_changes(weights: Weights, seed: int, rank: int) -> list[dict[str, Change]]:
    """An adapter: one dict for each layer; about half of the matrices are changed."""
    rng = np.random.default_rng(seed)
    return [
        {
            name: Change(
                _single(rng.normal(size=(rank, matrix.shape[1])) / math.sqrt(matrix.shape[1])),
                _single(rng.normal(size=(len(matrix), rank))),
            )
            for name, matrix in layer.matrices.items()
            if rng.random() < 0.6
        }
        for layer in weights.layers
    ]


# --- the reference ------------------------------------------------------------------------------------------------


def _norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    return x if weight is None else weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _activate(x: np.ndarray, name: str) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def angles(weights: Weights, table: int, positions: np.ndarray) -> np.ndarray:
    """Angles of (positions, head_dim / 2)."""
    exponents = np.arange(0, weights.head_dim, 2) / weights.head_dim
    return positions[:, None] / weights.thetas[table] ** exponents[None]


def _turn(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Rotate (tokens, heads, head_dim)."""
    a, b = np.split(x, 2, -1)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Reference:
    """Passes over whole sequences in float64."""

    def __init__(self, weights: Weights, changes: list[dict[str, Change]] | None = None) -> None:
        self.w, self.changes = weights, changes

    def _linear(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        found = self.w.layers[layer]
        y = x @ found.matrices[name].T.astype(float)
        if f"{name}_bias" in found.vectors:
            y = y + found.vectors[f"{name}_bias"]
        if self.changes is not None and name in self.changes[layer]:
            change = self.changes[layer][name]
            y = y + (x @ change.down.T.astype(float)) @ change.up.T
        return y

    def _attend(self, index: int, x: np.ndarray, kept: dict) -> np.ndarray:
        w, layer = self.w, self.w.layers[index]
        tokens = len(x)
        positions = np.arange(tokens)
        turn = (lambda y: y) if layer.rope < 0 else (lambda y: _turn(y, angles(w, layer.rope, positions)))
        shape = (tokens, -1, w.head_dim)
        q = turn(_norm(self._linear(index, "q", x).reshape(shape), layer.vectors.get("q_norm"), w.eps))
        if layer.source < 0:
            k = turn(_norm(self._linear(index, "k", x).reshape(shape), layer.vectors.get("k_norm"), w.eps))
            kept[index] = (k, self._linear(index, "v", x).reshape(shape), layer.window)
        k, v, window = kept[index if layer.source < 0 else layer.source]
        out = np.zeros_like(q)
        for head in range(w.heads):
            shared = head // (w.heads // w.kv_heads)
            for i in range(tokens):
                first = max(0, i - window + 1) if window else 0
                score = k[first : i + 1, shared] @ q[i, head] * w.attention_scale
                weight = np.exp(score - score.max())
                out[i, head] = weight @ v[first : i + 1, shared] / weight.sum()
        return self._linear(index, "output", out.reshape(tokens, -1))

    def _feed(self, index: int, x: np.ndarray) -> np.ndarray:
        layer = self.w.layers[index]
        if not layer.experts:
            up = self._linear(index, "up", x)
            gate = self._linear(index, "gate", x) if "gate" in layer.matrices else None
            inner = _activate(up, layer.activation) if gate is None else _activate(gate, layer.activation) * up
            return self._linear(index, "down", inner)
        y = np.zeros_like(x)
        for i, token in enumerate(x):
            score = layer.router.astype(float) @ token
            law = np.exp(score - score.max())
            law /= law.sum()
            best = np.argsort(-law, kind="stable")[: layer.active]
            share = law[best] / law[best].sum() if layer.renormalize else law[best]
            for expert, part in zip(best, share, strict=True):
                block = layer.experts[expert]
                up = block["up"].astype(float) @ token
                inner = (
                    _activate(block["gate"].astype(float) @ token, layer.activation) * up
                    if "gate" in block
                    else _activate(up, layer.activation)
                )
                y[i] += part * (block["down"].astype(float) @ inner)
        return y

    def run(self, ids, depth: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logits, normalized hidden states, and what left the last layer, of all tokens."""
        w = self.w
        x = w.embedding[np.asarray(ids)].astype(float) * w.embedding_scale
        kept: dict = {}
        for index in range(len(w.layers) if depth is None else depth):
            vectors = w.layers[index].vectors
            y = self._attend(index, _norm(x, vectors["attention_norm"], w.eps), kept)
            x = x + _norm(y, vectors.get("post_attention_norm"), w.eps)
            y = self._feed(index, _norm(x, vectors["feedforward_norm"], w.eps))
            x = x + _norm(y, vectors.get("post_feedforward_norm"), w.eps)
        hidden = _norm(x, w.final_norm, w.eps)
        return hidden @ w.head.T.astype(float), hidden, x


# --- behind the C interface ---------------------------------------------------------------------------------------


def aligned(size: int) -> np.ndarray:
    """Bytes that begin at a multiple of 64."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


class Packed:
    """A matrix in a packed format; ``values`` is what the format made of it."""

    def __init__(self, values: np.ndarray, form: str) -> None:
        library = native.library()
        assert library is not None
        rows, columns = values.shape
        group, zero = 0, 0.0
        if form in {"F32", "BF16"}:
            number = native.GGML_FORMATS[form]
            self.values = values if form == "F32" else round_bf16(values)
            raw = self.values if form == "F32" else (self.values.view(np.uint32) >> 16).astype(np.uint16)
            raw = np.ascontiguousarray(raw)
            self.memory = aligned(library.packed_bytes(number, 0, rows, columns))
            library.pack_dense(number, raw.ctypes.data, columns, rows, columns, self.memory.ctypes.data)
        else:
            bits, group = int(form[3:]), 32
            number, zero = native.GROUP_FORMATS[bits], (2**bits - 1) / 2
            groups = values.reshape(rows, -1, group)
            scales = (np.abs(groups).max(-1) / zero).astype(np.float16)
            codes = np.clip(np.rint(groups / np.maximum(scales.astype(float), 1e-9)[..., None] + zero), 0, 2**bits - 1)
            self.values = _single(((codes - zero) * scales[..., None].astype(float)).reshape(rows, columns))
            codes = np.ascontiguousarray(codes.reshape(rows, columns), np.uint8)
            self.memory = aligned(library.packed_bytes(number, group, rows, columns))
            addresses = codes.ctypes.data, scales.view(np.uint16).ctypes.data
            library.pack_codes(number, group, *addresses, rows, columns, self.memory.ctypes.data)
        self.matrix = native.NativeMatrix(number, group, rows, columns, zero, 0, self.memory.ctypes.data)


@dataclass
class Work:
    """New tokens of one sequence."""

    ids: list[int]
    held: int
    table: list[int]
    rows: list[int]
    changes: list[dict[str, Change]] | None = None


class NativeDecoder:
    """A decoder behind `pippin_forward`, with a pool of its own.

    ``forms``: the format of each role ("head" and "embedding" too), or one for all.
    """

    def __init__(
        self, weights: Weights, forms: str | dict[str, str] = "F32", *, blocks=64, cache="float32", positions=4096
    ):
        library = native.library()
        assert library is not None
        self.library, self.w, self.blocks, self.cache = library, weights, blocks, native.CACHE_TYPES[cache]
        self.forms = forms
        self.alive: list = []
        layers = (native.Layer * len(weights.layers))(*(self._layer(layer) for layer in weights.layers))
        self.config = native.NativeConfig(
            len(weights.embedding), weights.embedding.shape[1], weights.heads, weights.kv_heads, weights.head_dim,
            len(weights.layers), weights.eps, weights.attention_scale, weights.embedding_scale, len(weights.thetas),
            native.NORMS["rms"], 1.0, 1.0, 0.0,
            self._pack("embedding", weights.embedding), self._pack("head", weights.head),
            self._address(weights.final_norm),
        )  # fmt: skip
        dims = (ctypes.c_int32 * len(weights.thetas))(*(weights.head_dim for _ in weights.thetas))
        self.alive.append(dims)
        self.config.rotary_dims = dims
        self.layers = layers
        self.handle = library.model_new(self.config, layers)
        for table in range(len(weights.thetas)):
            angle = angles(weights, table, np.arange(positions))
            cos, sin = _single(np.cos(angle)), _single(np.sin(angle))
            library.model_rope(self.handle, table, cos.ctypes.data, sin.ctypes.data, positions)
        self.block_bytes = library.block_bytes(self.handle, self.cache)
        self.pool = aligned(blocks * self.block_bytes).reshape(blocks, self.block_bytes)
        self.pool[:] = 0xFF  # NaN in every precision: what was never written must never be read

    def __del__(self) -> None:
        self.library.model_free(self.handle)

    def _address(self, array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        self.alive.append(array)
        return array.ctypes.data

    def _pack(self, role: str, values: np.ndarray | None) -> native.NativeMatrix:
        if values is None:
            return native.NativeMatrix()
        packed = Packed(values, self.forms if isinstance(self.forms, str) else self.forms.get(role, "F32"))
        values[:] = packed.values  # from now on the reference has the same weights
        self.alive.append(packed)
        return packed.matrix

    def _layer(self, layer: Layer) -> native.Layer:
        made = native.Layer(source=layer.source, window=layer.window, rope=layer.rope, scalar=1.0)
        made.activation = native.ACTIVATIONS[layer.activation]
        for role in ROLES:
            setattr(made, role, self._pack(role, layer.matrices.get(role)))
        for name, vector in layer.vectors.items():
            setattr(made, name, self._address(vector))
        if layer.experts:
            parts = [[self._pack(role, e.get(role)) for role in ("gate", "up", "down")] for e in layer.experts]
            experts = (native.Expert * len(parts))(*(native.Expert(*part) for part in parts))
            self.alive.append(experts)
            made.experts, made.active, made.expert = len(parts), layer.active, experts
            made.router = native.NativeRouter(
                self._address(layer.router), normalize=layer.renormalize, groups=1, active_groups=1, scale=1.0
            )
        return made

    def batch(
        self, works: list[Work], *, begin=0, end=None, residual=None
    ) -> tuple[native.NativeBatch, np.ndarray, np.ndarray]:
        """The C struct and the arrays of logits and hidden states that a pass fills."""

        def ints(values) -> int | None:
            return self._address(np.asarray(values, np.int32))

        starts = np.cumsum([0] + [len(work.ids) for work in works])
        rows = [start + row for start, work in zip(starts, works, strict=False) for row in work.rows]
        logits = np.full((len(rows), len(self.w.embedding)), np.nan, np.float32)
        hidden = np.full((len(rows), self.w.embedding.shape[1]), np.nan, np.float32)
        shares = [
            native.SequenceShare(self._changes(work.changes), int(start), int(start) + len(work.ids))
            for start, work in zip(starts, works, strict=False)
            if work.changes is not None
        ]
        made = native.NativeBatch(
            int(starts[-1]), ints([i for work in works for i in work.ids]), len(works), ints(starts),
            ints([work.held for work in works]), ints([b for work in works for b in work.table]),
            ints(np.cumsum([0] + [len(work.table) for work in works])), len(rows), ints(rows),
            self._address(logits), self._address(hidden), begin, len(self.w.layers) if end is None else end,
            self._address(residual), len(shares), (native.SequenceShare * len(shares))(*shares),
        )  # fmt: skip
        return made, logits, hidden

    def _changes(self, changes: list[dict[str, Change]]):
        none = native.Change()
        parts = []
        for layer in changes:
            for role in ROLES:
                change = layer.get(role)
                if change is None:
                    parts.append(none)
                    continue
                rank, inputs = change.down.shape
                addresses = self._address(change.down), self._address(change.up)
                parts.append(native.Change(*addresses, rank, inputs, len(change.up)))
            parts += [none] * (native.CHANGES - len(ROLES))
        array = (native.Change * len(parts))(*parts)
        self.alive.append(array)
        return array

    def forward(self, works: list[Work], **options) -> tuple[np.ndarray, np.ndarray]:
        """Logits and hidden states of the wanted rows of all works, one after another."""
        kept = len(self.alive)
        batch, logits, hidden = self.batch(works, **options)
        try:
            status = self.library.forward(
                self.handle, self.pool.ctypes.data, self.blocks, self.cache, ctypes.byref(batch)
            )
            self.library.check(status)
        finally:
            del self.alive[kept:]
        return logits, hidden

    def whole(self, ids, table=None, changes=None) -> tuple[np.ndarray, np.ndarray]:
        """A sequence from nothing in one pass, with the results of all tokens."""
        table = list(range(-(-len(ids) // native.BLOCK))) if table is None else table
        return self.forward([Work(list(ids), 0, table, list(range(len(ids))), changes)])
