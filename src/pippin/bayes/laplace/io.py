"""Save and load a Laplace posterior as a folder of tensors and a config.

Notable here:
- the model is not saved: a hash of all its weights and buffers is, and must match when the posterior is loaded
- objects are written as a name and their fields, so that loading runs no code from the folder
- classes that contain posteriors (a mixture, `Uncertainty`) store the posteriors' configs and tensors in their own
  folder
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor, nn

from pippin.bayes import likelihood as likelihoods
from pippin.bayes.laplace import curvature as curvatures, structure as structures
from pippin.bayes.weight_subset import Selection
from pippin.core.checks import PositiveFloat, PositiveInt
from pippin.core.errors import CheckpointError, CorruptedFile, InvalidArgument, PippinError

if TYPE_CHECKING:
    from pippin.bayes.laplace.laplace import Laplace

CURVATURES: dict[str, Any] = {"ggn": curvatures.GGN, "ef": curvatures.EF, "hessian": curvatures.Hessian}


@dataclass(frozen=True)
class LaplaceConfig:
    """The config of a saved posterior.

    Attributes:
        likelihood: its name under "kind", and its fields.
        structure: its name under "kind", and its fields.
        curvature: its name under "kind", and its fields.
        names: see `Selection`, as for shapes, offsets and size.
        shapes: shapes of the parameters.
        offsets: offsets of the parameters.
        size: number of selected weights.
        temperature: see `Laplace`, as for the four below.
        sigma_noise: standard deviation of a regression's noise.
        examples: number of fitted examples.
        outputs: number of outputs of the model.
        loss: summed loss of the fitted examples.
        weights: `fingerprint` of the fitted model.
    """

    likelihood: dict[str, Any]
    structure: dict[str, Any]
    curvature: dict[str, Any]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: PositiveInt
    temperature: PositiveFloat
    sigma_noise: PositiveFloat
    examples: PositiveInt
    outputs: PositiveInt
    loss: Annotated[float, Gt(-math.inf), Lt(math.inf)]
    weights: str


class _Saved:
    """A subset whose selection was loaded from a file."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def resolve(self, model: nn.Module) -> Selection:
        """The saved selection, after a check that the model has its parameters."""
        self.selection.parameters(model)
        return self.selection


def describe(laplace: Laplace) -> tuple[LaplaceConfig, dict[str, Tensor]]:
    """The config and the tensors of a fitted posterior, for `restore`.

    Raises:
        NotFitted: before `fit`, or the weights changed since.
        InvalidArgument: a user-defined likelihood, structure or curvature.
    """
    laplace._fitted()
    selection, mean, state = laplace.selection, laplace.mean, laplace._state
    assert mean is not None
    assert state is not None
    config = LaplaceConfig(
        likelihood=_to_dict(laplace.likelihood, likelihoods.LIKELIHOODS),
        structure=_to_dict(laplace.structure, structures.structure_classes()),
        curvature=_to_dict(laplace.curvature, CURVATURES),
        names=tuple(selection.names),
        shapes=tuple(tuple(shape) for shape in selection.shapes),
        offsets=tuple(selection.offsets),
        size=selection.size,
        temperature=float(laplace.temperature),
        sigma_noise=laplace.sigma_noise,
        examples=laplace.examples,
        outputs=laplace.outputs,
        loss=laplace.loss,
        weights=fingerprint(laplace.model),
    )
    tensors = {f"state.{name}": value for name, value in state.tensors().items()}
    tensors |= {"mean": mean, "prior_precision": laplace.prior_precision}
    tensors["prior_mean"] = torch.as_tensor(laplace.prior_mean, dtype=torch.float64)
    if selection.indices is not None:
        tensors["indices"] = selection.indices
    return config, {name: value.clone() for name, value in tensors.items()}


def restore(
    cls: type[Laplace], config: LaplaceConfig, tensors: dict[str, Tensor], model: nn.Module, path: object
) -> Laplace:
    """Rebuild a posterior from the results of `describe`, around the model that it was fitted to.

    Args:
        cls: the class to make.
        config: config of the posterior.
        tensors: tensors of the posterior.
        model: the network.
        path: where they were read, for messages.

    Raises:
        CheckpointError: the model's weights are not those of the fit.
        CorruptedFile: config and tensors do not fit each other.
    """
    try:
        laplace = _assemble(cls, config, tensors, model)
    except PippinError as error:
        raise CheckpointError(f"the posterior in {path} does not fit: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptedFile(f"the posterior in {path} cannot be read: {error}") from error
    if fingerprint(laplace.model) != config.weights:
        raise CheckpointError(f"the model's weights are not those that the posterior in {path} was fitted to")
    return laplace


def _assemble(cls: type[Laplace], config: LaplaceConfig, tensors: dict[str, Tensor], model: nn.Module) -> Laplace:
    selection = Selection(config.names, config.shapes, config.offsets, config.size, tensors.get("indices"))
    prior_mean = tensors["prior_mean"]
    laplace = cls(
        model,
        _from_dict(config.likelihood, likelihoods.LIKELIHOODS),
        _Saved(selection),
        _from_dict(config.structure, structures.structure_classes()),
        _from_dict(config.curvature, CURVATURES),
        tensors["prior_precision"],
        config.temperature,
        prior_mean if prior_mean.ndim else float(prior_mean),
    )
    if config.sigma_noise != 1:
        laplace.sigma_noise = config.sigma_noise
    laplace.examples, laplace.outputs, laplace.loss = config.examples, config.outputs, config.loss
    laplace.mean = tensors["mean"].to(laplace.selection.vector(laplace.model))
    state = laplace.structure.start(selection, laplace._like)
    prefix, device = "state.", laplace._like.device
    state.load_tensors({n.removeprefix(prefix): t.to(device) for n, t in tensors.items() if n.startswith(prefix)})
    laplace._state = state
    return laplace


def fingerprint(model: nn.Module) -> str:
    """A hash of the names and values of all weights and buffers, as 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _to_dict(value: Any, classes: dict[str, Any]) -> dict[str, Any]:
    """An object as the name of its class and its fields."""
    kind = next((name for name, cls in classes.items() if type(value) is cls), None)
    if kind is None:
        raise InvalidArgument(f"{type(value).__name__} is not one of Pippin's own and cannot be saved; save its parts")
    public = [field.name for field in fields(value) if not field.name.startswith("_")]
    return {"kind": kind, **{name: getattr(value, name) for name in public}}


def _from_dict(saved: dict[str, Any], classes: dict[str, Any]) -> Any:
    given = dict(saved)
    return classes[given.pop("kind")](**given)
