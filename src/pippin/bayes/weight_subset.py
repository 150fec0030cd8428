"""Subsets of a model's weights that a posterior covers: all, the last layer, a subnetwork, or named parameters.

Notable here:
- a subset is a description without a model; `resolve` turns it into a `Selection`, which defines the flat weight vector
  of length P that the rest of `pippin.bayes` uses
- the vector concatenates the parameters in the order of `model.named_parameters()`, restricted to the subset, so that
  the weights of one parameter are contiguous, also in a subnetwork
- a tied parameter occurs once in the vector, under its first name
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.batches import call_model, slice_inputs
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Selection:
    """A subset of a model's weights as one flat vector.

    Args:
        names: the parameters with selected weights, in the order of `named_parameters`.
        shapes: shapes of these parameters.
        offsets: start of each parameter in their flat concatenation.
        size: number P of selected weights.
        indices: indices of the selected weights in that concatenation, ascending; None if all are selected.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int
    indices: Int[Tensor, " weights"] | None = None

    @property
    def full_size(self) -> int:
        """Number of all weights of the parameters with selected weights."""
        return self.offsets[-1] + math.prod(self.shapes[-1])

    def of(self, name: str) -> slice:
        """The slice of the vector that holds the selected weights of a parameter.

        Raises:
            InvalidArgument: the parameter has no selected weights.
        """
        if name not in self.names:
            raise InvalidArgument(f"{name!r} is not among the selected parameters: {listed(self.names)}")
        index = self.names.index(name)
        start = self.offsets[index]
        stop = start + math.prod(self.shapes[index])
        if self.indices is None:
            return slice(start, stop)
        edges = torch.tensor([start, stop], device=self.indices.device)
        first, last = torch.searchsorted(self.indices, edges).tolist()
        return slice(first, last)

    def within(self, name: str) -> Int[Tensor, " chosen"] | None:
        """Indices of the selected weights within a flattened parameter; None if all are selected."""
        part = self.of(name)
        return None if self.indices is None else self.indices[part] - self.offsets[self.names.index(name)]

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters with selected weights, by name.

        Raises:
            InvalidArgument: the selection belongs to another model: a parameter is missing or has another shape.
        """
        own = dict(model.named_parameters())
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in own or tuple(own[name].shape) != shape:
                found = tuple(own[name].shape) if name in own else "no such parameter"
                raise InvalidArgument(f"the selection was made for another model: {name} {shape}, here {found}")
        return {name: own[name] for name in self.names}

    def vector(self, model: nn.Module) -> Float[Tensor, " weights"]:
        """A copy of the selected weights [P], without gradients."""
        flat = torch.cat([p.detach().flatten() for p in self.parameters(model).values()])
        return flat if self.indices is None else flat[self.indices.to(flat.device)]

    def tensors(self, model: nn.Module, vector: Float[Tensor, " weights"]) -> dict[str, Tensor]:
        """The parameters with the selected weights replaced, for `torch.func.functional_call`.

        Args:
            model: provides the other weights; it is not changed.
            vector: the selected weights; gradients flow into it.
        """
        self._check(vector)
        own = self.parameters(model)
        if self.indices is not None:
            flat = torch.cat([p.detach().flatten() for p in own.values()])
            vector = flat.index_put((self.indices.to(flat.device),), vector)
        parts = vector.split([math.prod(shape) for shape in self.shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    @contextmanager
    def at(self, model: nn.Module, vector: Float[Tensor, " weights"]) -> Iterator[nn.Module]:
        """A context in which the vector is written into the model's weights; the old weights are restored on exit.

        >>> model = nn.Linear(2, 1)
        >>> selection = All().resolve(model)
        >>> with selection.at(model, torch.tensor([1.0, 2.0, 3.0])) as changed:
        ...     changed(torch.ones(1, 2)).item()
        6.0
        """
        new = self.tensors(model, vector.detach())
        own = self.parameters(model)
        old = {name: parameter.detach().clone() for name, parameter in own.items()}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(new[name])
        try:
            yield model
        finally:
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(old[name])

    def _check(self, vector: Tensor) -> None:
        if tuple(vector.shape) != (self.size,):
            raise InvalidArgument(f"the vector has shape {tuple(vector.shape)}, the selection {self.size} weights")


@runtime_checkable
class Subset(Protocol):
    """A description of a subset of weights."""

    def resolve(self, model: nn.Module) -> Selection:
        """The subset of this model's weights."""


@dataclass(frozen=True)
class All:
    """Every parameter of the model.

    >>> All().resolve(nn.Linear(3, 2)).names
    ('weight', 'bias')
    """

    def resolve(self, model: nn.Module) -> Selection:
        """All parameters.

        Raises:
            InvalidArgument: the model has none.
        """
        return _selection(model, lambda name, parameter: True, "a model without parameters has no posterior")


@dataclass(frozen=True)
class LastLayer:
    """The weight and the bias of the layer that computes the outputs.

    Args:
        name: name of the layer, as in `named_modules`; any layer with parameters. None takes the layer that was
            registered last, which must be linear and also run last.

    >>> LastLayer().resolve(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).names
    ('2.weight', '2.bias')
    """

    name: str | None = None

    def resolve(self, model: nn.Module) -> Selection:
        """The parameters of that layer.

        Raises:
            InvalidArgument: no such layer, or the last one is not linear; the message lists the linear layers.
        """
        layers = {name: part for name, part in model.named_modules() if any(True for _ in part.parameters(False))}
        linear = [name for name, part in layers.items() if _is_linear(part)]
        name = self.name
        if name is None:
            name = next(reversed(layers), None)
            if name is None or name not in linear:
                found = f"the last layer is {name} ({type(layers[name]).__name__})" if name else "there are no layers"
                raise InvalidArgument(
                    f"the model has no linear last layer: {found}; name the layer that computes the outputs, "
                    f"LastLayer(name=...); linear are: {listed(linear) or 'none'}"
                )
        elif name not in layers:
            raise InvalidArgument(f"there is no layer {name!r} with parameters; there are: {listed(list(layers))}")
        own = {id(parameter) for parameter in layers[name].parameters(False)}
        return _selection(model, lambda _, parameter: id(parameter) in own, f"the layer {name!r} has no parameters")


@dataclass(frozen=True)
class Named:
    """Parameters chosen by name, such as those of a LoRA adapter.

    Args:
        names: exact names, or a predicate of names. None takes the parameters that require gradients, which are those
            of the adapter where the base model is frozen.

    >>> Named(lambda name: "bias" in name).resolve(nn.Linear(3, 2)).names
    ('bias',)
    """

    names: Sequence[str] | Callable[[str], bool] | None = None

    def resolve(self, model: nn.Module) -> Selection:
        """The parameters with these names.

        Raises:
            InvalidArgument: an unknown name, or no parameters.
        """
        wanted = self.names
        if wanted is None:
            return _selection(model, lambda _, p: p.requires_grad, "no parameter of the model requires a gradient")
        if callable(wanted):
            return _selection(model, lambda name, _: bool(wanted(name)), "the predicate chose no parameter")
        names = {wanted} if isinstance(wanted, str) else set(wanted)
        own = dict(model.named_parameters())
        if unknown := sorted(names - own.keys()):
            raise InvalidArgument(f"the model has no parameters {listed(unknown)}; there are: {listed(list(own))}")
        return _selection(model, lambda name, _: name in names, "no names of parameters were given")


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """Individual weights; all others are fixed at their values.

    Args:
        indices: indices into the vector of all parameters, in any order.

    >>> selection = Subnetwork(torch.tensor([6, 0])).resolve(nn.Linear(3, 2))
    >>> selection.names, selection.size, selection.indices.tolist(), selection.of("bias")
    (('weight', 'bias'), 2, [0, 6], slice(1, 2, None))
    """

    indices: Tensor | Sequence[int]

    def resolve(self, model: nn.Module) -> Selection:
        """The selection of these weights.

        Raises:
            InvalidArgument: no indices, repeated indices, indices out of range, or values that are not integers.
        """
        indices = torch.as_tensor(self.indices)
        everything = All().resolve(model)
        if indices.ndim != 1 or indices.numel() == 0:
            raise InvalidArgument(f"a subnetwork needs a list of indices, got shape {tuple(indices.shape)}")
        if indices.dtype.is_floating_point or indices.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise InvalidArgument(f"indices of weights are integers, got {indices.dtype}; of a mask take nonzero()")
        indices, _ = indices.long().sort()
        if indices[0] < 0 or indices[-1] >= everything.size:
            bad = int(indices[0] if indices[0] < 0 else indices[-1])
            raise InvalidArgument(f"index {bad} is out of range; the model has {everything.size} weights")
        if (repeated := indices[1:][indices.diff() == 0]).numel():
            raise InvalidArgument(f"index {int(repeated[0])} was given twice")
        ends = torch.tensor([*everything.offsets[1:], everything.size], device=indices.device)
        held = torch.bincount(torch.searchsorted(ends, indices, right=True), minlength=len(ends)) > 0
        chosen = {name for name, own in zip(everything.names, held.tolist(), strict=True) if own}
        inside = _selection(model, lambda name, _: name in chosen, "no weights")
        mask = torch.zeros(everything.size, dtype=torch.bool)
        mask[indices.cpu()] = True
        pieces = [mask[everything.of(name)] for name in inside.names]
        return Selection(inside.names, inside.shapes, inside.offsets, len(indices), torch.cat(pieces).nonzero()[:, 0])


SubsetName = Literal["all", "last_layer"]


@checked
def to_subset(subset: SubsetName | Subset) -> Subset:
    """A subset by its name; an object is returned unchanged.

    Raises:
        InvalidArgument: an unknown name, or an object that is not a subset.

    >>> to_subset("last_layer")
    LastLayer(name=None)
    """
    if isinstance(subset, str):
        return All() if subset == "all" else LastLayer()
    if not isinstance(subset, Subset):
        raise InvalidArgument(f"subset must be a name or a Subset, got {type(subset).__name__}")
    return subset


def check_last(model: nn.Module, selection: Selection, inputs: Any) -> None:
    """Check that the layer that was registered last is also the last linear layer to run.

    Raises:
        InvalidArgument: it is not; the message names the layer that runs last.
    """
    ran: list[str] = []
    linear = {name: layer for name, layer in model.named_modules() if _is_linear(layer)}
    hooks = [layer.register_forward_hook(lambda *_, name=name: ran.append(name)) for name, layer in linear.items()]
    try:
        with torch.no_grad():
            call_model(model, slice_inputs(inputs, 0, 1))
    finally:
        for hook in hooks:
            hook.remove()
    chosen = {id(parameter) for parameter in selection.parameters(model).values()}
    if ran and not chosen & {id(parameter) for parameter in linear[ran[-1]].parameters()}:
        raise InvalidArgument(
            f"the last layer in the order of registration, which has {listed(selection.names)}, is not the last that "
            f"runs, which is {ran[-1]!r}; name the layer that computes the outputs: LastLayer({ran[-1]!r})"
        )


def _selection(model: nn.Module, chosen: Callable[[str, nn.Parameter], bool], otherwise: str) -> Selection:
    """The selection of whole parameters; ``otherwise`` is the error message if there are none."""
    own = {name: parameter for name, parameter in model.named_parameters() if chosen(name, parameter)}
    if not sum(parameter.numel() for parameter in own.values()):
        raise InvalidArgument(otherwise)
    offsets, size = [], 0
    for name, parameter in own.items():
        if not parameter.is_floating_point():
            raise InvalidArgument(f"{name} holds {parameter.dtype}, which has no derivatives; choose others by name")
        offsets.append(size)
        size += parameter.numel()
    return Selection(tuple(own), tuple(tuple(p.shape) for p in own.values()), tuple(offsets), size)


def _is_linear(part: nn.Module) -> bool:
    """Whether a module is torch's linear layer or Pippin's."""
    from pippin.nn.linear import Linear

    return isinstance(part, nn.Linear | Linear)


def listed(names: Sequence[str]) -> str:
    """The first twelve names as text for a message."""
    shown = ", ".join(names[:12])
    return shown if len(names) <= 12 else f"{shown}, ... ({len(names)} in all)"
