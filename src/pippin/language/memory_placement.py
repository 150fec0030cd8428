"""What of a model is in memory under a budget and what stays in storage, decided from headers alone.

Notable here:
- dense parts are resident; what can stay in storage is that of which a token needs little: experts of mixtures, and
  neurons of layers with ReLU, which sets most of them to zero. Those of SwiGLU and GeGLU are never zero
- the least that works is computed from shapes; a budget below it is refused with that number, and that number works
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from pippin.core import native
from pippin.core.direct_file import BLOCK
from pippin.core.errors import CorruptedFile, InvalidArgument, NotEnoughMemory
from pippin.core.files import format_bytes
from pippin.core.memory import MemoryBudget
from pippin.core.store import store
from pippin.core.store.reference import Resolved
from pippin.language import stored_experts, stored_neurons
from pippin.language.checkpoint_headers import CheckpointHeaders
from pippin.language.decoder_config import DecoderConfig
from pippin.language.stored_experts import ExpertNames, FileExperts, FileMatrix
from pippin.language.stored_neurons import LEAST_NEURONS, NUMBER_BYTES, NeuronDType, NeuronLayer, StoredNeurons
from pippin.language.weight_loading import read_packed
from pippin.language.weight_packing import Packing
from pippin.nn.quantization.packed import AbsentWeight, NativeWeight

if TYPE_CHECKING:
    from pippin.language.neuron_predictor import NeuronPredictor

LEAST_CONTEXT: Final = 512
"""Tokens whose keys and values must fit beside the weights."""
LEAST_EXPERTS: Final = 2
"""Experts whose room is always kept: one is computed with while the next one is read."""
_LEAST_PASS: Final = 256
_LIBRARIES: Final = 40_000_000
"""Bytes of what is imported and built after `import pippin, torch`: grammars, threads, buffers."""
_TORCH: Final = 64_000_000
"""Bytes of what torch loads and builds in its first passes, where it computes and not the native kernels."""
_BRINGING: Final = 20_000_000
"""Bytes of neurons while they are read and computed with: as they are read, gathered, and in float32."""
_VOCABULARY: Final = 700
"""Bytes of a token of the vocabulary while a tokenizer is built."""


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model with a memory budget are.

    Attributes:
        budget: the most that the model adds to its process.
        least: the least budget that works.
        experts: the experts that stay in storage; None where none do.
        neurons: the neurons that stay in storage; None where none do.
        key: tells the weights and their packing from all others.
        files: the files that hold them, each with its size and its time of change in nanoseconds.
        predictor: says which neurons fire; None where matrices in memory do.
    """

    budget: MemoryBudget
    least: int
    experts: FileExperts | None = None
    key: str = ""
    files: Mapping[Path, tuple[int, int]] = field(default_factory=dict)
    neurons: StoredNeurons | None = None
    predictor: NeuronPredictor | None = None

    @property
    def in_storage(self) -> bool:
        """Whether a part of the model stays in storage."""
        return self.experts is not None or self.neurons is not None

    @cached_property
    def largest_expert(self) -> int:
        """Bytes of the largest expert in memory; 0 without experts in storage."""
        return max((expert.packed_bytes for layer in self.experts or () for expert in layer), default=0)

    @property
    def least_room(self) -> int:
        """Bytes that are kept for what comes from storage, whatever else is needed."""
        if self.neurons is not None:
            return _neuron_room(self.neurons.layers, self.neurons.dtype)
        return LEAST_EXPERTS * self.largest_expert

    def workspace_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Upper bound of the memory of one pass beside weights and caches, and of what computes it; see
        `workspace_bytes`."""
        neurons = 0 if self.neurons is None else _neuron_workspace(self.neurons.layers, tokens)
        return neurons + workspace_bytes(config, tokens)

    def check_files(self) -> None:
        """Check that the files of what is in storage are those from which the model was loaded.

        Raises:
            CorruptedFile: one of them was changed or removed since.
        """
        for path, state in self.files.items():
            if _state(path) != state:
                raise CorruptedFile(f"{path} was changed since the model was loaded from it; load the model again")


def place(
    found: Resolved,
    headers: CheckpointHeaders,
    packing: Packing,
    budget: MemoryBudget,
    predictor: NeuronPredictor | None = None,
) -> tuple[Placement | None, dict[str, AbsentWeight]]:
    """Decide what stays in storage: nothing if all fits.

    Args:
        found: the resolved reference.
        headers: of the checkpoint.
        packing: the formats of the weights.
        budget: the most memory.
        predictor: says which neurons fire, so that all of their weights may stay in storage.

    Returns:
        The placement, None for a budget that found itself and is not needed; and the matrices that stay in storage.

    Raises:
        NotEnoughMemory: the budget is less than the least that works, which the message names.
        InvalidArgument: weights that the native kernels do not compute with, or a predictor of other neurons.
        DiskFull, InvalidInput: what is in storage has to be written to a file of its own, which is not possible.
    """
    whole, least = least_budgets(headers, packing, predictor)
    if budget.nbytes >= whole:
        return (None if budget.automatic else Placement(budget, whole)), {}
    if budget.nbytes < least:
        raise NotEnoughMemory(
            f"{found.name} needs {format_bytes(least)} at least, and its memory is {format_bytes(budget.nbytes)}; "
            f"pass memory={least} or more, or take a smaller model{_why(headers, packing)}"
        )
    if _neurons(headers, packing):
        return _place_neurons(found, headers, packing, budget, least, predictor)
    names, sizes = stored_experts.expert_names(headers.module), packing.sizes(headers.module, headers.kinds)
    key = _key(found, packing)
    experts = stored_experts.in_place(names, lambda name: _in_place(headers, packing, name))
    if experts is None:
        experts = stored_experts.write(
            store.home() / "experts" / key,
            names,
            lambda name: _packed(headers, packing, name),
            sum(sizes[name] for layer in names for expert in layer for name in expert.values()),
        )
    absent = {
        name: _absent(place.parts[part])
        for layer, places in zip(names, experts, strict=True)
        for expert, place in zip(layer, places, strict=True)
        for part, name in expert.items()
    }
    paths = {part.path for layer in experts for expert in layer for part in expert.parts.values()}
    files = {path: state for path in sorted(paths) if (state := _state(path)) is not None}
    return Placement(budget, least, experts, key, files), absent


def least_budgets(
    headers: CheckpointHeaders, packing: Packing, predictor: NeuronPredictor | None = None
) -> tuple[int, int]:
    """The least budgets with which all weights are in memory, and with which as few are as possible.

    Args:
        headers: of the checkpoint.
        packing: the formats of the weights.
        predictor: says which neurons fire; None where matrices in memory do.

    Raises:
        InvalidArgument: weights that the native kernels do not compute with, or a predictor of other neurons.
    """
    if not packing.native:
        raise InvalidArgument(
            "memory needs weights that are packed for the native kernels: a CPU, and neither pack=False nor float16"
        )
    sizes, config = packing.sizes(headers.module, headers.kinds), headers.module.config
    whole = _least(config, packing, sizes, [])
    layers = _neurons(headers, packing, predicted=predictor is not None)
    if predictor is not None:
        predictor.check_layers(layers, _why(headers, packing))
    if layers:
        return whole, min(whole, _least_with_neurons(config, packing, sizes, layers, predictor))
    return whole, _least(config, packing, sizes, stored_experts.expert_names(headers.module))


def workspace_bytes(config: DecoderConfig, tokens: int) -> int:
    """Upper bound of the memory of one pass beside weights and caches.

    Args:
        config: of the decoder.
        tokens: new tokens of the pass.
    """
    inner = active = queries = recurrent = 0
    for layer in config.layers:
        for spec in filter(None, (layer.feedforward, layer.experts)):
            inner = max(inner, spec.intermediate_size, spec.shared_intermediate_size)
            active = max(active, spec.num_experts_per_tok)
        queries = max(queries, config.num_attention_heads * config.head_dim)
        recurrent = max(recurrent, layer.recurrent.work_size(config.hidden_size) if layer.recurrent else 0)
    # float32, and the copies that the kernels prepare
    row = 8 * config.hidden_size + 6 * queries + 4 * inner + 2 * recurrent
    runs = active * (3 * config.hidden_size + 3 * inner)
    return 4 * (tokens * (row + runs) + 2 * config.vocab_size)


def _least(config: DecoderConfig, packing: Packing, sizes: Mapping[str, int], names: ExpertNames) -> int:
    """The least budget that works.

    Args:
        config: of the decoder.
        packing: the formats of the weights.
        sizes: bytes of each weight in memory.
        names: the experts that stay in storage.
    """
    experts = [[sizes[name] for name in expert.values()] for layer in names for expert in layer]
    away = {name for layer in names for expert in layer for name in expert.values()}
    room = LEAST_EXPERTS * max(map(sum, experts), default=0) + max(map(max, experts), default=0)
    return _budget(config, packing, {name: size for name, size in sizes.items() if name not in away}, room)


def _least_with_neurons(
    config: DecoderConfig,
    packing: Packing,
    sizes: Mapping[str, int],
    layers: Sequence[NeuronLayer],
    predictor: NeuronPredictor | None,
) -> int:
    """The least budget with the neurons of some layers in storage; arguments as of `_least`."""
    away, dtype = {name for layer in layers for name in layer.names}, _neuron_dtype(packing)
    size = max(layer.neurons * layer.numbers for layer in layers) * NUMBER_BYTES[dtype]
    checksums = stored_neurons.stored_bytes(layers, dtype) // BLOCK * 5  # and which were compared
    room = _neuron_room(layers, dtype) + checksums + _neuron_workspace(layers, _LEAST_PASS)
    resident = {name: size for name, size in sizes.items() if name not in away}
    if predictor is not None:
        resident["predictor"] = predictor.nbytes
    # a layer is packed before the rest is read: what is mapped, and the same in the precision of the file
    packing_neurons = _LIBRARIES + _VOCABULARY * config.vocab_size + 3 * size
    return max(packing_neurons, _budget(config, packing, resident, room))


def _budget(config: DecoderConfig, packing: Packing, resident: Mapping[str, int], room: int) -> int:
    """The least budget with some weights in memory.

    Args:
        config: of the decoder.
        packing: the formats of the weights.
        resident: bytes of each weight that is in memory.
        room: bytes for the others.
    """
    layers: dict[str, int] = {}
    for name, nbytes in resident.items():
        prefix = ".".join(name.split(".")[:2])
        layers[prefix] = layers.get(prefix, 0) + nbytes
    dense = sum(layers.values())
    # while a layer is packed it is there twice
    loading = dense + max(layers.values())
    states = 4 * config.state_bytes  # a prompt's, a snapshot of it, a continuation's before a pass and after it
    context = packing.cache_bytes(config, LEAST_CONTEXT) + states
    running = dense + room + context + workspace_bytes(config, _LEAST_PASS)
    return _LIBRARIES + _VOCABULARY * config.vocab_size + max(loading, running)


def _neurons(headers: CheckpointHeaders, packing: Packing, *, predicted: bool = False) -> tuple[NeuronLayer, ...]:
    """The layers whose neurons can stay in storage; none for a mixture, or where weights are quantized."""
    forms = {native.GGML_FORMATS[name] for name in ("F32", "BF16")}
    found = stored_neurons.neuron_layers(headers.module, predicted=predicted)

    def dense(name: str) -> bool:
        owner = headers.module.get_submodule(name.rpartition(".")[0])
        return packing.format(owner, name, headers.kinds.get(name)) in forms

    mixture = bool(stored_experts.expert_names(headers.module))
    return () if mixture or not all(dense(name) for layer in found for name in layer.names) else found


def _neuron_dtype(packing: Packing) -> NeuronDType:
    return "float32" if packing.dense == "F32" else "bfloat16"


def _neuron_room(layers: Sequence[NeuronLayer], dtype: NeuronDType) -> int:
    """Bytes of the neurons whose room is always kept."""
    return sum(min(LEAST_NEURONS, each.neurons) * each.numbers for each in layers) * NUMBER_BYTES[dtype]


def _neuron_workspace(layers: Sequence[NeuronLayer], tokens: int) -> int:
    """Bytes of which neurons each token needs, of what is computed with them, and of torch."""
    return _TORCH + _BRINGING + 7 * tokens * max(layer.neurons for layer in layers)


def _why(headers: CheckpointHeaders, packing: Packing) -> str:
    """Why nothing of a dense model stays in storage, as the end of a sentence."""
    if stored_experts.expert_names(headers.module) or _neurons(headers, packing):
        return ""
    if stored_neurons.neuron_layers(headers.module):
        return "; its neurons could stay in storage, but not those of quantized weights"
    activations = sorted({layer.feedforward.activation for layer in headers.module.config.layers})
    return f"; it has no experts, and none of its neurons is ever exactly zero ({', '.join(activations)}), as with ReLU"


def _place_neurons(
    found: Resolved,
    headers: CheckpointHeaders,
    packing: Packing,
    budget: MemoryBudget,
    least: int,
    predictor: NeuronPredictor | None,
) -> tuple[Placement, dict[str, AbsentWeight]]:
    """Write the neurons to a file, if it is not there; results and errors as of `place`."""
    stored = write_neurons(found, headers, packing, predicted=predictor is not None)
    form = native.GGML_FORMATS["F32" if stored.dtype == "float32" else "BF16"]
    absent = {}
    for name in (name for layer in stored.layers for name in layer.names):
        rows, columns = headers.module.get_parameter(name).shape
        absent[name] = AbsentWeight(form, rows, columns)
    key, state = _key(found, packing), _state(stored.path)
    if predictor is not None:
        predictor.check(stored)
        key = f"{key}-{predictor.digest()}"  # other neurons, other answers
    return Placement(budget, least, None, key, {} if state is None else {stored.path: state}, stored, predictor), absent


def check_neurons(
    found: Resolved, headers: CheckpointHeaders, packing: Packing, *, predicted: bool
) -> tuple[NeuronLayer, ...]:
    """The layers whose neurons `write_neurons` writes; arguments as there.

    Raises:
        InvalidArgument: there are none; the message says why.
    """
    layers = _neurons(headers, packing, predicted=predicted)
    if not layers:
        raise InvalidArgument(f"{found.name} has no neurons that can stay in storage{_why(headers, packing)}")
    return layers


def write_neurons(found: Resolved, headers: CheckpointHeaders, packing: Packing, *, predicted: bool) -> StoredNeurons:
    """The file of a model's neurons; it is written where there is none.

    Args:
        found: the resolved reference.
        headers: of the checkpoint.
        packing: the formats of the weights.
        predicted: whether all matrices of the layers are in it, for a predictor.

    Raises:
        InvalidArgument: the model has no neurons that can stay in storage; the message says why.
        DiskFull, InvalidInput: it cannot be written.
        CorruptedFile: it is damaged.
    """
    layers, dtype = check_neurons(found, headers, packing, predicted=predicted), _neuron_dtype(packing)

    def read(name: str) -> Tensor:
        return headers.tensor(name, torch.float32 if dtype == "float32" else torch.bfloat16)

    folder = store.home() / "neurons" / (_key(found, packing) + ("-predicted" if predicted else ""))
    return stored_neurons.write_neurons(folder, layers, read, dtype, release=headers.release)


def _absent(place: FileMatrix) -> AbsentWeight:
    return AbsentWeight(place.form, place.rows, place.columns, place.group, place.zero)


def _key(found: Resolved, packing: Packing) -> str:
    """A name for the weights of a model in a packing: of the files, by name, size and time, and the formats."""
    files = [found.path] if found.path.is_file() else sorted(found.path.glob("*.safetensors"))
    state = [(file.name, _state(file)) for file in files]
    how = (packing.dense, packing.keep, packing.bits, native.ABI)
    return hashlib.sha256(repr((state, how)).encode()).hexdigest()[:32]


def _state(path: Path) -> tuple[int, int] | None:
    """Size and time of change of a file; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _in_place(headers: CheckpointHeaders, packing: Packing, name: str) -> FileMatrix | None:
    """Where a matrix lies in a form that the kernels pack to the format that is wanted."""
    there = headers.place(name)
    if there is None or there.kind not in native.GGML_FORMATS:
        return None
    owner, (rows, columns) = (
        headers.module.get_submodule(name.rpartition(".")[0]),
        headers.module.get_parameter(name).shape,
    )
    form = native.GGML_FORMATS[there.kind]
    if packing.format(owner, name, headers.kinds.get(name)) != form:
        return None
    return FileMatrix(there.path, there.offset, there.nbytes, rows, columns, form, there.kind)


def _packed(headers: CheckpointHeaders, packing: Packing, name: str) -> NativeWeight:
    form = packing.format(headers.module.get_submodule(name.rpartition(".")[0]), name, headers.kinds.get(name))
    assert form is not None
    weight = read_packed(headers, packing, name, form)
    headers.release([name])
    assert isinstance(weight, NativeWeight)
    return weight
