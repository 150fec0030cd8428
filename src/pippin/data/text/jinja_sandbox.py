"""Sandboxed Jinja for untrusted chat templates, with limits on loops and output size.

Notable here:
- the immutable sandbox prevents access to Python; the limits here name the usual ways to loop or grow without end, and
  are no bound: `pippin.data.text.template_process` renders in a process whose time and memory are bounded
- the limits are inserted into the template's syntax tree: a counter in every loop, a measured join for every `~`
- the helper functions are the usual ones of templates (`raise_exception`, `strftime_now`, a `tojson` without HTML
  escapes, the `generation` tag), as in transformers
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from pippin.core.errors import CheckpointError

_MAX_ITERATIONS = 500_000
_MAX_LENGTH = 1 << 24  # length of a text or list that an expression creates
_MAX_SLACK = 1 << 22  # characters that a template may add of its own
_MAX_GROWTH = 16  # how often it may repeat its input
_TICK, _JOIN = "pippin_tick", "pippin_join"
_BUDGET = f"pippin_{secrets.token_hex(8)}"  # a name that no template can know, and so replace
_WIDE_FIELD = re.compile(r"[%{:][^%}a-zA-Z]*\d{5}")


class TemplateRejection(CheckpointError):
    """A template called `raise_exception`: it cannot write these messages, and says why."""


class SandboxedTemplate:
    """A compiled template.

    >>> SandboxedTemplate("{% for word in words %}<{{ word }}>{% endfor %}").render({"words": ["a", "b"]}, size=2)
    '<a><b>'
    """

    def __init__(self, source: str) -> None:
        """Compile the template.

        Raises:
            CheckpointError: ``source`` is not valid Jinja; the message names the location.
        """
        try:
            environment = _Environment()
            tree = _Bounds().visit(environment.parse(source))
            self._program = environment.from_string(tree.set_environment(environment))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the chat template is not valid: {error}") from error

    def render(self, variables: dict[str, Any], size: int) -> str:
        """The output for these variables.

        Args:
            variables: plain JSON values.
            size: number of characters of text in them; the output may be a multiple of it.

        Raises:
            TemplateRejection: the template raised, with its own message.
            CheckpointError: it failed or exceeded a limit.
            MemoryError: it took more memory than the process may.
        """
        pieces, room = [], _MAX_SLACK + _MAX_GROWTH * size
        variables = {**variables, _BUDGET: iter(range(_MAX_ITERATIONS))}
        try:
            for piece in self._program.generate(variables):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise SecurityError("the output is far longer than the messages")
        except (MemoryError, TemplateRejection):
            raise
        except Exception as error:  # an expression can raise anything
            raise CheckpointError(str(error)) from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        # The bounds are filters, since a filter is called directly and a function through the sandbox's checks.
        self.filters.update({"tojson": _to_json, _TICK: _tick, _JOIN: _join})
        for name in ("center", "indent", "wordwrap", "tojson"):
            self.filters[name] = _refuse_large(self.filters[name])
        self.filters["format"] = _refuse_wide(self.filters["format"])
        self.globals.update(raise_exception=_raise, strftime_now=_strftime_now, namespace=_Namespace)
        del self.globals["lipsum"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic with limits on the size of the result."""
        if operator in ("*", "**"):
            factor = max((abs(value) for value in (left, right) if isinstance(value, (int, float))), default=0)
            lengths = [len(value) if isinstance(value, (str, list, tuple)) else 1 for value in (left, right)]
            if factor * max(lengths) > _MAX_LENGTH or (operator == "**" and factor > 64):
                raise SecurityError(f"{operator!r} of values this large")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return _measured(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template, e.g. a method of a text."""
        _check_arguments((*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` and `str.format_map`, accessed as attributes of a text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


class _Bounds(NodeTransformer):
    """Inserts the limits into the syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), _JOIN, [], [], None, None)

    def _counted(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.Filter(nodes.Name(_BUDGET, "load"), _TICK, [], [], None, None)))
        return node


class _Generation(Extension):
    """The `{% generation %}` tag, which marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's own interface

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Namespace(Namespace):
    """A namespace that refuses names that give access to Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template cannot set {name!r}")
        super().__setitem__(name, value)


def _tick(budget: Iterator[int]) -> None:
    if next(budget, None) is None:
        raise SecurityError(f"more than {_MAX_ITERATIONS} loop iterations")


def _join(values: list[Any]) -> Any:
    return _measured("".join(map(str, values)))


def _measured(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > _MAX_LENGTH:
        raise SecurityError(f"an expression makes a value of length {len(value)}")
    return value


def _check_arguments(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_LENGTH:
            raise SecurityError(f"the number {value} in a call")


def _check_format(form: str) -> None:
    if _WIDE_FIELD.search(form):
        raise SecurityError("a format with fields this wide")


def _refuse_large(function: Any) -> Any:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments((*args, *kwargs.values()))
        return function(*args, **kwargs)

    bounded.__dict__.update(function.__dict__)  # Jinja's marks that the function needs the environment
    return bounded


def _refuse_wide(function: Any) -> Any:
    def bounded(form: str, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(form))
        return function(form, *args, **kwargs)

    return bounded


def _raise(message: str) -> NoReturn:
    raise TemplateRejection(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
