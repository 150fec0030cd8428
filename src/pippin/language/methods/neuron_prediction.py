"""Training of the networks that say which neurons of a layer with ReLU fire, before any of its weights is there.

Notable here:
- they are trained on the inputs that the layers of a whole model have on text; nothing of the model changes
- neurons that fire are few, so those weigh as much in the loss as all that don't (balanced loss)
- each layer's threshold is the highest that finds the asked share of the firing neurons on text that was held out

Source: Alizadeh et al. 2024, arXiv:2312.11514, section 3.1; the predictor of Liu et al. 2023, arXiv:2310.17157.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.language.decoder import Decoder
from pippin.language.neuron_predictor import NeuronPredictor, NeuronPredictorConfig, fingerprint
from pippin.language.stored_neurons import StoredNeurons, neuron_layers
from pippin.nn.linear import Linear
from pippin.train import AdamW, CosineSchedule, Trainer

_HELD_OUT: Final = 0.1
_MOST_WEIGHT: Final = 1000.0
_AT_ONCE: Final = 4096


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


@checked
def fit_neuron_predictor(
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
        module: the model, with all weights in memory and not packed.
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
    held = -(-len(ids) // round(1 / _HELD_OUT))
    firing = _Firing(module, stored)
    inputs = firing.inputs(ids[:-held])
    neurons = tuple(layer.neurons for layer in stored.layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        predictor = NeuronPredictor(NeuronPredictorConfig(stored.layers[0].width, neurons, rank, fingerprint(stored)))
    Trainer(
        predictor,
        _balanced,
        _batches(firing, inputs, tokens, seed),
        steps=steps,
        optimizer=AdamW(lr=lr, weight_decay=0.0),
        schedule=CosineSchedule(warmup_steps=0.05),
        seed=seed,
        title="predictor of neurons",
        show_progress=show_progress,
    ).fit()
    predictor.eval().requires_grad_(False)
    for layer, x in enumerate(firing.inputs(ids[-held:])):
        parts = x.split(_AT_ONCE)
        scores = torch.cat([predictor.scores(layer, part)[firing.fires(layer, part)] for part in parts])
        if len(scores):
            predictor.thresholds[layer] = scores.sort().values[int((1 - recall) * len(scores))]
    return predictor, evaluate_neuron_predictor(predictor, module, stored, ids[-held:])


@torch.no_grad()
def evaluate_neuron_predictor(
    predictor: NeuronPredictor, module: Decoder, stored: StoredNeurons, ids: Int[Tensor, "sequences length"]
) -> PredictorQuality:
    """How well a predictor finds the neurons of a whole model that fire on some text.

    Args:
        predictor: of the model.
        module: the model, with all weights in memory.
        stored: the file of its neurons.
        ids: the text.

    Raises:
        InvalidArgument: neurons of another model.
    """
    predictor.check(stored)
    firing, found = _Firing(module, stored), []
    for layer, x in enumerate(firing.inputs(ids)):
        hits = fires = active = 0
        for part in x.split(_AT_ONCE):
            fired, predicted = firing.fires(layer, part), predictor.active(layer, part)
            hits, fires = hits + int((fired & predicted).sum()), fires + int(fired.sum())
            active += int(predicted.sum())
        every = len(x) * stored.layers[layer].neurons
        found.append((hits / fires if fires else 1.0, active / every, fires / every))
    return PredictorQuality(*zip(*found, strict=True))


class _Firing:
    """What the layers of a whole model are given, and which of their neurons fire.

    Only inputs are kept: neurons are many times as many numbers, and one product away.
    """

    def __init__(self, module: Decoder, stored: StoredNeurons) -> None:
        if [layer.name for layer in neuron_layers(module, predicted=True)] != [layer.name for layer in stored.layers]:
            raise InvalidArgument(f"{stored.path} has neurons of other layers than the model")
        self.module = module
        self.layers = [module.get_submodule(layer.name) for layer in stored.layers]

    @torch.no_grad()
    def inputs(self, ids: Tensor) -> list[Float[Tensor, "tokens width"]]:
        """The inputs of each layer."""
        found: list[list[Tensor]] = [[] for _ in self.layers]
        hooks = [
            layer.register_forward_pre_hook(lambda _, given, x=x: x.append(given[0].flatten(0, -2).float()))
            for layer, x in zip(self.layers, found, strict=True)
        ]
        try:
            for part in ids.split(8):
                self.module(part)
        finally:
            for hook in hooks:
                hook.remove()
        return [torch.cat(x) for x in found]

    @torch.no_grad()
    def fires(self, layer: int, x: Float[Tensor, "tokens width"]) -> Bool[Tensor, "tokens neurons"]:
        """Which neurons of a layer fire for some inputs."""
        of = self.layers[layer]
        decides = getattr(of, "gate_proj", None)
        decides = of.get_submodule("up_proj") if decides is None else decides
        assert isinstance(decides, Linear)
        y: Tensor = decides(x.to(decides.weight.dtype))
        return y > 0


_Batch = list[tuple[Tensor, Tensor]]
"""Of each layer the inputs (tokens, width), and which neurons fire (tokens, neurons)."""


def _batches(firing: _Firing, inputs: list[Tensor], tokens: int, seed: int) -> Iterator[_Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(inputs[0]), (tokens,), generator=generator)
        yield [(x[chosen], firing.fires(layer, x[chosen])) for layer, x in enumerate(inputs)]


def _balanced(model: nn.Module, batch: _Batch, generator: torch.Generator) -> Tensor:
    """Mean binary cross-entropy over all layers; firing neurons weigh as much as the others together."""
    assert isinstance(model, NeuronPredictor)
    total = torch.zeros(())
    for layer, (x, fires) in enumerate(batch):
        share = fires.float().mean().clamp(min=1 / _MOST_WEIGHT)
        weight = (1 - share) / share
        total = total + F.binary_cross_entropy_with_logits(model.scores(layer, x), fires.float(), pos_weight=weight)
    return total / len(batch)
