"""Availability of a model, determined from names and headers without loading it; else the reason and the remedy.

Notable here:
- the reasons are a closed set, so that an application can switch on them; a sentence for people is added to each
- a damaged or unsupported file is found by the checks of `load`, with the same code
- memory is computed from the shapes in the headers: weights in the formats that `load` would use, and keys and values
  for the context
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, Literal, get_args

import torch

from pippin.core import device as devices
from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import (
    AssetError,
    CheckpointError,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.core.files import format_bytes
from pippin.core.formats.checkpoint import open_folder, read_json
from pippin.core.store import catalog, hub, reference, store
from pippin.core.store.reference import Resolved
from pippin.language.checkpoint_headers import Transform, read_headers, transformed
from pippin.language.language_model import check_transformers
from pippin.language.memory_placement import least_budgets
from pippin.language.transformers_models import open as transformers_folder
from pippin.language.weight_packing import DType, choose_packing
from pippin.nn.quantization.packed import Bits

Reason = Literal[
    "available",
    "not_installed",
    "not_found",
    "license_required",
    "not_enough_memory",
    "unsupported",
    "corrupted",
    "offline",
]
REASONS: Final[tuple[str, ...]] = get_args(Reason)

# A model is available if a conversation of this many tokens fits, even if its whole context would not.
_CONVERSATION: Final = 2048
# Model types of sentence encoders: they have no KV cache, are not packed, and run in float32.
_ENCODERS: Final = ("bert",)


@dataclass(frozen=True)
class Availability:
    """The result of `availability`; true if the model can be used now."""

    reason: Reason
    detail: str
    """One or two sentences for a person: the problem, and what to do."""

    @property
    def available(self) -> bool:
        """Whether `pippin.load` would work now, without the network."""
        return self.reason == "available"

    def __bool__(self) -> bool:
        return self.available


@checked
def availability(
    ref: str | Path,
    *,
    dtype: DType = "auto",
    device: str | None = None,
    context: PositiveInt | None = None,
    bits: Bits | None = None,
) -> Availability:
    """Whether a model can be used now; it is not loaded or downloaded, and problems of the model raise no error.

    Args:
        ref: a reference as `pippin.load` takes it.
        dtype: precision that it would be loaded in.
        device: device on which it would run; None takes the best available.
        context: tokens of prompt and answer whose keys and values must fit in memory besides the weights; None for
            2,048, or the model's whole context if that is less.
        bits: bits that its matrices would be quantized to; None for no quantization.

    Raises:
        InvalidArgument: an unknown device, precision or number of bits.

    >>> availability("no-such-model").reason
    'not_found'
    """
    where = devices.choose(device)
    choose_packing(dtype, where, bits=bits)
    try:
        found = reference.resolve(ref, download=False)
    except ModelNotFound as error:
        return _not_here(ref, error)
    except (CheckpointError, AssetError, OSError) as error:
        return _unusable(error)
    try:
        weights, cache, most = _sizes(found, dtype, where, bits)
    except (CheckpointError, AssetError, OSError) as error:
        return _unusable(error)
    tokens = min(most, context or _CONVERSATION)
    needed, free = weights + cache * tokens, _free(where)
    memory = f"{found.name} needs {format_bytes(weights)} for its weights"
    if cache:
        memory += f" and {format_bytes(cache * tokens)} for {tokens:,} tokens of context"
    if needed > free:
        return Availability(
            "not_enough_memory",
            f"{memory}; {format_bytes(free)} are free on {where}. End other programs, or take a smaller model: "
            "`pippin models` lists them",
        )
    return Availability("available", f"{memory}; {format_bytes(free)} are free on {where}")


@checked
def memory_needed(
    ref: str | Path,
    dtype: DType = "auto",
    *,
    device: str | None = None,
    context: NonNegativeInt | None = None,
    bits: Bits | None = None,
    transform: Transform | None = None,
) -> int:
    """Bytes of an installed model with a full cache, without the memory of Python and torch.

    For the default model it is within 6 % of the process's memory (the difference is the tokenizer); the C library may
    retain as much as the largest tensor in addition.

    Args:
        ref: a reference as for `pippin.load`; it is not downloaded.
        dtype: precision, as for `pippin.load`.
        device: device on which it would run; None takes the best available.
        context: tokens in the cache; None for the model's whole context, 0 for the weights alone.
        bits: bits that its matrices would be quantized to; None for no quantization.
        transform: as for `pippin.load`; None for the decoder in the checkpoint.

    Raises:
        InvalidArgument: an unknown device, precision or number of bits, a transform that the checkpoint does not
            allow.
        ModelNotFound: there is no such model, or it is not installed.
        CorruptedFile, UnsupportedModel, UnsafeCheckpoint: as `pippin.load`.
    """
    where = devices.choose(device)
    choose_packing(dtype, where, bits=bits)
    weights, cache, most = _sizes(reference.resolve(ref, download=False), dtype, where, bits, transform)
    return weights + cache * (most if context is None else context)


@checked
def least_memory(
    ref: str | Path,
    dtype: DType = "auto",
    *,
    device: str | None = None,
    bits: Bits | None = None,
    transform: Transform | None = None,
    neuron_predictor: str | Path | None = None,
) -> int:
    """The least that ``pippin.load(ref, memory=…)`` works with, for an installed model.

    Its arguments are those of `memory_needed`, and the folder of a predictor of neurons as of `pippin.load`.

    Raises:
        InvalidArgument: weights that the native kernels do not compute with, a predictor of another model, or as of
            `memory_needed`.
        ModelNotFound: there is no such model, or it is not installed.
        CorruptedFile, UnsupportedModel, UnsafeCheckpoint: as `pippin.load`.
    """
    packing = choose_packing(dtype, devices.choose(device), bits=bits)
    headers = transformed(read_headers(reference.resolve(ref, download=False)), transform)
    predictor = None
    if neuron_predictor is not None:
        from pippin.language.neuron_predictor import NeuronPredictor

        predictor = NeuronPredictor.load(neuron_predictor)
    return least_budgets(headers, packing, predictor)[1]


def _not_here(ref: str | Path, error: ModelNotFound) -> Availability:
    """Why a reference has no files on this disk: an unknown name, or a model that is not downloaded yet."""
    name = str(ref)
    entry = catalog.find(name) if isinstance(ref, str) else None
    if entry is not None and entry.kind == "data":
        return Availability("not_found", str(error))
    repository = hub.parse(name) if isinstance(ref, str) and entry is None else None
    # `resolve` says "not in the cache" only for models that can be pulled; otherwise the path or the name is wrong
    if entry is None and (repository is None or "is not in the cache" not in str(error)):
        return Availability("not_found", str(error))
    title = entry.name if entry else str(repository)
    if store.offline():
        return Availability(
            "offline",
            f"{title} is not in the cache, and PIPPIN_OFFLINE=1 forbids fetching it. Unset PIPPIN_OFFLINE and run "
            f"`pippin pull {title}`, or name a folder or file by its path",
        )
    if entry is not None and entry.gated and not _logged_in():
        return Availability(
            "license_required",
            f"{title} is under the {entry.license}: accept them on its page on the hub ({entry.sources[0].package}), "
            f"log in with `hf auth login`, then run `pippin pull {title}`",
        )
    size = f" ({format_bytes(entry.size)})" if entry and entry.size else ""
    doubt = "" if entry else ", if the hub has it"
    return Availability("not_installed", f"{title} is not in the cache; `pippin pull {title}` fetches it{size}{doubt}")


def _logged_in() -> bool:
    """Whether the hub's own library has a token; whether its owner accepted a license, only the hub can tell."""
    from huggingface_hub import get_token

    return get_token() is not None


def _unusable(error: Exception) -> Availability:
    """The answer for a model whose files exist but cannot be loaded."""
    unsupported = isinstance(error, UnsupportedModel | UnsafeCheckpoint)
    return Availability("unsupported" if unsupported else "corrupted", str(error))


def _sizes(
    found: Resolved, dtype: DType, where: torch.device, bits: Bits | None, transform: Transform | None = None
) -> tuple[int, int, int]:
    """Bytes of the weights once loaded, bytes of cache for one token, and the longest context in tokens."""
    packing = choose_packing(dtype, where, bits=bits)
    if found.kind == "folder":
        config = read_json(found.path / "config.json")
        if config.get("model_type") in _ENCODERS:
            folder = open_folder(found.path)
            elements = sum(prod(folder.shape(name)) for name in folder.names())
            return elements * torch.float32.itemsize, 0, config.get("max_position_embeddings", _CONVERSATION)
    try:
        headers = transformed(read_headers(found), transform)
    except UnsupportedModel as error:
        check_transformers(found, error, only_run=bits is None and transform is None)
        return transformers_folder.memory_of(found.path, where, dtype)
    decoder = headers.module.config
    weights = packing.nbytes(headers.module, headers.kinds)
    return weights, packing.cache_bytes(decoder), decoder.max_position_embeddings


def _free(where: torch.device) -> int:
    """Free memory of the device on which the model would run, in bytes."""
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    return devices.memory().available
