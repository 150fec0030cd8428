"""Find the scale-invariant weights of a network: those that a norm layer follows.

Notable here:
- invariance is tested: the parameters of each module are halved and doubled, and outputs are compared
- a batch norm in evaluation mode has statistics of its inputs, which must be rescaled too; the norm of each layer is
  found by the same test, in the order in which norms are called
- the epsilon of a norm breaks the invariance slightly, so it is reduced during the test
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pippin.bayes.batches import call_model, num_examples, to_model
from pippin.core.checks import OpenFraction, checked
from pippin.core.errors import InvalidArgument, InvalidInput

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share one prior precision.

    Attributes:
        name: name of their module, or "other".
        parameters: names, as in ``model.named_parameters()``.
        invariant: whether all of them can be rescaled together without changing the outputs.
        statistics: name of the batch norm whose statistics must be rescaled too; empty if there is none.
    """

    name: str
    parameters: tuple[str, ...]
    invariant: bool = False
    statistics: str = ""


@checked
def find_scale_invariant_groups(model: nn.Module, x: Any, tolerance: OpenFraction = 1e-5) -> list[ParamGroup]:
    """The parameters of each module that can be rescaled without changing any output.

    Weight and bias of a module are rescaled together, by a half and by two. Parameters without any effect, tested by
    setting them to zero, are unused and form no invariant group.

    Args:
        model: in evaluation mode if it has batch norms.
        x: a small batch of inputs to test with.
        tolerance: the largest change of an output, relative to the largest output.

    Returns:
        One group for each scale-invariant module, in the order of ``model.named_parameters()``.

    Raises:
        InvalidArgument: batch norm in training mode.
        InvalidInput: no inputs, or outputs that are not finite.

    Source: Antoran et al., arXiv:2206.08900, recommendation 2: f(k w', w'') = f(w', w'') for k > 0.

    >>> layer = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> [group.parameters for group in find_scale_invariant_groups(layer, torch.eye(3))]
    [('0.weight', '0.bias')]
    """
    check_evaluation(model)
    if num_examples(x) == 0:
        raise InvalidInput("the inputs to test with are empty; give at least one example")
    x = to_model(x, model)
    found = []
    with torch.no_grad(), _tiny_constants(model):
        outputs = call_model(model, x)
        if not outputs.isfinite().all():
            raise InvalidInput("the outputs on the inputs to test with are not finite; check inputs and weights")
        bound = tolerance * float(outputs.abs().max())
        norms = _norms_in_order(model, x)
        for name, parameters in candidates(model).items():
            statistics = _invariant(model, x, outputs, parameters, norms, bound)
            if statistics is not None:
                found.append(ParamGroup(name, tuple(parameters), True, statistics))
    return found


GroupChoice = Literal["auto", "layerwise", "scalar"]


@checked
def partition(
    model: nn.Module, groups: GroupChoice | Sequence[ParamGroup], x: Any, names: Sequence[str] | None = None
) -> list[ParamGroup]:
    """Partition the parameters into groups that share a prior precision.

    Args:
        model: the network.
        groups: "scalar" for one group; "layerwise" for one for each module; "auto" for one for each scale-invariant
            module and one, "other", for all other parameters; or the groups themselves.
        x: inputs for the test of invariance.
        names: names of the parameters to partition; None is all of them.

    Raises:
        InvalidArgument: groups that omit a parameter, name one twice, or name an unknown one.
    """
    everything = tuple(name for name, _ in model.named_parameters() if names is None or name in names)
    if not isinstance(groups, str):
        _check_partition(everything, groups)
        return list(groups)
    if groups == "scalar":
        return [ParamGroup("all", everything)]
    found = {group.parameters: group for group in find_scale_invariant_groups(model, x)}
    owned = {name: tuple(n for n in own if n in everything) for name, own in candidates(model).items()}
    layers = [found.get(own, ParamGroup(name, own)) for name, own in owned.items() if own]
    if groups == "layerwise":
        return layers
    free = [group for group in layers if group.invariant]
    held = {name for group in free for name in group.parameters}
    others = tuple(name for name in everything if name not in held)
    return free + ([ParamGroup("other", others)] if others else [])


def candidates(model: nn.Module) -> dict[str, list[str]]:
    """The parameters that each module owns, by its name; a tied parameter belongs to its first owner."""
    owners: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        owners.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return owners


def check_evaluation(model: nn.Module) -> None:
    """Check that no batch norm is in training mode.

    Raises:
        InvalidArgument: a batch norm is; the message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            raise InvalidArgument(
                f"the batch norm {name!r} is in training mode, where an output depends on the other examples of its "
                "batch; call model.eval() first"
            )


def _check_partition(own: Sequence[str], groups: Sequence[ParamGroup]) -> None:
    seen = set[str]()
    names = [group.name for group in groups]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidArgument(f"several groups have the name {twice[0]!r}; names tell them apart")
    for group in groups:
        if not group.parameters:
            raise InvalidArgument(f"group {group.name!r} is empty; leave it out")
        for name in group.parameters:
            if name not in own:
                raise InvalidArgument(f"group {group.name!r} names {name!r}, which is no parameter to be covered")
            if name in seen:
                raise InvalidArgument(f"the groups name {name!r} twice; each parameter belongs to one group")
            seen.add(name)
    if left := [name for name in own if name not in seen]:
        raise InvalidArgument(f"the groups leave out {', '.join(left)}; every parameter belongs to one group")


def _invariant(
    model: nn.Module, x: Any, outputs: Tensor, parameters: list[str], norms: dict[str, nn.Module], bound: float
) -> str | None:
    """The batch norm that must go along ("" for none) if these parameters can be rescaled, else None."""
    own = dict(model.named_parameters())
    tensors = [own[name] for name in parameters]
    if _apart(model, x, outputs, tensors, None, 0.0) <= bound:
        return None
    # of a convolution or a linear layer, the first dimension counts its channels; of a transposed one, the second
    channels = tensors[0].shape[:2]
    matching = [name for name, norm in norms.items() if getattr(norm, "num_features", None) in channels]
    for name in ["", *matching]:
        norm = norms[name] if name else None
        if all(_apart(model, x, outputs, tensors, norm, factor) <= bound for factor in (0.5, 2.0)):
            return name
    return None


def _apart(
    model: nn.Module, x: Any, outputs: Tensor, tensors: list[nn.Parameter], norm: nn.Module | None, factor: float
) -> float:
    """The largest change of an output when tensors and the norm's statistics are rescaled."""
    with rescaled(tensors, norm, factor):
        changed = (call_model(model, x) - outputs).abs().max()
    return float(changed) if changed.isfinite() else float("inf")


@contextmanager
def rescaled(tensors: Sequence[Tensor], norm: nn.Module | None, factor: float) -> Iterator[None]:
    """A context in which tensors are multiplied by a factor, and a batch norm's mean and variance accordingly.

    >>> layer = nn.Linear(2, 1)
    >>> before = layer.weight.detach().clone()
    >>> with rescaled([layer.weight], None, 2.0):
    ...     torch.equal(layer.weight, 2 * before)
    True
    """
    scaled = [(tensor, factor) for tensor in tensors]
    if norm is not None:
        mean, variance = norm.running_mean, norm.running_var
        if isinstance(mean, Tensor) and isinstance(variance, Tensor):
            scaled += [(mean, factor), (variance, factor**2)]
    originals = [tensor.detach().clone() for tensor, _ in scaled]
    with torch.no_grad():
        for tensor, by in scaled:
            tensor.mul_(by)
        try:
            yield
        finally:
            for (tensor, _), old in zip(scaled, originals, strict=True):
                tensor.copy_(old)


@contextmanager
def _tiny_constants(model: nn.Module) -> Iterator[None]:
    """A context in which the epsilon of every norm is a million times smaller."""
    parts: list[Any] = [part for part in model.modules() if isinstance(getattr(part, "eps", None), float)]
    held = [(part, float(part.eps)) for part in parts]
    try:
        for part, eps in held:
            part.eps = 1e-6 * eps
        yield
    finally:
        for part, eps in held:
            part.eps = eps


def _norms_in_order(model: nn.Module, x: Any) -> dict[str, nn.Module]:
    """Batch norms by name, in the order in which the model calls them."""
    order: dict[str, nn.Module] = {}
    named = model.named_modules()
    names: dict[nn.Module, str] = {module: name for name, module in named if isinstance(module, BATCH_NORMS)}

    def note(module: nn.Module, inputs: Any, outputs: Any) -> None:
        order.setdefault(names[module], module)

    hooks = [module.register_forward_hook(note) for module in names]
    try:
        call_model(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    return order
