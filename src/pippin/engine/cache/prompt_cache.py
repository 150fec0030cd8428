r"""Prompt caches on disk: keys and values of prompts and states of recurrent layers, with their token ids.

Notable here:
- a file can be used only with the weights that computed it: it contains their hash, the precision of the cache, the
  layout of its blocks, and the hash of each adapter; any other combination is refused
- a block or a snapshot of states that several prompts share is written once
- the whole file is checked against its SHA-256 before the first block is returned; it contains arrays and JSON, no
  code, and is never unpickled
- a file is written atomically, and only its owner may read it, since it contains the prompts

Format: 8 bytes of name, version and length of the header (32-bit, little endian), the header as JSON, the blocks, the
states, the keys of the tokens (64-bit: ids, or negative numbers), and the SHA-256 of all of it.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from pippin.core import device as devices
from pippin.core.errors import CorruptedFile, DiskFull, InvalidInput, PromptCacheMismatch
from pippin.core.files import atomic_write, format_bytes
from pippin.engine.cache.prefix_tree import CachedSequence, CacheKey, Row
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK, Runner
from pippin.language.language_model import LanguageModel
from pippin.nn.lora import Adapter

MAGIC: Final = b"PIPPINKV"
VERSION: Final = 3
"""Version of the file format and of the meaning of a block's bytes."""

_START: Final = struct.Struct("<8sII")
_DIGEST: Final = hashlib.sha256().digest_size
_AT_ONCE: Final = 64  # blocks in memory beside the cache
_STATE_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}

States = Mapping[int, Tensor]
"""The states of recurrent layers, by layer."""


class LoadedSequence(NamedTuple):
    """A prompt of a file."""

    key: CacheKey
    """What it was computed with."""
    token_keys: list[int]
    """The keys of its tokens."""
    rows: list[Row]
    """The numbers of its blocks in the file."""
    blocks: dict[int, UInt8[Tensor, bytes]]
    """The contents of these blocks."""
    states: dict[int, States]
    """By row: the states after its tokens."""


@dataclass(frozen=True)
class CacheOrigin:
    """Model, runner and precision that a file was computed with; a file can be used only with the same.

    Args:
        model: hash of the weights, as they are run (`model_hash`).
        runner: class name of the runner, which determines the layout of blocks.
        kv_cache_dtype: precision of keys and values.
        block_tokens, block_bytes: size of a block.
        windows: the sliding window of each group of layers with a block table.
    """

    model: str
    runner: str
    kv_cache_dtype: str
    block_tokens: int
    block_bytes: int
    windows: list[int | None]

    @classmethod
    def of(cls, model: LanguageModel, runner: Runner) -> CacheOrigin:
        """The origin of a cache computed by a model on a runner."""
        return cls(
            model_hash(model),
            type(runner).__name__,
            runner.kv_cache_dtype,
            BLOCK_SIZE,
            runner.block_bytes,
            list(runner.windows),
        )


# --- hashes -----------------------------------------------------------------------------------------------------------


def model_hash(model: LanguageModel) -> str:
    """SHA-256, as hexadecimal digits, of a model's configuration and of its weights in the form in which they are run.

    The same checkpoint in another precision, or packed to other bits, is another model: it computes other keys.
    """
    tensors, seen = dict(model.network.state_dict()), set()
    for name, part in model.network.named_modules():
        packed = getattr(part, "packed", None)
        if packed is not None and id(packed) not in seen:  # embedding and head may be one
            seen.add(id(packed))
            packed_tensors = {key: value for key, value in vars(packed).items() if isinstance(value, Tensor)}
            opaque = any(tensor.layout is not torch.strided for tensor in packed_tensors.values()) or not packed_tensors
            kind = f"{type(packed).__name__} {getattr(packed, 'format', '')} {getattr(packed, 'group', '')}"
            found = {"": packed.dense()} if opaque else packed_tensors
            tensors |= {f"{name}.{key} {kind}": tensor for key, tensor in found.items()}
    away = "" if model.placement is None else model.placement.key  # tells experts in storage from all others
    return _hash_of(repr(model.cache_layout) + away, sorted(tensors.items()))


def adapter_hash(model: LanguageModel, adapter: Adapter) -> str:
    """SHA-256, as hexadecimal digits, of an adapter's weights; its name does not matter."""
    found = []
    for name, part in model.module.named_modules():
        for change in adapter.changes.get(part, ()):
            found += [(f"{name} {change.start} down", change.down), (f"{name} {change.start} up", change.up)]
    return _hash_of("", found)


def _hash_of(head: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    def each(named: tuple[str, Tensor]) -> bytes:
        name, tensor = named
        line = f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode()
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(line + hashlib.sha256(flat.numpy().data).digest()).digest()

    tensors = list(tensors)
    with ThreadPoolExecutor(devices.threads()) as pool:  # hashing lets other threads run
        try:
            parts = list(pool.map(each, tensors))
        except RuntimeError:  # a process that is shutting down cannot start threads, but may still save its cache
            parts = list(map(each, tensors))
    return hashlib.sha256(head.encode() + b"".join(parts)).hexdigest()


# --- writing ----------------------------------------------------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Check that a file can be written: that its folder exists and is writable.

    Raises:
        InvalidInput: the file could not be written.
    """
    folder = path.absolute().parent
    _check_kind(path)
    if not folder.is_dir():
        raise InvalidInput(f"the prompt cache {path} cannot be written: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput(f"the prompt cache {path} cannot be written: no right to write into {folder}")


def remove_partials(path: Path) -> None:
    """Delete what a process that was killed while it wrote this file left beside it: it holds prompts.

    A file that another process is writing is locked, and stays.
    """
    for partial in path.absolute().parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with suppress(OSError), partial.open("rb") as file:  # locked, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink()


def _check_kind(path: Path) -> None:
    """Raise for anything but a regular file: a device would be replaced, and reading a pipe could block forever."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise InvalidInput(f"the prompt cache {path} is {kind}; name a file")


def save(path: Path, model: LanguageModel, runner: Runner, sequences: Iterable[CachedSequence]) -> int:
    """Write cached prompts to a file; an older file is replaced atomically, or stays if anything fails.

    Args:
        path: the file; its folder must exist.
        model: the model that computed them.
        runner: the runner that holds the blocks; it is only read.
        sequences: the prompts, least recently used first; each of ``ceil(tokens / 16)`` blocks.

    Returns the bytes of the file.

    Raises:
        DiskFull: the disk has no room for it, or filled up meanwhile.
        InvalidInput: nothing may be written there.
    """
    check_writable(path)
    remove_partials(path)
    prompts = [each for each in sequences if len(each.token_keys)]
    used = dict.fromkeys(block for each in prompts for row in each.rows for block in row if block != GIVEN_BACK)
    index_of = {block: at for at, block in enumerate(used)}
    found = {id(states): states for each in prompts for states in each.states.values()}
    number_of = {known: at for at, known in enumerate(found)}
    adapters = {adapter: adapter_hash(model, adapter) for each in prompts if (adapter := each.key.adapter) is not None}
    header = asdict(CacheOrigin.of(model, runner)) | {
        "name": model.name,
        "blocks": len(index_of),
        "states": [_described(states) for states in found.values()],
        "sequences": [
            {
                "owner": key.owner,
                "adapter": None if key.adapter is None else adapters[key.adapter],
                "tokens": len(ids),
                "variant": key.variant,
                "rows": [[index_of.get(block, GIVEN_BACK) for block in row] for row in rows],
                "states": [[row, number_of[id(each)]] for row, each in states.items()],
            }
            for key, ids, rows, states in prompts
        ],
    }
    text = json.dumps(header).encode()
    behind = [_state_bytes(state) for states in found.values() for state in states.values()]
    behind += [np.array(each.token_keys, "<i8") for each in prompts]
    size = _START.size + len(text) + len(index_of) * runner.block_bytes + sum(part.nbytes for part in behind) + _DIGEST
    try:
        free = shutil.disk_usage(path.absolute().parent).free
        if free < size:
            raise DiskFull(f"{format_bytes(free)} are free")
        with atomic_write(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.chmod(file.name, 0o600)
            _write(file, text, runner, list(index_of), behind)
    except DiskFull as error:
        raise DiskFull(
            f"the prompt cache {path} needs {format_bytes(size)}, and the disk has no room for it ({error}); free some "
            "space or name a file on another disk"
        ) from error
    except OSError as error:
        raise InvalidInput(f"the prompt cache {path} cannot be written: {error.strerror}") from error
    return size


def _described(states: States) -> list[list[Any]]:
    """Layer, precision and shape of each state, in the order in which they are written."""
    return [[layer, str(state.dtype).removeprefix("torch."), list(state.shape)] for layer, state in states.items()]


def _state_bytes(state: Tensor) -> np.ndarray:
    return state.cpu().contiguous().flatten().view(torch.uint8).numpy()


def _write(file: IO[bytes], header: bytes, runner: Runner, blocks: list[int], behind: list[np.ndarray]) -> None:
    digest = hashlib.sha256()

    def put(data: Any) -> None:
        file.write(data)
        digest.update(data)

    put(_START.pack(MAGIC, VERSION, len(header)))
    put(header)
    for at in range(0, len(blocks), _AT_ONCE):
        put(runner.read(blocks[at : at + _AT_ONCE]).contiguous().numpy())
    for part in behind:
        put(part)
    file.write(digest.digest())


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: Path, model: LanguageModel, runner: Runner) -> Iterator[LoadedSequence]:
    """The prompts of a file, with the contents of their blocks and their states, least recently used first.

    The whole file is checked before the first prompt is returned. Prompts of adapters that are not loaded are skipped.

    Args:
        path: the file.
        model: the model that will use them.
        runner: the runner that the blocks will be written to.

    Raises:
        InvalidInput: the file cannot be read, or there is none.
        CorruptedFile: it is not a prompt cache, or is truncated or changed.
        PromptCacheMismatch: it was computed by another model or in another precision, or has another format version.
    """
    adapters = {adapter_hash(model, adapter): adapter for adapter in model.adapters.values()}
    try:
        _check_kind(path)
        with path.open("rb") as file:
            header, at = _header(file, path)
            _verify(file, path)
            _compare(header, CacheOrigin.of(model, runner), model, path)
            described = _states(header, model, path)
            sequences = _sequences(header, path)
            states_at = at + header["blocks"] * runner.block_bytes
            ids_at = states_at + sum(map(_nbytes, described))
            _check_size(file, ids_at + 8 * sum(one["tokens"] for one in sequences) + _DIGEST, path)
            snapshots = _Snapshots(file, states_at, described)
            for one in sequences:
                ids = np.frombuffer(_read(file, ids_at, 8 * one["tokens"]), "<i8")
                ids_at += ids.nbytes
                if ids.max() >= model.vocab_size:
                    raise CorruptedFile(f"{path}: the prompt cache holds tokens that {model.name} does not have")
                if one["adapter"] is None or one["adapter"] in adapters:
                    rows = [tuple(row) for row in one["rows"]]
                    blocks = [block for row in rows for block in row if block != GIVEN_BACK]
                    data = dict(zip(blocks, _blocks(file, at, blocks, runner.block_bytes), strict=True))
                    states = {row: snapshots[number] for row, number in one["states"]}
                    key = CacheKey(one["owner"], adapters.get(one["adapter"]), variant=one["variant"])
                    yield LoadedSequence(key, ids.tolist(), rows, data, states)
    except OSError as error:
        raise InvalidInput(f"the prompt cache {path} cannot be read: {error.strerror}") from error


def _header(file: IO[bytes], path: Path) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the blocks; nothing in it is verified yet."""
    start = file.read(_START.size)
    if start[: len(MAGIC)] != MAGIC:
        raise CorruptedFile(f"{path} is no prompt cache of Pippin's; name another file, or delete this one")
    try:
        _, version, length = _START.unpack(start)
        if version != VERSION:
            raise PromptCacheMismatch(
                f"the prompt cache {path} has form {version}, this version of Pippin reads and writes {VERSION}; "
                "delete it, and it will be written anew"
            )
        header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
    except (struct.error, ValueError, RecursionError) as error:
        raise _damaged(path, "its header cannot be read") from error
    return header, _START.size + length


def _compare(header: dict[str, Any], ours: CacheOrigin, model: LanguageModel, path: Path) -> None:
    """Raise if the file has another origin."""
    for key, mine in asdict(ours).items():
        theirs = header.get(key)
        if theirs != mine:
            what = {
                "model": f"by another model ({header.get('name')!s:.80}; weights {theirs!s:.12}…, not {mine!s:.12}…)",
                "kv_cache_dtype": f"with keys and values in {theirs!s:.20}, not {mine}",
            }.get(key, f"in another form ({key} {theirs!s:.40}, not {mine})")
            raise PromptCacheMismatch(
                f"the prompt cache {path} was computed {what}, so {model.name} cannot go on with it; name another "
                "file, or delete this one and it will be written anew"
            )


def _verify(file: IO[bytes], path: Path) -> None:
    """Raise unless the file's last bytes are the hash of the others."""
    file.seek(0, os.SEEK_END)
    left = file.tell() - _DIGEST
    file.seek(0)
    digest = hashlib.sha256()
    while left > 0 and (part := file.read(min(left, 1 << 20))):
        digest.update(part)
        left -= len(part)
    if file.read() != digest.digest():
        raise _damaged(path, "its contents do not fit their hash")


def _check_size(file: IO[bytes], size: int, path: Path) -> None:
    if file.seek(0, os.SEEK_END) != size:
        raise _damaged(path, "it is not as long as it says")


def _states(header: dict[str, Any], model: LanguageModel, path: Path) -> list[list[list[Any]]]:
    """Layer, precision and shape of the states of each snapshot, after a check of their consistency."""
    found, layers = header.get("states"), list(model.cache_layout.recurrent_layers)
    if not isinstance(found, list):
        raise _damaged(path, "its header contradicts itself")
    for states in found:
        good = isinstance(states, list) and all(
            isinstance(one, list)
            and len(one) == 3
            and one[1] in _STATE_DTYPES
            and isinstance(one[2], list)
            and all(isinstance(size, int) and size >= 0 for size in one[2])
            for one in states
        )
        if not good or sorted(layer for layer, *_ in states) != layers:
            raise _damaged(path, "its header contradicts itself")
    return found


def _nbytes(states: list[list[Any]]) -> int:
    """Bytes of the states of a snapshot."""
    return sum(prod(shape) * _STATE_DTYPES[dtype].itemsize for _, dtype, shape in states)


class _Snapshots:
    """The snapshots of a file; each is read once, when it is first asked for."""

    def __init__(self, file: IO[bytes], at: int, described: list[list[list[Any]]]) -> None:
        self._file, self._described = file, described
        self._starts = [at + sum(map(_nbytes, described[:index])) for index in range(len(described))]
        self._known: dict[int, States] = {}

    def __getitem__(self, number: int) -> States:
        if number not in self._known:
            at, states = self._starts[number], {}
            for layer, dtype, shape in self._described[number]:
                size = prod(shape) * _STATE_DTYPES[dtype].itemsize
                flat = torch.frombuffer(bytearray(_read(self._file, at, size)) or bytearray(1), dtype=torch.uint8)
                states[layer] = flat[:size].view(_STATE_DTYPES[dtype]).view(shape)
                at += size
            self._known[number] = states
        return self._known[number]


def _sequences(header: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The prompts that the header lists, after a check of its consistency."""
    count, found, windows = header.get("blocks"), header.get("sequences"), header["windows"]
    snapshots = len(header["states"])
    if not isinstance(count, int) or count < 0 or not isinstance(found, list):
        raise _damaged(path, "its header contradicts itself")
    for one in found:
        good = (
            isinstance(one, dict)
            and isinstance(one.get("owner"), str)
            and isinstance(one.get("adapter"), str | None)
            and isinstance(one.get("tokens"), int)
            and one["tokens"] > 0
            and isinstance(one.get("variant"), str)
            and isinstance(one.get("rows"), list)
            and len(one["rows"]) == -(-one["tokens"] // BLOCK_SIZE)
            and all(isinstance(row, list) and len(row) == len(windows) for row in one["rows"])
            and all(
                isinstance(block, int) and (0 if window is None else GIVEN_BACK) <= block < count
                for row in one["rows"]
                for block, window in zip(row, windows, strict=True)
            )
            and isinstance(one.get("states"), list)
            and all(
                isinstance(pair, list)
                and len(pair) == 2
                and all(isinstance(number, int) for number in pair)
                and 0 <= pair[0] < one["tokens"] // BLOCK_SIZE
                and 0 <= pair[1] < snapshots
                for pair in one["states"]
            )
        )
        if not good:
            raise _damaged(path, "its header contradicts itself")
    return found


def _blocks(file: IO[bytes], at: int, blocks: Sequence[int], nbytes: int) -> UInt8[Tensor, "blocks bytes"]:
    data = np.empty((len(blocks), nbytes), np.uint8)
    for row, block in zip(data, blocks, strict=True):
        file.seek(at + block * nbytes)
        file.readinto(row)  # type: ignore[attr-defined]
    return torch.from_numpy(data)


def _read(file: IO[bytes], at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _damaged(path: Path, why: str) -> CorruptedFile:
    return CorruptedFile(f"the prompt cache {path} is damaged or cut short: {why}; delete it, and it will be made anew")
