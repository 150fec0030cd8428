"""Exported programs as JSON and safetensors, loaded without executing anything in the file.

Notable here:
- torch's reader of exported programs falls back to pickle, evaluates size expressions as Python, compiles guards and
  looks up operators by any dotted name under `torch`; so the file is checked against allow-lists before torch reads it
- weights are stored in safetensors; source locations have the file's name, not the folders of the capturing machine
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from pippin.core.errors import CorruptedFile, UnsafeCheckpoint, UnsupportedModel

_METADATA = {"nn_module_stack", "stack_trace", "torch_fn"}
_TARGET = re.compile(r"torch\.ops\.(aten\.\w+(\.\w+)?|higher_order\.\w+)|torch\.sym_\w+|_operator\.(\w+)|math\.\w+")
_OPERATORS = re.compile("getitem|add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|pow|and_|or_|not_")
# sizes are stored as sympy constructors, which torch evaluates as Python
_WORDS = (
    "Add|Mul|Pow|Integer|Rational|Float|Mod|PythonMod|FloorDiv|CleanDiv|IntTrueDiv|TruncToInt|Max|Min|"
    "Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|And|Or|Not|true|false|"
    "positive|nonnegative|integer|precision|evaluate|True|False"
)
_EXPRESSION = re.compile(rf"(Symbol\('[suz]\w*\d'|\b({_WORDS})\b|\b\d+\b|[-(),= ])*")
_TYPES = {"builtins.tuple", "builtins.list", "builtins.dict", None}


def to_bytes(program: ExportedProgram) -> bytes:
    """Serialize a program without its tensors to JSON; equal programs give equal bytes.

    Raises:
        UnsupportedModel: the program uses something other than ATen operators and tensors.
    """
    from torch._export.serde import serialize

    artifact = serialize.ExportedProgramSerializer().serialize(
        program, serialize_state_dict=False, serialize_constants=False, serialize_example_inputs=False
    )
    record = json.loads(serialize._to_json_bytes(artifact.exported_program))
    record["guards_code"] = []
    record["torch_version"] = ""
    for node in _records(record, "target"):
        node["metadata"] = {key: innermost(text) for key, text in node["metadata"].items() if key in _METADATA}
    try:
        _check(record, "this program")
    except UnsafeCheckpoint as error:
        raise UnsupportedModel(f"only programs of ATen operators over tensors can be exported: {error}") from error
    return json.dumps(record, indent=None, sort_keys=True, separators=(",", ":")).encode()


def from_bytes(data: bytes, tensors: dict[str, Tensor], where: object) -> ExportedProgram:
    """Deserialize a program that `to_bytes` wrote.

    Args:
        data: the JSON.
        tensors: its parameters, buffers and constants by name.
        where: the file, for error messages.

    Raises:
        UnsafeCheckpoint: it contains something other than operators of a model.
        CorruptedFile: it is inconsistent.
        UnsupportedModel: it was written by a version of torch whose programs the installed version cannot read.
    """
    from torch._export.serde import schema, serialize

    try:
        record = json.loads(data)
        _check(record, where)
        parsed = serialize._dict_to_dataclass(schema.ExportedProgram, record)
        signature = parsed.graph_module.signature
        constants = {
            spec.tensor_constant.tensor_constant_name
            for spec in signature.input_specs
            if spec.type == "tensor_constant"
        }
        parameters = {spec.parameter.parameter_name for spec in signature.input_specs if spec.type == "parameter"}
        tensors = {key: nn.Parameter(tensor) if key in parameters else tensor for key, tensor in tensors.items()}
        program = serialize.ExportedProgramDeserializer().deserialize(
            parsed,
            {name: tensor for name, tensor in tensors.items() if name not in constants},
            {name: tensor for name, tensor in tensors.items() if name in constants},
            None,
        )
    except serialize.SerializeError as error:
        raise UnsupportedModel(
            f"{where} was written by another version of torch than {torch.__version__}: {error}"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
        raise CorruptedFile(f"{where} is not an exported program: {error}") from error
    return program


def innermost(text: str) -> str:
    """The innermost frame of a stack trace, which is in the model's code, without the folder of its file."""
    frames = re.findall(r'File "(?:[^"]*[/\\])?([^"/\\]+)", line (\d+), in (\S+)', text)
    return 'File "{}", line {}, in {}'.format(*frames[-1]) if frames else text


def _records(value: Any, key: str) -> Iterator[dict[str, Any]]:
    """Iterate over all nested JSON objects with this key and "metadata": the nodes of the graphs."""
    if isinstance(value, dict):
        if key in value and "metadata" in value:
            yield value
        for inner in value.values():
            yield from _records(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _records(inner, key)


def _check(value: Any, where: object) -> None:
    """Reject names, expressions and code that torch would resolve, evaluate or compile, beyond an operator graph."""
    if isinstance(value, list):
        for inner in value:
            _check(inner, where)
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if key == "target" and "metadata" in value:
            match = _TARGET.fullmatch(inner) if isinstance(inner, str) else None
            if match is None or (match[3] and not _OPERATORS.fullmatch(match[3])):
                raise UnsafeCheckpoint(f"{where} calls {inner!r}, which is not an operator of a model")
        elif key == "expr_str" and not (isinstance(inner, str) and _EXPRESSION.fullmatch(inner)):
            raise UnsafeCheckpoint(f"{where} has {inner!r} instead of the size of a tensor")
        elif key == "metadata" and "target" in value and not set(inner) <= _METADATA:
            raise UnsafeCheckpoint(f"{where} has unknown metadata of an operator: {sorted(set(inner) - _METADATA)}")
        elif key == "guards_code" and inner:
            raise UnsafeCheckpoint(f"{where} contains Python code: {str(inner)[:80]}")
        elif key in ("in_spec", "out_spec") and isinstance(inner, str) and inner:
            _check_tree(json.loads(inner), where)
        elif key in ("as_custom_obj", "as_operator"):
            raise UnsafeCheckpoint(f"{where} contains an object that is not a tensor: {str(inner)[:80]}")
        _check(inner, where)


def _check_tree(value: Any, where: object) -> None:
    """Check that inputs and outputs are nested in tuples, lists and dictionaries only."""
    if isinstance(value, list):
        for inner in value:
            _check_tree(inner, where)
    elif isinstance(value, dict):
        if value.get("type") not in _TYPES:
            raise UnsafeCheckpoint(
                f"{where} nests its inputs in {value['type']!r}; only tuple, list and dict are allowed"
            )
        for inner in value.get("children_spec", []):
            _check_tree(inner, where)
