"""Derive the options of a command from its settings: each field or argument with an `Option` becomes one.

Notable here:
- name, type, default and help of an option are declared once, with the setting: in a recipe, in
  `pippin.engine.options`, in the settings of the server; `eval_every` becomes `--eval-every`
- types that typer lacks are translated: a tuple becomes a list, a mapping becomes a repeatable KEY=VALUE
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.core.store import catalog
from pippin.recipes.options import StrPath


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Make a typer command from a function whose arguments are settings.

    An argument that is a frozen dataclass becomes one option for each field that has an `Option`; its default, if any,
    supplies the fields that are not given. An argument with an `Option` becomes that option; others are unchanged.
    """
    arguments = inspect.signature(verb, eval_str=True).parameters.values()
    parameters: list[inspect.Parameter] = []
    for one in arguments:
        parameters += _fields(one) if dataclasses.is_dataclass(one.annotation) else [_argument(one)]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]

    @functools.wraps(verb)
    def command(**given: Any) -> None:
        verb(**{one.name: _made(one, given) for one in arguments})

    # typer reads the options of a command off its signature
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: names of chat models with this prefix, and their titles."""
    return [(e.name, e.title) for e in catalog.entries().values() if e.chat and e.name.startswith(incomplete)]


# --- parameters for typer ---------------------------------------------------------------------------------------------


def _fields(taken: inspect.Parameter) -> list[inspect.Parameter]:
    """A typer parameter for each option of a dataclass."""
    plain, found = get_type_hints(taken.annotation), []
    for field, option in _settings(taken.annotation):
        default = _default(field, option, taken.default)
        found.append(_parameter(field.name, plain[field.name], option, default))
    return found


def _argument(taken: inspect.Parameter) -> inspect.Parameter:
    """A typer parameter for an argument of the command itself."""
    option = _option(taken.annotation)
    if option is None:
        return taken
    holder = type("_", (), {"__annotations__": {"value": taken.annotation}})
    return _parameter(taken.name, get_type_hints(holder)["value"], option, taken.default)


def _parameter(name: str, hint: Any, option: Option, default: Any) -> inspect.Parameter:
    kind = _kind(hint, option)
    described: Any = Annotated[kind, _typer_option(name, kind, option, on=default is True)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=described, default=default)


def _settings(config: type[Any]) -> list[tuple[dataclasses.Field[Any], Option]]:
    """The fields of a dataclass that are options."""
    described = get_type_hints(config, include_extras=True)
    pairs = ((field, _option(described[field.name])) for field in dataclasses.fields(config))
    return [(field, option) for field, option in pairs if option is not None]


def _option(annotation: Any) -> Option | None:
    """
    >>> _option(Annotated[int, Option("Steps.")]).help
    'Steps.'
    """
    return next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Option)), None)


def _kind(hint: Any, option: Option) -> Any:
    """The type of an option that typer supports."""
    members = [each for each in get_args(hint) if each is not types.NoneType]
    optional = get_origin(hint) in (Union, types.UnionType) and len(members) < len(get_args(hint))
    inner = functools.reduce(operator.or_, members) if optional else hint
    if option.parse is not None:
        kind: Any = str
    elif inner == StrPath:
        kind = Path
    elif get_origin(inner) in (tuple, Sequence):
        kind = list[_kind(get_args(inner)[0], option)]  # type: ignore[misc]  # made at run time
    elif get_origin(inner) is Mapping:
        kind = list[str]
    else:
        kind = inner
    return kind | None if optional else kind


def _default(field: dataclasses.Field[Any], option: Option, config: Any) -> Any:
    """The default that typer shows; None where it cannot be written on the command line."""
    value = field.default if config is inspect.Parameter.empty else getattr(config, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return None
    if value is dataclasses.MISSING:
        return inspect.Parameter.empty
    if value is None or value == ():
        return None  # the config supplies its default if the option is not given
    if option.parse is not None:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return value


def _typer_option(name: str, kind: Any, option: Option, *, on: bool) -> Any:
    if option.positional:
        complete = complete_model if name in ("model", "models") else None
        return typer.Argument(help=option.help, metavar=option.metavar, autocompletion=complete)
    flag = _flag(name, option)
    if kind is bool and on:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return typer.Option(flag, help=option.help, metavar=option.metavar, rich_help_panel=option.group)


def _flag(name: str, option: Option) -> str:
    return option.flag or f"--{name.replace('_', '-')}"


# --- values from typer ----------------------------------------------------------------------------------------


def _made(taken: inspect.Parameter, given: Mapping[str, Any]) -> Any:
    """The value of an argument, from the values that typer parsed."""
    config: Any = taken.annotation
    if not dataclasses.is_dataclass(taken.annotation):
        option, value = _option(taken.annotation), given[taken.name]
        parse = option is not None and option.parse is not None and value is not None
        return _parsed(taken.name, option, value) if option and parse else value
    values = {}
    for field, option in _settings(config):
        value = given[field.name]
        if value is None or value == []:
            text = os.environ.get(option.variable, "") if option.variable else ""
            if text and option.parse_variable:
                values[field.name] = option.parse_variable(text)
            continue  # the config's own default
        if option.parse is not None:
            value = _parsed(field.name, option, value)
        elif isinstance(value, list):
            value = _pairs(value, option) if field.default_factory is not dataclasses.MISSING else tuple(value)
        values[field.name] = value
    try:
        if taken.default is inspect.Parameter.empty:
            return config(**values)
        return dataclasses.replace(taken.default, **values)
    except InvalidArgument as error:
        flags = {field.name: _flag(field.name, option) for field, option in _settings(config) if not option.positional}
        raise InvalidArgument(_with_flags(str(error), flags)) from error


def _with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace field names in a message by option names.

    A name of one word is replaced only at the beginning, since elsewhere it may be prose.

    >>> _with_flags("host (--host) is open; set any_key or another host", {"host": "--host", "any_key": "--any-key"})
    '--host is open; set --any-key or another host'
    """
    for name, flag in flags.items():
        begin = r"(?<![\w-])" if "_" in name else "^"
        message = re.sub(rf"{begin}{name}\b", flag, message.replace(f"{name} ({flag})", flag))
    return message


def _parsed(name: str, option: Option, text: str) -> Any:
    assert option.parse is not None
    try:
        return option.parse(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{_flag(name, option)}: {error}") from error


def _pairs(words: list[str], option: Option) -> dict[str, str]:
    """
    >>> _pairs(["prompt=question"], Option("Fields.", flag="--field"))
    {'prompt': 'question'}
    """
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise InvalidArgument(f"{option.flag} is {word!r}; write it as {option.metavar or 'KEY=VALUE'}")
    return dict(word.split("=", 1) for word in words)
