"""A feed-forward layer with ReLU whose neurons are in storage, and the decoder that has such layers.

Notable here:
- *exact*: the matrix whose sign decides which neurons fire is resident (the gate of a gated layer, the up matrix of a
  plain one); only the rest of those that fire is read, and outputs are those of the whole layer
- *predicted*: a small network says which neurons fire, and all matrices are in storage; a neuron that it misses counts
  as zero
- a token uses its own neurons alone, whatever those of its neighbors are

Source: Alizadeh et al. 2024, arXiv:2312.11514, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.engine.neurons.neuron_store import NeuronStore
from pippin.language.decoder import Decoder
from pippin.language.stored_neurons import neuron_layers
from pippin.nn.context import LayerContext
from pippin.nn.feedforward.feedforward import FeedForward, activate
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices, apply_adapters

if TYPE_CHECKING:
    from pippin.language.neuron_predictor import NeuronPredictor


class StoredFeedForward(nn.Module):
    """The layer; for generating alone, without gradients.

    Args:
        layer: the whole layer, of which it has the resident matrix and the biases.
        store: brings the neurons.
        index: of the layer in the store.
        predictor: says which neurons fire; None where a resident matrix does.
    """

    def __init__(
        self, layer: FeedForward, store: NeuronStore, index: int, predictor: NeuronPredictor | None = None
    ) -> None:
        super().__init__()
        assert layer.up_proj is not None
        self.spec, self.store, self.index = layer.spec, store, index
        # under the same names, so that adapters find them
        self.gate_proj, self.up_proj, self.down_proj = layer.gate_proj, layer.up_proj, layer.down_proj
        self.predictors = [] if predictor is None else [predictor]  # a list: no part of the decoder

    @torch.no_grad()
    def forward(
        self, x: Float[Tensor, "*batch width"], context: LayerContext | None = None
    ) -> Float[Tensor, "*batch width"]:
        """Apply the layer; of the context it uses the adapters.

        Raises:
            CorruptedFile: the file is damaged. InvalidArgument: the store is closed.
        """
        adapters = None if context is None else context.adapters
        flat = x.reshape(-1, x.shape[-1])
        with self.store.lock:
            y = self._computed(flat, adapters)
        return y.to(x.dtype).view_as(x)

    def _computed(self, x: Tensor, adapters: AdapterSlices | None) -> Tensor:
        """The layer for some tokens, in float32."""
        decides = self.gate_proj or self.up_proj
        inner: Tensor | None = None
        if not self.predictors:
            inner = decides(x, adapters)
            active = inner > 0
        else:
            active = self.predictors[0].active(self.index, x)
        y = torch.zeros(x.shape, dtype=torch.float32)
        rows, x32 = self.store.stored.layers[self.index], x.float()
        changes = {} if adapters is None else self._changes(x, adapters)
        whole = None if adapters is None else torch.zeros(active.shape)  # what enters the down matrix
        for neurons, bundles in self.store.pieces(self.index, active.numpy()):
            which = torch.from_numpy(neurons)
            parts = dict(zip(rows.parts, bundles.view(len(neurons), -1, rows.width).float().unbind(1), strict=True))

            def product(name: str, layer: Linear, which: Tensor = which, parts: dict[str, Tensor] = parts) -> Tensor:
                found = x32 @ parts[name].T
                found = found if layer.bias is None else found + layer.bias.float()[which]
                return found + changes[name][:, which] if name in changes else found

            first = "gate" if self.gate_proj is not None else "up"
            fires = product(first, decides) if inner is None else inner[:, which].float()
            fires = activate(fires, self.spec.activation)
            if self.gate_proj is not None:
                fires = fires * product("up", self.up_proj)
            if self.predictors:
                fires = fires * active[:, which]
            if whole is not None:
                whole[:, which] = fires
            y += fires @ parts["down"]
        if self.down_proj.bias is not None:
            y += self.down_proj.bias.float()
        return y if whole is None or adapters is None else apply_adapters(self.down_proj, whole, y, adapters)

    def _changes(self, x: Tensor, adapters: AdapterSlices) -> dict[str, Tensor]:
        """What adapters add to the matrices that are in storage, for all neurons."""
        found = {}
        for name, layer in (("gate", self.gate_proj), ("up", self.up_proj)):
            if layer is not None and name in self.store.stored.layers[self.index].parts:
                found[name] = apply_adapters(layer, x, torch.zeros(len(x), layer.outputs, dtype=x.dtype), adapters)
        return found


class Attached:
    """The layers of a decoder while their neurons come from a store.

    Args:
        module: the decoder, changed in place.
        store: brings the neurons.
        predictor: says which of them fire; None where the resident matrices do.

    Raises:
        InvalidArgument: the file is one of other layers, or holds matrices that nothing predicts.
    """

    def __init__(self, module: Decoder, store: NeuronStore, predictor: NeuronPredictor | None = None) -> None:
        wanted = {layer.name: layer for layer in neuron_layers(module, predicted=predictor is not None)}
        self.module, self._whole = module, {}
        for index, layer in enumerate(store.stored.layers):
            found = wanted.get(layer.name)
            if found is None or (found.parts, found.neurons, found.width) != (layer.parts, layer.neurons, layer.width):
                raise InvalidArgument(
                    f"{store.stored.path} has {', '.join(layer.names)} of {layer.neurons} neurons, which do not fit "
                    f"the decoder{' with' if predictor is not None else ' without'} a predictor"
                )
            whole = module.get_submodule(layer.name)
            assert isinstance(whole, FeedForward)
            self._whole[layer.name] = whole, StoredFeedForward(whole, store, index, predictor)
        if predictor is not None:
            predictor.check(store.stored)
        for name, (_, stored) in self._whole.items():
            module.get_submodule(name.rpartition(".")[0]).mlp = stored
        # a runner says itself what a pass computes
        self._hook = module.register_forward_pre_hook(
            lambda _, given: store.begin_pass([given[0].shape[1]] * len(given[0]))
        )

    def detach(self) -> None:
        """Give the decoder its own layers back."""
        self._hook.remove()
        for name, (whole, _) in self._whole.items():
            self.module.get_submodule(name.rpartition(".")[0]).mlp = whole
