"""Folders in Hugging Face layout: `config.json`, `model.safetensors` or shards and their index, and companions.

Notable here:
- a tensor is a view of the mapped file; nothing is read before it is used
- the folder is checked as a whole when it is opened, so a missing shard is found before the first weight is loaded
- a pickle is refused and never touched
- saving is all or nothing: `config.json` goes first and comes last, so no reader ever opens half a checkpoint
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pippin.core import memory
from pippin.core.errors import CheckpointError, CorruptedFile, InvalidArgument, ModelNotFound, UnsafeCheckpoint
from pippin.core.files import disk_errors, make_folder, require_free_space, sync_folder

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


@runtime_checkable
class SavableTokenizer(Protocol):
    """What `save_folder` asks of a tokenizer."""

    eos_ids: tuple[int, ...]
    bos_id: int | None

    def save(self, folder: Path) -> None:
        """Write the tokenizer's own files."""


class Checkpoint:
    """An open folder; made by `open_folder`."""

    def __init__(self, folder: Path, config: dict[str, Any], generation_config: dict[str, Any], shards: Iterable[Path]):
        """Open the shards; `open_folder` has found them.

        Raises:
            CorruptedFile: a shard is cut short, or two shards hold a tensor of the same name.
        """
        self.folder = folder
        self.config = config
        self.generation_config = generation_config
        self._owners: dict[str, Any] = {}
        for path in shards:
            shard = _open_shard(path)
            for name in shard.keys():  # noqa: SIM118 -- not a dictionary
                if name in self._owners:
                    raise CorruptedFile(f"{folder}: tensor {name!r} is in two shards")
                self._owners[name] = shard

    def __repr__(self) -> str:
        return f"Checkpoint({self.folder.name!r}, {len(self._owners)} tensors)"

    def names(self) -> list[str]:
        """The names of all tensors, in the order of the files."""
        return list(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without touching its values.

        Raises:
            CorruptedFile: there is no tensor of this name.
        """
        return tuple(self._owner(name).get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file; copy it before writing to it.

        Raises:
            CorruptedFile: there is no tensor of this name.
        """
        tensor: Tensor = self._owner(name).get_tensor(name)
        return tensor

    def release(self, names: Iterable[str]) -> None:
        """Take what was read of tensors out of this process's memory; it can be read again. None may be written to."""
        for tensor in map(self.tensor, names):
            memory.forget(tensor.data_ptr(), tensor.nbytes)

    def _owner(self, name: str) -> Any:
        if name not in self._owners:
            raise CorruptedFile(f"{self.folder}: no tensor named {name!r} among its {len(self._owners)}")
        return self._owners[name]


def open_folder(folder: str | Path) -> Checkpoint:
    """Open a checkpoint folder and check that it is complete.

    Raises:
        ModelNotFound: there is no such folder, or no weights in it.
        UnsafeCheckpoint: the weights are there only as a pickle.
        CorruptedFile: a file is missing, cut short, or contradicts another one.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelNotFound(f"no folder {str(folder)!r}; give a folder with config.json and model.safetensors")
    shards = _find_shards(folder)
    if not (folder / _CONFIG).is_file():
        raise CorruptedFile(f"{folder}: no config.json; the folder is incomplete, download or save it again")
    generation = read_json(folder / _GENERATION) if (folder / _GENERATION).is_file() else {}
    checkpoint = Checkpoint(folder, read_json(folder / _CONFIG), generation, shards)
    if (folder / _INDEX).is_file():
        held = set(checkpoint.names())
        for name in read_json(folder / _INDEX)["weight_map"]:
            if name not in held:
                raise CorruptedFile(f"{folder}: the index names {name!r}, which no shard holds; download it again")
    return checkpoint


def save_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: SavableTokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint that this and other libraries read.

    Everything is written beside its place first; then the old `config.json` goes, the new files come, the new
    `config.json` last. A crash leaves the old checkpoint, the new one, or a folder that `open_folder` refuses.
    Other files in the folder stay.

    Args:
        folder: created where it does not exist; a checkpoint already in it is replaced.
        config: the model's config, JSON values only.
        tensors: weights by name; leave out the second name of a tied weight.
        tokenizer: saved along, its begin and end tokens go into the generation config.
        generation_config: defaults for generation, JSON values only.

    Raises:
        InvalidArgument: two names share the same memory, or a config holds something that JSON cannot.
        DiskFull: there is less free space than the weights need; nothing was changed.
    """
    folder = Path(folder)
    weights = _separate(tensors)
    generation = {**_ends(tokenizer), **(generation_config or {})}
    texts = {_GENERATION: _dump(generation), _CONFIG: _dump(config)}
    require_free_space(folder, sum(tensor.nbytes for tensor in weights.values()))
    make_folder(folder)
    with disk_errors(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        fresh = Path(temporary)
        _save_weights(weights, fresh / _WEIGHTS)
        for name, text in texts.items():
            (fresh / name).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(fresh)
        for path in fresh.iterdir():
            _sync(path)
        (folder / _CONFIG).unlink(missing_ok=True)
        for path in [folder / _INDEX, *folder.glob("*.safetensors")]:
            path.unlink(missing_ok=True)
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == _CONFIG):
            os.replace(path, folder / path.name)
    sync_folder(folder)


def _find_shards(folder: Path) -> list[Path]:
    """The weight files of a folder."""
    if (folder / _INDEX).is_file():
        return _indexed_shards(folder)
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise CorruptedFile(f"{folder}: {len(others)} weight files but no {_INDEX}; download it too")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise UnsafeCheckpoint(
            f"{folder}: {pickles[0]!r} is a pickle, which can run code when it is opened. Take the model in "
            "safetensors, or if you trust it convert it: "
            f"safetensors.torch.save_file(torch.load({pickles[0]!r}, weights_only=True), {_WEIGHTS!r})"
        )
    raise ModelNotFound(f"{folder}: no {_WEIGHTS} and no {_INDEX}")


def _indexed_shards(folder: Path) -> list[Path]:
    index = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CorruptedFile(f"{folder / _INDEX}: no 'weight_map' from tensors to files; download it again")
    shards = []
    for name in sorted(set(index.values())):
        if Path(name).name != name:
            raise CorruptedFile(f"{folder / _INDEX}: shard {name!r} lies outside the folder")
        if not (folder / name).is_file():
            raise CorruptedFile(f"{folder}: shard {name!r} is missing; download it")
        shards.append(folder / name)
    return shards


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptedFile(f"{path}: damaged or truncated: {error}; download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file of a checkpoint holds.

    Raises:
        CorruptedFile: it holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptedFile(f"{path}: not JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CorruptedFile(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def model_type(folder: str | Path) -> str | None:
    """The kind of model that the `config.json` of a folder names; None where none can be read there.

    A damaged file is told about by what opens it, not by whoever only wants to know what to open it with.
    """
    try:
        found = read_json(Path(folder).expanduser() / "config.json").get("model_type")
    except (OSError, CorruptedFile):
        return None
    return found if isinstance(found, str) else None


def _dump(value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value), ensure_ascii=False, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"a config must hold JSON values only: {error}") from error


def _ends(tokenizer: SavableTokenizer | None) -> dict[str, Any]:
    """What the generation config says about the begin and end of text; the form that transformers reads."""
    if tokenizer is None:
        return {}
    ends = {"eos_token_id": list(tokenizer.eos_ids)} if tokenizer.eos_ids else {}
    return ends if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id, **ends}


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors wants them: on the CPU, contiguous, each in memory of its own."""
    owners: dict[int, str] = {}
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        elif tensor.nbytes and storage.data_ptr() in owners:
            raise InvalidArgument(
                f"tensors {owners[storage.data_ptr()]!r} and {name!r} share their memory; leave one out "
                "(a tied weight is saved once, with 'tie_word_embeddings' in the config)"
            )
        owners[tensor.untyped_storage().data_ptr()] = name
        separate[name] = tensor
    return separate


def _save_weights(weights: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(weights, str(path), metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path.parent.parent}: the weights could not be written: {error}") from error


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
