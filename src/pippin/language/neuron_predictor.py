"""A small network for each layer that says which neurons fire, before any of their weights is there.

Notable here:
- it has two matrices of low rank, between the input of the layer and its neurons, and is trained on text alone
- neurons that fire are few, so those weigh as much in the loss as all that don't (balanced loss)
- a neuron that is missed changes the output, one that is read in vain does not: each layer's threshold is the highest
  that finds the asked share of the firing neurons on text that was held out

Source: Alizadeh et al. 2024, arXiv:2312.11514, section 3.1; the predictor of Liu et al. 2023, arXiv:2310.17157.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.formats import checkpoint
from pippin.language.decoder import Decoder
from pippin.language.stored_neurons import StoredNeurons, neuron_layers
from pippin.nn.linear import Linear
from pippin.train import AdamW, CosineSchedule, Trainer

_HELD_OUT: Final = 0.1
_MOST_WEIGHT: Final = 1000.0


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
                f"the predictor was trained for other weights than those in {stored.path}; train one for these with "
                "`fit_predictor`"
            )

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


@dataclass(frozen=True)
class PredictorQuality:
    """How well a predictor finds the neurons that fire, on text that it was not trained on.

    Attributes:
        recall: of each layer, the share of the firing neurons that it finds.
        predicted: of each layer, the share of all neurons that it finds.
        active: of each layer, the share of all neurons that fire.
    """

    recall: tuple[float, ...]
    predicted: tuple[float, ...]
    active: tuple[float, ...]


def fingerprint(stored: StoredNeurons) -> str:
    """A name for the weights of a file."""
    found = hashlib.sha256(repr((stored.dtype, stored.layers)).encode())
    found.update(stored.checksums.tobytes())
    return found.hexdigest()


@checked
def fit_predictor(
    module: Decoder,
    stored: StoredNeurons,
    ids: Int[Tensor, "sequences length"],
    *,
    rank: PositiveInt = 128,
    steps: PositiveInt = 500,
    tokens: PositiveInt = 256,
    lr: PositiveFloat = 3e-3,
    recall: Annotated[float, Gt(0), Lt(1)] = 0.98,
    seed: int = 0,
    show_progress: bool = True,
) -> tuple[NeuronPredictor, PredictorQuality]:
    """Train a predictor on the inputs that the layers of a whole model have on some text.

    Args:
        module: the model, with all weights in memory.
        stored: the file of its neurons.
        ids: the text, at least ten sequences; the last tenth of them is held out.
        rank: inner size of the predictor.
        steps: of the optimizer.
        tokens: of each step.
        lr: highest learning rate.
        recall: share of the firing neurons that the thresholds find on the held-out text.
        seed: of weights and batches.
        show_progress: whether a progress bar is shown.

    Raises:
        InvalidArgument: fewer than ten sequences, or neurons of another model.
        NonFiniteLoss: the training diverged.
    """
    if len(ids) < round(1 / _HELD_OUT):
        raise InvalidArgument(f"a predictor needs {round(1 / _HELD_OUT)} sequences at least, got {len(ids)}")
    if [layer.name for layer in neuron_layers(module, predicted=True)] != [layer.name for layer in stored.layers]:
        raise InvalidArgument(f"{stored.path} has neurons of other layers than the model")
    held = -(-len(ids) // round(1 / _HELD_OUT))
    seen, unseen = _recorded(module, stored, ids[:-held]), _recorded(module, stored, ids[-held:])
    neurons = tuple(layer.neurons for layer in stored.layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        predictor = NeuronPredictor(NeuronPredictorConfig(stored.layers[0].width, neurons, rank, fingerprint(stored)))
    Trainer(
        predictor,
        _balanced,
        _batches(seen, tokens, seed),
        steps=steps,
        optimizer=AdamW(lr=lr, weight_decay=0.0),
        schedule=CosineSchedule(warmup_steps=0.05),
        seed=seed,
        title="predictor of neurons",
        show_progress=show_progress,
    ).fit()
    predictor.eval().requires_grad_(False)
    found: list[tuple[float, float, float]] = []
    for layer, (x, fires) in enumerate(unseen):
        scores = predictor.scores(layer, x)
        firing = scores[fires]
        if len(firing):
            predictor.thresholds[layer] = firing.sort().values[int((1 - recall) * len(firing))]
        active = predictor.active(layer, x)
        share = float(active[fires].float().mean()) if len(firing) else 1.0
        found.append((share, float(active.float().mean()), float(fires.float().mean())))
    return predictor, PredictorQuality(*zip(*found, strict=True))


_Recorded = list[tuple[Tensor, Tensor]]
"""Of each layer the inputs (tokens, width), and which neurons fire (tokens, neurons)."""


@torch.no_grad()
def _recorded(module: Decoder, stored: StoredNeurons, ids: Tensor) -> _Recorded:
    inputs: list[list[Tensor]] = [[] for _ in stored.layers]
    fires: list[list[Tensor]] = [[] for _ in stored.layers]
    hooks = []
    for layer, x, fired in zip(stored.layers, inputs, fires, strict=True):
        mlp = module.get_submodule(layer.name)

        def note(_: nn.Module, given: tuple[Any, ...], y: Tensor, x: list[Tensor] = x, fired: Any = fired) -> None:
            x.append(given[0].flatten(0, -2).float())
            fired.append((y > 0).flatten(0, -2))

        decides = getattr(mlp, "gate_proj", None)
        hooks.append((mlp.get_submodule("up_proj") if decides is None else decides).register_forward_hook(note))
    try:
        for part in ids.split(8):
            module(part)
    finally:
        for hook in hooks:
            hook.remove()
    return [(torch.cat(x), torch.cat(fired)) for x, fired in zip(inputs, fires, strict=True)]


def _batches(recorded: _Recorded, tokens: int, seed: int) -> Iterator[_Recorded]:
    generator = torch.Generator().manual_seed(seed)
    count = len(recorded[0][0])
    while True:
        chosen = torch.randint(count, (tokens,), generator=generator)
        yield [(x[chosen], fires[chosen]) for x, fires in recorded]


def _balanced(model: nn.Module, batch: _Recorded, generator: torch.Generator) -> Tensor:
    """Mean binary cross-entropy over all layers; firing neurons weigh as much as the others together."""
    assert isinstance(model, NeuronPredictor)
    total = torch.zeros(())
    for layer, (x, fires) in enumerate(batch):
        share = fires.float().mean().clamp(min=1 / _MOST_WEIGHT)
        weight = (1 - share) / share
        total = total + F.binary_cross_entropy_with_logits(model.scores(layer, x), fires.float(), pos_weight=weight)
    return total / len(batch)
