"""Folders in Hugging Face layout: `config.json`, `model.safetensors` or shards and their index, and companions.

Notable here:
- a tensor is a view of the mapped file; nothing is read before it is used
- the folder is checked as a whole when it is opened, so a missing shard is found before the first weight is loaded
- a pickle is refused and never touched
- saving is all or nothing: `config.json` goes first and comes last, so no reader ever opens half a checkpoint
- `save`, `load` and `fill` are the one way in which models of ours become folders: a frozen dataclass is the config,
  pydantic turns it into JSON and back, and tied weights are stored once
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
_MAX_LISTED: Final = 20  # faults that a message names
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})

C = TypeVar("C")
M = TypeVar("M", bound=nn.Module)


@runtime_checkable
class SavableTokenizer(Protocol):
    """What `save_folder` asks of a tokenizer."""

    eos_ids: tuple[int, ...]
    bos_id: int | None

    def save(self, path: Path) -> None:
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

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Copies of the tensors whose names begin with a prefix, by what follows it."""
        return {n.removeprefix(prefix): self.tensor(n).clone() for n in self._owners if n.startswith(prefix)}

    def release(self, names: Iterable[str]) -> None:
        """Take what was read of tensors out of this process's memory; it can be read again. None may be written to."""
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
        UnsafeCheckpoint: the weights are there only as a pickle.
        CorruptedFile: a file is missing, cut short, or contradicts another one.
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
        held = set(checkpoint.names())
        for name in read_json(path / _INDEX)["weight_map"]:
            if name not in held:
                raise CorruptedFile(f"{path}: the index names {name!r}, which no shard holds; download it again")
    return checkpoint


def save_folder(
    path: str | Path,
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
        path: created where it does not exist; a checkpoint already in it is replaced.
        config: the model's config, JSON values only.
        tensors: weights by name; leave out the second name of a tied weight.
        tokenizer: saved along, its begin and end tokens go into the generation config.
        generation_config: defaults for generation, JSON values only.

    Raises:
        InvalidArgument: two names share the same memory, or a config holds something that JSON cannot.
        DiskFull: there is less free space than the weights need; nothing was changed.
    """
    path = Path(path)
    weights = _separate(tensors)
    generation = {**_ends(tokenizer), **(generation_config or {})}
    texts = {_GENERATION: _dump(generation), _CONFIG: _dump(config)}
    require_free_space(path, sum(tensor.nbytes for tensor in weights.values()))
    make_folder(path)
    with disk_errors(path), tempfile.TemporaryDirectory(dir=path, prefix=".partial-") as temporary:
        fresh = Path(temporary)
        _save_weights(weights, fresh / _WEIGHTS)
        for name, text in texts.items():
            (fresh / name).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(fresh)
        for file in fresh.iterdir():
            _sync(file)
        (path / _CONFIG).unlink(missing_ok=True)
        for old in [path / _INDEX, *path.glob("*.safetensors")]:
            old.unlink(missing_ok=True)
        for file in sorted(fresh.iterdir(), key=lambda file: file.name == _CONFIG):
            os.replace(file, path / file.name)
    sync_folder(path)


# --- models with a config of ours -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedModel(Generic[C]):
    """A folder that `save` wrote, with its config read and no weight touched.

    Attributes:
        path: the folder.
        config: the model's config.
        metadata: what else was saved beside it.
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
        model: its parameters and persistent buffers are saved, a tied one once; or tensors by name, of what is not a
            module.
        path: the folder, created where it does not exist; a model already in it is replaced, whole or not at all.
        model_type: what kind of model it is; see `pippin.core.formats.model_types`.
        config: a dataclass of JSON values, tuples and further dataclasses; its fields stand in `config.json`.
        metadata: JSON values that loading does not need to build the model, such as how it was trained.
        tokenizer: its files are saved beside.

    Raises:
        InvalidArgument: a config or metadata that JSON cannot hold.
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
    """Read what `save` wrote; the model is in evaluation mode.

    Args:
        path: the folder.
        build: makes the model of its config, with any weights; on torch's meta device, where all of its tensors are
            saved, no memory is used twice.
        model_type: the kind that is asked for.
        config_type: the class of its config.
        device: as `pippin.load` takes it; None takes the best there is.
        dtype: of floating-point tensors; None keeps what was saved.

    Raises:
        ModelNotFound: there is no such folder, or no weights in it.
        UnsupportedModel: it holds another kind of model.
        CorruptedFile: a file is damaged, or the config or the tensors do not fit.
    """
    where = devices.choose(device)
    saved = open_model(path, model_type=model_type, config_type=config_type)
    try:
        model = build(saved)
    except InvalidArgument as error:
        raise CorruptedFile(f"{saved.path / _CONFIG} contradicts itself: {error}") from error
    fill(model, saved.checkpoint, device=where, dtype=dtype)
    return model.to(where).eval()


def open_model(path: str | Path, *, model_type: str, config_type: type[C]) -> SavedModel[C]:
    """Read the config of a folder that `save` wrote; for models that `load` cannot build from a config alone.

    Raises:
        ModelNotFound: there is no such folder, or no weights in it.
        UnsupportedModel: it holds another kind of model.
        CorruptedFile: a file is damaged, or the config is not one of ``config_type``.
    """
    from pydantic import TypeAdapter, ValidationError

    checkpoint = open_folder(path)
    fields = dict(checkpoint.config)
    found, metadata = fields.pop("model_type", None), fields.pop("metadata", {})
    if found != model_type:
        raise UnsupportedModel(f"{path} holds a model of type {found!r}, not {model_type!r}")
    expected = {field.name for field in dataclasses.fields(cast(Any, config_type))}
    wrong = [f"{name}: unknown field" for name in sorted(fields.keys() - expected)]
    wrong += [] if isinstance(metadata, dict) else ["metadata: not an object"]
    try:
        config = TypeAdapter(config_type).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        wrong += [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    if wrong:
        raise CorruptedFile(f"{checkpoint.folder / _CONFIG} is not that of a {model_type!r}: {_listed(wrong)}")
    return SavedModel(checkpoint.folder, config, metadata, checkpoint)


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Put the tensors of a checkpoint in place of a model's own, all of them or none.

    A tied tensor has one name in the checkpoint and stays tied. Parameters keep whether they want gradients, and marks
    such as ``no_decay``.

    Args:
        model: its tensors may be on torch's meta device.
        checkpoint: what `open_folder` gave.
        device: of the new tensors; None for the CPU.
        dtype: of floating-point tensors; None keeps what was saved.
        ignore: tensors of the checkpoint that are not the model's.

    Raises:
        CorruptedFile: a tensor is missing, unexpected or of another shape; they are listed.
    """
    check_tensors(model, checkpoint, ignore=ignore)
    for names, old in _named_tensors(model):
        value = checkpoint.tensor(names[0])
        new = value.to(device, dtype if value.is_floating_point() else None, copy=True)
        for name in names:
            owner, _, attribute = name.rpartition(".")
            part = model.get_submodule(owner)
            if not isinstance(old, nn.Parameter):
                part._buffers[attribute] = new
                continue
            if not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
                vars(new).update(vars(old))
            part._parameters[attribute] = new


def check_tensors(model: nn.Module, checkpoint: Checkpoint, *, ignore: Collection[str] = ()) -> None:
    """Compare the names and shapes of a checkpoint's tensors with a model's; no weight is read.

    Raises:
        CorruptedFile: a tensor is missing, unexpected or of another shape; they are listed.
    """
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names() if name not in ignore}
    expected = {names[0]: tuple(tensor.shape) for names, tensor in _named_tensors(model)}
    wrong = [f"{name!r} is missing" for name in sorted(expected.keys() - shapes.keys())]
    wrong += [f"{name!r} is unexpected" for name in sorted(shapes.keys() - expected.keys())]
    wrong += [
        f"{name!r} has shape {shapes[name]} instead of {shape}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    if wrong:
        raise CorruptedFile(f"{checkpoint.folder} does not fit its configuration: {_listed(wrong)}")


def _named_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Every parameter and persistent buffer once, with all of its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _listed(wrong: Sequence[str]) -> str:
    """Faults for a message, the first of them where there are many."""
    more = [f"and {len(wrong) - _MAX_LISTED} more"] if len(wrong) > _MAX_LISTED else []
    return "; ".join([*wrong[:_MAX_LISTED], *more])


# --- inside -----------------------------------------------------------------------------------------------------------


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


def model_type(path: str | Path) -> str | None:
    """The kind of model that the `config.json` of a folder names; None where none can be read there.

    A damaged file is told about by what opens it, not by whoever only wants to know what to open it with.
    """
    try:
        found = read_json(Path(path).expanduser() / "config.json").get("model_type")
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
