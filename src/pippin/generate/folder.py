"""Generators as folders: `config.json` (kind, configuration, facts) and `model.safetensors`.

Notable here:
- a model is a class with a frozen dataclass as its ``config``; pydantic turns it into JSON and back, and checks it
- the layout is Hugging Face's, under model types of our own: nothing is unpickled, and no file names code to run
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from pippin.core import device as devices
from pippin.core.checkpoint import model_type, open_folder, save_folder
from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.generate.contract import Generator

KINDS: Final[Mapping[str, str]] = {
    "pippin_diffusion": "pippin.generate.diffusion:Diffusion",
    "pippin_tarflow": "pippin.generate.tarflow:TarFlow",
    "pippin_starflow": "pippin.generate.starflow:StarFlow",
    "pippin_dart": "pippin.generate.dart:DART",
}
"""The class of each model type, as module:name."""


def is_generator(folder: str | Path) -> bool:
    """Whether a folder holds a generator of this library."""
    return model_type(folder) in KINDS


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a folder that `load` reads.

    Args:
        model: of one of the classes in `KINDS`: with ``config`` (a frozen dataclass) and ``facts`` (JSON values).
        folder: created where it does not exist; a model already in it is replaced, whole or not at all.

    Raises:
        UnsupportedModel: a model of another class.
        DiskFull: nothing was written.
    """
    from pydantic import TypeAdapter

    kind = next((name for name, place in KINDS.items() if place.endswith(f":{type(model).__name__}")), None)
    if kind is None:
        raise UnsupportedModel(f"{type(model).__name__} is none of the generators that are saved: {sorted(KINDS)}")
    made: Any = model
    config = TypeAdapter(type(made.config)).dump_python(made.config, mode="json")
    values = {"model_type": kind, "architectures": [], "config": config, "facts": dict(made.facts)}
    save_folder(Path(folder), config=values, tensors=model.state_dict())


def load(folder: str | Path, *, device: str | None = None) -> Generator:
    """Read what `save` wrote; the model is in evaluation mode.

    Args:
        folder: where it was written.
        device: as `pippin.load` takes it; None chooses.

    Raises:
        ModelNotFound: there is no such folder.
        UnsupportedModel: it holds another kind of model.
        CorruptedFile: a file is damaged, or tensors do not fit the configuration.
    """
    from pydantic import TypeAdapter, ValidationError

    checkpoint = open_folder(folder)
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedModel(
            f"{folder} holds a model of type {kind!r} and no generator of pictures; those are {sorted(KINDS)}"
        )
    module, name = KINDS[kind].split(":")
    made: Any = getattr(importlib.import_module(module), name)
    try:
        config = TypeAdapter(made.config_type).validate_python(checkpoint.config.get("config"))
        model = made(config)
        tensors = {key: checkpoint.tensor(key).clone() for key in checkpoint.names()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except (ValidationError, RuntimeError, ValueError, TypeError) as error:
        raise CorruptedFile(f"{folder}: the configuration or the weights do not fit: {error}") from error
    if missing or unexpected:
        raise CorruptedFile(f"{folder}: tensors missing {missing[:3]}, not known {unexpected[:3]}; save it again")
    facts = checkpoint.config.get("facts")
    if not isinstance(facts, dict):
        raise CorruptedFile(f"{folder}: config.json holds no 'facts'; save it again")
    model.facts = facts
    model.to(devices.choose(device)).requires_grad_(False).eval()
    return cast(Generator, model)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device
