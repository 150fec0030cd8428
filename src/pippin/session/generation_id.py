"""Stable ids for the items of an answer while it is streamed.

Notable here:
- the id is a function of the answer's identity and of the item's path in it: every snapshot and the final value agree
- the model never sees the field: it is in neither the prompt nor the grammar, and costs no token
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

MARK = "x-generation-id"


class GenerationID(str):
    """The type of a field that identifies items of a streamed answer: ``id: GenerationID``.

    Use it in models, dataclasses and TypedDicts (there ``NotRequired[GenerationID]``). The session fills it in: the
    same item has the same id in every snapshot and in the final value, items of different answers have different ids.
    In a value that you make or validate yourself it is empty unless you give one.

    >>> GenerationID.at("answer 1", ["items", 0]) == GenerationID.at("answer 1", ["items", 0])
    True
    >>> GenerationID.at("answer 1", ["items", 0]) == GenerationID.at("answer 2", ["items", 0])
    False
    """

    __slots__ = ()

    @classmethod
    def at(cls, identity: str, path: Sequence[str | int]) -> GenerationID:
        """The id of the item at a path of an answer.

        Args:
            identity: identifies the answer.
            path: names and indices from the root.

        Returns:
            24 hexadecimal digits.
        """
        spelled = json.dumps([identity, *path]).encode()
        return cls(hashlib.blake2b(spelled, digest_size=12).hexdigest())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.with_default_schema(core_schema.str_schema(), default="")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> JsonSchemaValue:
        return {MARK: True}
