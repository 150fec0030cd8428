"""Passes in which every sequence has one new token, in static shapes: recorded once as CUDA graphs, then replayed.

Notable here:
- a decode step on a GPU is hundreds of small kernels, whose launches take longer than their execution; a graph
  launches them all with one call
- shapes are padded: the number of sequences is rounded up with idle ones, which write to a spare block, and the length
  of tables to a power of two; a graph is recorded when its shape first occurs
- all inputs that change from step to step are copied to the GPU at once, a few integers per sequence
- attention reads the blocks in place, in a Triton kernel; without Triton they are gathered for torch's attention
- without a GPU the same code runs without recording, which is how it is tested
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from pippin.engine.cache.paged_store import PagedStore
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.language.decoder_config import LayerSpec
from pippin.language.language_model import LanguageModel
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.kv_cache import New
from pippin.nn.triton.triton_attention import available, paged_attention

_BATCHES: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
_LEAST_TABLE: Final = 16
"""Blocks of the smallest table, so that short sequences share a shape."""
_GRAPHS: Final = 64
"""Maximum number of recorded graphs; further shapes are computed without a graph."""


_RECORDED: Final = frozenset({"token_ids", "num_computed_tokens", "block_table", "outputs"})
"""Fields of an input that a recorded step reads; every other one must have its default."""


def can_record(model_input: ModelInput) -> bool:
    """Whether a recorded step can compute this input: one new token through all layers, and nothing beside it."""
    if len(model_input.token_ids) != 1 or len(model_input.outputs) != 1:
        return False
    return all(
        getattr(model_input, each.name) == (each.default if each.default is not MISSING else {})
        for each in fields(model_input)
        if each.name not in _RECORDED
    )


def shape_of(sequences: int, tokens: int) -> tuple[int, int]:
    """The static shape for ``sequences`` sequences, the longest of ``tokens`` tokens: sequences and blocks per table.

    >>> shape_of(1, 10), shape_of(5, 300), shape_of(200, 4096)
    ((1, 16), (8, 32), (256, 256))
    """
    batch = next((size for size in _BATCHES if size >= sequences), -(-sequences // 128) * 128)
    blocks = -(-tokens // BLOCK_SIZE)
    return batch, max(_LEAST_TABLE, 1 << (blocks - 1).bit_length())


class StepPass:
    """The cache of one step: a `pippin.nn.kv_cache.KVCache` for a batch of single tokens.

    Args:
        store: the blocks.
        inputs: for each sequence its new token, that token's position and slot, and its table.
        dtype: precision of the queries.
    """

    def __init__(self, store: PagedStore, inputs: Int[Tensor, "batch fields"], dtype: torch.dtype) -> None:
        self.store, self.dtype = store, dtype
        self.ids, self.positions = inputs[:, :1], inputs[:, 1:2]
        self._slots, self.tables = inputs[:, 2], inputs[:, 3:]
        # one less than the longest sequence that fits: how far the rotary tables must reach
        self.length = self.tables.shape[1] * BLOCK_SIZE - 1

    def append(self, layer: int, k: New, v: New, window: int | None) -> StepRead:
        """Write the new token of each sequence; return an object whose `attend` reads the blocks."""
        self.store.write(layer, self._slots, k.transpose(0, 2), v.transpose(0, 2))
        return StepRead(self, layer, window)

    def advance(self, new: int) -> None:
        """Do nothing: the scheduler counts the tokens of a sequence."""


@dataclass(frozen=True)
class StepRead:
    """Attention of one token of each sequence over its blocks in one layer."""

    step: StepPass
    layer: int
    window: int | None

    def attend(
        self, q: Float[Tensor, "batch heads 1 head_dim"], scale: float | None
    ) -> Float[Tensor, "batch 1 heads_times_dim"]:
        """Attention output of the queries; ``scale`` as for `torch.nn.functional.scaled_dot_product_attention`."""
        store, tables, positions = self.step.store, self.step.tables, self.step.positions
        values, scales = store.layer(self.layer)
        if available(q.device):
            return paged_attention(q, values, scales, tables, positions, window=self.window, scale=scale)
        keys, values = store.gather(self.layer, tables, self.step.dtype)
        key = torch.arange(keys.shape[2], device=q.device)
        mask = key <= positions
        if self.window is not None:
            mask &= positions - key < self.window
        batch, heads, _, dim = q.shape
        groups = q.reshape(batch, keys.shape[1], -1, dim)
        y = F.scaled_dot_product_attention(groups, keys, values, attn_mask=mask[:, None, None], scale=scale)
        return y.reshape(batch, 1, heads * dim)


@dataclass
class _Recorded:
    """One static shape: its input buffers on device and host, and the function that computes the logits."""

    inputs: Tensor
    host: Tensor
    run: Callable[[], Tensor]
    rotary_tables: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Rotary tables that the graph reads; referenced here, since the decoder may replace its own by longer ones."""


def _is_plain(layer: LayerSpec) -> bool:
    """Whether a recorded step can compute a layer: attention with unbounded scores, and a dense feed-forward layer."""
    attention = AttentionSpec(layer.attention.window, layer.attention.rotary, layer.attention.kv_source)
    feedforward = FeedForwardSpec(
        layer.feedforward.intermediate_size,
        layer.feedforward.activation,
        layer.feedforward.gated,
        bias=layer.feedforward.bias,
    )
    return layer == LayerSpec(attention, feedforward)


class DecodeSteps:
    """Steps of one token per sequence over one store.

    Args:
        model: the model; without experts, whose routing needs the CPU.
        store: the blocks, initially zero.
        spare_block: index of a block that belongs to no sequence.
    """

    def __init__(self, model: LanguageModel, store: PagedStore, spare_block: int) -> None:
        self.model, self.store, self.spare_block = model, store, spare_block
        self.record = model.device.type == "cuda"
        self._shapes: dict[tuple[int, int], _Recorded] = {}
        self._memory: Any = None  # handle of the memory pool that all graphs share

    @staticmethod
    def supports(model: LanguageModel) -> bool:
        """Whether steps of this model can be recorded."""
        if model.config.learned_positions or model.module.collectives is not None:  # sums wait for other processes
            return False
        return all(_is_plain(layer) for layer in model.config.layers)

    def forward(self, inputs: Sequence[ModelInput]) -> Float[Tensor, "sequences vocab"]:
        """Logits of one new token of each sequence, float32 on the CPU."""
        shape = shape_of(len(inputs), 1 + max(model_input.num_computed_tokens for model_input in inputs))
        if shape not in self._shapes:
            self._shapes[shape] = self._prepare(shape)
        step = self._shapes[shape]
        self._fill(step.host, inputs)
        step.inputs.copy_(step.host, non_blocking=True)
        return step.run()[: len(inputs)].to("cpu").float()

    def _fill(self, host: Tensor, inputs: Sequence[ModelInput]) -> None:
        """Write the inputs of the sequences; the remaining rows are idle."""
        rows = host.numpy()
        rows[len(inputs) :] = (0, 0, self.spare_block * BLOCK_SIZE, *([self.spare_block] * (rows.shape[1] - 3)))
        for row, model_input in zip(rows, inputs, strict=False):
            block, offset = divmod(model_input.num_computed_tokens, BLOCK_SIZE)
            row[:3] = (
                model_input.token_ids[0],
                model_input.num_computed_tokens,
                model_input.block_table[block] * BLOCK_SIZE + offset,
            )
            row[3 : 4 + block] = model_input.block_table[: block + 1]
            row[4 + block :] = self.spare_block

    def _prepare(self, shape: tuple[int, int]) -> _Recorded:
        """Buffers of a shape, and its graph."""
        batch, blocks = shape
        host = torch.empty(batch, 3 + blocks, dtype=torch.int64, pin_memory=self.record)
        self._fill(host, [])
        inputs = host.to(self.model.device, copy=True)
        decoder = self.model.module

        def compute() -> Tensor:
            step = StepPass(self.store, inputs, self.model.dtype)
            logits: Tensor = decoder(step.ids, cache=step)[:, 0]
            return logits

        recorded = _Recorded(inputs, host, compute)
        if self.record and len(self._shapes) < _GRAPHS:
            self._capture(recorded, compute)
        return recorded

    def _capture(self, recorded: _Recorded, compute: Callable[[], Tensor]) -> None:
        """Record a step in which all sequences are idle."""
        try:
            ahead = torch.cuda.Stream(self.model.device)
            ahead.wait_stream(torch.cuda.current_stream(self.model.device))
            with torch.cuda.stream(ahead):  # libraries initialize and Triton compiles outside the recording
                for _ in range(2):
                    compute()
            torch.cuda.current_stream(self.model.device).wait_stream(ahead)
            graph = torch.cuda.CUDAGraph()
            # the graphs never run at the same time, and logits are read before the next begins: one memory for all
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                logits = compute()
        except RuntimeError as error:
            self.record = False
            warnings.warn(f"CUDA graphs cannot be recorded, so steps start kernel by kernel: {error}", stacklevel=2)
            return
        self._memory = graph.pool()
        recorded.rotary_tables = list(self.model.module.rotary_tables())

        def replay() -> Tensor:
            graph.replay()
            return logits

        recorded.run = replay
