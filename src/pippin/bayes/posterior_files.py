"""A Laplace posterior as two files: tensors, and what they belong to.

Notable here:
- the model is not saved but recognised: a hash of all its weights and buffers must agree when the posterior is loaded
- objects are written as a word and their plain fields, so that reading runs no code
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from pippin.bayes import curvature as curvatures, likelihood as likelihoods, structure as structures
from pippin.bayes.subset import Selection
from pippin.core.errors import CheckpointError, CorruptedFile, InvalidArgument, PippinError
from pippin.core.files import atomic_write, make_folder

if TYPE_CHECKING:
    from pippin.bayes.laplace import Laplace

TENSORS, FACTS = "laplace.safetensors", "laplace.json"
CURVATURES: dict[str, Any] = {"ggn": curvatures.GGN, "ef": curvatures.EF, "hessian": curvatures.Hessian}


class _Saved:
    """A subset that was resolved before."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def resolve(self, model: nn.Module) -> Selection:
        """The saved one, if the model has its parameters."""
        self.selection.parameters(model)
        return self.selection


def save_posterior(laplace: Laplace, folder: Path) -> None:
    """Write both files; see `Laplace.save`."""
    facts = {
        "likelihood": _plain(laplace.likelihood, likelihoods.WORDS),
        "structure": _plain(laplace.structure, {word: structures.named(word) for word in structures.WORDS}),
        "curvature": _plain(laplace.curvature, CURVATURES),
        "names": laplace.selection.names,
        "shapes": laplace.selection.shapes,
        "offsets": laplace.selection.offsets,
        "size": laplace.selection.size,
        "temperature": laplace.temperature,
        "sigma_noise": laplace.sigma_noise,
        "examples": laplace.examples,
        "outputs": laplace.outputs,
        "loss": laplace.loss,
        "weights": fingerprint(laplace.model),
    }
    assert laplace._state is not None
    assert laplace.mean is not None
    tensors = {f"state.{name}": value for name, value in laplace._state.tensors().items()}
    tensors |= {"mean": laplace.mean, "prior_precision": laplace.prior_precision}
    tensors["prior_mean"] = torch.as_tensor(laplace.prior_mean, dtype=torch.float64)
    if laplace.selection.indices is not None:
        tensors["indices"] = laplace.selection.indices
    make_folder(folder)
    data = save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    with atomic_write(folder / TENSORS) as file:
        file.write(data)
    with atomic_write(folder / FACTS, mode="w") as file:
        json.dump(facts, file, indent=1)


def load_posterior(kind: type[Laplace], folder: Path, model: nn.Module) -> Laplace:
    """Read both files; see `Laplace.load`."""
    if not (folder / FACTS).is_file() or not (folder / TENSORS).is_file():
        raise CheckpointError(f"{folder} holds no posterior: {FACTS} and {TENSORS} are wanted")
    try:
        facts = json.loads((folder / FACTS).read_text())
        tensors = load_file(folder / TENSORS)
        made = _assemble(kind, facts, tensors, model)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, PippinError):
            raise CheckpointError(f"the posterior in {folder} does not fit: {error}") from error
        raise CorruptedFile(f"the posterior in {folder} cannot be read: {error}") from error
    if fingerprint(made.model) != facts["weights"]:
        raise CheckpointError(f"the model's weights are not those that the posterior in {folder} was fitted to")
    return made


def _assemble(kind: type[Laplace], facts: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module) -> Laplace:
    shapes = tuple(tuple(shape) for shape in facts["shapes"])
    names, offsets = tuple(facts["names"]), tuple(facts["offsets"])
    selection = Selection(names, shapes, offsets, facts["size"], tensors.get("indices"))
    prior_mean = tensors["prior_mean"]
    made = kind(
        model,
        _object(facts["likelihood"], likelihoods.WORDS),
        _Saved(selection),
        _object(facts["structure"], {facts["structure"]["kind"]: structures.named(facts["structure"]["kind"])}),
        _object(facts["curvature"], CURVATURES),
        tensors["prior_precision"],
        facts["temperature"],
        prior_mean if prior_mean.ndim else float(prior_mean),
    )
    if facts["sigma_noise"] != 1:
        made.sigma_noise = facts["sigma_noise"]
    made.examples, made.outputs, made.loss = int(facts["examples"]), int(facts["outputs"]), float(facts["loss"])
    if made.examples < 1 or made.outputs < 1 or not math.isfinite(made.loss):
        raise ValueError(f"{made.examples} examples, {made.outputs} outputs and a loss of {made.loss}")
    made.mean = tensors["mean"].to(made.selection.vector(made.model))
    state = made.structure.start(selection, made._like)
    device = made._like.device
    prefix = "state."
    state.load({n.removeprefix(prefix): t.to(device) for n, t in tensors.items() if n.startswith(prefix)})
    made._state = state
    return made


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights and buffers and their names."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any, known: dict[str, Any]) -> dict[str, Any]:
    """An object as its word and fields."""
    word = next((word for word, kind in known.items() if type(value) is kind), None)
    if word is None:
        raise InvalidArgument(f"{type(value).__name__} is not one of Pippin's own and cannot be saved; save its parts")
    shown = {field.name for field in fields(value) if not field.name.startswith("_")}
    return {"kind": word, **{name: item for name, item in _fields(value).items() if name in shown}}


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are, without copies of what cannot be copied."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _object(saved: dict[str, Any], known: dict[str, Any]) -> Any:
    given = dict(saved)
    return known[given.pop("kind")](**given)
