"""Save the state of a training run to a checkpoint, check that a checkpoint matches the run, and restore it.

Notable here:
- optimizer states are named by parameter, so error messages name the tensor that is missing or has another shape
- everything is compared before anything is restored: a mismatch leaves the run unchanged
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pippin.core.errors import InvalidArgument, NonFiniteLoss, ResumeMismatch
from pippin.core.files import disk_errors
from pippin.train.batch import tensors_of
from pippin.train.checkpoints import Checkpoints, differences, raise_mismatch, read_state, read_tensors, trained_tensors
from pippin.train.objective import Stateful

if TYPE_CHECKING:
    from pathlib import Path

    from pippin.train.trainer import Trainer

_FORMAT = 1


def save(trainer: Trainer, checkpoints: Checkpoints) -> None:
    """Write a checkpoint of a run; all processes must call it, and rank 0 writes.

    Raises:
        DiskFull: too little free space; the earlier checkpoints are complete.
    """
    tensors = {
        file: trainer.processes.gather({name: tensor.detach() for name, tensor in entries.items()})
        for file, entries in _tensors(trainer).items()
    }
    data = trainer.data.state_dict() if isinstance(trainer.data, Stateful) else None
    state = {
        "format": _FORMAT,
        "step": trainer.step,
        "steps": trainer.steps,
        "settings": _settings(trainer),
        "data": data,
        "best": trainer.best,
    }
    if trainer.processes.rank == 0:
        checkpoints.save(trainer.step, tensors, state)
    trainer.processes.barrier()


def resume(trainer: Trainer) -> int | None:
    """Restore the newest checkpoint.

    Returns:
        Its step; None if there is no checkpoint.

    Raises:
        InvalidArgument: there is a checkpoint, and `Checkpoints.resume` is False.
        ResumeMismatch: it was written by another run; the message lists the differences.
    """
    checkpoints = trainer.checkpoints
    if checkpoints is None:
        return None
    if trainer.processes.rank == 0:
        checkpoints.clear()
        checkpoints.path.mkdir(parents=True, exist_ok=True)
    trainer.processes.barrier()
    folder = checkpoints.newest_path()
    if folder is None:
        return None
    if not checkpoints.resume:
        raise InvalidArgument(
            f"{folder} exists already and resume is False; give another folder, or delete this one to start again"
        )
    state = read_state(folder)
    saved = {
        file: trainer.processes.own(read_tensors(folder, file)) for file in ("model", "optimizer", "ema", "objective")
    }
    _compare(trainer, folder, state, saved)
    _restore(trainer, folder, state, saved)
    return trainer.step


def raise_non_finite(trainer: Trainer, total: float, norm: float, batches: list[tuple[int, Any]]) -> None:
    """Save the batches of a step whose loss or gradient is not finite, and raise an error.

    Raises:
        NonFiniteLoss: always.
    """
    step = trainer.step + 1
    what = f"the loss is {total}" if not math.isfinite(total) else f"the loss is {total:.6g} and its gradient {norm}"
    saved = None
    if trainer.checkpoints is not None:
        rank = f"-{trainer.processes.rank}" if trainer.processes.size > 1 else ""
        path = trainer.checkpoints.path / f"nonfinite-step-{step:08d}{rank}.safetensors"
        tensors = {
            name: tensor.detach().cpu().contiguous().clone()
            for index, batch in batches
            for name, tensor in tensors_of(batch, f"batch.{index}")
        }
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, str(path))
        saved = str(path)
    raise NonFiniteLoss(
        f"step {step}: {what}; the weights are those of step {trainer.step}. "
        + (f"The batch is saved in {saved}. " if saved else "With checkpoints=... the batch would have been saved. ")
        + "Try a lower learning rate, a longer warm-up, or max_grad_norm=1.0",
        step=step,
        saved=saved,
    )


def _tensors(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """All tensors of a run's state by file and name, not copied."""
    objective = trainer.objective.state_dict() if isinstance(trainer.objective, Stateful) else {}
    for name, value in objective.items():
        if not isinstance(value, Tensor):
            raise InvalidArgument(f"the objective's state {name!r} is a {type(value).__name__}; it must be a tensor")
    return {
        "model": trained_tensors(trainer.model),
        "optimizer": {
            f"{name}.{key}": value
            for optimizer, names in _named(trainer)
            for parameter, state in optimizer.state.items()
            for name in [names[parameter]]
            for key, value in state.items()
        },
        "ema": dict(trainer.ema.averages) if trainer.ema else {},
        "objective": objective,
    }


def _named(trainer: Trainer) -> list[tuple[torch.optim.Optimizer, dict[Tensor, str]]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in trainer.model.named_parameters()}
    return [(optimizer, names) for optimizer in trainer.optimizers]


def _settings(trainer: Trainer) -> dict[str, Any]:
    """The settings that must be equal to resume a run; `steps` is not among them, so a run can be extended."""
    return {
        "objective": _name(trainer.objective),
        "data": _name(trainer.data),
        "optimizer": _name(trainer.optimizer),
        "schedule": _name(trainer.schedule),
        "micro-batches a step": trainer.gradient_accumulation_steps * trainer.processes.size,
        "max_grad_norm": trainer.max_grad_norm,
        "precision": trainer.precision,
        "ema": trainer.ema.decay if trainer.ema else None,
        "seed": trainer.seed,
        **_config(trainer.config),
    }


def _config(config: Any) -> dict[str, str]:
    """What a model's config says, by field: what cannot be seen in the shapes of its tensors must be equal too."""
    if not dataclasses.is_dataclass(config):
        return {}
    values = {f"the model's {each.name}": repr(getattr(config, each.name)) for each in dataclasses.fields(config)}
    return {name: _short(value) for name, value in values.items() if " at 0x" not in value}


def _short(value: str) -> str:
    """A value, or its beginning and hash if it is long."""
    if len(value) <= 200:
        return value
    return f"{value[:100]}... ({hashlib.blake2b(value.encode(), digest_size=8).hexdigest()})"


def _name(value: Any) -> str:
    """The repr of a dataclass of `pippin.train`; the name of a function, or of the type of anything else."""
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("pippin.train"):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _compare(trainer: Trainer, folder: Path, state: dict[str, Any], saved: dict[str, dict[str, Tensor]]) -> None:
    ours, theirs = _settings(trainer), state["settings"]
    lines = [
        f"{key}: {theirs.get(key)} in the checkpoint and {ours[key]} in this run"
        for key in ours
        if theirs.get(key) != ours[key]
    ]
    expected = _tensors(trainer)
    lines += differences("tensor", saved["model"], expected["model"])
    lines += differences("average", saved["ema"], expected["ema"])
    if expected["objective"]:  # an objective without state yet gets its tensors from `load_state_dict`
        lines += differences("tensor of the objective", saved["objective"], expected["objective"])
    if (state["data"] is not None) != isinstance(trainer.data, Stateful):
        lines.append("only one of the two has data with a position (state_dict)")
    raise_mismatch(folder, lines)


@torch.no_grad()
def _restore(trainer: Trainer, folder: Path, state: dict[str, Any], saved: dict[str, dict[str, Tensor]]) -> None:
    shard = trainer.processes.shard
    for file in ("model", "ema"):
        for name, tensor in _tensors(trainer)[file].items():
            tensor.copy_(shard(saved[file][name], tensor))
    for optimizer, names in _named(trainer):
        _restore_optimizer(trainer, optimizer, names, saved["optimizer"])
    if isinstance(trainer.objective, Stateful):
        trainer.objective.load_state_dict({name: tensor.clone() for name, tensor in saved["objective"].items()})
    trainer.step, trainer.best = state["step"], state["best"]
    if isinstance(trainer.data, Stateful):
        try:
            trainer.data.load_state_dict(state["data"])
        except (LookupError, ValueError, TypeError) as error:
            raise ResumeMismatch(f"{folder}: the position in the data cannot be restored: {error}") from error
    else:
        trainer.skip(state["step"])


def _restore_optimizer(
    trainer: Trainer, optimizer: torch.optim.Optimizer, names: dict[Tensor, str], saved: dict[str, Tensor]
) -> None:
    """Restore an optimizer with its `load_state_dict`, which moves each tensor to the right device."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, tensor in saved.items():
        name, _, entry = key.rpartition(".")
        by_name.setdefault(name, {})[entry] = tensor
    current = optimizer.state_dict()
    states: dict[int, dict[str, Tensor]] = {}
    for group, numbered in zip(optimizer.param_groups, current["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            states[number] = {
                entry: trainer.processes.shard(tensor, parameter).clone()
                if tensor.shape == parameter.shape and tensor.ndim
                else tensor.clone()
                for entry, tensor in by_name.get(names[parameter], {}).items()
            }
    current["state"] = {number: entries for number, entries in states.items() if entries}
    optimizer.load_state_dict(current)
