"""Checkpoint folders in Hugging Face layout: `config.json`, `model.safetensors` or shards with an index, tokenizer.

Notable here:
- a tensor is a view of the memory-mapped file; nothing is read before it is used
- the whole folder is checked when it is opened, so a missing shard is found before the first weight is loaded
- pickles are rejected and never loaded
- saving is atomic: `config.json` is removed first and written last, so no reader ever opens half a checkpoint
- every Pippin model is stored with `save`, `load` and `fill`: its config is a frozen dataclass, which pydantic
  converts to JSON and back, and tied weights are stored once
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pippin.core import device as devices, memory
from pippin.core.errors import (
    CheckpointError,
    CorruptedFile,
    InvalidArgument,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.core.files import disk_errors, make_folder, require_free_space, sync_folder

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_MAX_LISTED: Final = 20  # problems listed in one message
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})

C = TypeVar("C")
M = TypeVar("M", bound=nn.Module)


@runtime_checkable
class SavableTokenizer(Protocol):
    """The part of a tokenizer that `save_folder` uses."""

    eos_ids: tuple[int, ...]
    bos_id: int | None

    def save(self, path: Path) -> None:
        """Write the tokenizer's own files."""


class Checkpoint:
    """An open checkpoint folder; `open_folder` creates it."""

    def __init__(self, folder: Path, config: dict[str, Any], generation_config: dict[str, Any], shards: Iterable[Path]):
        """Open the shards that `open_folder` found.

        Raises:
            CorruptedFile: a shard is truncated, or two shards contain a tensor of the same name.
        """
        self.folder = folder
        self.config = config
        self.generation_config = generation_config
        self._owners: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._begins: dict[Path, dict[str, int]] = {}
        for path in shards:
            shard = _open_shard(path)
            for name in shard.keys():  # noqa: SIM118 -- not a dictionary
                if name in self._owners:
                    raise CorruptedFile(f"{folder}: tensor {name!r} is in two shards")
                self._owners[name], self._paths[name] = shard, path

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

    def dtype(self, name: str) -> str:
        """The type of a tensor's values as the file names it ("BF16", "F8_E4M3"), without touching them.

        Raises:
            CorruptedFile: there is no tensor of this name.
        """
        return str(self._owner(name).get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file; clone it before writing to it.

        Raises:
            CorruptedFile: there is no tensor of this name.
        """
        tensor: Tensor = self._owner(name).get_tensor(name)
        return tensor

    def begin(self, name: str) -> tuple[Path, int]:
        """The file that holds a tensor, and the offset at which it begins.

        Raises:
            CorruptedFile: there is no tensor of this name.
        """
        self._owner(name)
        path = self._paths[name]
        if path not in self._begins:
            self._begins[path] = _beginnings(path)
        return path, self._begins[path][name]

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Copies of the tensors whose names begin with ``prefix``, by their names without it."""
        return {n.removeprefix(prefix): self.tensor(n).clone() for n in self._owners if n.startswith(prefix)}

    def release(self, names: Iterable[str]) -> None:
        """Drop the pages of tensors from this process's memory; they are read again on access. Not for written ones."""
        for tensor in map(self.tensor, names):
            memory.forget(tensor.data_ptr(), tensor.nbytes)

    def _owner(self, name: str) -> Any:
        if name not in self._owners:
            raise CorruptedFile(f"{self.folder}: no tensor named {name!r} among its {len(self._owners)}")
        return self._owners[name]


def open_folder(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder and check that it is complete.

    Raises:
        ModelNotFound: there is no such folder, or no weights in it.
        UnsafeCheckpoint: the weights exist only as a pickle.
        CorruptedFile: a file is missing, truncated, or contradicts another one.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelNotFound(f"no folder {str(path)!r}; give a folder with config.json and model.safetensors")
    shards = _find_shards(path)
    if not (path / _CONFIG).is_file():
        raise CorruptedFile(f"{path}: no config.json; the folder is incomplete, download or save it again")
    generation = read_json(path / _GENERATION) if (path / _GENERATION).is_file() else {}
    checkpoint = Checkpoint(path, read_json(path / _CONFIG), generation, shards)
    if (path / _INDEX).is_file():
        names = set(checkpoint.names())
        for name in read_json(path / _INDEX)["weight_map"]:
            if name not in names:
                raise CorruptedFile(f"{path}: the index names {name!r}, which no shard contains; download it again")
    return checkpoint


def save_folder(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: SavableTokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint that Pippin and other libraries can read.

    All files are first written to a temporary folder; then the old `config.json` is removed and the new files are
    moved in, the new `config.json` last. A crash leaves the old checkpoint, the new one, or a folder that
    `open_folder` rejects. Other files in the folder are kept.

    Args:
        path: created where it does not exist; a checkpoint already in it is replaced.
        config: the model's config, JSON values only.
        tensors: weights by name; leave out the second name of a tied weight.
        tokenizer: saved with the model; its BOS and EOS tokens are added to the generation config.
        generation_config: defaults for generation, JSON values only.

    Raises:
        InvalidArgument: two tensors share memory, or a config has values that JSON cannot represent.
        DiskFull: there is less free space than the weights need; nothing was changed.
    """
    path = Path(path)
    weights = _separate(tensors)
    generation = {**_special_tokens(tokenizer), **(generation_config or {})}
    texts = {_GENERATION: _dump(generation), _CONFIG: _dump(config)}
    require_free_space(path, sum(tensor.nbytes for tensor in weights.values()))
    make_folder(path)
    with disk_errors(path), tempfile.TemporaryDirectory(dir=path, prefix=".partial-") as temporary:
        new = Path(temporary)
        _save_weights(weights, new / _WEIGHTS)
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(new)
        for file in new.iterdir():
            _sync(file)
        (path / _CONFIG).unlink(missing_ok=True)
        for old in [path / _INDEX, *path.glob("*.safetensors")]:
            old.unlink(missing_ok=True)
        for file in sorted(new.iterdir(), key=lambda file: file.name == _CONFIG):
            os.replace(file, path / file.name)
    sync_folder(path)


# --- Pippin models ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedModel(Generic[C]):
    """A folder written by `save`, with its config parsed and no weight read.

    Attributes:
        path: the folder.
        config: the model's config.
        metadata: further JSON values that were saved with it.
        checkpoint: the tensors.
    """

    path: Path
    config: C
    metadata: dict[str, Any]
    checkpoint: Checkpoint


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    *,
    model_type: str,
    config: Any,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: SavableTokenizer | None = None,
) -> None:
    """Write a model as a folder that `load` reads: `config.json` with its `model_type`, and `model.safetensors`.

    Args:
        model: a module, whose parameters and persistent buffers are saved (a tied one once); or tensors by name.
        path: the folder, created where it does not exist; a model already in it is replaced atomically.
        model_type: the key of the model's class in `pippin.core.formats.model_types`.
        config: a dataclass of JSON values, tuples and further dataclasses; its fields are written to `config.json`.
        metadata: JSON values that are not needed to build the model, such as the training settings.
        tokenizer: saved with the model.

    Raises:
        InvalidArgument: config or metadata have values that JSON cannot represent.
        DiskFull: there is less free space than the weights need; nothing was changed.
    """
    from pydantic import TypeAdapter

    fields = TypeAdapter(type(config)).dump_python(config, mode="json")
    values = {"model_type": model_type, **fields}
    if metadata:
        values["metadata"] = dict(metadata)
    tensors = {names[0]: each for names, each in _named_tensors(model)} if isinstance(model, nn.Module) else model
    save_folder(path, values, tensors, tokenizer)


def load(
    path: str | Path,
    build: Callable[[SavedModel[C]], M],
    *,
    model_type: str,
    config_type: type[C],
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> M:
    """Load a model that `save` wrote; it is in evaluation mode.

    Args:
        path: the folder.
        build: builds the model of its config with arbitrary weights; on torch's meta device, where all tensors are
            saved, this allocates no extra memory.
        model_type: the expected model type.
        config_type: the class of its config.
        device: as in `pippin.load`; None takes the best device available.
        dtype: of floating-point tensors; None keeps the saved dtype.

    Raises:
        ModelNotFound: there is no such folder, or no weights in it.
        UnsupportedModel: the folder contains another type of model.
        CorruptedFile: a file is damaged, or the config and the tensors do not match.
    """
    target = devices.choose(device)
    saved = open_model(path, model_type=model_type, config_type=config_type)
    try:
        model = build(saved)
    except InvalidArgument as error:
        raise CorruptedFile(f"{saved.path / _CONFIG} contradicts itself: {error}") from error
    fill(model, saved.checkpoint, device=target, dtype=dtype)
    return model.to(target).eval()


def open_model(path: str | Path, *, model_type: str, config_type: type[C]) -> SavedModel[C]:
    """Read the config of a folder that `save` wrote; for models that need more than their config to be built.

    Raises:
        ModelNotFound: there is no such folder, or no weights in it.
        UnsupportedModel: the folder contains another type of model.
        CorruptedFile: a file is damaged, or the config does not match ``config_type``.
    """
    from pydantic import TypeAdapter, ValidationError

    checkpoint = open_folder(path)
    fields = dict(checkpoint.config)
    saved_type, metadata = fields.pop("model_type", None), fields.pop("metadata", {})
    if saved_type != model_type:
        raise UnsupportedModel(f"{path} holds a model of type {saved_type!r}, not {model_type!r}")
    expected = {field.name for field in dataclasses.fields(cast(Any, config_type))}
    problems = [f"{name}: unknown field" for name in sorted(fields.keys() - expected)]
    problems += [] if isinstance(metadata, dict) else ["metadata: not an object"]
    try:
        config = TypeAdapter(config_type).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    if problems:
        raise CorruptedFile(f"{checkpoint.folder / _CONFIG} is not that of a {model_type!r}: {_listed(problems)}")
    return SavedModel(checkpoint.folder, config, metadata, checkpoint)


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Replace all tensors of a model by those of a checkpoint; on an error the model is unchanged.

    A tied tensor has one name in the checkpoint and stays tied. Parameters keep ``requires_grad`` and attributes such
    as ``no_decay``.

    Args:
        model: its tensors may be on torch's meta device.
        checkpoint: the result of `open_folder`.
        device: of the new tensors; None for the CPU.
        dtype: of floating-point tensors; None keeps the saved dtype.
        ignore: names of checkpoint tensors that the model does not have.

    Raises:
        CorruptedFile: tensors are missing, unexpected or of another shape; the message lists them.
    """
    check_tensors(model, checkpoint, ignore=ignore)
    for names, old in _named_tensors(model):
        value = checkpoint.tensor(names[0])
        new = value.to(device, dtype if value.is_floating_point() else None, copy=True)
        for name in names:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            if not isinstance(old, nn.Parameter):
                module._buffers[attribute] = new
                continue
            if not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
                vars(new).update(vars(old))
            module._parameters[attribute] = new


def check_tensors(model: nn.Module, checkpoint: Checkpoint, *, ignore: Collection[str] = ()) -> None:
    """Compare the names and shapes of a checkpoint's tensors with a model's; no weight is read.

    Raises:
        CorruptedFile: tensors are missing, unexpected or of another shape; the message lists them.
    """
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names() if name not in ignore}
    expected = {names[0]: tuple(tensor.shape) for names, tensor in _named_tensors(model)}
    problems = [f"{name!r} is missing" for name in sorted(expected.keys() - shapes.keys())]
    problems += [f"{name!r} is unexpected" for name in sorted(shapes.keys() - expected.keys())]
    problems += [
        f"{name!r} has shape {shapes[name]} instead of {shape}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    if problems:
        raise CorruptedFile(f"{checkpoint.folder} does not match its config: {_listed(problems)}")


def _named_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Every parameter and persistent buffer once, with all of its names."""
    by_identity: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_identity.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(by_identity.values())


def _listed(problems: Sequence[str]) -> str:
    """Join the first `_MAX_LISTED` problems for a message."""
    more = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
    return "; ".join([*problems[:_MAX_LISTED], *more])


# --- files of a folder ------------------------------------------------------------------------------------------------


def _find_shards(folder: Path) -> list[Path]:
    """The weight files of a folder, from the index where there is one."""
    if (folder / _INDEX).is_file():
        return _indexed_shards(folder)
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    candidates = sorted(folder.glob("*.safetensors"))
    if len(candidates) == 1:
        return candidates
    if candidates:
        raise CorruptedFile(f"{folder}: {len(candidates)} weight files but no {_INDEX}; download it too")
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


def _beginnings(path: Path) -> dict[str, int]:
    """Where the tensors of a shard begin, which was opened before, so that its header is sound."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: 8 + size + each["data_offsets"][0] for name, each in header.items() if name != "__metadata__"}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CorruptedFile: the file is not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptedFile(f"{path}: not JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CorruptedFile(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def model_type(path: str | Path) -> str | None:
    """The ``model_type`` in the `config.json` of a folder; None where there is none.

    A damaged file gives None too: the function that opens it raises the error.
    """
    try:
        value = read_json(Path(path).expanduser() / "config.json").get("model_type")
    except (OSError, CorruptedFile):
        return None
    return value if isinstance(value, str) else None


def _dump(value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value), ensure_ascii=False, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"a config must hold JSON values only: {error}") from error


def _special_tokens(tokenizer: SavableTokenizer | None) -> dict[str, Any]:
    """The BOS and EOS tokens for the generation config, in the form that transformers reads."""
    if tokenizer is None:
        return {}
    eos = {"eos_token_id": list(tokenizer.eos_ids)} if tokenizer.eos_ids else {}
    return eos if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id, **eos}


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors requires them: on the CPU, contiguous, none sharing memory with another."""
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
