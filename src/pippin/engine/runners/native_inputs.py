"""The inputs of a pass in the layout of the native library: tokens and tables of all sequences, and rarer parts.

Notable here:
- tokens, tables and outputs lie end to end in arrays whose addresses the library gets; nothing is copied to tensors
- what few passes have (positions, given embeddings, steering, masks of experts, captures) costs a plain pass one check
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.engine.model_runner import BLOCK_SIZE, Capture, ModelInput
from pippin.language.decoder_config import DecoderConfig
from pippin.language.language_model import LanguageModel
from pippin.nn.lora import Adapter
from pippin.nn.steering import Steering


class PackedInputs:
    """The new tokens of several sequences packed end to end, as the library reads them.

    Raises:
        InvalidArgument: tokens, a table or outputs that are impossible; ids and blocks are checked by the library.
    """

    def __init__(self, inputs: Sequence[ModelInput]) -> None:
        self.ids, self.num_computed_tokens, self.tables, self.rows = array("i"), array("i"), array("i"), array("i")
        self.starts, self.table_starts = array("i", (0,)), array("i", (0,))
        self.counts: list[int] = []
        self.shares: list[tuple[Adapter, int, int]] = []
        self.longest = begin = 0
        for model_input in inputs:
            try:
                self.ids.extend(model_input.token_ids)
            except OverflowError as error:
                raise InvalidArgument(f"a token id does not fit into 32 bits: {error}") from error
            end = len(self.ids)
            count, outputs = end - begin, model_input.outputs
            needed = -(-(model_input.num_computed_tokens + count) // BLOCK_SIZE)
            shortest = min(map(len, model_input.tables))
            apart = model_input.heads is not None  # whose tables the library checks
            if count == 0 or model_input.num_computed_tokens < 0 or (needed > shortest and not apart):
                raise InvalidArgument(
                    f"{count} new tokens after {model_input.num_computed_tokens} older ones cannot be computed with "
                    f"{shortest} blocks of {BLOCK_SIZE}"
                )
            if outputs and not (outputs[0] >= 0 and outputs[-1] < count):
                raise InvalidArgument(f"outputs {list(outputs)} were asked for of {count} tokens")
            self.rows.extend([begin + row for row in outputs])
            self.starts.append(end)
            self.num_computed_tokens.append(model_input.num_computed_tokens)
            self.counts.append(len(outputs))
            self.longest = max(self.longest, model_input.num_computed_tokens + count)
            if model_input.adapter is not None:
                self.shares.append((model_input.adapter, begin, end))
            begin = end
        self.inputs = inputs
        for tables in zip(*(model_input.tables for model_input in inputs), strict=True):
            for model_input, table in zip(inputs, tables, strict=True):
                needed = -(-(model_input.num_computed_tokens + len(model_input.token_ids)) // BLOCK_SIZE)
                self.tables.extend(table if needed == len(table) else table[:needed])
                self.table_starts.append(len(self.tables))


class Extras:
    """What few passes have: positions, given embeddings, steering, masks of experts, and what is captured.

    Args:
        packed: the inputs of the pass.
        model: the model.
        first: the first layer of the pass.

    Attributes:
        furthest: number of positions that the rotary tables must have.
    """

    def __init__(self, packed: PackedInputs, model: LanguageModel, first: int) -> None:
        self.furthest, self._packed, self._model, self._first = packed.longest, packed, model, first
        self._alive: list[Any] = []
        self._positions: Tensor | None = None
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._received: list[tuple[Capture, Tensor, int]] = []
        self.plain = all(is_plain(model_input, len(model_input.tables)) for model_input in packed.inputs)
        if not self.plain and any(model_input.positions is not None for model_input in packed.inputs):
            self._positions = self._all_positions()
            self.furthest = max(self.furthest, int(self._positions.max()) + 1)

    def fill(self, batch: native.NativeBatch) -> None:
        """Add what there is to the library's structure."""
        if self.plain:
            return
        inputs = self._packed.inputs
        spans = list(zip(inputs, self._packed.starts, self._packed.starts[1:], strict=False))
        if self._positions is not None:
            batch.axes, batch.positions = len(self._positions), self._positions.data_ptr()
        if any(model_input.visible is not None for model_input in inputs):
            visible = array("i")
            for w in inputs:
                own = range(w.num_computed_tokens, w.num_computed_tokens + len(w.token_ids))
                visible.extend(own if w.visible is None else w.visible)
            batch.visible = address(self._keep(visible))
        given = [(rows, begin + at) for w, begin, _ in spans for at, rows in w.embeddings]
        if given and self._first == 0:
            rows = [self._keep(each.detach().to("cpu", torch.float32).contiguous()) for each, _ in given]
            listed = (native.NativeEmbeddings * len(given))()
            for index, (each, (_, begin)) in enumerate(zip(rows, given, strict=True)):
                listed[index] = native.NativeEmbeddings(each.data_ptr(), begin, len(each))
            batch.givens, batch.given = len(given), listed
        steered = [(w.steering, begin, end) for w, begin, end in spans if w.steering is not None]
        if steered:
            vectors = (native.NativeSteering * len(steered))()
            for index, (steering, begin, end) in enumerate(steered):
                scale, shift = self._sites(steering)
                vectors[index] = native.NativeSteering(ctypes.addressof(scale), ctypes.addressof(shift), begin, end)
            batch.steerings, batch.steering = len(steered), vectors
        self._fill_experts(batch)
        self._fill_captures(batch)
        self._fill_heads(batch)

    def give(self) -> None:
        """Hand over what was captured."""
        if self.plain:
            return
        at = 0
        for model_input in self._packed.inputs:
            capture, count = model_input.capture, len(model_input.outputs)
            if capture is not None and capture.hidden and self._before is not None:
                capture.hidden_states = self._before[at : at + count].clone()
            if capture is not None and capture.normalized and self._after is not None:
                capture.normalized_states = self._after[at : at + count].clone()
            at += count
        for capture, received, length in self._received:
            assert capture.attention is not None
            config = self._model.config
            for layer, each in zip(config.cached_layers, received, strict=True):
                heads = config.layers[layer].attention.num_key_value_heads or config.num_key_value_heads
                capture.attention.received[layer] = each[:heads, :length]

    def _keep(self, data: Any) -> Any:
        """Keep memory alive until the pass is over."""
        self._alive.append(data)
        return data

    def _all_positions(self) -> Tensor:
        inputs = self._packed.inputs
        axes = max(1 if w.positions is None else len(w.positions) for w in inputs)
        parts = []
        for w in inputs:
            own = torch.arange(w.num_computed_tokens, w.num_computed_tokens + len(w.token_ids))[None]
            parts.append((own if w.positions is None else w.positions.cpu()).to(torch.int32).expand(axes, -1))
        return torch.cat(parts, 1).contiguous()

    def _sites(self, steering: Steering) -> tuple[Any, Any]:
        """The addresses of a steering's factors and summands, by site."""
        names, like = _steering_sites(self._model.config), torch.empty(0)
        scale, shift = ((ctypes.c_void_p * len(names))() for _ in range(2))
        for index, name in enumerate(names):
            found = None if name is None else steering.at(name, like)
            if found is not None:
                scale[index], shift[index] = found[0].data_ptr(), found[1].data_ptr()
        return self._keep(scale), self._keep(shift)

    def _fill_experts(self, batch: native.NativeBatch) -> None:
        inputs = self._packed.inputs
        masks = [w.experts for w in inputs if w.experts is not None]
        if not masks:
            return
        addresses = (ctypes.c_void_p * len(inputs))()
        for index, w in enumerate(inputs):
            if w.experts is not None:
                addresses[index] = self._keep(w.experts.multipliers).data_ptr()
        batch.experts, batch.expert_columns = ctypes.addressof(self._keep(addresses)), masks[0].allowed.shape[1]

    def _fill_heads(self, batch: native.NativeBatch) -> None:
        inputs, config = self._packed.inputs, self._model.config
        if all(w.heads is None for w in inputs):
            return
        listed, addresses = (native.Ragged * len(inputs))(), (ctypes.c_void_p * len(inputs))()
        for index, heads in enumerate(w.heads for w in inputs):
            if heads is None:
                continue
            shape = (len(config.cached_layers), config.num_key_value_heads)
            for part in (heads.tables, heads.lost):
                if part.shape[:2] != shape or part.dtype != torch.int32 or not part.is_contiguous():
                    raise InvalidArgument(
                        f"tables of heads must be int32, contiguous and begin with the shape {shape}, got "
                        f"{part.dtype} of shape {tuple(part.shape)}"
                    )
            listed[index] = native.Ragged(heads.tables.data_ptr(), heads.lost.data_ptr(), heads.tables.shape[2])
            addresses[index] = ctypes.addressof(listed[index])
        batch.ragged = ctypes.addressof(self._keep(addresses))
        self._keep(listed)

    def _fill_captures(self, batch: native.NativeBatch) -> None:
        config, captures = self._model.config, [w.capture for w in self._packed.inputs if w.capture is not None]
        outputs = len(self._packed.rows)
        if outputs and any(capture.hidden for capture in captures):
            self._before = torch.empty(outputs, config.hidden_size)
            batch.before_norm = self._before.data_ptr()
        if outputs and any(capture.normalized for capture in captures):
            self._after = torch.empty(outputs, config.hidden_size)
            batch.hidden = self._after.data_ptr()
        watched = [
            (index, w.capture, w.num_computed_tokens + len(w.token_ids) - (w.heads.least_lost if w.heads else 0))
            for index, w in enumerate(self._packed.inputs)
            if w.capture is not None and w.capture.attention is not None and config.cached_layers
        ]
        listed = (native.Observed * len(watched))()
        for at, (index, capture, length) in enumerate(watched):
            received = torch.zeros(len(config.cached_layers), config.num_key_value_heads, length)
            self._received.append((capture, received, length))
            wanted = capture.attention
            assert wanted is not None
            before = -1 if wanted.before is None else wanted.before
            listed[at] = native.Observed(received.data_ptr(), length, index, wanted.reduction == "max", before, 0)
        if watched:
            batch.observations, batch.observed = len(watched), listed


_SITES: Final[dict[str, tuple[str | None, ...]]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "pre and post": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm", None, None, None),
    "parallel two norms": ("input_layernorm", None, "post_attention_layernorm", None),
}
"""The norms of a layer before attention, after it, before the feed-forward layer and after it."""


def _steering_sites(config: DecoderConfig) -> list[str | None]:
    """Name in the decoder of each of the library's sites; None for those without a norm."""
    found: list[str | None] = []
    for index, layer in enumerate(config.layers):
        norms = _SITES[layer.residual or config.residual]
        found += [None if name is None else f"layers.{index}.{name}" for name in norms]
        found.append(f"layers.{index}")
    return [*found, "norm"]


def is_plain(model_input: ModelInput, groups: int) -> bool:
    """Whether an input has none of what `Extras` adds."""
    return (
        model_input.positions is None
        and model_input.visible is None
        and not model_input.embeddings
        and model_input.experts is None
        and model_input.steering is None
        and model_input.capture is None
        and model_input.heads is None
        and len(model_input.other_tables) == groups - 1
    )


def address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
