"""Recurrent layers as the native library reads them, and the states of sequences around a pass.

Notable here:
- a state is laid out as `pippin.nn.recurrent` lays it out, so that torch and the kernels go on from each other's
- a pass writes the states of all layers of a sequence into new memory, and hands them over when it is done
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.engine.model_runner import ModelInput
from pippin.language.decoder_config import DecoderConfig
from pippin.nn.linear import Linear
from pippin.nn.recurrent.convolution import CausalConvolution, ShortConvolution
from pippin.nn.recurrent.gated_delta import GatedDeltaNet, LowRankLinear
from pippin.nn.recurrent.mamba2 import Mamba2
from pippin.nn.recurrent.rg_lru import RGLRU, SHARPNESS
from pippin.nn.recurrent.states import StatefulLayer


class RecurrentStates:
    """The states of some sequences before and after a pass.

    Args:
        inputs: the sequences; their states are replaced by `give`.
        config: the decoder, which has recurrent layers.

    Raises:
        InvalidArgument: states that do not fit the model or the tokens that were computed.
    """

    def __init__(self, inputs: Sequence[ModelInput], config: DecoderConfig) -> None:
        specs = [(layer, config.layers[layer].recurrent) for layer in config.recurrent_layers]
        self._sizes = {layer: spec.state_size(config.hidden_size) for layer, spec in specs if spec is not None}
        self._inputs = inputs
        for model_input in inputs:
            self._check(model_input)
        self._new = [torch.empty(sum(self._sizes.values())) for _ in inputs]
        starts = [0, *accumulate(4 * size for size in self._sizes.values())]
        before, after = [], []
        for layer, start in zip(self._sizes, starts, strict=False):
            before += [w.states[layer].data_ptr() if w.num_computed_tokens else None for w in inputs]
            after += [new.data_ptr() + start for new in self._new]
        self._before = (ctypes.c_void_p * len(before))(*before)
        self._after = (ctypes.c_void_p * len(after))(*after)

    def fill(self, batch: native.NativeBatch) -> None:
        """Add the states to the library's structure."""
        batch.states, batch.new_states = ctypes.addressof(self._before), ctypes.addressof(self._after)

    def give(self) -> None:
        """Hand the new states over."""
        for model_input, new in zip(self._inputs, self._new, strict=True):
            model_input.states.update(zip(self._sizes, new.split(list(self._sizes.values())), strict=True))

    def _check(self, model_input: ModelInput) -> None:
        held = model_input.num_computed_tokens
        if set(model_input.states) != (set(self._sizes) if held else set()):
            raise InvalidArgument(
                f"a sequence of {held} tokens brought the states of layers {sorted(model_input.states)}, the model "
                f"keeps those of layers {list(self._sizes)}"
            )
        for layer, state in model_input.states.items():
            if state.dtype != torch.float32 or state.device.type != "cpu" or not state.is_contiguous():
                raise InvalidArgument(f"the state of layer {layer} must be float32, contiguous and on the CPU")
            if state.numel() != self._sizes[layer]:
                raise InvalidArgument(
                    f"the state of layer {layer} has {state.numel()} elements, the model needs {self._sizes[layer]}"
                )


Matrix = Callable[[Linear], tuple[native.NativeMatrix, int | None]]
"""Describes a linear layer: its packed weight, and the address of its bias."""
Floats = Callable[[Tensor], int]
"""The address of a float32 copy of a tensor."""


def describe(layer: StatefulLayer, matrix: Matrix, floats: Floats) -> native.NativeRecurrent:
    """A recurrent layer in the library's structure.

    Args:
        layer: the layer.
        matrix: describes a linear layer.
        floats: gives the address of a tensor.

    Raises:
        InvalidArgument: the kernels have no such recurrence.
    """
    to = native.NativeRecurrent(groups=1, beta=1.0)
    for index, part in enumerate(inputs_of(layer)):
        if part is not None:
            to.inputs[index], to.input_biases[index] = matrix(part)
    if isinstance(layer, ShortConvolution):
        to.kind, to.heads, to.value_dim = native.RECURRENCES["convolution"], 1, layer.width
        _convolution(to, [layer.conv], floats)
    elif isinstance(layer, GatedDeltaNet):
        _delta(to, layer, floats)
    elif isinstance(layer, Mamba2):
        _state_space(to, layer, floats)
    elif isinstance(layer, RGLRU):
        _gated_unit(to, layer, floats)
    else:
        raise InvalidArgument(f"the native kernels have no {type(layer).__name__}")
    to.out, to.out_bias = matrix(layer.out_proj)
    return to


def inputs_of(layer: StatefulLayer) -> Iterator[Linear | None]:
    """The linear layers before a recurrence, in the library's order; None where there is none."""
    parts: list[Any] = []
    if isinstance(layer, GatedDeltaNet):
        parts = [layer.q_proj, layer.k_proj, layer.v_proj, layer.b_proj, layer.a_proj, layer.gate_proj]
        if isinstance(layer.a_proj, LowRankLinear) and isinstance(layer.gate_proj, LowRankLinear):
            parts[4:] = [layer.a_proj.down, layer.gate_proj.down, layer.a_proj.up, layer.gate_proj.up]
    elif isinstance(layer, RGLRU):
        parts = [layer.x_proj, layer.gate_proj]
    elif isinstance(layer, ShortConvolution | Mamba2):
        parts = [layer.in_proj]
    yield from (*parts, *(None,) * (native.RECURRENT_INPUTS - len(parts)))


def _convolution(to: native.NativeRecurrent, parts: Sequence[CausalConvolution], floats: Floats) -> None:
    """Taps of all channels, (taps, channels), and their biases."""
    taps = torch.cat([part.weight[:, 0] for part in parts]).T
    to.taps, to.conv = len(taps), floats(taps)
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    if biases:
        to.conv_bias = floats(torch.cat(biases))


def _delta(to: native.NativeRecurrent, layer: GatedDeltaNet, floats: Floats) -> None:
    spec = layer.spec
    to.kind, to.heads, to.groups = native.RECURRENCES["delta rule"], spec.value_heads, spec.key_heads
    to.key_dim, to.value_dim, to.decays, to.beta = spec.key_dim, spec.value_dim, spec.decays, spec.beta
    to.tiled = int(spec.tiled)
    _convolution(to, [layer.q_conv, layer.k_conv, layer.v_conv], floats)
    to.rate, to.step_bias = floats(-layer.A_log.float().exp()), floats(layer.dt_bias)
    to.norm, to.norm_size = floats(layer.norm.weight.repeat(spec.value_heads)), spec.value_dim
    to.gate, to.eps = native.GATES[layer.norm.gate], layer.norm.eps


def _state_space(to: native.NativeRecurrent, layer: Mamba2, floats: Floats) -> None:
    spec = layer.spec
    to.kind, to.heads, to.groups = native.RECURRENCES["state space"], spec.heads, spec.groups
    to.key_dim, to.value_dim = spec.state, spec.head_dim
    to.min_step, to.max_step = spec.min_step, spec.max_step
    _convolution(to, [layer.conv], floats)
    to.rate, to.step_bias = floats(-layer.A_log.float().exp()), floats(layer.dt_bias)
    to.skip = floats(layer.D)
    to.gate = native.GATES["silu after" if layer.norm is None else layer.norm.gate]
    if layer.norm is not None:
        to.norm, to.norm_size = floats(layer.norm.weight), spec.inner // layer.norm.groups
        to.eps = layer.norm.eps


def _gated_unit(to: native.NativeRecurrent, layer: RGLRU, floats: Floats) -> None:
    spec = layer.spec
    to.kind, to.heads = native.RECURRENCES["gated unit"], spec.heads
    to.value_dim = spec.size // spec.heads
    _convolution(to, [layer.conv], floats)
    to.rate = floats(-SHARPNESS * F.softplus(layer.recurrent_param.float()))
    for index, name in enumerate(("input", "recurrent")):
        to.open[index] = floats(getattr(layer, f"{name}_gate_weight"))
        to.open_bias[index] = floats(getattr(layer, f"{name}_gate_bias"))
    to.gate, to.activation = native.GATES["activated"], native.ACTIVATIONS[spec.activation]
