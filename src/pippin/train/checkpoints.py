"""Checkpoints of a run: folders written atomically; the last few and the best are kept.

Notable here:
- a checkpoint is written under a temporary name, synced, and renamed: a kill or a full disk leaves the one before it
- tensors are in safetensors and everything else in JSON: nothing that runs code when it is opened
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
        path: of this run alone; created where it does not exist. The log stands beside the checkpoints.
        save_every: steps between checkpoints; the last step is always saved.
        keep: number of last checkpoints to keep.
        best: whether to keep the checkpoint with the best evaluation too.
        resume: go on from the newest one; False refuses a folder that holds any, so that none is overwritten.
    """

    path: Path
    save_every: PositiveInt
    keep: PositiveInt = 2
    best: bool = True
    resume: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def all(self) -> dict[int, Path]:
        """The checkpoints there are, by step, oldest first."""
        if not self.path.is_dir():
            return {}
        found = ((_FOLDER.fullmatch(path.name), path) for path in self.path.iterdir())
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def newest_path(self) -> Path | None:
        """The folder of the newest checkpoint."""
        return next(reversed(self.all().values()), None)

    def best_path(self) -> Path | None:
        """The folder of the checkpoint with the best evaluation; None where nothing was evaluated."""
        newest = self.newest_path()
        best = read_json(newest / _STATE)["best"] if newest else None
        return self.all().get(best["step"]) if best else None

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove the ones beyond ``keep`` and ``best``.

        Args:
            step: updates made so far.
            tensors: by file name without suffix, then by tensor name; a file without tensors is left out.
            state: JSON values; its "best" is None or names the "step" of the best one.

        Raises:
            DiskFull: nothing was changed; the older checkpoints are whole.
        """
        target = self.path / f"step-{step:08d}"
        self.path.mkdir(parents=True, exist_ok=True)
        require_free_space(self.path, sum(t.nbytes for file in tensors.values() for t in file.values()))
        with disk_errors(target), tempfile.TemporaryDirectory(dir=self.path, prefix=_PARTIAL) as temporary:
            fresh = Path(temporary) / target.name
            fresh.mkdir()
            for name, entries in tensors.items():
                if entries:
                    _write(entries, fresh / f"{name}.safetensors")
            (fresh / _STATE).write_text(json.dumps(dict(state), indent=1) + "\n", encoding="utf-8")
            for path in fresh.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(fresh, target)
        sync_folder(self.path)
        self._prune(state["best"]["step"] if state.get("best") else None)

    def clear(self) -> None:
        """Remove what a killed run left half-written."""
        if self.path.is_dir():
            for path in self.path.glob(f"{_PARTIAL}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, best: int | None) -> None:
        checkpoints = self.all()
        retained = {*list(checkpoints)[-self.keep :], best if self.best else None}
        for step, path in checkpoints.items():
            if step not in retained:
                # renamed first, so that no half-removed folder looks like a checkpoint
                doomed = self.path / f"{_PARTIAL}{path.name}"
                os.replace(path, doomed)
                shutil.rmtree(doomed)


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CorruptedFile: it is absent or no JSON object.
    """
    if not (path / _STATE).is_file():
        raise CorruptedFile(f"{path}: no {_STATE}; this is no checkpoint of a run, or it was damaged")
    return read_json(path / _STATE)


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, as views of the mapped file; none where there is no such file.

    Raises:
        CorruptedFile: it is damaged.
    """
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        return {}
    try:
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- not a dictionary
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptedFile(f"{path}: damaged or truncated: {error}; resume from an older checkpoint") from error


def differences(what: str, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Every tensor that only one side has, or that differs in shape or precision; one line each."""
    lines = [f"{what} {name!r} is not in the checkpoint" for name in wanted if name not in saved]
    lines += [f"{what} {name!r} of the checkpoint is not in this run" for name in saved if name not in wanted]
    for name, tensor in wanted.items():
        if name in saved and (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            there, here = (f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in (saved[name], tensor))
            lines.append(f"{what} {name!r} is {there} in the checkpoint and {here} in this run")
    return lines


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: the parameters that are trained, and the buffers that it would save."""
    saved = set(model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**{name: p for name, p in model.named_parameters() if p.requires_grad}, **buffers}


@torch.no_grad()
def load_weights(path: Path, model: nn.Module, *, averaged: bool = False) -> None:
    """Give a model the weights of a checkpoint, the best one, say.

    Args:
        path: of the checkpoint.
        model: of the same form as the one that was trained, with the same parameters trainable.
        averaged: take the moving averages instead, as far as there are any (buffers have none).

    Raises:
        ModelNotFound: there is no such folder, or no averages in it.
        ResumeMismatch: names or shapes differ; all of them are listed.
    """
    path = Path(path)
    tensors = read_tensors(path, "model")
    averages = read_tensors(path, "ema") if averaged else {}
    if not tensors or (averaged and not averages):
        raise ModelNotFound(f"{path}: no {'moving averages' if tensors else 'checkpoint'} there")
    wanted = trained_tensors(model)
    raise_mismatch(path, differences("tensor", tensors, wanted))
    for name, tensor in wanted.items():
        tensor.copy_(averages.get(name, tensors[name]))


def raise_mismatch(path: Path, lines: list[str]) -> None:
    """Raise what differs, where anything does."""
    if lines:
        listed = "\n  ".join(lines)
        raise ResumeMismatch(
            f"{path} was written by another run:\n  {listed}\n"
            "give the same model, optimizer and data again, or another folder for a new run"
        )


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """safetensors wants each tensor contiguous, on the CPU, in memory of its own."""
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
                f"the disk filled up while writing {path.parent.name}; the checkpoints before it are whole"
            ) from error
        raise
