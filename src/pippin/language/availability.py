"""Whether a model can be used now, and if not, why and what to do: answered from names and headers, loading nothing.

Notable here:
- the reasons are few and closed, so that an application can switch on them; the sentence beside each is for people
- a damaged or unsupported file is found by the very checks that `load` makes, because it is the same code
- memory is counted from the shapes in the headers: weights in the formats that they will be kept in, by the very rules
  that `load` follows, and keys and values for the context
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, Literal, get_args

import torch

from pippin.core import catalogue, device as devices, hub, reference, store
from pippin.core.checkpoint import open_folder, read_json
from pippin.core.errors import (
    AssetError,
    CheckpointError,
    InvalidArgument,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.core.files import format_bytes
from pippin.core.reference import Resolved
from pippin.language.load import led_by, survey
from pippin.language.packing import choose_packing

Reason = Literal[
    "available",
    "not_installed",
    "not_found",
    "licence_required",
    "not_enough_memory",
    "unsupported",
    "corrupted",
    "offline",
]
REASONS: Final[tuple[str, ...]] = get_args(Reason)

# A model counts as usable when a conversation of this many tokens fits, even where its whole context would not.
_CONVERSATION: Final = 2048
# Sentence encoders: no decoder, so no cache, nothing is packed, and they run in float32.
_ENCODERS: Final = ("bert",)


@dataclass(frozen=True)
class Availability:
    """The answer of `availability`; true in a condition where the model can be used now."""

    reason: Reason
    detail: str
    """One or two sentences for a person: what is the matter, and what to do."""

    @property
    def available(self) -> bool:
        """Whether `pippin.load` would work now, without the network."""
        return self.reason == "available"

    def __bool__(self) -> bool:
        return self.available


def availability(
    ref: str | Path,
    *,
    dtype: str = "auto",
    device: str | None = None,
    context: int | None = None,
    bits: int | None = None,
) -> Availability:
    """Say whether a model can be used now; never loads, never fetches, never raises for what is wrong with the model.

    Args:
        ref: a reference as `pippin.load` takes it.
        dtype: precision that it would be loaded in.
        device: where it would run; None takes the best there is.
        context: tokens, prompt and answer together, whose keys and values must fit beside the weights; None asks for
            2,048, or for the model's whole context where that is less.
        bits: width that its matrices would be quantised to; None leaves them as they are.

    Raises:
        InvalidArgument: an unknown device, precision or number of bits, or a context below 1.

    >>> availability("no-such-model").reason
    'not_found'
    """
    where = devices.choose(device)
    choose_packing(dtype, where, bits=bits)
    if context is not None and context < 1:
        raise InvalidArgument(f"context is {context}; give 1 token or more, or None")
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
    facts = f"{found.name} needs {format_bytes(weights)} for its weights"
    if cache:
        facts += f" and {format_bytes(cache * tokens)} for {tokens:,} tokens of context"
    if needed > free:
        return Availability(
            "not_enough_memory",
            f"{facts}; {format_bytes(free)} are free on {where}. End other programs, or take a smaller model: "
            "`pippin models` lists them",
        )
    return Availability("available", f"{facts}; {format_bytes(free)} are free on {where}")


def memory_needed(
    ref: str | Path,
    dtype: str = "auto",
    *,
    device: str | None = None,
    context: int | None = None,
    bits: int | None = None,
    retention: float | None = None,
) -> int:
    """Bytes that an installed model takes once it is loaded and its cache is full, beyond what Python and torch take.

    Measured with the default model it is within 6 % of what the process holds (the tokenizer is the difference); the
    C library may keep as much again as the largest tensor while it has no need to give it back.

    Args:
        ref: a reference as `pippin.load` takes it; it is not fetched.
        dtype: precision, as `pippin.load` takes it.
        device: where it would run; None takes the best there is.
        context: tokens in the cache; None for as many as the model was trained for, 0 for the weights alone.
        bits: width that its matrices would be quantised to; None leaves them as they are.
        retention: share of the layers that would keep keys and values, as `pippin.load` takes it; None for all.

    Raises:
        InvalidArgument: an unknown device, precision or number of bits, a negative context, a retention that the model
            cannot have.
        ModelNotFound: nothing answers to the reference, or it is not installed.
        CorruptedFile, UnsupportedModel, UnsafeCheckpoint: as `pippin.load`.
    """
    if context is not None and context < 0:
        raise InvalidArgument(f"context is {context}; give 0 tokens or more, or None")
    where = devices.choose(device)
    choose_packing(dtype, where, bits=bits)
    weights, cache, most = _sizes(reference.resolve(ref, download=False), dtype, where, bits, retention)
    return weights + cache * (most if context is None else context)


def _not_here(ref: str | Path, error: ModelNotFound) -> Availability:
    """Why a reference has no files on this disk: a name that nothing answers to, or one that is still to be fetched."""
    name = str(ref)
    entry = catalogue.find(name) if isinstance(ref, str) else None
    if entry is not None and entry.kind == "data":
        return Availability("not_found", str(error))
    repository = hub.parse(name) if isinstance(ref, str) and entry is None else None
    # `resolve` says "not in the cache" only of what a pull could bring; all else is a path or a name that is wrong.
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
            "licence_required",
            f"{title} is under the {entry.licence}: accept them on its page on the hub ({entry.sources[0].package}), "
            f"log in with `hf auth login`, then run `pippin pull {title}`",
        )
    size = f" ({format_bytes(entry.size)})" if entry and entry.size else ""
    doubt = "" if entry else ", if the hub has it"
    return Availability("not_installed", f"{title} is not in the cache; `pippin pull {title}` fetches it{size}{doubt}")


def _logged_in() -> bool:
    """Whether the hub's own library holds a token; whether its owner accepted a licence, only the hub knows."""
    from huggingface_hub import get_token

    return get_token() is not None


def _unusable(error: Exception) -> Availability:
    """What is there but cannot be loaded."""
    unsupported = isinstance(error, UnsupportedModel | UnsafeCheckpoint)
    return Availability("unsupported" if unsupported else "corrupted", str(error))


def _sizes(
    found: Resolved, dtype: str, where: torch.device, bits: int | None, retention: float | None = None
) -> tuple[int, int, int]:
    """Bytes of the weights once loaded, bytes of cache for one token, and the longest context in tokens."""
    packing = choose_packing(dtype, where, bits=bits)
    if found.kind == "folder":
        config = read_json(found.path / "config.json")
        if config.get("model_type") in _ENCODERS:
            folder = open_folder(found.path)
            elements = sum(prod(folder.shape(name)) for name in folder.names())
            return elements * torch.float32.itemsize, 0, config.get("max_position_embeddings", _CONVERSATION)
    seen = led_by(survey(found), retention, None)
    config_ = seen.module.config
    numbers = 2 * len(config_.cached_layers) * config_.kv_heads * config_.head_dim
    return (
        packing.nbytes(seen.module, seen.kinds),
        numbers * packing.cache_precision.itemsize,
        config_.max_context,
    )


def _free(where: torch.device) -> int:
    """Bytes that are free for this process where the model would run."""
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    return devices.memory().available
