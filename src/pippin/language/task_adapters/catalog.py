"""The task adapters that come with Pippin, by the base model that they belong to.

Notable here:
- an adapter is a folder beside this file in PEFT's layout; `base_model.json` in it has the recipe, the seed and the
  curve of its training
- `catalog.json` has the hashes of the weights and of the base model, and the shape by which models that cannot be the
  base are told apart before the file of a model is hashed
- an adapter is loaded once for a model, when its task is asked for
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from pippin.core.errors import CorruptedFile
from pippin.core.files import sha256_of
from pippin.core.formats.checkpoint import read_json
from pippin.language.adapter_files import BASE, WEIGHTS, AdaptedModel, attach, base_sha256, read_factors

Task = Literal["extraction", "tools", "summaries", "classification"]

FOLDER: Final = Path(__file__).parent
_LOADING: Final = threading.Lock()


@dataclass(frozen=True)
class TaskAdapter:
    """An adapter that comes with Pippin.

    Attributes:
        name: its name, under which requests find it once it is loaded.
        model: name of its base model.
        task: what it is for.
        shape: layers, width and vocabulary of the base model.
        base_sha256: hash of the base model, as `pippin.language.adapter_files.base_sha256` has it.
        sha256: hash of its weights.
        size: bytes of its weights.
    """

    name: str
    model: str
    task: Task
    shape: tuple[int, int, int]
    base_sha256: str
    sha256: str
    size: int

    @property
    def path(self) -> Path:
        """The folder of the adapter, for `LanguageModel.load_adapter`, PEFT, and further training."""
        return FOLDER / self.name

    @property
    def provenance(self) -> dict[str, Any]:
        """The recipe, the seed and the curve of its training."""
        return dict(read_json(self.path / BASE).get("made", {}))


@cache
def task_adapters() -> tuple[TaskAdapter, ...]:
    """All adapters of the catalog."""
    entries = json.loads((FOLDER / "catalog.json").read_text(encoding="utf-8"))
    return tuple(TaskAdapter(**{**each, "shape": tuple(each["shape"])}) for each in entries)


def find(model: AdaptedModel, task: Task) -> TaskAdapter | None:
    """The adapter of a task for a model; None if there is none for its weights.

    Args:
        model: the base model, packed or not.
        task: what is to be done.
    """
    config = model.module.config
    shape = (len(config.layers), config.hidden_size, config.vocab_size)
    for entry in task_adapters():
        if (entry.task, entry.shape) == (task, shape) and entry.base_sha256 == base_sha256(model):
            return entry
    return None


def load(model: AdaptedModel, task: Task) -> str | None:
    """Load the adapter of a task for a model, unless it is loaded; return its name, None where there is none.

    Raises:
        CorruptedFile: its weights are not those of the catalog.
    """
    entry = find(model, task)
    if entry is None:
        return None
    with _LOADING:
        if entry.name not in model.adapters:
            if sha256_of(entry.path / WEIGHTS) != entry.sha256:
                raise CorruptedFile(f"{entry.path / WEIGHTS} is not the file of the catalog; reinstall pippin")
            model.adapters[entry.name] = attach(model, entry.name, read_factors(model, entry.path))
    return entry.name
