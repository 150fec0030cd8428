"""A typed Python class for an exported model: typed names, with shapes and dtypes checked at each call.

Notable here:
- the class checks the model's hash, so it rejects another model with the same signatures
"""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import TYPE_CHECKING

from pippin.core.errors import InvalidArgument
from pippin.core.files import atomic_write

if TYPE_CHECKING:
    from pippin.shape.export.exported_model import ExportedModel
    from pippin.shape.export.signature import Signature

_HEAD = '''"""{name}: an exported model with typed functions. Written by Pippin; edits are lost.

{functions}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pippin.shape.export import ExportedModel

HASH = "{hash}"
'''

_CLASS = '''

class {name}:
    """The model, compiled for one backend."""

    def __init__(self, asset: ExportedModel | str | Path, backend: str = "onnxruntime", **options: Any) -> None:
        """Load the model; raises CorruptedFile if it is not the one that this interface was generated for."""
        if not isinstance(asset, ExportedModel):
            asset = ExportedModel.load(asset, hash=HASH)
        asset.require(HASH)
        self.compiled = asset.to(backend, **options)
'''

_CLOSE = '''
    def close(self) -> None:
        """Release the backend's resources."""
        self.compiled.close()
'''

_RESERVED = {"compiled", "close"}


def generate_interface(asset: ExportedModel, path: str | Path, class_name: str = "Model") -> str:
    """Generate a Python module with a class that has a method for each function of the model.

    Args:
        asset: the exported model.
        path: the file to write.
        class_name: name of the class.

    Returns:
        The source code of the module.

    Raises:
        InvalidArgument: the name of the class, a function, an input or an output is not a valid identifier.
    """
    names = [class_name, *asset.functions]
    for function in asset.functions:
        signature = asset.signature(function)
        names += [port.name for port in (*signature.inputs, *signature.outputs)]
    invalid = [name for name in names if not name.isidentifier() or keyword.iskeyword(name) or name == "self"]
    invalid += [name for name in asset.functions if name in _RESERVED or name.startswith("_")]
    if invalid:
        raise InvalidArgument(f"these names cannot be used in a Python class: {', '.join(map(repr, invalid))}")
    lines = [f"- {name}({asset.signature(name)})" for name in asset.functions]
    text = _HEAD.format(name=class_name, functions="\n".join(lines), hash=asset.hash)
    for name in asset.functions:
        text += _outputs(name, asset.signature(name))
    text += _CLASS.format(name=class_name)
    for name in asset.functions:
        text += _method(name, asset.signature(name))
    text += _CLOSE
    with atomic_write(Path(path), mode="w") as file:
        file.write(text)
    return text


def _outputs(function: str, signature: Signature) -> str:
    """The source of a named tuple of the outputs; empty for a function with one output."""
    if len(signature.outputs) == 1:
        return ""
    fields = "".join(f'    {port.name}: Tensor\n    """{port}"""\n' for port in signature.outputs)
    return f'\n\nclass {_tuple(function)}(NamedTuple):\n    """The outputs of `{function}`."""\n\n{fields}'


def _tuple(function: str) -> str:
    return "".join(part.capitalize() for part in function.split("_")) + "Outputs"


def _method(function: str, signature: Signature) -> str:
    """The source of the method of one function; its docstring lists the inputs with shapes and dtypes."""
    parameters = ", ".join(f"{port.name}: Tensor" for port in signature.inputs)
    arguments = ", ".join(f"{port.name}={port.name}" for port in signature.inputs)
    inputs = "\n".join(f"            {port}" for port in signature.inputs)
    single = len(signature.outputs) == 1
    result = "Tensor" if single else _tuple(function)
    returned = f'outputs["{signature.outputs[0].name}"]' if single else f"{result}(**outputs)"
    return f'''
    def {function}(self, *, {parameters}) -> {result}:
        """Run `{function}`; raises SignatureMismatch before computing anything unless the inputs are:

{inputs}
        """
        outputs = self.compiled.run("{function}", {arguments})
        return {returned}
'''
