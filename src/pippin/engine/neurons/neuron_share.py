"""Neurons in storage for a model with a budget of memory: from its placement to layers that compute with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from pippin.core.errors import CorruptedFile, PippinError
from pippin.core.files import atomic_write
from pippin.core.formats.checkpoint import read_json
from pippin.engine.neurons.neuron_store import NeuronStore
from pippin.engine.neurons.stored_feedforward import Attached
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language.memory_placement import Placement
from pippin.language.stored_neurons import StoredNeurons

_HOT = "hot.json"


class PlacedNeurons:
    """The store of a model's neurons, and its layers while they come from there.

    Neurons are kept until others need their room: what a budget leaves would be of no use otherwise. It begins with
    those that were used most before.

    Args:
        placement: the budget, and the neurons in storage.
        runner: computes the model.
        share: what neurons may take.

    Raises:
        CorruptedFile: the file was changed since the model was loaded, or is damaged where neurons are read first.
    """

    def __init__(self, placement: Placement, runner: TorchRunner, share: Callable[[int, int], int]) -> None:
        placement.check_files()
        stored = placement.neurons
        assert stored is not None
        capacity = max(placement.least_room, min(stored.nbytes, placement.budget.nbytes))
        self.store = NeuronStore(stored, capacity, window=None, share=share)
        try:
            self.store.warm(_read_hot(stored))
            self._attached = Attached(runner.model.module, self.store, placement.predictor)
        except BaseException:  # a damaged file, or an interrupt
            self.store.close()
            raise
        runner.fetch_neurons(self.store)

    def close(self) -> None:
        """Give the decoder its own layers back, which have no weights, and close the file.

        Which neurons were used most is kept beside it, where that can be written.
        """
        self._attached.detach()
        self.store.close()
        used = [neurons.tolist() for neurons in self.store.most_used()]
        if any(used):
            # the next start is only slower without it
            with suppress(PippinError, OSError), atomic_write(_hot_path(self.store.stored), mode="w") as file:
                json.dump({"neurons": used}, file)


def _hot_path(stored: StoredNeurons) -> Path:
    return stored.path.parent / _HOT


def _read_hot(stored: StoredNeurons) -> list[np.ndarray]:
    """Of each layer, the neurons that were used most; none where there is no such file."""
    nothing = [np.empty(0, dtype=np.int64) for _ in stored.layers]
    try:
        found = [np.array(layer, dtype=np.int64) for layer in read_json(_hot_path(stored))["neurons"]]
        fits = [len(set(each.tolist())) == each.size and each.ndim == 1 for each in found]
        inside = [
            not each.size or (each.min() >= 0 and each.max() < layer.neurons)
            for each, layer in zip(found, stored.layers, strict=True)
        ]
    except (OSError, CorruptedFile, KeyError, TypeError, ValueError, OverflowError):  # it is written anew at the end
        return nothing
    return found if all(fits) and all(inside) else nothing
