"""Byte models of which few neurons fire, and what they read of a file while they go through a text.

Notable here:
- every arm goes through the same texts, one text after the other with all arms in turn, so that a noisy disk meets all
- what fires is noted where the store is asked for it: the curve of neurons over windows is counted from sets, not reads
- naive loading has half of each layer in memory and reads the other half for each token, in large parts on all threads
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippin.claims.worlds.sequences.byte_text import VOCABULARY, byte_decoder, byte_model, byte_text, train_bytes
from pippin.core.direct_file import BLOCK, DirectFile
from pippin.engine.model_runner import ModelInput
from pippin.engine.neurons import Attached, NeuronReader, NeuronStore
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language import Decoder, DecoderConfig, LayerSpec
from pippin.language.methods.neuron_prediction import fit_neuron_predictor
from pippin.language.neuron_predictor import NeuronPredictor
from pippin.language.objectives import NextToken
from pippin.language.stored_neurons import StoredNeurons, neuron_layers, write_neurons
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForward, FeedForwardSpec
from pippin.train.objective import Loss, as_loss

WINDOW, THREADS, PROMPT, LENGTH = 5, 8, 64, 128
SPARSITY_WEIGHT = 0.1
"""Of the sparsity term: about 95 % of the neurons are zero, as in the models of the paper (90 to 97 %). With 1 it is
99.8 %, and always the same neurons are nearly as good as the right ones."""
LOSS, BYTES, NEURONS, SECONDS = "held-out loss", "bytes read for a token", "bytes of neurons for a token", "seconds"
USEFUL, PEAK = "useful bytes in a second of reading", "most bytes of neurons in memory"


class SparseActivations:
    """The likelihood of the next byte, and the mean size of what enters the down matrices.

    Args:
        weight: of the mean size.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """The loss of a batch."""
        sizes: list[Tensor] = []
        hooks = [
            part.down_proj.register_forward_pre_hook(lambda _, given: sizes.append(given[0].abs().mean()))
            for part in model.modules()
            if isinstance(part, FeedForward)
        ]
        try:
            loss = as_loss(NextToken()(model, batch, generator))
        finally:
            for hook in hooks:
                hook.remove()
        return Loss(loss.total + loss.count * self.weight * torch.stack(sizes).sum(), loss.count)


def relu_config(width: int, neurons: int, layers: int) -> DecoderConfig:
    """Config of a byte decoder with plain ReLU layers."""
    layer = LayerSpec(AttentionSpec(rotary=Rotary()), FeedForwardSpec(neurons, "relu", gated=False))
    return DecoderConfig("arcee", VOCABULARY, width, (layer,) * layers, 4, 2, width // 4, 4096)


@dataclass(frozen=True)
class Sparse:
    """A trained model with the file of its neurons.

    Attributes:
        module: the model, whole.
        stored: its neurons with all matrices, in bundles.
        apart: the same numbers with a region of the file for each matrix.
        exact: the neurons without the matrices whose sign decides which of them fire.
        predictor: says which neurons fire.
        frequent: of each layer, which neurons fire most often on training text: as many as the predictor finds.
    """

    module: Decoder
    stored: StoredNeurons
    apart: StoredNeurons
    exact: StoredNeurons
    predictor: NeuronPredictor
    frequent: list[Tensor]


def train(seed: int, *, width: int, neurons: int, layers: int, steps: int, rate: float) -> Decoder:
    """Train a model until few of its neurons fire.

    Args:
        seed: of weights and batches.
        width: of the model.
        neurons: of each layer.
        layers: their number.
        steps: optimizer steps.
        rate: highest learning rate.
    """
    module = byte_decoder(relu_config(width, neurons, layers), seed=seed)
    train_bytes(
        module, steps=steps, seed=seed, rows=4, length=LENGTH, lr=rate, objective=SparseActivations(SPARSITY_WEIGHT)
    )
    return module.eval().requires_grad_(False)


@contextmanager
def in_storage(module: Decoder, *, predictor_steps: int, seed: int) -> Iterator[Sparse]:
    """Write the neurons of a model and train a predictor of them; files are there as long as the context is.

    Args:
        module: the model.
        predictor_steps: optimizer steps of the predictor.
        seed: of its weights and batches.
    """
    bundled, exact = neuron_layers(module, predicted=True), neuron_layers(module)
    alone = [type(each)(each.name, (part,), each.neurons, each.width) for each in bundled for part in each.parts]
    with tempfile.TemporaryDirectory() as folder:

        def write(name: str, layers: Any) -> StoredNeurons:
            return write_neurons(Path(folder) / name, layers, module.get_parameter, "float32")

        stored = write("bundled", bundled)
        text = byte_text().train
        rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
        rows = rows[:: max(1, len(rows) // 256)]
        predictor, quality = fit_neuron_predictor(
            module, stored, rows, steps=predictor_steps, recall=0.98, seed=seed, show_progress=False
        )
        frequent = []
        for often, share in zip(firing_shares(module, stored, rows[:32]), quality.predicted, strict=True):
            frequent.append(torch.zeros(len(often), dtype=torch.bool))
            frequent[-1][often.topk(round(share * len(often))).indices] = True
        yield Sparse(module, stored, write("apart", alone), write("exact", exact), predictor, frequent)


@torch.no_grad()
def firing_shares(module: Decoder, stored: StoredNeurons, ids: Tensor) -> list[Tensor]:
    """Of each layer, the share of tokens for which each neuron fires."""
    found: list[Tensor] = []
    ups = [module.get_submodule(f"{layer.name}.up_proj") for layer in stored.layers]
    hooks = [
        up.register_forward_hook(lambda _, given, y: found.append((y > 0).float().flatten(0, -2).mean(0))) for up in ups
    ]
    module(ids)
    for hook in hooks:
        hook.remove()
    return found


def texts(count: int, length: int) -> list[list[int]]:
    """Stretches of held-out text, spread evenly over it."""
    text = byte_text().held_out
    starts = range(0, len(text) - length, (len(text) - length) // count)
    return [text[at : at + length].tolist() for at in starts[:count]]


def bytes_in_a_second(stored: StoredNeurons, neurons_per_read: int, *, reads: int = 400) -> float:
    """How fast neurons come that lie together, in reads at random places.

    Args:
        stored: a file.
        neurons_per_read: neurons of each read.
        reads: how many, over all layers.
    """
    reader, generator = NeuronReader(stored, threads=THREADS), np.random.default_rng(0)
    for number, layer in enumerate(stored.layers):
        places = layer.neurons // neurons_per_read // 2 * 2
        chosen = generator.permutation(places // 2)[: reads // len(stored.layers)]
        first = np.sort(2 * chosen) * neurons_per_read  # no two are neighbors, which would be one read
        neurons = (first[:, None] + np.arange(neurons_per_read)).ravel()
        reader.read(number, neurons, np.empty((len(neurons), layer.numbers), dtype=np.uint32))
    found = float(sum(reader.bytes_read) / reader.seconds)
    reader.close()
    return found


@dataclass
class Walk:
    """What one way through some texts cost; behind the prompts, each text's tokens.

    Attributes:
        losses: of each predicted byte.
        seconds: of each token.
        read: bytes of the file, in whole blocks.
        neurons: bytes of the neurons that were read.
        reading: seconds for which reads were waited for.
        peak: most bytes of neurons in memory.
        direct: whether all reads went around the page cache.
        logits: of each text, behind its prompt.
        active: of each text, for each layer and token which neurons were asked for.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    read: int = 0
    neurons: int = 0
    reading: float = 0.0
    peak: int = 0
    direct: bool = True
    logits: list[Tensor] = field(default_factory=list)
    active: list[list[np.ndarray]] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Its figures by name."""
        tokens = len(self.seconds)
        found = {LOSS: float(np.mean(self.losses)), SECONDS: float(np.mean(self.seconds)), BYTES: self.read / tokens}
        found |= {NEURONS: self.neurons / tokens, PEAK: float(self.peak), "direct reads": float(self.direct)}
        if self.reading:
            found[USEFUL] = self.neurons / self.reading
        return found


@torch.no_grad()
def go_through(sparse: Sparse, arm: str, ids: list[int], walk: Walk) -> None:
    """Go through one text token by token, its first `PROMPT` tokens at once.

    Args:
        sparse: the model.
        arm: "whole", "naive", or a way to bring neurons: "all", "no window", "unbundled", "static neurons", "exact".
        ids: the text.
        walk: what is found is added to it.
    """
    runner = TorchRunner(byte_model(sparse.module), -(-len(ids) // 16))
    source = None if arm == "whole" else _Naive(sparse) if arm == "naive" else _Stored(sparse, arm)
    if isinstance(source, _Stored):
        runner.fetch_neurons(source.store)
    logits = []
    try:
        computed, before = 0, (0, 0, 0.0)
        for end in range(PROMPT, len(ids)):
            began = time.perf_counter()
            work = ModelInput(ids[computed:end], computed, range(runner.blocks), (end - computed - 1,))
            (found,) = runner.forward([work])
            if computed:
                walk.seconds.append(time.perf_counter() - began)
            elif source is not None:
                before = source.counted()
            computed = end
            walk.losses.append(float(F.cross_entropy(found, torch.tensor(ids[end : end + 1]))))
            walk.peak = max(walk.peak, 0 if source is None else source.nbytes)
            logits.append(found[0])
        if source is not None:
            read, neurons, reading = source.counted()
            walk.read, walk.neurons = walk.read + read - before[0], walk.neurons + neurons - before[1]
            walk.reading += reading - before[2]
            walk.direct &= source.direct
        if isinstance(source, _Stored):
            walk.active.append([np.concatenate(layer) for layer in source.active])
    finally:
        if source is not None:
            source.close()
        runner.close()
    walk.logits.append(torch.stack(logits))


def new_neurons(active: list[list[np.ndarray]], window: int, bundle: int) -> float:
    """Bytes of neurons that a token needs beyond those of the tokens before it, from how sets grow over windows.

    The mean size of the union of so many consecutive sets and one more, less that of so many: s(k + 1) - s(k).

    Args:
        active: of each text, for each layer (tokens, neurons).
        window: k.
        bundle: bytes of a neuron.
    """
    return sum(_union(active, layer, window + 1) - _union(active, layer, window) for layer in range(len(active[0]))) * (
        bundle
    )


def _union(active: list[list[np.ndarray]], layer: int, tokens: int) -> float:
    """Mean number of neurons in a layer that one of so many consecutive tokens asks for."""
    sizes = []
    for text in active:
        windows = np.lib.stride_tricks.sliding_window_view(text[layer], tokens, 0)
        sizes += windows.any(-1).sum(-1).tolist()
    return float(np.mean(sizes))


class _Stored:
    """Neurons from their file, with half of their bytes as room."""

    def __init__(self, sparse: Sparse, arm: str) -> None:
        stored = sparse.exact if arm == "exact" else sparse.stored
        self.store = NeuronStore(
            stored, stored.nbytes // 2, window=1 if arm == "no window" else WINDOW, threads=THREADS
        )
        if arm == "unbundled":
            self.store.reader.close()
            self.store.reader = _Apart(sparse.apart, threads=THREADS)
        self.active: list[list[np.ndarray]] = [[] for _ in stored.layers]
        pieces = self.store.pieces

        def noted(layer: int, active: np.ndarray) -> Any:
            self.active[layer].append(active)
            return pieces(layer, active)

        self.store.pieces = noted  # type: ignore[method-assign]
        predictor: Any = _Frequent(sparse) if arm == "static neurons" else sparse.predictor
        self._attached = Attached(sparse.module, self.store, None if arm == "exact" else predictor)

    @property
    def nbytes(self) -> int:
        return self.store.nbytes

    @property
    def direct(self) -> bool:
        return self.store.stats.direct

    def counted(self) -> tuple[int, int, float]:
        """Bytes read, bytes of the neurons among them, and seconds of reading."""
        stats = self.store.stats
        bundles = [self.store.stored.bundle_bytes(layer) for layer in range(len(stats.needed))]
        return int(stats.bytes_read.sum()), int(((stats.needed - stats.hits) * bundles).sum()), stats.stall_seconds

    def close(self) -> None:
        self._attached.detach()
        self.store.close()


class _Apart(NeuronReader):
    """Reads the parts of a bundle from two regions of a file, the up rows and the down columns."""

    def read(self, layer: int, neurons: np.ndarray, out: np.ndarray) -> None:
        """As `NeuronReader.read`."""
        half = out.shape[1] // 2
        for part in range(2):
            found = np.empty((len(neurons), half), dtype=out.dtype)
            super().read(2 * layer + part, neurons, found)
            out[:, part * half : (part + 1) * half] = found


class _Frequent:
    """The same neurons for every token."""

    def __init__(self, sparse: Sparse) -> None:
        self._masks = sparse.frequent

    def active(self, layer: int, x: Tensor) -> Tensor:
        return self._masks[layer].expand(len(x), -1)

    def check(self, stored: StoredNeurons) -> None:
        """Any file will do."""


class _Naive:
    """Reads half of each layer before it is computed."""

    _PART = 256 * BLOCK

    def __init__(self, sparse: Sparse) -> None:
        self._stored = sparse.stored
        self._files = [DirectFile(self._stored.path) for _ in range(THREADS)]
        self._pool, self._reading = ThreadPoolExecutor(THREADS), 0.0
        self._room = memoryview(mmap.mmap(-1, max(self._half(layer)[1] for layer in range(len(self._stored.layers)))))
        self._hooks = [
            sparse.module.get_submodule(layer.name).register_forward_pre_hook(lambda *_, index=index: self._read(index))
            for index, layer in enumerate(self._stored.layers)
        ]

    nbytes = property(lambda self: self._stored.nbytes // 2)
    direct = property(lambda self: all(file.direct for file in self._files))

    def counted(self) -> tuple[int, int, float]:
        """Bytes read, all of them neurons, and seconds of reading."""
        read = sum(file.bytes_read for file in self._files)
        return read, read, self._reading

    def _half(self, layer: int) -> tuple[int, int]:
        """Where the second half of a layer begins, and its bytes."""
        of = self._stored.layers[layer]
        size = of.neurons * self._stored.bundle_bytes(layer) // 2 // BLOCK * BLOCK
        return of.offset + size, size

    def _read(self, layer: int) -> None:
        begin, size = self._half(layer)
        parts = [(at, min(self._PART, size - at)) for at in range(0, size, self._PART)]
        began = time.perf_counter()

        def read(number: int) -> None:
            for at, length in parts[number::THREADS]:
                self._files[number].read(begin + at, length, self._room[at : at + length])

        list(self._pool.map(read, range(THREADS)))
        self._reading += time.perf_counter() - began

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._pool.shutdown()
        for file in self._files:
            file.close()
