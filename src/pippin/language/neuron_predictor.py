"""A small network for each layer that says which neurons fire, before any of their weights is there.

Notable here:
- it has two matrices of low rank, between the input of the layer and its neurons
- a neuron that is missed changes the output, one that is read in vain does not: each layer has a threshold of its own
- training one is `pippin.language.methods.neuron_prediction`, which takes memory that answering has no use for

Source: Alizadeh et al. 2024, arXiv:2312.11514, section 3.1; the predictor of Liu et al. 2023, arXiv:2310.17157.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.core.formats import checkpoint
from pippin.language.stored_neurons import NeuronLayer, StoredNeurons
from pippin.nn.linear import Linear

_HELD_OUT: Final = 0.1
_MOST_WEIGHT: Final = 1000.0
_AT_ONCE: Final = 4096


@dataclass(frozen=True)
class NeuronPredictorConfig:
    """Shapes of a predictor.

    Attributes:
        width: size of a layer's input.
        neurons: of each layer.
        rank: inner size.
        weights: tells the neurons that it was trained for from all others.
    """

    width: int
    neurons: tuple[int, ...]
    rank: int
    weights: str


class NeuronPredictor(nn.Module):
    r"""$p = \sigma(B A x)$ for each layer, and from which p on a neuron counts as firing.

    Args:
        config: its shapes.
    """

    model_type: Final = "pippin_neuron_predictor"

    def __init__(self, config: NeuronPredictorConfig) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.ModuleList(Linear(config.width, config.rank) for _ in config.neurons)
        self.outer = nn.ModuleList(Linear(config.rank, neurons, bias=True) for neurons in config.neurons)
        self.thresholds: Tensor
        self.register_buffer("thresholds", torch.zeros(len(config.neurons)))
        for layer in (*self.inner, *self.outer):
            nn.init.normal_(layer.weight, std=layer.inputs**-0.5)

    def scores(self, layer: int, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens neurons"]:
        """Logits of p.

        Args:
            layer: its index in the file of the neurons.
            x: inputs of the layer.
        """
        found: Tensor = self.outer[layer](self.inner[layer](x.float()))
        return found

    def active(self, layer: int, x: Float[Tensor, "tokens width"]) -> Bool[Tensor, "tokens neurons"]:
        """Which neurons count as firing, for each token by itself; arguments as of `scores`."""
        return self.scores(layer, x) >= self.thresholds[layer]

    def check(self, stored: StoredNeurons) -> None:
        """Check that it was trained for the neurons of a file.

        Raises:
            InvalidArgument: it was trained for others.
        """
        if self.config.weights != fingerprint(stored):
            raise InvalidArgument(
                f"the predictor was trained for other weights than those in {stored.path}, or for these in another "
                "precision; train one for them: pippin train neuron-predictor"
            )

    def check_layers(self, layers: Sequence[NeuronLayer], why: str = "") -> None:
        """Check that it has an output for each neuron of some layers.

        Args:
            layers: those that can stay in storage with a predictor.
            why: why there are none, as the end of a sentence.

        Raises:
            InvalidArgument: it was trained for other shapes, or there are no layers.
        """
        wanted = (layers[0].width if layers else 0, tuple(layer.neurons for layer in layers))
        if wanted != (self.config.width, self.config.neurons):
            own = (
                f"{len(self.config.neurons)} layers of {max(self.config.neurons)} neurons and width {self.config.width}"
            )
            of = f"{len(layers)} of {max(wanted[1])} and width {wanted[0]}{why}" if layers else f"no such neurons{why}"
            raise InvalidArgument(f"the predictor is for {own}, and the model has {of}")

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def digest(self) -> str:
        """A name for its numbers."""
        found = hashlib.sha256()
        for tensor in self.state_dict().values():
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write it to a folder: `config.json`, which names the weights, and `model.safetensors`.

        Raises:
            DiskFull: there is less free space than it needs.
        """
        checkpoint.save(self, path, model_type=self.model_type, config=self.config)

    @classmethod
    def load(cls, path: str | Path) -> NeuronPredictor:
        """Read a folder that `save` wrote.

        Raises:
            ModelNotFound, UnsupportedModel, CorruptedFile: there is no predictor, or it is damaged.
        """
        return checkpoint.load(
            path,
            lambda saved: cls(saved.config),
            model_type=cls.model_type,
            config_type=NeuronPredictorConfig,
            device="cpu",
        )


def fingerprint(stored: StoredNeurons) -> str:
    """A name for the weights of a file."""
    found = hashlib.sha256(repr((stored.dtype, stored.layers)).encode())
    found.update(stored.checksums.tobytes())
    return found.hexdigest()
