"""JSON Schema of a Python type, in Pippin's dialect; every constraint of the type is included or refused.

Notable here:
- Pydantic's generator does the work; what it would lose (length limits of a configuration, bounds on dates, flags of a
  pattern) is found in the core schema and refused by name
- validators written in Python are no part of it: they run on the finished answer, and `describe` names them
- dialect: `x-order`, no additional properties, a field with a default is absent from `required`, constants are enums
- a `GenerationID` is left out: the session knows it, the model does not
- a set of values that may be equal in Python and not in JSON is an array: duplicates are merged when it is parsed
"""

from __future__ import annotations

import enum
import functools
import re
from typing import Any, Final, cast

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import SchemaError as PydanticCoreError

from pippin.core.errors import EmptySchema, SchemaError, UnsupportedGuide
from pippin.session.generation_id import MARK

_BOUNDS: Final = "gt ge lt le multiple_of"
_LENGTHS: Final = "min_length max_length fail_fast"
# Constraints of each core type that reach the grammar; any other would be lost.
_KEYS: Final = {
    "int": _BOUNDS,
    "float": f"{_BOUNDS} allow_inf_nan",
    "decimal": f"{_BOUNDS} max_digits decimal_places allow_inf_nan",
    "str": "min_length max_length pattern strip_whitespace to_lower to_upper regex_engine coerce_numbers_to_str",
    "bytes": "min_length",
    "date": "",
    "time": "microseconds_precision tz_constraint",
    "datetime": "microseconds_precision tz_constraint",
    "timedelta": "microseconds_precision",
    "list": f"items_schema {_LENGTHS}",
    "set": f"items_schema {_LENGTHS}",
    "frozenset": f"items_schema {_LENGTHS}",
    "tuple": f"items_schema variadic_item_index {_LENGTHS}",
    "dict": f"keys_schema values_schema {_LENGTHS}",
    "uuid": "version",
    "url": "max_length allowed_schemes",
    "literal": "expected",
    **dict.fromkeys(("any", "none", "bool"), ""),
}
_ALWAYS: Final = frozenset(["type", "ref", "metadata", "serialization", "strict"])
# fmt: off
_CONTAINERS: Final = frozenset({
    "enum", "union", "tagged-union", "nullable", "default", "typed-dict", "typed-dict-field", "model",
    "model-field", "model-fields", "dataclass", "dataclass-args", "dataclass-field", "definitions", "definition-ref",
    "lax-or-strict", "json-or-python", "chain", "named-tuple", "named-tuple-field",
})
# fmt: on
# Pydantic's own functions behind a type whose JSON Schema has all that they check.
_OWN_FUNCTIONS: Final = (
    "ip_v4_address_validator",
    "ip_v6_address_validator",
    "_BaseUrl.__get_pydantic_core_schema__.<locals>.wrap_val",
    "GenerateSchema._path_schema.<locals>.path_validator",
    "SecretStr",
)
_GUIDES: Final = {
    "greater_than": "gt",
    "greater_than_or_equal": "ge",
    "less_than": "lt",
    "less_than_or_equal": "le",
}
_LOOSE_FORMATS: Final = ("binary", "path", "password")
_VALUES: Final = ("default", "examples", "enum", "const")  # keywords that hold values, not schemas
_KEY_FORMATS: Final = {"uuid": "uuid", "date": "date", "datetime": "date-time"}
_ANY: Final = {"type": "any"}
_MOST_EXACT_DIGITS: Final = 15  # a decimal is parsed as a float


def describe(target: Any) -> tuple[TypeAdapter[Any], dict[str, Any], tuple[str, ...]]:
    """The validator of a type, its JSON Schema, and the names of the functions in it that validate in Python.

    Args:
        target: whatever Pydantic takes: a model, dataclass, TypedDict, Enum, Literal, list[int], int | None …

    Raises:
        UnsupportedGuide: a constraint that JSON Schema, or the grammar, cannot express.
        EmptySchema: an Enum without members. SchemaError: the type has no JSON form.

    >>> describe(list[bool])[1:]
    ({'items': {'type': 'boolean'}, 'type': 'array'}, ())
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(target)
        adapter.rebuild(raise_errors=True)
        functions: list[str] = []
        schema = adapter.json_schema(schema_generator=cast(Any, functools.partial(_Generator, functions=functions)))
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUserError) as error:
        raise SchemaError(f"{target!r} cannot describe an answer: {str(error).splitlines()[0]}") from error
    except PydanticCoreError as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("SchemaError: ")
        hint = "; in a TypedDict it is NotRequired[GenerationID]" if "default value" in reason else ""
        raise SchemaError(f"{target!r} cannot describe an answer: {reason}{hint}") from error
    except AssertionError as error:  # Pydantic's reaction to Literal[()]
        raise EmptySchema(f"{target!r} has no values") from error
    except TypeError as error:
        guide = re.search(r"constraint '(\w+)'", str(error))
        raise UnsupportedGuide(f"{target!r}: {error}", guide=guide.group(1) if guide else "") from error
    found = _in_dialect(schema)
    if _is_marked(found):
        raise SchemaError(f"{target!r}: a GenerationID can only be a field of a model, a dataclass or a TypedDict")
    return adapter, cast("dict[str, Any]", found), tuple(dict.fromkeys(functions))


def _in_dialect(schema: Any) -> Any:
    """The schema in Pippin's dialect."""
    if isinstance(schema, list):
        return [_in_dialect(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {k: v if k in _VALUES else _in_dialect(v) for k, v in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        shown = {name: value for name, value in schema["properties"].items() if MARK not in value}
        found["properties"] = {name: _in_dialect(value) for name, value in shown.items()}
        if "required" in found:
            found["required"] = [name for name in found["required"] if name in shown]
        found["x-order"] = list(found["properties"])
        found.setdefault("additionalProperties", False)
    if "const" in found and "type" in found:
        found["enum"] = [found.pop("const")]
    if found.get("format") in _LOOSE_FORMATS:
        del found["format"]
    return found


def _is_marked(schema: Any) -> bool:
    """Whether a field of type `GenerationID` is where it cannot be left out."""
    if isinstance(schema, list):
        return any(map(_is_marked, schema))
    if not isinstance(schema, dict):
        return False
    return schema.get(MARK) is True or any(_is_marked(value) for key, value in schema.items() if key not in _VALUES)


class _Generator(GenerateJsonSchema):
    """Pydantic's generator, with a check of every part of the type."""

    def __init__(self, *args: Any, functions: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._functions = functions
        self._path: list[str] = []
        self._names: dict[int, str] = {}
        self._core: dict[str, Any] = {}
        self._configs: list[dict[str, Any]] = [{}]

    def refuse(self, guide: str, reason: str) -> UnsupportedGuide:
        field = self._path[-1] if self._path else ""
        where = f"field {'.'.join(self._path)!r}: " if self._path else ""
        return UnsupportedGuide(f"{where}{guide} {reason}", field=field, guide=guide)

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Ignore defaults that have no JSON form; nothing is lost."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        name = self._names.get(id(schema)) or (schema.get("name") if schema["type"].endswith("-field") else None)
        self._path += [name] if name else []
        self._configs += [schema["config"]] if isinstance(schema.get("config"), dict) else []
        self.check(schema)
        for field_name, field in schema.get("fields", {}).items() if isinstance(schema.get("fields"), dict) else ():
            self._names[id(field)] = field_name
        found = super().generate_inner(schema)
        if name:
            self._path.pop()
        if isinstance(schema.get("config"), dict):
            self._configs.pop()
        return found

    def check(self, schema: Any) -> None:
        """Refuse constraints that the schema of a part will not include."""
        kind: str = schema["type"]
        if kind.startswith("function-"):
            self.check_function(schema)
        elif kind == "chain":
            if rest := [step for step in schema["steps"][1:] if step]:
                inner = rest[0].get("schema", rest[0])
                guide = next((key for key in inner if key not in _ALWAYS), inner["type"])
                raise self.refuse(guide, f"does not apply to a {schema['steps'][0]['type']}")
        elif kind in _KEYS:
            for key in schema:
                if key not in _ALWAYS and key not in _KEYS[kind].split() and not key.startswith("custom_error"):
                    raise self.refuse(key, f"on a {kind} cannot be enforced")
        elif kind == "is-instance" and issubclass(schema["cls"], enum.Enum):
            raise EmptySchema(f"{schema['cls'].__name__} has no members")
        elif kind not in _CONTAINERS:
            raise self.refuse(kind, "has no JSON form that can be enforced")
        if schema.get("tz_constraint", "aware") != "aware":
            raise self.refuse("tz_constraint", "cannot be enforced: date-time and time carry an offset")
        alias = schema.get("validation_alias")
        if isinstance(alias, list) and alias and (len(alias) > 1 and not isinstance(alias[0], list)):
            raise self.refuse("validation_alias", "must be a name, not a path")
        if kind == "bytes" and self._configs[-1].get("val_json_bytes", "utf8") != "utf8":
            raise self.refuse("val_json_bytes", "must be 'utf8'")

    def check_function(self, schema: Any) -> None:
        function = schema["function"]["function"]
        if isinstance(function, functools.partial):  # Pydantic's check of a constraint unknown to the kind
            guide = function.func.__name__.removesuffix("_validator")
            kind = schema.get("schema", {}).get("type", "value")
            raise self.refuse(
                _GUIDES.get(guide, guide), f"does not apply to a {kind}; put it on the type that it is about"
            )
        if getattr(function, "__qualname__", "") not in _OWN_FUNCTIONS or not function.__module__.startswith(
            "pydantic"
        ):
            name = getattr(function, "__name__", repr(function))
            if schema["type"] == "function-plain" and schema.get("json_schema_input_schema", _ANY) == _ANY:
                reason = "is a PlainValidator, which says nothing of what the model is to write; use an AfterValidator"
                raise self.refuse(name, f"{reason}, or give it json_schema_input_type")
            self._functions.append(name)

    # --- one method per kind of value ---------------------------------------------------------------------------------

    def str_schema(self, schema: Any) -> JsonSchemaValue:
        names = ("min_length", "max_length", "strip_whitespace", "to_lower", "to_upper")
        config = {name: value for name in names if (value := self._configs[-1].get(f"str_{name}"))}
        said = {**config, **schema}
        if said.get("strip_whitespace") and (said.get("min_length") or said.get("pattern") is not None):
            raise self.refuse("strip_whitespace", "changes the text after its length or pattern was enforced")
        if (said.get("to_lower") or said.get("to_upper")) and said.get("pattern") is not None:
            raise self.refuse("pattern", "is checked after the text's case was changed")
        pattern = said.get("pattern")
        if isinstance(pattern, re.Pattern) and pattern.flags & ~re.UNICODE:
            raise self.refuse("pattern", f"{pattern.pattern!r} has flags, which cannot be enforced")
        return super().str_schema(cast(Any, said))

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if digits is not None and (places is None or digits > _MOST_EXACT_DIGITS):
            raise self.refuse("max_digits", f"needs decimal_places beside it, and at most {_MOST_EXACT_DIGITS}")
        names = {
            "ge": "minimum",
            "gt": "exclusiveMinimum",
            "le": "maximum",
            "lt": "exclusiveMaximum",
            "multiple_of": "multipleOf",
        }
        found: dict[str, Any] = {"type": "number"}
        found.update({names[key]: float(schema[key]) for key in names if key in schema})
        rules = []
        if places is not None:
            rules.append({"multipleOf": 10.0**-places})
        if places is not None or "multiple_of" in schema:
            size = 10 ** ((digits if digits is not None else _MOST_EXACT_DIGITS) - (places or 4))
            rules.append({"exclusiveMinimum": -size, "exclusiveMaximum": size})
        return {**found, **({"allOf": rules} if rules else {})}

    def set_schema(self, schema: Any) -> JsonSchemaValue:
        return self._set(schema, super().set_schema(schema))

    def frozenset_schema(self, schema: Any) -> JsonSchemaValue:
        return self._set(schema, super().frozenset_schema(schema))

    def _set(self, schema: Any, found: JsonSchemaValue) -> JsonSchemaValue:
        if not self._stays_distinct(schema.get("items_schema", {"type": "any"})):
            if schema.get("min_length", 0) > 1:
                raise self.refuse("min_length", "of a set needs items of str, int, bool, Literal or Enum")
            del found["uniqueItems"]
        return found

    def _stays_distinct(self, schema: Any) -> bool:
        """Whether items that differ in JSON differ in Python."""
        if schema["type"] == "definition-ref":
            return self._stays_distinct(self._core[schema["schema_ref"]])
        if schema["type"] == "union":
            return all(self._stays_distinct(c[0] if isinstance(c, tuple) else c) for c in schema["choices"])
        return schema["type"] in ("literal", "enum", "bool", "none", "str", "int")

    def definitions_schema(self, schema: Any) -> JsonSchemaValue:
        self._core.update((definition["ref"], definition) for definition in schema["definitions"])
        return super().definitions_schema(schema)

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        keys = schema.get("keys_schema", {"type": "str"})
        while keys["type"] == "definition-ref":
            keys = self._core[keys["schema_ref"]]
        values = self.generate_inner(schema["values_schema"]) if "values_schema" in schema else True
        found: dict[str, Any] = {"type": "object", "additionalProperties": values}
        names = self._key_names(keys)
        found.update({"propertyNames": names} if names else {})
        for key, keyword in (("min_length", "minProperties"), ("max_length", "maxProperties")):
            found.update({keyword: schema[key]} if key in schema else {})
        return found

    def _key_names(self, keys: Any) -> dict[str, Any]:
        """Constraints on the keys of a dict, as JSON Schema."""
        kind = keys["type"]
        if kind in ("str", "literal", "enum"):
            names = self.generate_inner(keys)
            return {key: value for key, value in names.items() if key != "type"}
        if kind in _KEY_FORMATS and set(keys) <= _ALWAYS | {"version", "microseconds_precision"}:
            return {"format": _KEY_FORMATS[kind]}
        if kind == "int" and set(keys) <= _ALWAYS:
            return {"pattern": "^(0|-?[1-9][0-9]{0,17})$"}
        if kind == "any":
            return {}
        raise self.refuse("keys", f"of a dict cannot be {kind}: names in JSON are texts")
