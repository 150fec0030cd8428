"""Random schemas and types with every kind of constraint, and answers sampled under them from random logits.

Notable here:
- names and constants hold quotation marks, escapes, accents and emoji: what breaks hand-written JSON
- definitions refer to themselves; a few schemas are contradictory or beyond the grammar, and must then be refused
- the logits are noise with a slowly growing bias to closing tokens, so that most answers end
"""

from __future__ import annotations

import datetime
import enum
import json
import random
import uuid
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, Field, create_model

from pippin.core.errors import MissingDependency
from pippin.engine.grammar.constraint import Constraint

WORDS: Final = (
    *("name", "Größe", 'quo"te', "back\\slash", "new\nline", "tab\t", "日本", "😀", "", " ", "é", "x y", "a/b"),
    *("~", "%20", "a", "b", "ab", "null", "\u0001", "\u2028", "{", "]", "-1"),
)
PATTERNS: Final = (
    *("^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "[A-Z]", r'^["\\]+$', "^(ab|cd)*e$", "é", "^[^aeiou]*$", r"^\S+\s\S+$"),
    *(r"^\w+@\w+\.[a-z]{2,3}$", "^.{2}$", r"[\n\t]", "😀?$"),
)
FORMATS: Final = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "json-pointer"),
)


def random_schema(seed: int, *, depth: int = 4) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) with definitions that may refer to one another.

    Args:
        seed: the same seed gives the same schema.
        depth: most levels of nesting, not counting references.

    >>> random_schema(3) == random_schema(3)
    True
    """
    writer = _SchemaWriter(random.Random(seed))
    schema = writer.schema(depth)
    if writer.referred:
        schema["$defs"] = {name: writer.definition(depth - 1) for name in ("tree", "list")}
    return schema


class _SchemaWriter:
    """Samples schemas, and remembers whether one of them refers to a definition."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.referred = rng, False

    def schema(self, depth: int) -> dict[str, Any]:
        scalars = [self.string, self.string, self.number, self.number, self.constants, self.boolean, self.null]
        nested = [self.array, self.object, self.object, self.union, self.joined, self.reference]
        chosen: Callable[[int], dict[str, Any]] = self.rng.choice(
            nested if depth > 0 and self.rng.random() < 0.6 else scalars
        )
        return chosen(depth - 1)

    def definition(self, depth: int) -> dict[str, Any]:
        """An object that may hold itself, or be null: the base case of the recursion."""
        found = self.object(depth)
        found["properties"]["next"] = {"anyOf": [self.reference(0), {"type": "null"}]}
        return found

    def reference(self, depth: int) -> dict[str, Any]:
        self.referred = True
        return {"$ref": f"#/$defs/{self.rng.choice(['tree', 'list'])}"}

    def boolean(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def null(self, depth: int) -> dict[str, Any]:
        return {"type": "null"}

    def constants(self, depth: int) -> dict[str, Any]:
        pool = [*WORDS, 0, -3, 2.5, 1e22, True, False, None, [1, "é"], {"a": None, "b": [True]}]
        values = self.rng.sample(pool, self.rng.randint(1, 4))
        return {"const": values[0]} if len(values) == 1 else {"enum": values}

    def string(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        kind = self.rng.randrange(6)
        if kind == 0:
            found["format"] = self.rng.choice(FORMATS)
        elif kind == 1:
            found["pattern"] = self.rng.choice(PATTERNS)
        elif kind == 2:
            found |= {"enum": self.rng.sample(WORDS, 5), "minLength": self.rng.randint(0, 2)}
        elif kind == 3:
            found["not"] = {"enum": self.rng.sample(WORDS, 3)}
        if kind in (1, 4):
            found["minLength"] = self.rng.randint(0, 3)
            found["maxLength"] = found["minLength"] + self.rng.randint(0, 8)
        return found

    def number(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": self.rng.choice(["integer", "number"])}
        scale = self.rng.choice([0.05, 1, 100, 10**17])
        low = round(self.rng.uniform(-9, 9), 2) * scale
        if self.rng.random() < 0.5:
            found[self.rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self.rng.random() < 0.5:
            found[self.rng.choice(["maximum", "exclusiveMaximum"])] = low + self.rng.choice([0, 0.1, 3, 1000]) * scale
        if self.rng.random() < 0.3:
            found["multipleOf"] = self.rng.choice([1, 2, 3, 5, 7, 10, 0.5, 0.1, 0.01, 0.25, 1.5])
        return found

    def array(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "array"}
        if self.rng.random() < 0.8:
            found["items"] = self.schema(depth)
        if self.rng.random() < 0.3:
            found["prefixItems"] = [self.schema(depth) for _ in range(self.rng.randint(1, 3))]
        if self.rng.random() < 0.6:
            found["minItems"] = self.rng.randint(0, 3)
            found["maxItems"] = found["minItems"] + self.rng.randint(0, 3)
        elif self.rng.random() < 0.3:
            found = {"type": "array", "uniqueItems": True, "items": {"enum": self.rng.sample(WORDS, 4)}, "minItems": 2}
        elif self.rng.random() < 0.2:
            found = {
                "type": "array",
                "contains": {"const": self.rng.choice(WORDS)},
                "minContains": self.rng.randint(1, 2),
            }
        return found

    def object(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(WORDS, self.rng.randint(0, 4))
        found: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        found["required"] = [name for name in names if self.rng.random() < 0.6]
        choice = self.rng.randrange(8)
        if choice < 4:
            found["additionalProperties"] = False
        elif choice == 4:
            found["additionalProperties"] = self.schema(depth)
        elif choice == 5:
            found |= {"patternProperties": {"^[a-f]": self.schema(depth), "[x-z]$": self.schema(depth)}}
        elif choice == 6:
            found["propertyNames"] = self.rng.choice(
                [{"enum": [*names, "k"]}, {"maxLength": 3}, {"pattern": "^[a-zé]"}]
            )
        if self.rng.random() < 0.2:
            found["maxProperties"] = len(found["required"]) + self.rng.randint(0, 2)
        if self.rng.random() < 0.2:
            found["minProperties"] = min(len(names), 2)
        if len(names) > 1 and self.rng.random() < 0.2:
            found["dependentRequired"] = {names[0]: [names[1]]}
        return found

    def union(self, depth: int) -> dict[str, Any]:
        if self.rng.random() < 0.5:
            return {"anyOf": [self.schema(depth) for _ in range(self.rng.randint(2, 3))]}
        tags = self.rng.sample(WORDS, 2)
        members = [self.object(depth) for _ in tags]
        for tag, member in zip(tags, members, strict=True):
            member["properties"] = {"kind": {"const": tag}} | member["properties"]
            member["required"] = ["kind", *member["required"]]
        return {"oneOf": members}

    def joined(self, depth: int) -> dict[str, Any]:
        if self.rng.random() < 0.4:
            return {"allOf": [self.number(depth), self.number(depth)]}
        if self.rng.random() < 0.5:
            return {"allOf": [{"type": "string", "pattern": "[a-z]"}, {"maxLength": 6}, {"not": {"pattern": "[A-Y]"}}]}
        then, other = self.schema(depth), self.schema(depth)
        return {"if": {"type": self.rng.choice(["string", "null"])}, "then": then, "else": other}


def random_type(seed: int, *, depth: int = 3) -> Any:
    """A Pydantic model with fields of every kind that a type can declare."""
    rng = random.Random(seed)
    return _model(rng, depth, f"Model{seed}")


def _model(rng: random.Random, depth: int, name: str) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for index in range(rng.randint(1, 4)):
        kind = _annotation(rng, depth - 1, f"{name}_{index}")
        alias = f"{rng.choice(WORDS)}{index}" if rng.random() < 0.3 else None
        optional = rng.random() < 0.3
        default = None if optional else ...
        fields[f"field{index}"] = (kind | None if optional else kind, Field(default=default, alias=alias))
    model: type[BaseModel] = create_model(name, **fields)
    return model


def _annotation(rng: random.Random, depth: int, name: str) -> Any:
    low = rng.randint(-20, 20)
    scalars: list[Any] = [
        *(bool, str, int, float, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, bytes),
        *(Annotated[int, Field(ge=low, le=low + 9)], Annotated[int, Field(gt=low, multiple_of=3)]),
        *(Annotated[float, Field(gt=low, lt=low + 0.5)], Annotated[float, Field(ge=low, multiple_of=0.25)]),
        Annotated[Decimal, Field(max_digits=6, decimal_places=2, ge=0)],
        Annotated[str, Field(min_length=1, max_length=5)],
        Annotated[str, Field(pattern=rng.choice(PATTERNS))],
        Literal["a", 'b"c', "é\n", 3, True, None],
        enum.Enum(f"{name}Enum", {f"m{i}": word for i, word in enumerate(rng.sample(WORDS, 3))}),
    ]
    if depth <= 0 or rng.random() < 0.4:
        return rng.choice(scalars)
    inner = _annotation(rng, depth - 1, f"{name}i")
    many: Any = list  # as values, since a type checker takes no variable for an argument of a type
    table: Any = dict
    return rng.choice(
        [
            many[inner],
            Annotated[many[inner], Field(min_length=1, max_length=3)],
            set[Literal["x", "y", "ü"]],
            Annotated[set[Literal[1, 2, 3]], Field(min_length=2)],
            Annotated[table[str, inner], Field(max_length=2)],
            table[Literal["k", "q\\"], inner],
            tuple.__class_getitem__((inner, int)),
            inner | None,
            _model(rng, depth - 1, f"{name}m"),
        ]
    )


def faults(schema: Any, text: str) -> list[str]:
    """Validation errors of a text by the independent library jsonschema, formats included, in exact arithmetic.

    With floats it would find 0.3 not to be a multiple of 0.1.

    Raises:
        MissingDependency: jsonschema is not installed.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise MissingDependency("answers are checked with jsonschema: pip install 'pippin[test]'") from error
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
    with localcontext(prec=400):
        return [error.message for error in validator.iter_errors(json.loads(text, parse_float=Decimal))]


def draw_answer(
    constraint: Constraint,
    token_bytes: list[bytes],
    *,
    seed: int,
    greedy: bool,
    max_tokens: int = 200,
    bias: torch.Tensor | None = None,
) -> tuple[str | None, int]:
    """Sample an answer from random logits under a constraint.

    Args:
        constraint: a constraint in its initial state.
        token_bytes: bytes of each token; empty for the end token.
        seed: seed of the noise.
        greedy: take the best token; else sample at temperature 1.
        bias: added to the logits of every step.

    Returns:
        The text, or None where ``max_tokens`` were not enough; and the number of tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    closing = torch.tensor([float(not text or text[-1:] in b'"]},') for text in token_bytes])
    ids: list[int] = []
    while len(ids) < max_tokens:
        logits = 3 * torch.randn(len(token_bytes), generator=generator) + closing * len(ids) / 10
        logits += 0 if bias is None else bias
        constraint.apply(logits)
        token = int(logits.argmax() if greedy else torch.multinomial(logits.softmax(-1), 1, generator=generator))
        constraint.accept(token)
        if constraint.ended:
            return b"".join(token_bytes[i] for i in ids).decode(), len(ids)
        ids.append(token)
    return None, len(ids)
