"""A plugin for mypy that knows the fields of unfinished answers: ``plugins = ["pippin.mypy_plugin"]``.

Notable here:
- Python cannot say "this type with every field optional"; without the plugin a field of a snapshot is Any, with it the
  field's type in the whole, or None
- nothing is made up: the type of a field is looked up where the answer's type declares it; a misspelled name an error
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mypy.nodes import TypeInfo
    from mypy.plugin import AttributeContext, Plugin
    from mypy.types import Instance, Type

PARTIAL: Final = "pippin.session.response.PartialOf"
_ID: Final = "pippin.session.generation_id.GenerationID"
_MODEL: Final = "pydantic.main.BaseModel"
_ROOT: Final = "pydantic.root_model.RootModel"
# Containers of an unfinished answer are lists; those of the whole are what they are declared to be.
_SEEN_AS: Final = {
    "builtins.list": "builtins.list",
    "builtins.set": "typing.Collection",
    "builtins.frozenset": "typing.Collection",
    "builtins.tuple": "typing.Sequence",
    "typing.Sequence": "typing.Sequence",
}


def plugin(version: str) -> type[Plugin]:
    """What mypy calls to get the plugin.

    Args:
        version: of mypy.
    """
    from mypy.plugin import Plugin

    class PippinPlugin(Plugin):
        """Types of the attributes of `PartialOf`."""

        def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
            """A function for attributes of `PartialOf`, None for any other."""
            head, _, name = fullname.rpartition(".")
            return (lambda context: _field(context, name)) if head == PARTIAL else None

    return PippinPlugin


def _field(context: AttributeContext, name: str) -> Type:
    """The type of a field of an unfinished value."""
    from mypy.expandtype import expand_type_by_instance
    from mypy.nodes import Var
    from mypy.types import AnyType, Instance, NoneType, TypeOfAny, UnionType, get_proper_type

    partial = get_proper_type(context.type)
    whole = get_proper_type(partial.args[0]) if isinstance(partial, Instance) and partial.args else None
    if not isinstance(whole, Instance) or not _has_fields(whole.type):
        return context.default_attr_type
    symbol = whole.type.get(name)
    if symbol is None:
        context.api.fail(f'"{whole.type.name}" has no field "{name}"', context.context)
        return AnyType(TypeOfAny.from_error)
    if not isinstance(symbol.node, Var) or symbol.node.type is None:
        return context.default_attr_type
    found = expand_type_by_instance(symbol.node.type, whole)
    proper = get_proper_type(found)
    if isinstance(proper, Instance) and proper.type.fullname == _ID:
        return found  # an id is there from the start
    return UnionType.make_union([_partial(found, context, partial), NoneType()])


def _partial(whole: Type, context: AttributeContext, pattern: Any) -> Type:
    """The type of what a value of a type is before it is whole."""
    from mypy.types import Instance, TupleType, UnionType, get_proper_type

    proper = get_proper_type(whole)
    if isinstance(proper, UnionType):
        return UnionType.make_union([_partial(item, context, pattern) for item in proper.items])
    if isinstance(proper, TupleType):
        items = UnionType.make_union([_partial(item, context, pattern) for item in proper.items])
        return _generic(context, "typing.Sequence", [items])
    if not isinstance(proper, Instance):
        return whole
    if _has_fields(proper.type):
        return Instance(pattern.type, [whole])
    if proper.type.fullname in _SEEN_AS and proper.args:
        return _generic(context, _SEEN_AS[proper.type.fullname], [_partial(proper.args[0], context, pattern)])
    if proper.type.fullname == "builtins.dict" and len(proper.args) == 2:
        return _generic(context, "builtins.dict", [proper.args[0], _partial(proper.args[1], context, pattern)])
    return whole


def _generic(context: AttributeContext, name: str, arguments: list[Type]) -> Instance:
    from mypy.checker import TypeChecker

    assert isinstance(context.api, TypeChecker)
    return context.api.named_generic_type(name, arguments)


def _has_fields(info: TypeInfo) -> bool:
    """Whether it is a model or a dataclass."""
    if info.has_base(_ROOT):
        return False
    return info.has_base(_MODEL) or any("dataclass" in base.metadata for base in info.mro)
