"""Training checkpoints: folders written atomically, of which the last few and the best are kept.

Notable here:
- a checkpoint is written under a temporary name, synced, and renamed: a kill or a full disk leaves the previous one
- tensors are stored in safetensors and everything else in JSON, so nothing runs code when it is loaded
- `step-00000100/` holds `model.safetensors`, `optimizer.safetensors`, `ema.safetensors` and `objective.safetensors`
  (the last two where the run has them) and `state.json`, which is written last
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import CorruptedFile, DiskFull, ModelNotFound, ResumeMismatch
from pippin.core.files import disk_errors, require_free_space, sync_folder
from pippin.core.formats.checkpoint import read_json

_STATE = "state.json"
_FOLDER = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"


@checked
@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run is saved.

    Attributes:
        path: a folder for this run only, created where it does not exist; the training log is written there too.
        save_every: steps between checkpoints; the last step is always saved.
        keep: number of most recent checkpoints to keep.
        best: whether to keep the checkpoint with the best evaluation too.
        resume: whether to resume from the newest checkpoint; False raises an error if the folder contains one.
    """

    path: Path
    save_every: PositiveInt
    keep: PositiveInt = 2
    best: bool = True
    resume: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def all(self) -> dict[int, Path]:
        """The folders of all checkpoints by step, oldest first."""
        if not self.path.is_dir():
            return {}
        matches = ((_FOLDER.fullmatch(path.name), path) for path in self.path.iterdir())
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    def newest_path(self) -> Path | None:
        """The folder of the newest checkpoint; None where there is none."""
        return next(reversed(self.all().values()), None)

    def best_path(self) -> Path | None:
        """The folder of the checkpoint with the best evaluation; None where there was no evaluation."""
        newest = self.newest_path()
        best = read_json(newest / _STATE)["best"] if newest else None
        return self.all().get(best["step"]) if best else None

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Write a checkpoint, then delete those that ``keep`` and ``best`` do not retain.

        Args:
            step: number of completed steps.
            tensors: by file name without suffix, then by tensor name; files without tensors are not written.
            state: JSON values; its "best" is None or has the "step" of the best checkpoint.

        Raises:
            DiskFull: nothing was written; the older checkpoints are unchanged.
        """
        target = self.path / f"step-{step:08d}"
        self.path.mkdir(parents=True, exist_ok=True)
        require_free_space(self.path, sum(t.nbytes for file in tensors.values() for t in file.values()))
        with disk_errors(target), tempfile.TemporaryDirectory(dir=self.path, prefix=_PARTIAL) as temporary:
            new = Path(temporary) / target.name
            new.mkdir()
            for name, entries in tensors.items():
                if entries:
                    _write(entries, new / f"{name}.safetensors")
            (new / _STATE).write_text(json.dumps(dict(state), indent=1) + "\n", encoding="utf-8")
            for path in new.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(new, target)
        sync_folder(self.path)
        self._prune(state["best"]["step"] if state.get("best") else None)

    def clear(self) -> None:
        """Delete incomplete checkpoints that a killed run left."""
        if self.path.is_dir():
            for path in self.path.glob(f"{_PARTIAL}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, best: int | None) -> None:
        checkpoints = self.all()
        retained = {*list(checkpoints)[-self.keep :], best if self.best else None}
        for step, path in checkpoints.items():
            if step not in retained:
                # renamed first, so that no partly deleted folder looks like a checkpoint
                renamed = self.path / f"{_PARTIAL}{path.name}"
                os.replace(path, renamed)
                shutil.rmtree(renamed)


def read_state(path: Path) -> dict[str, Any]:
    """Read the JSON state of a checkpoint.

    Raises:
        CorruptedFile: it is missing or not a JSON object.
    """
    if not (path / _STATE).is_file():
        raise CorruptedFile(f"{path}: no {_STATE}; this is not a training checkpoint, or it is damaged")
    return read_json(path / _STATE)


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors in one file of a checkpoint, as views of the mapped file; empty where there is no such file.

    Raises:
        CorruptedFile: the file is damaged.
    """
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        return {}
    try:
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- not a dictionary
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptedFile(f"{path}: damaged or truncated: {error}; resume from an older checkpoint") from error


def differences(what: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """One line for every tensor that only one side has, or that differs in shape or dtype."""
    lines = [f"{what} {name!r} is not in the checkpoint" for name in expected if name not in saved]
    lines += [f"{what} {name!r} of the checkpoint is not in this run" for name in saved if name not in expected]
    for name, tensor in expected.items():
        if name in saved and (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            theirs, ours = (f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in (saved[name], tensor))
            lines.append(f"{what} {name!r} is {theirs} in the checkpoint and {ours} in this run")
    return lines


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that a checkpoint stores: trainable parameters and persistent buffers."""
    persistent = set(model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**{name: p for name, p in model.named_parameters() if p.requires_grad}, **buffers}


@torch.no_grad()
def load_weights(path: Path, model: nn.Module, *, averaged: bool = False) -> None:
    """Load the weights of a checkpoint into a model.

    Args:
        path: the folder of the checkpoint, such as `Checkpoints.best_path()`.
        model: of the same architecture as the trained one, with the same trainable parameters.
        averaged: load the exponential moving averages instead; buffers, which have none, get their last values.

    Raises:
        ModelNotFound: there is no such checkpoint, or it has no averages.
        ResumeMismatch: names or shapes differ; all differences are listed.
    """
    path = Path(path)
    tensors = read_tensors(path, "model")
    averages = read_tensors(path, "ema") if averaged else {}
    if not tensors or (averaged and not averages):
        raise ModelNotFound(f"{path} has no {'moving averages' if tensors else 'checkpoint'}")
    targets = trained_tensors(model)
    raise_mismatch(path, differences("tensor", tensors, targets))
    for name, tensor in targets.items():
        tensor.copy_(averages.get(name, tensors[name]))


def raise_mismatch(path: Path, lines: list[str]) -> None:
    """Raise `ResumeMismatch` if there are differences."""
    if lines:
        listed = "\n  ".join(lines)
        raise ResumeMismatch(
            f"{path} was written by another run:\n  {listed}\n"
            "give the same model, optimizer and data again, or another folder for a new run"
        )


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file, which requires contiguous CPU tensors that do not share memory."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    try:
        save_file(separate, str(path), metadata={"format": "pt"})
    except SafetensorError as error:
        if "os error 28" in str(error) or "os error 122" in str(error):  # ENOSPC, EDQUOT
            raise DiskFull(
                f"the disk filled up while writing {path.parent.name}; the earlier checkpoints are complete"
            ) from error
        raise
