"""Bounded caches on disk: what a conversation has left of its keys and values, so that a restart loses nothing.

Notable here:
- a file can be used only with the weights that computed it, as a prompt cache (`pippin.engine.cache.prompt_cache`)
- it is arrays and JSON with a hash of both, is written atomically, and only its owner may read it
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from pippin.core.errors import CorruptedFile, DiskFull, InvalidArgument, InvalidInput, PromptCacheMismatch
from pippin.core.files import atomic_write
from pippin.engine.cache.prefix_tree import CacheKey
from pippin.engine.cache.prompt_cache import CacheOrigin, adapter_hash, check_writable, remove_partials
from pippin.engine.kv_eviction.bounded_cache import BoundedCache
from pippin.engine.model_runner import Runner
from pippin.language.language_model import LanguageModel

FORM: Final = "pippin bounded caches 1"


class Loaded(NamedTuple):
    """What a file holds."""

    states: dict[str, tuple[dict[str, Tensor], dict[str, Any], CacheKey | None]]
    """Of each cache, by its name, the arguments of `BoundedCache.restore`, and whose it is."""
    tensors: dict[str, Tensor]
    """What else was saved."""
    values: dict[str, Any]
    """Likewise, as JSON."""


def save(
    path: Path,
    caches: Mapping[str, BoundedCache],
    model: LanguageModel,
    runner: Runner,
    *,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> int:
    """Write caches to a file, which replaces an older one; return its bytes.

    Args:
        path: the file; its folder must exist.
        caches: by name; none may be in use.
        model: the model that computed them.
        runner: the runner whose pool they lie in while they are used.
        tensors: what else to keep, by name.
        values: likewise, as JSON.

    Raises:
        InvalidArgument: a request holds one of them.
        DiskFull: the disk has no room for it. InvalidInput: nothing may be written there.
    """
    check_writable(path)
    remove_partials(path)
    arrays = {f"other.{name}": tensor for name, tensor in tensors.items()}
    described: dict[str, Any] = {}
    for name, cache in caches.items():
        if cache.in_use:
            raise InvalidArgument("a request holds the cache; wait for its end before you save it")
        state, numbers = cache.state()
        arrays |= {f"cache.{name}.{key}": tensor for key, tensor in state.items()}
        key = cache.key
        adapter = None if key is None or key.adapter is None else adapter_hash(model, key.adapter)
        own = None if key is None else {"owner": key.owner, "adapter": adapter, "variant": key.variant}
        described[name] = {"numbers": numbers, "key": own}
    header = {"form": FORM, "origin": asdict(CacheOrigin.of(model, runner)), "caches": described, "values": values}
    arrays = {name: tensor.contiguous().cpu() for name, tensor in arrays.items()}
    text = json.dumps(header)
    data = safetensors.torch.save(arrays, {"header": text, "sha256": _digest(text, arrays)})
    try:
        with atomic_write(path) as file:
            os.chmod(file.name, 0o600)
            file.write(data)
    except DiskFull:
        raise
    except OSError as error:
        raise InvalidInput(f"the cache {path} cannot be written: {error.strerror}") from error
    return len(data)


def load(path: Path, model: LanguageModel, runner: Runner) -> Loaded:
    """Read what `save` wrote; caches of adapters that are not loaded are left out.

    Args:
        path: the file.
        model: the model that will go on with them.
        runner: the runner whose pool they will lie in.

    Raises:
        InvalidInput: the file cannot be read, or there is none.
        CorruptedFile: it is no such file, or is truncated or changed.
        PromptCacheMismatch: it was computed by another model, or in another precision.
    """
    header, arrays = _read(path)
    for name, mine in asdict(CacheOrigin.of(model, runner)).items():
        theirs = header["origin"].get(name)
        if theirs != mine:
            raise PromptCacheMismatch(
                f"the cache {path} was computed with {name} {theirs!s:.16}, {model.name} has {mine!s:.16} here; name "
                "another file, or begin the conversation anew"
            )
    adapters = {adapter_hash(model, adapter): adapter for adapter in model.adapters.values()}
    states = {}
    for name, entry in header["caches"].items():
        own, key = entry["key"], None
        if own is not None:
            if own["adapter"] is not None and own["adapter"] not in adapters:
                continue
            key = CacheKey(own["owner"], adapters.get(own["adapter"]), variant=own["variant"])
        begin = f"cache.{name}."
        state = {each.removeprefix(begin): tensor for each, tensor in arrays.items() if each.startswith(begin)}
        ids = state.get("token_ids")
        if ids is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < model.vocab_size:
            raise CorruptedFile(f"{path} holds tokens that {model.name} does not have; delete it and begin anew")
        states[name] = (state, entry["numbers"], key)
    others = {name.removeprefix("other."): each for name, each in arrays.items() if name.startswith("other.")}
    return Loaded(states, others, header["values"])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the arrays of a file, which fit their hash."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"the cache {path} cannot be read: {error.strerror}") from error
    try:
        arrays = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        noted = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        good = noted.get("sha256") == _digest(noted.get("header", ""), arrays)
        header = json.loads(noted["header"]) if good else {}
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise CorruptedFile(f"{path} is no cache of Pippin's, or is damaged; name another file") from error
    if header.get("form") != FORM:
        raise CorruptedFile(f"{path} is damaged, or was written by another version; delete it and begin anew")
    return header, arrays


def _digest(header: str, arrays: Mapping[str, Tensor]) -> str:
    """SHA-256 of a header and of arrays, as hexadecimal digits."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(arrays.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(-1).numpy().data)
    return digest.hexdigest()
