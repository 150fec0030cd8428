"""Ranges and choices declared in annotations, checked when a function is called or a dataclass is created.

Notable here:
- `Annotated[float, Ge(0), Le(1)]` is a range, `Literal["mean", "sum"]` a choice; both are also checked inside
  `X | None`, tuples, lists and sequences; the rest of an annotation is left to the type checker
- a value with a range must be a number: text and booleans are rejected, and floats where the type is int
- annotations are evaluated once, at the first call, so that importing a module stays cheap
- NaN is outside every range
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from pippin.core.errors import InvalidArgument

FiniteFloat = Annotated[float, Gt(-math.inf), Lt(math.inf)]
PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]
Probability = Annotated[float, Ge(0), Le(1)]
"""From 0 to 1, both included."""
Fraction = Annotated[float, Ge(0), Lt(1)]
"""From 0 to below 1, such as a fraction of weights to prune: never all of them."""
OpenFraction = Annotated[float, Gt(0), Lt(1)]

_ALIASES = (
    "FiniteFloat",
    "PositiveInt",
    "NonNegativeInt",
    "PositiveFloat",
    "NonNegativeFloat",
    "Probability",
    "Fraction",
)

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, Any], None]


def checked(target: F) -> F:
    """Check the arguments of a function, or the fields of a dataclass, against the ranges and choices in annotations.

    A range is written with `annotated_types` (or one of the aliases of this module), a choice as a `Literal`.

    Args:
        target: a function, or a dataclass (put the decorator above `@dataclass`). Checks run before the body and
            before `__post_init__`.

    Raises:
        InvalidArgument: (at the call) a value outside its range or its choices; the message names the argument, the
            value and what is allowed.

    >>> @checked
    ... def smooth(x: list[float], damping: Annotated[float, Ge(0), Le(1)], kind: Literal["mean", "max"] = "max"):
    ...     return sum(x) * damping
    >>> smooth([1.0, 3.0], damping=0.5)
    2.0
    >>> smooth([1.0], damping=2.0)
    Traceback (most recent call last):
    pippin.core.errors.InvalidArgument: damping must be from 0 to 1, got 2.0
    >>> smooth([1.0], 0.5, kind="median")
    Traceback (most recent call last):
    pippin.core.errors.InvalidArgument: kind must be 'mean' or 'max', got 'median'
    """
    if isinstance(target, type):
        if not dataclasses.is_dataclass(target):
            raise TypeError(f"{target.__name__} is not a dataclass; decorate its __init__ instead")
        cls: Any = target
        cls.__init__ = _with_checks(cls.__init__, lambda: _field_annotations(target))
        return target
    namespace = inspect.unwrap(target).__globals__
    annotations = target.__annotations__
    return typing.cast(F, _with_checks(target, lambda: {n: _resolved(a, namespace) for n, a in annotations.items()}))


def _field_annotations(target: type[Any]) -> dict[str, Any]:
    """The evaluated annotations of a dataclass's fields, inherited ones in the namespace of their own module."""
    field_names = {field.name for field in dataclasses.fields(target) if field.init}
    annotations = {}
    for cls in reversed(target.__mro__):
        for name in field_names & vars(cls).get("__annotations__", {}).keys():
            annotations[name] = _resolved(cls.__annotations__[name], vars(sys.modules[cls.__module__]))
    return annotations


def _with_checks(function: Callable[..., Any], annotations: Callable[[], dict[str, Any]]) -> Callable[..., Any]:
    """Wrap a function so that its arguments are checked before it runs."""
    signature = inspect.signature(function)
    checks: dict[str, Check] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checks
        if checks is None:
            checks = {name: check for name, annotation in annotations().items() if (check := _check_of(annotation))}
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own message names the function
        for name in checks.keys() & arguments.keys():
            checks[name](name, arguments[name])
        return function(*args, **kwargs)

    return call


def _resolved(annotation: Any, namespace: dict[str, Any]) -> Any:
    """Evaluate an annotation; None where a name in it is imported for the type checker only."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, namespace)
    except NameError:
        if any(word in annotation for word in ("Annotated", "Literal", *_ALIASES)):
            raise  # a check must not be skipped silently: import the name at run time
        return None


def _check_of(annotation: Any) -> Check | None:
    """The check for an annotation; None where it has neither a range nor a choice."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [each for each in args[1:] if isinstance(each, Ge | Gt | Le | Lt)]
        return _range_check(args[0], bounds) if bounds else _check_of(args[0])
    if origin is Literal:
        return _choice_check(args)
    if origin in (Union, types.UnionType):
        return _union_check(args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return _position_check(args)
    if origin in (tuple, list, Sequence, Iterable, Collection) and args:
        return _item_check(args[0])
    return None


def _range_check(kind: Any, bounds: Sequence[Ge | Gt | Le | Lt]) -> Check:
    tests = {
        Ge: lambda v, b: v >= b.ge,
        Gt: lambda v, b: v > b.gt,
        Le: lambda v, b: v <= b.le,
        Lt: lambda v, b: v < b.lt,
    }

    wrong_types = (bool, str, float) if kind is int else (bool, str)

    def check(name: str, value: Any) -> None:
        if value is None or isinstance(value, wrong_types):
            expected = "an integer" if kind is int else "a number"
            raise InvalidArgument(f"{name} must be {expected}, {_words(bounds)}, got {value!r}")
        if not all(tests[type(bound)](value, bound) for bound in bounds):
            raise InvalidArgument(f"{name} must be {_words(bounds)}, got {value!r}")

    return check


def _words(bounds: Sequence[Ge | Gt | Le | Lt]) -> str:
    """
    >>> _words([Gt(0), Lt(math.inf)]), _words([Ge(0), Lt(1)]), _words([Ge(1)]), _words([Gt(-math.inf), Lt(math.inf)])
    ('above 0 and finite', 'from 0 to below 1', 'at least 1', 'finite')
    """
    low = next((each for each in bounds if isinstance(each, Ge | Gt)), None)
    high = next((each for each in bounds if isinstance(each, Le | Lt)), None)
    finite = isinstance(high, Lt) and high.lt == math.inf
    if finite and isinstance(low, Gt) and low.gt == -math.inf:
        return "finite"
    lower = "" if low is None else f"at least {low.ge}" if isinstance(low, Ge) else f"above {low.gt}"
    if high is None or finite:
        return f"{lower} and finite" if finite else lower
    upper = f"at most {high.le}" if isinstance(high, Le) else f"below {high.lt}"
    if isinstance(low, Ge):
        return f"from {low.ge} to {high.le if isinstance(high, Le) else upper}"
    return f"{lower} and {upper}" if lower else upper


def _choice_check(choices: Sequence[Any]) -> Check:
    quoted = [repr(choice) for choice in choices]
    allowed = " or ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))

    def check(name: str, value: Any) -> None:
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise InvalidArgument(f"{name} must be {allowed}, got {value!r}")

    return check


def _union_check(members: Sequence[Any]) -> Check | None:
    """Check a value by the union member of its type; the choices of all `Literal` members are merged into one check."""
    choices = [choice for each in members if get_origin(each) is Literal for choice in get_args(each)]
    by_type = [(_plain(each), _check_of(each)) for each in members if get_origin(each) is not Literal]
    checks = [(kind, check) for kind, check in by_type if check is not None]
    if choices:
        checks.append((tuple({type(choice) for choice in choices}), _choice_check(choices)))
    if not checks:
        return None
    unchecked = {kind for kind, each in by_type if each is None}

    def check_member(name: str, value: Any) -> None:
        if type(value) in unchecked:
            return
        applicable = [each for kind, each in checks if isinstance(value, kind)]
        if not applicable and unchecked <= {type(None)} and isinstance(value, bool | int | float | str | None):
            applicable = [checks[0][1]]  # a plain value of no member's type: raise the first member's error
        for each in applicable:
            each(name, value)

    return check_member


def _plain(annotation: Any) -> Any:
    """The class of an annotation as `isinstance` takes it; int is accepted for float, as in PEP 484."""
    base = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    base = get_origin(base) or base
    return {int: Integral, float: Real}.get(base, base)


def _position_check(items: Sequence[Any]) -> Check | None:
    """Check the positions of a fixed-length tuple, each by its own annotation."""
    inner = {index: each for index, item in enumerate(items) if (each := _check_of(item)) is not None}
    if not inner:
        return None

    def check(name: str, value: Any) -> None:
        if isinstance(value, Sequence):
            for index, each in inner.items():
                if index < len(value):
                    each(f"{name}[{index}]", value[index])

    return check


def _item_check(item: Any) -> Check | None:
    inner = _check_of(item)
    if inner is None:
        return None

    def check(name: str, value: Any) -> None:
        if isinstance(value, Sequence | set | frozenset):
            for index, each in enumerate(value):
                inner(f"{name}[{index}]", each)

    return check
