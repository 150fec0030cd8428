"""Trace one forward pass: which functions use which parameters, and which rule computes their Jacobian rows.

Notable here:
- a rule belongs to a torch function (`F.linear`, `conv2d`, `F.layer_norm`), not to a module class, so that tied
  weights, repeated calls and weights that are used without a module are handled
- a weight that is transposed or multiplied by a scalar is still recognized, as LoRA adapters need it
- parameters with a use that has no rule are listed in `unruled`; their rows come from per-example differentiation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pippin.bayes.laplace.jacobians.layer_rules import (
    BroadcastCall,
    Call,
    ChannelNormCall,
    ConvolutionCall,
    EmbeddingCall,
    LinearCall,
    NormCall,
)

Maker = Callable[[dict[int, str], Sequence[Any], dict[str, Any]], "Call | None"]


def _named(names: dict[int, str], value: object) -> str | None:
    return names.get(id(value))


def _given(args: Sequence[Any], kwargs: dict[str, Any], words: str, **defaults: Any) -> list[Any]:
    """Arguments in the order of ``words``, however they were passed."""
    values = dict(zip(words.split(), args, strict=False)) | kwargs
    return [values.get(word, defaults.get(word)) for word in words.split()]


def _linear(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    x, weight, bias = _given(args, kwargs, "input weight bias")
    if id(x) in names or weight.ndim != 2 or x.ndim < 2:
        return None
    return LinearCall(_named(names, weight), _named(names, bias), x.detach(), {}, tuple(weight.shape))


def _convolution(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    words = "input weight bias stride padding dilation groups"
    x, weight, bias, stride, padding, dilation, groups = _given(
        args, kwargs, words, stride=1, padding=0, dilation=1, groups=1
    )
    dims = weight.ndim - 2
    if id(x) in names or x.ndim != weight.ndim:
        return None
    stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
    both: list[int] = []
    for dim in range(dims):
        if padding == "same":
            total = dilation[dim] * (weight.shape[2 + dim] - 1)
            both = [total // 2, total - total // 2, *both]
        else:
            size = 0 if padding == "valid" else _tuple(padding, dims)[dim]
            both = [size, size, *both]
    options = {"stride": stride, "dilation": dilation, "groups": groups, "padding": both}
    return ConvolutionCall(_named(names, weight), _named(names, bias), x.detach(), options, tuple(weight.shape))


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _embedding(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    words = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    ids, weight, padding, max_norm, _, by_frequency, _ = _given(args, kwargs, words)
    if max_norm is not None or by_frequency:
        return None
    return EmbeddingCall(_named(names, weight), None, ids, {"padding": padding}, tuple(weight.shape))


def _layer_norm(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    x, shape, weight, bias, eps = _given(args, kwargs, "input normalized_shape weight bias eps", eps=1e-5)
    if id(x) in names:
        return None
    plain = {"plain": lambda x: F.layer_norm(x, shape, None, None, eps)}
    return NormCall(_named(names, weight), _named(names, bias), x.detach(), plain, tuple(shape))


def _rms_norm(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    x, shape, weight, eps = _given(args, kwargs, "input normalized_shape weight eps")
    if id(x) in names:
        return None
    return NormCall(
        _named(names, weight), None, x.detach(), {"plain": lambda x: F.rms_norm(x, shape, None, eps)}, tuple(shape)
    )


def _group_norm(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    x, groups, weight, bias, eps = _given(args, kwargs, "input num_groups weight bias eps", eps=1e-5)
    if id(x) in names:
        return None
    plain = {"plain": lambda x: F.group_norm(x, groups, None, None, eps)}
    return ChannelNormCall(_named(names, weight), _named(names, bias), x.detach(), plain, (x.shape[1],))


def _batch_norm(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    words = "input running_mean running_var weight bias training momentum eps"
    x, mean, variance, weight, bias, training, _, eps = _given(args, kwargs, words, training=False, eps=1e-5)
    if id(x) in names or training:
        return None
    plain = {"plain": lambda x: F.batch_norm(x, mean, variance, None, None, False, 0.0, eps)}
    return ChannelNormCall(_named(names, weight), _named(names, bias), x.detach(), plain, (x.shape[1],))


def _broadcast(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any], multiplies: bool) -> Call | None:
    """A rule for a parameter that is broadcast over the examples of another tensor."""
    if len(args) != 2 or kwargs or not all(isinstance(arg, Tensor) for arg in args):
        return None
    first, second = args
    x, parameter = (second, first) if id(first) in names else (first, second)
    shape = tuple(parameter.shape)
    fits = len(shape) < x.ndim or (len(shape) == x.ndim and shape[:1] == (1,))
    if id(x) in names or not fits or torch.broadcast_shapes(shape, x.shape) != x.shape:
        return None
    name = names[id(parameter)]
    return BroadcastCall(name if multiplies else None, None if multiplies else name, x.detach(), {}, shape)


def _multiplied(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    return _broadcast(names, args, kwargs, multiplies=True)


def _added(names: dict[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    return _broadcast(names, args, kwargs, multiplies=False)


RULES: dict[Any, Maker] = {
    F.linear: _linear,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _multiplied),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _added),
}


@dataclass
class Changed:
    """A parameter that was transposed or multiplied by a scalar; holding ``value`` keeps its `id` valid."""

    name: str
    parameter: Tensor
    transposed: bool
    factor: float
    value: Tensor


TRANSPOSING = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t)  # type: ignore[attr-defined]
SCALING = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


class CallTracer(TorchFunctionMode):
    """Records each call of a function that takes one of the given parameters.

    Args:
        names: names of the parameters, by `id`.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self._changed: dict[int, Changed] = {}
        self.calls: list[Call] = []
        self.unruled: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, and record the call if it takes one of the parameters."""
        kwargs = kwargs or {}
        changed = [found for value in _flat((args, kwargs)) if (found := self._changed.get(id(value)))]
        touched = {name for value in _flat((args, kwargs)) if (name := self._names.get(id(value)))}
        touched |= {found.name for found in changed}
        if not touched:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        known = self._names.keys() | self._changed.keys()
        if not any(isinstance(v, Tensor) and v.requires_grad and id(v) not in known for v in _flat(result)):
            return result  # a shape, say, or the parameter itself
        if (renamed := self._rename(func, args, kwargs, result)) is not None:
            self._changed[id(result)] = renamed
            return result
        if changed:
            call = self._product(func, args, kwargs)
        else:
            call = RULES[func](self._names, args, kwargs) if func in RULES else None
        if call is not None and set(call.names) == touched and result.requires_grad:
            call.record(result)
            self.calls.append(call)
        else:
            self.unruled |= touched
        return result

    def _rename(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Changed | None:
        """The result as a changed parameter, if the function transposes or scales a matrix parameter."""
        before = self._changed.get(id(args[0])) if args else None
        if before is None and args and id(args[0]) in self._names:
            before = Changed(self._names[id(args[0])], args[0], False, 1.0, args[0])
        if before is None or before.parameter.ndim != 2 or kwargs:
            return None
        if func in TRANSPOSING and len(args) == 1:
            return Changed(before.name, before.parameter, not before.transposed, before.factor, result)
        if func in SCALING and len(args) == 2 and isinstance(args[1], int | float):
            return Changed(before.name, before.parameter, before.transposed, before.factor * args[1], result)
        return None

    def _product(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        """The call of a product with a transposed weight: x W^T, or y + x W^T."""
        operands = args[1:] if func in (torch.addmm, Tensor.addmm) else args if func in PRODUCTS else ()
        if len(operands) != 2 or kwargs or not isinstance(operands[0], Tensor):
            return None
        x, weight = operands[0], self._changed.get(id(operands[1]))
        others = [value for value in args if value is not operands[1]]
        if weight is None or not weight.transposed or x.ndim < 2 or any(id(v) in self._changed for v in others):
            return None
        call = LinearCall(weight.name, None, x.detach(), {}, tuple(weight.parameter.shape))
        call.factor = weight.factor
        return call


def _flat(value: Any) -> list[Any]:
    """All values in tuples, lists and dictionaries."""
    if isinstance(value, tuple | list):
        return [inner for part in value for inner in _flat(part)]
    if isinstance(value, dict):
        return [inner for part in value.values() for inner in _flat(part)]
    return [value]
