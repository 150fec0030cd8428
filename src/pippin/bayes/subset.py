"""Which weights are uncertain: all, those of the last layer, a subnetwork, or those that are named.

Notable here:
- a subset is a description without a model; `resolve` turns it into a `Selection`, the flat vector that everything
  else in `pippin.bayes` speaks of
- the vector concatenates `model.named_parameters()` in their order, restricted to the subset, so that the weights of
  one parameter always lie side by side, a subnetwork's too
- a tied parameter has one place in the vector, that of its first name
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.batches import call, part
from pippin.core.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Selection:
    """A subset of a model's weights as one flat vector.

    Args:
        names: the parameters that hold chosen weights, in the order of `named_parameters`.
        shapes: of these parameters.
        offsets: where each begins in the concatenation of these parameters, flattened.
        size: how many weights are chosen, P.
        indices: which of that concatenation are chosen, in ascending order; None if all are.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int
    indices: Int[Tensor, " weights"] | None = None

    @property
    def full_size(self) -> int:
        """How many weights the parameters have that hold chosen ones."""
        return self.offsets[-1] + math.prod(self.shapes[-1])

    def of(self, name: str) -> slice:
        """Where the chosen weights of a parameter lie in the vector.

        Raises:
            InvalidArgument: the parameter holds no chosen weight.
        """
        if name not in self.names:
            raise InvalidArgument(f"{name!r} is not among the chosen parameters: {listed(self.names)}")
        place = self.names.index(name)
        start = self.offsets[place]
        stop = start + math.prod(self.shapes[place])
        if self.indices is None:
            return slice(start, stop)
        edges = torch.tensor([start, stop], device=self.indices.device)
        first, last = torch.searchsorted(self.indices, edges).tolist()
        return slice(first, last)

    def within(self, name: str) -> Int[Tensor, " chosen"] | None:
        """Which weights of a parameter, flattened, are chosen; None if all are."""
        where = self.of(name)
        return None if self.indices is None else self.indices[where] - self.offsets[self.names.index(name)]

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters themselves, by name.

        Raises:
            InvalidArgument: the model is not the one of this selection: a parameter is missing or has another shape.
        """
        own = dict(model.named_parameters())
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in own or tuple(own[name].shape) != shape:
                found = tuple(own[name].shape) if name in own else "no such parameter"
                raise InvalidArgument(f"the selection was made for another model: {name} {shape}, here {found}")
        return {name: own[name] for name in self.names}

    def vector(self, model: nn.Module) -> Float[Tensor, " weights"]:
        """The chosen weights as they are now, a copy without gradients."""
        flat = torch.cat([p.detach().flatten() for p in self.parameters(model).values()])
        return flat if self.indices is None else flat[self.indices.to(flat.device)]

    def tensors(self, model: nn.Module, vector: Float[Tensor, " weights"]) -> dict[str, Tensor]:
        """The parameters with the chosen weights replaced, as `torch.func.functional_call` takes them.

        Args:
            model: whose other weights are kept; it is not changed.
            vector: the chosen weights. Gradients flow into it.
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
        """Write the vector into the model's weights, and put the old ones back on exit.

        >>> model = nn.Linear(2, 1)
        >>> selection = All().resolve(model)
        >>> with selection.at(model, torch.tensor([1.0, 2.0, 3.0])) as changed:
        ...     changed(torch.ones(1, 2)).item()
        6.0
        """
        fresh = self.tensors(model, vector.detach())
        own = self.parameters(model)
        kept = {name: parameter.detach().clone() for name, parameter in own.items()}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(fresh[name])
        try:
            yield model
        finally:
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(kept[name])

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
        name: of the layer, as in `named_modules`; any layer that has parameters. None takes the last layer that was
            registered, which must be linear, and the last to run.

    >>> LastLayer().resolve(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).names
    ('2.weight', '2.bias')
    """

    name: str | None = None

    def resolve(self, model: nn.Module) -> Selection:
        """The parameters of that layer.

        Raises:
            InvalidArgument: no such layer, or the last one is not linear; the message names those that are.
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
    """The parameters of some names: a LoRA's, say.

    Args:
        names: exact names, or a predicate of a name. None takes those with `requires_grad`, which are a LoRA's where
            the base model is frozen.

    >>> Named(lambda name: "bias" in name).resolve(nn.Linear(3, 2)).names
    ('bias',)
    """

    names: Sequence[str] | Callable[[str], bool] | None = None

    def resolve(self, model: nn.Module) -> Selection:
        """The parameters of these names.

        Raises:
            InvalidArgument: a name that the model does not have, or none chosen.
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
    """Single weights; all others stay where they are.

    Args:
        indices: places in the vector of all parameters; their order does not matter.

    >>> selection = Subnetwork(torch.tensor([6, 0])).resolve(nn.Linear(3, 2))
    >>> selection.names, selection.size, selection.indices.tolist(), selection.of("bias")
    (('weight', 'bias'), 2, [0, 6], slice(1, 2, None))
    """

    indices: Tensor | Sequence[int]

    def resolve(self, model: nn.Module) -> Selection:
        """These weights.

        Raises:
            InvalidArgument: no indices, one twice, one out of range, or numbers that are not integers.
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


def subset(choice: str | Subset) -> Subset:
    """The subset that a word or an object stands for.

    Raises:
        InvalidArgument: an unknown word, or something that is no subset.

    >>> subset("last_layer")
    LastLayer(name=None)
    """
    if isinstance(choice, str):
        made: Subset | None = {"all": All(), "last_layer": LastLayer()}.get(choice)  # type: ignore[assignment]
        if made is None:
            raise InvalidArgument(f"subset is {choice!r}; choose all or last_layer, or give a Subnetwork or Named")
        return made
    if not isinstance(choice, Subset):
        raise InvalidArgument(f"subset must be a word or a subset, got {type(choice).__name__}")
    return choice


def check_last(model: nn.Module, selection: Selection, inputs: Any) -> None:
    """See that the layer that was registered last is the last linear one that runs.

    Raises:
        InvalidArgument: it is not; the message names the one that is.
    """
    ran: list[str] = []
    linear = {name: layer for name, layer in model.named_modules() if _is_linear(layer)}
    hooks = [layer.register_forward_hook(lambda *_, name=name: ran.append(name)) for name, layer in linear.items()]
    try:
        with torch.no_grad():
            call(model, part(inputs, 0, 1))
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
    """Whole parameters; ``otherwise`` says what is wrong if there are none."""
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
    """torch's linear layer, or one that computes the same: a matrix as ``weight``, perhaps a ``bias``, no children."""
    from pippin.nn.linear import Linear

    return isinstance(part, nn.Linear | Linear)


def listed(names: Sequence[str]) -> str:
    """The names for a message, not more than twelve."""
    shown = ", ".join(names[:12])
    return shown if len(names) <= 12 else f"{shown}, ... ({len(names)} in all)"
