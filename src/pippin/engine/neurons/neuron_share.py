"""Neurons in storage for a model with a budget of memory: from its placement to layers that compute with them."""

from __future__ import annotations

from collections.abc import Callable

from pippin.engine.neurons.neuron_store import NeuronStore
from pippin.engine.neurons.stored_feedforward import Attached
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language.memory_placement import Placement


class PlacedNeurons:
    """The store of a model's neurons, and its layers while they come from there.

    Neurons are kept until others need their room: what a budget leaves would be of no use otherwise.

    Args:
        placement: the budget, and the neurons in storage.
        runner: computes the model.
        share: what neurons may take.

    Raises:
        CorruptedFile: the file was changed since the model was loaded.
    """

    def __init__(self, placement: Placement, runner: TorchRunner, share: Callable[[int, int], int]) -> None:
        placement.check_files()
        stored = placement.neurons
        assert stored is not None
        capacity = max(placement.least_room, min(stored.nbytes, placement.budget.nbytes))
        self.store = NeuronStore(stored, capacity, window=None, share=share)
        self._attached = Attached(runner.model.module, self.store, placement.predictor)
        runner.fetch_neurons(self.store)

    def close(self) -> None:
        """Give the decoder its own layers back, which have no weights, and close the file."""
        self._attached.detach()
        self.store.close()
