"""What of a model is in memory under a budget and what stays in storage, decided from headers alone.

Notable here:
- dense parts are resident; only experts of mixtures can stay in storage, since a token needs few of them. Neurons of
  gated layers (SwiGLU) have no zeros that could be left out
- the least that works is computed from shapes; a budget below it is refused with that number, and that number works
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from pippin.core import native
from pippin.core.errors import CorruptedFile, InvalidArgument, NotEnoughMemory
from pippin.core.files import format_bytes
from pippin.core.memory import MemoryBudget
from pippin.core.store import store
from pippin.core.store.reference import Resolved
from pippin.language import stored_experts
from pippin.language.checkpoint_headers import CheckpointHeaders
from pippin.language.decoder_config import DecoderConfig
from pippin.language.stored_experts import ExpertNames, FileExperts, FileMatrix
from pippin.language.weight_loading import read_packed
from pippin.language.weight_packing import Packing
from pippin.nn.quantization.packed import NativeWeight

LEAST_CONTEXT: Final = 512
"""Tokens whose keys and values must fit beside the weights."""
LEAST_EXPERTS: Final = 2
"""Experts whose room is always kept: one is computed with while the next one is read."""
_LEAST_PASS: Final = 256
_LIBRARIES: Final = 40_000_000
"""Bytes of what is imported and built after `import pippin, torch`: grammars, threads, buffers."""
_VOCABULARY: Final = 700
"""Bytes of a token of the vocabulary while a tokenizer is built."""


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model with a memory budget are.

    Attributes:
        budget: the most that the model adds to its process.
        least: the least budget that works.
        experts: the experts that stay in storage; None for a model that is in memory as a whole.
        key: tells the weights and their packing from all others.
        files: the files that hold them, each with its size and its time of change in nanoseconds.
    """

    budget: MemoryBudget
    least: int
    experts: FileExperts | None = None
    key: str = ""
    files: Mapping[Path, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def largest_expert(self) -> int:
        """Bytes of the largest expert in memory; 0 without experts in storage."""
        return max((expert.packed_bytes for layer in self.experts or () for expert in layer), default=0)

    @property
    def least_experts(self) -> int:
        """Bytes that are kept for experts whatever else is needed."""
        return LEAST_EXPERTS * self.largest_expert

    def check_files(self) -> None:
        """Check that the files of the experts are those from which the model was loaded.

        Raises:
            CorruptedFile: one of them was changed or removed since.
        """
        for path, state in self.files.items():
            if _state(path) != state:
                raise CorruptedFile(f"{path} was changed since the model was loaded from it; load the model again")


def place(
    found: Resolved, headers: CheckpointHeaders, packing: Packing, budget: MemoryBudget
) -> tuple[Placement | None, dict[str, FileMatrix]]:
    """Decide what stays in storage: nothing if all fits.

    Args:
        found: the resolved reference.
        headers: of the checkpoint.
        packing: the formats of the weights.
        budget: the most memory.

    Returns:
        The placement, None for a budget that found itself and is not needed; and the matrices that stay in storage.

    Raises:
        NotEnoughMemory: the budget is less than the least that works, which the message names.
        InvalidArgument: weights that the native kernels do not compute with.
        DiskFull, InvalidInput: experts have to be written to a file of their own, which is not possible.
    """
    whole, least = least_budgets(headers, packing)
    if budget.nbytes >= whole:
        return (None if budget.automatic else Placement(budget, whole)), {}
    if budget.nbytes < least:
        raise NotEnoughMemory(
            f"{found.name} needs {format_bytes(least)} at least, and its memory is "
            f"{format_bytes(budget.nbytes)}; pass memory={least} or more, or take a smaller model"
        )
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
        name: place.parts[part]
        for layer, places in zip(names, experts, strict=True)
        for expert, place in zip(layer, places, strict=True)
        for part, name in expert.items()
    }
    paths = {part.path for layer in experts for expert in layer for part in expert.parts.values()}
    files = {path: state for path in sorted(paths) if (state := _state(path)) is not None}
    return Placement(budget, least, experts, key, files), absent


def least_budgets(headers: CheckpointHeaders, packing: Packing) -> tuple[int, int]:
    """The least budgets with which all weights are in memory, and with which as few are as possible.

    Args:
        headers: of the checkpoint.
        packing: the formats of the weights.

    Raises:
        InvalidArgument: weights that the native kernels do not compute with.
    """
    if not packing.native:
        raise InvalidArgument(
            "memory needs weights that are packed for the native kernels: a CPU, and neither pack=False nor float16"
        )
    sizes, config = packing.sizes(headers.module, headers.kinds), headers.module.config
    names = stored_experts.expert_names(headers.module)
    return _least(config, packing, sizes, []), _least(config, packing, sizes, names)


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
    layers: dict[str, int] = {}
    for name, nbytes in sizes.items():
        if name not in away:
            prefix = ".".join(name.split(".")[:2])
            layers[prefix] = layers.get(prefix, 0) + nbytes
    dense = sum(layers.values())
    # while a layer is packed it is there twice
    loading = dense + max(layers.values())
    room = LEAST_EXPERTS * max(map(sum, experts), default=0) + max(map(max, experts), default=0)
    states = 4 * config.state_bytes  # a prompt's, a snapshot of it, a continuation's before a pass and after it
    context = packing.cache_bytes(config, LEAST_CONTEXT) + states
    running = dense + room + context + workspace_bytes(config, _LEAST_PASS)
    return _LIBRARIES + _VOCABULARY * config.vocab_size + max(loading, running)


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
