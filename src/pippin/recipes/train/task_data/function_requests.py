"""Requests with functions from BFCL, as tool requests: a second source beside the synthetic library.

Notable here:
- its types are those of Python; here they are JSON's, and its names have no dots, which no model could call
- of each parameter, the first acceptable value is taken, and none where it may be left out
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from pippin.core.store import store
from pippin.data.synthetic.tool_requests import ToolRequest, is_held_out

_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array", "any": None}
_CALLED: Final = ("simple_python", "multiple", "live_simple", "live_multiple")
_UNCALLED: Final = ("irrelevance", "live_irrelevance")
_KEPT: Final = ("required", "enum", "description")


@cache
def function_requests(*, held_out: bool, called: bool) -> tuple[ToolRequest, ...]:
    """The requests of BFCL; none where it is not installed.

    Args:
        held_out: whether all their functions are of the tenth that is evaluated on, rather than none of them.
        called: whether a function fits, rather than none.
    """
    folder = store.find("bfcl")
    if folder is None:
        return ()
    found = list[ToolRequest]()
    for part in _CALLED if called else _UNCALLED:
        name, truths = f"BFCL_v4_{part}.json", dict[str, Any]()
        if called:
            truths = {each["id"]: each["ground_truth"] for each in _lines(folder / "possible_answer" / name)}
        for entry in _lines(folder / name):
            request = _request(entry, truths.get(entry["id"]))
            if request is not None and {is_held_out(tool["function"]["name"]) for tool in request.tools} == {held_out}:
                found.append(request)
    return tuple(found)


def standard(schema: Any) -> Any:
    """A schema in BFCL's types as JSON Schema.

    >>> standard({"type": "dict", "properties": {"x": {"type": "float"}}, "required": ["x"]})["type"]
    'object'
    """
    if not isinstance(schema, dict):
        return {}
    named = str(schema.get("type", ""))
    kind = _TYPES.get(named, named)
    result: dict[str, Any] = {"type": kind} if kind else {}
    result |= {key: schema[key] for key in _KEPT if key in schema}
    if "properties" in schema:
        result["properties"] = {name: standard(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        result["items"] = standard(schema["items"])
    return result | ({"additionalProperties": False} if kind == "object" else {})


def _lines(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _request(entry: dict[str, Any], truth: Any) -> ToolRequest | None:
    """An entry as a request; None for a conversation of several turns."""
    turns = entry["question"]
    messages = turns[0] if len(turns) == 1 else []
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]) or not entry["function"]:
        return None
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": each["name"].replace(".", "_"),
                "description": each["description"],
                "parameters": standard(each["parameters"]),
            },
        }
        for each in entry["function"]
    )
    call = None
    if truth is not None:
        ((name, accepted),) = truth[0].items()
        values = {key: values[0] for key, values in accepted.items() if values and "" not in values}
        call = name.replace(".", "_"), values
    instructions = messages[0]["content"] if len(messages) == 2 else ""
    return ToolRequest(tools, messages[-1]["content"], call, instructions=instructions)
