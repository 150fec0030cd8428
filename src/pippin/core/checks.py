"""Ranges and choices that stand in annotations, checked when a function is called or a dataclass is made.

Notable here:
- `Annotated[float, Ge(0), Le(1)]` is a range, `Literal["mean", "sum"]` a choice; both hold inside `X | None`, tuples,
  lists and sequences as well, and what else an annotation says is left to the type checker
- what has a range is a number: text and booleans are refused, and a fraction where an integer is meant
- annotations are read once, at the first call, so that importing a module stays cheap
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
"""From 0 to below 1: a share of something of which a part must be left."""
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
    """Hold the arguments of a function, or the fields of a dataclass, to the ranges and choices of their annotations.

    A range is written with `annotated_types` (or one of the aliases of this module), a choice as a `Literal`.

    Args:
        target: a function, or a dataclass (the decorator stands above `@dataclass`). Checks run before the body, and
            before `__post_init__`.

    Raises:
        InvalidArgument: (when it is called) a value outside its range or its choices; the message names the argument,
            the value and what is allowed.

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
            raise TypeError(f"{target.__name__} is no dataclass; decorate its __init__ instead")
        made: Any = target
        made.__init__ = _guarded(made.__init__, lambda: _field_annotations(target))
        return target
    namespace = inspect.unwrap(target).__globals__
    annotations = target.__annotations__
    return typing.cast(F, _guarded(target, lambda: {n: _resolved(a, namespace) for n, a in annotations.items()}))


def _field_annotations(target: type[Any]) -> dict[str, Any]:
    """What the annotations of a dataclass stand for, each in the module of the class that it was written in."""
    wanted = {field.name for field in dataclasses.fields(target) if field.init}
    found = {}
    for owner in reversed(target.__mro__):
        for name in wanted & vars(owner).get("__annotations__", {}).keys():
            found[name] = _resolved(owner.__annotations__[name], vars(sys.modules[owner.__module__]))
    return found


def _guarded(function: Callable[..., Any], annotations: Callable[[], dict[str, Any]]) -> Callable[..., Any]:
    """The function, behind the checks of its arguments."""
    signature = inspect.signature(function)
    checks: dict[str, Check] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checks
        if checks is None:
            checks = {name: check for name, annotation in annotations().items() if (check := _check_of(annotation))}
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # it says better itself what is wrong with the call
        for name in checks.keys() & given.keys():
            checks[name](name, given[name])
        return function(*args, **kwargs)

    return call


def _resolved(annotation: Any, namespace: dict[str, Any]) -> Any:
    """What an annotation stands for; None where a name in it exists for the type checker only."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, namespace)
    except NameError:
        if any(word in annotation for word in ("Annotated", "Literal", *_ALIASES)):
            raise  # a check must not be lost in silence: import the name at run time
        return None


def _check_of(annotation: Any) -> Check | None:
    """What holds a value to an annotation; None where it has neither a range nor a choice."""
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

    refused = (bool, str, float) if kind is int else (bool, str)

    def check(name: str, value: Any) -> None:
        if value is None or isinstance(value, refused):
            a_number = "an integer" if kind is int else "a number"
            raise InvalidArgument(f"{name} must be {a_number}, {_words(bounds)}, got {value!r}")
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
    least = "" if low is None else f"at least {low.ge}" if isinstance(low, Ge) else f"above {low.gt}"
    if high is None or finite:
        return f"{least} and finite" if finite else least
    most = f"at most {high.le}" if isinstance(high, Le) else f"below {high.lt}"
    if isinstance(low, Ge):
        return f"from {low.ge} to {high.le if isinstance(high, Le) else most}"
    return f"{least} and {most}" if least else most


def _choice_check(choices: Sequence[Any]) -> Check:
    words = [repr(choice) for choice in choices]
    listed = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))

    def check(name: str, value: Any) -> None:
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise InvalidArgument(f"{name} must be {listed}, got {value!r}")

    return check


def _union_check(members: Sequence[Any]) -> Check | None:
    """A value of one member's plain type is held to that member's check; choices of all members count together."""
    choices = [choice for each in members if get_origin(each) is Literal for choice in get_args(each)]
    found = [(_plain(each), _check_of(each)) for each in members if get_origin(each) is not Literal]
    checks = [(kind, check) for kind, check in found if check is not None]
    if choices:
        checks.append((tuple({type(choice) for choice in choices}), _choice_check(choices)))
    if not checks:
        return None
    unchecked = {kind for kind, each in found if each is None}

    def check_member(name: str, value: Any) -> None:
        if type(value) in unchecked:
            return
        held = [each for kind, each in checks if isinstance(value, kind)]
        if not held and unchecked <= {type(None)} and isinstance(value, bool | int | float | str | None):
            held = [checks[0][1]]  # a plain value that is no member's
        for each in held:
            each(name, value)

    return check_member


def _plain(annotation: Any) -> Any:
    """The class behind an annotation, as `isinstance` takes it; an int will do for a float, as PEP 484 has it."""
    base = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    base = get_origin(base) or base
    return {int: Integral, float: Real}.get(base, base)


def _position_check(items: Sequence[Any]) -> Check | None:
    """Each place of a tuple of a given length has a check of its own."""
    inner = {index: found for index, item in enumerate(items) if (found := _check_of(item)) is not None}
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
