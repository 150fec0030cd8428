"""A model outside of its Python code: exported programs, their signatures and weights, in one folder with one hash.

Notable here:
- the record is `torch.export.ExportedProgram`; every backend starts from it and none from another backend's file
- a folder is JSON and safetensors; every byte of it is hashed, and compared before it is read
- a weight that two functions share (prefill and step of a decoder) is stored once
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pippin.core.errors import CorruptedFile, ExportError, InvalidArgument, ModelNotFound
from pippin.core.files import atomic_write, require_free_space, sha256_of
from pippin.shape.export import serialization
from pippin.shape.export.signature import DTYPES, Signature, SizeRange, TensorSpec, symbols_of

if TYPE_CHECKING:
    from pippin.shape.export.backends import BackendName
    from pippin.shape.export.compiled_model import CompiledModel

FORMAT = "pippin.model-asset.1"


@dataclass(frozen=True)
class ExportedFunction:
    """What to capture: a module, one call of it, and which sizes may differ in other calls.

    Args:
        module: called with the example's tensors by position, in their order; returns a tensor or a tuple of tensors.
        example: one call, by name of input. A dynamic size should be neither 0 nor 1 here, nor equal to another size.
        dynamic: for each input, its dynamic dimensions: ``{"x": {0: Range("batch", 1, 64)}}``.
        outputs: names of the outputs; without them "output", or "output_0", "output_1"…
    """

    module: nn.Module
    example: Mapping[str, Tensor]
    dynamic: Mapping[str, Mapping[int, SizeRange]] | None = None
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """One captured function."""

    exported: ExportedProgram
    signature: Signature
    example: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, buffers and constants of the program by name."""
        found = {**self.exported.state_dict, **self.exported.constants}
        return {name: tensor.detach() for name, tensor in found.items() if isinstance(tensor, Tensor)}


class ExportedModel:
    """Captured functions that share weights; made by `capture` or `load`, changed by nothing.

    >>> double = ExportedModel.capture(nn.Linear(3, 2), {"x": torch.zeros(4, 3)}, {"x": {0: SizeRange("batch", 1, 9)}})
    >>> print(double.signature())
    x: float32[batch=1..9, 3] -> output: float32[batch=1..9, 2]
    >>> double.ops()
    {'aten.linear.default': 1}
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        note: Mapping[str, Any] | None = None,
        texts: Mapping[str, bytes] | None = None,
    ) -> None:
        self.programs = dict(programs)
        self.note = dict(note or {})
        # as they are written; kept, because backends may write into the sizes of a program while they convert it
        self.texts = dict(texts or {name: serialization.to_bytes(one.exported) for name, one in programs.items()})
        self._hash: str | None = None

    @classmethod
    def capture(
        cls,
        module: nn.Module,
        example: Mapping[str, Tensor],
        dynamic: Mapping[str, Mapping[int, SizeRange]] | None = None,
        *,
        outputs: tuple[str, ...] = (),
        functions: Mapping[str, ExportedFunction] | None = None,
    ) -> ExportedModel:
        """Capture a module, in evaluation mode, as the function "main".

        Args:
            module: see `ExportedFunction`.
            example: see `ExportedFunction`.
            dynamic: see `ExportedFunction`.
            outputs: see `ExportedFunction`.
            functions: further functions, by name.

        Raises:
            InvalidArgument: ``dynamic`` names no input or dimension, or a name of a function is no identifier.
            ExportError: torch cannot capture the module, or the example shows that a size cannot differ.
        """
        wanted = {"main": ExportedFunction(module, example, dynamic, outputs), **(functions or {})}
        if odd := [name for name in wanted if not name.isidentifier()]:
            raise InvalidArgument(f"the name of a function must be an identifier, got {odd[0]!r}")
        return cls({name: _capture(name, function) for name, function in wanted.items()})

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions; "main" is the first."""
        return tuple(self.programs)

    def signature(self, function: str = "main") -> Signature:
        """Inputs and outputs of a function.

        Raises:
            InvalidArgument: there is no such function.
        """
        return self.program(function).signature

    def program(self, function: str = "main") -> Program:
        """One captured function.

        Raises:
            InvalidArgument: there is no such function.
        """
        if function not in self.programs:
            raise InvalidArgument(f"there is no function {function!r}; functions: {', '.join(self.programs)}")
        return self.programs[function]

    def example(
        self, function: str = "main", sizes: Mapping[str, int] | None = None, *, seed: int = 0
    ) -> dict[str, Tensor]:
        """Random inputs: standard normal numbers; whole numbers from the range of the example that was captured.

        Args:
            function: of which function.
            sizes: of the dynamic dimensions by name; those of the example where none are given.
            seed: the same seed gives the same inputs.
        """
        program = self.program(function)
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for port in program.signature.inputs:
            known = program.example[port.name]
            shape = [
                (sizes or {}).get(size.name, known.shape[index]) if isinstance(size, SizeRange) else size
                for index, size in enumerate(port.shape)
            ]
            if known.is_floating_point():
                made[port.name] = torch.randn(shape, generator=generator).to(known.dtype)
            else:
                low, high = int(known.min()), int(known.max())
                made[port.name] = torch.randint(low, high + 1, shape, generator=generator).to(known.dtype)
        return made

    def ops(self, function: str | None = None) -> dict[str, int]:
        """How often each operator occurs, the most frequent first; over all functions without a name."""
        chosen = self.functions if function is None else (function,)
        nodes = (node for name in chosen for node in self.program(name).exported.graph.nodes)
        return dict(Counter(str(node.target) for node in nodes if node.op == "call_function").most_common())

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, shared ones once."""
        return sum(tensor.nbytes for tensor in self._weights()[0].values())

    @property
    def hash(self) -> str:
        """SHA-256 over programs, signatures and weights: 64 hexadecimal digits, equal for equal models."""
        if self._hash is None:
            signatures = {name: program.signature.to_json() for name, program in self.programs.items()}
            self._hash = _digest(*self._weights(), self.texts, signatures, self.note)
        return self._hash

    def require(self, hash: str) -> None:
        """Raise `CorruptedFile` unless the model has this hash."""
        if self.hash != hash:
            raise CorruptedFile(f"the model has the hash {self.hash}, not {hash}")

    def module(self, function: str = "main") -> nn.Module:
        """The program as a module in evaluation mode; its floating-point weights can be trained.

        A compressed model trains its scales and palettes this way; `with_weights` takes the result back.
        """
        own = self.with_weights(self.program(function).tensors())  # so that training it leaves the asset as it is
        module = own.program(function).exported.module(check_guards=False)
        for weight in module.parameters():
            weight.requires_grad_(weight.is_floating_point())
        # torch refuses these two for captured programs, which know one mode only; a loop of training calls them
        module.train = module.eval = lambda *_: module  # type: ignore[method-assign, assignment]
        return module

    def with_weights(self, weights: Mapping[str, Tensor]) -> ExportedModel:
        """The same programs with other values of these weights.

        Raises:
            InvalidArgument: a name or a shape that the programs do not have; all of them are listed.
        """
        known = {name: tensor for program in self.programs.values() for name, tensor in program.tensors().items()}
        wrong = [
            f"{name} {tuple(tensor.shape)}"
            for name, tensor in weights.items()
            if name not in known or known[name].shape != tensor.shape or known[name].dtype != tensor.dtype
        ]
        if wrong:
            raise InvalidArgument(f"no weights of this model: {', '.join(wrong)}")
        copies = {name: tensor.detach().clone() for name, tensor in weights.items()}
        programs = {}
        for name, program in self.programs.items():
            exported = program.exported
            fresh = ExportedProgram(
                root=exported.graph_module,
                graph=exported.graph,
                graph_signature=exported.graph_signature,
                state_dict={key: _like(copies.get(key), old) for key, old in exported.state_dict.items()},
                range_constraints=exported.range_constraints,
                module_call_graph=exported.module_call_graph,
                constants={key: _like(copies.get(key), old) for key, old in exported.constants.items()},
                verifiers=exported.verifiers,
            )
            programs[name] = replace(program, exported=fresh)
        return ExportedModel(programs, self.note, self.texts)

    def to(self, backend: str, **options: Any) -> CompiledModel:
        """Compile for a backend, ready to run; see `pippin.shape.export.backends`.

        Raises:
            BackendUnavailable: it is not installed, or does not run on this system.
            UnsupportedOperator: it does not support an operator.
            InvalidArgument: there is no such backend, or it has no such option.
        """
        from pippin.shape.export.backends import find

        return find(cast("BackendName", backend)).compile(self, **options)

    def save(self, path: str | Path) -> str:
        """Write the model into a folder; give its hash. What stood there under the same names is replaced.

        Raises:
            DiskFull: an older model in the folder stays as it was.
        """
        from safetensors.torch import save_file

        path = Path(path)
        weights, places = self._weights()
        examples = {
            f"{name}/{key}": tensor for name, one in self.programs.items() for key, tensor in one.example.items()
        }
        require_free_space(path, self.nbytes + sum(tensor.nbytes for tensor in examples.values()) + (1 << 20))
        path.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {"format": FORMAT, "hash": self.hash, "note": self.note, "functions": {}}
        files = {"weights.safetensors": weights, "examples.safetensors": examples}
        sums = {}
        for file, tensors in files.items():
            temporary = path / f".{file}.partial"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary)
            temporary.rename(path / file)
            sums[file] = sha256_of(path / file)
        for name, program in self.programs.items():
            with atomic_write(path / f"{name}.json") as stream:
                stream.write(self.texts[name])
            sums[f"{name}.json"] = sha256_of(path / f"{name}.json")
            record["functions"][name] = {"signature": program.signature.to_json(), "weights": places[name]}
        record["files"] = sums
        with atomic_write(path / "asset.json", mode="w") as stream:
            json.dump(record, stream, indent=1, sort_keys=True)
        return self.hash

    @classmethod
    def load(cls, path: str | Path, *, hash: str | None = None) -> ExportedModel:
        """Read a model that `save` wrote; nothing in it is run.

        Args:
            path: where it is.
            hash: the hash that it must have, if you know it; a folder that was changed and signed anew is found by it.

        Raises:
            ModelNotFound: there is no model in the folder.
            CorruptedFile: a file is missing or was changed, or the hash is another one.
            UnsafeCheckpoint: the program names something that is no operator of a model.
            UnsupportedModel: it was written by a torch whose programs this one does not read.
        """
        path = Path(path)
        record = _record(path)
        for file, wanted in record["files"].items():
            if not (path / file).is_file() or "/" in file or sha256_of(path / file) != wanted:
                raise CorruptedFile(f"{path / file} is missing or was changed since it was written")
        weights = _tensors(path / "weights.safetensors")
        examples = _tensors(path / "examples.safetensors")
        functions = record["functions"]
        texts = {name: (path / f"{name}.json").read_bytes() for name in functions}
        places = {name: function["weights"] for name, function in functions.items()}
        signatures = {name: function["signature"] for name, function in functions.items()}
        found = _digest(weights, places, texts, signatures, record["note"])
        for wanted in (record["hash"], hash or found):
            if found != wanted:
                raise CorruptedFile(f"{path} has the hash {found}, not {wanted}")
        programs = {}
        try:
            for name in functions:
                tensors = {key: weights[place] for key, place in places[name].items()}
                exported = serialization.from_bytes(texts[name], tensors, path / f"{name}.json")
                signature = Signature.from_json(signatures[name])
                example = {port.name: examples[f"{name}/{port.name}"] for port in signature.inputs}
                programs[name] = Program(exported, signature, example)
        except KeyError as error:
            raise CorruptedFile(f"{path} lacks the tensor {error}") from error
        asset = cls(programs, record["note"], texts)
        asset._hash = found
        return asset

    def _weights(self) -> tuple[dict[str, Tensor], dict[str, dict[str, str]]]:
        """All different weights by the first name they have, and for each function where its weights stand."""
        first: dict[tuple[Any, ...], str] = {}
        weights: dict[str, Tensor] = {}
        places: dict[str, dict[str, str]] = {}
        for name, program in self.programs.items():
            places[name] = {}
            for key, tensor in program.tensors().items():
                same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
                place = first.setdefault(same, f"{name}/{key}") if tensor.numel() else f"{name}/{key}"
                weights.setdefault(place, tensor)
                places[name][key] = place
        return weights, places


def _digest(
    weights: Mapping[str, Tensor],
    places: Mapping[str, Any],
    texts: Mapping[str, bytes],
    signatures: Mapping[str, Any],
    note: Mapping[str, Any],
) -> str:
    """SHA-256 over all that makes a model."""
    digest = hashlib.sha256()
    for key in sorted(weights):
        tensor = weights[key].contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    for name in sorted(texts):
        digest.update(texts[name])
    digest.update(json.dumps([places, signatures, note], sort_keys=True).encode())
    return digest.hexdigest()


def _like(new: Tensor | None, old: Any) -> Any:
    """A new value of a weight, a parameter where the old one was."""
    if new is None:
        return old
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _capture(name: str, function: ExportedFunction) -> Program:
    """Export one function and write down its signature."""
    dynamic = {key: dict(sizes) for key, sizes in (function.dynamic or {}).items()}
    for key, sizes in dynamic.items():
        if key not in function.example or any(index >= function.example[key].ndim for index in sizes):
            raise InvalidArgument(f"{name}: dynamic sizes are given for {key!r} {sorted(sizes)}, which no input has")
    ranges = {size.name: size for sizes in dynamic.values() for size in sizes.values()}
    dims = {key: Dim(key, min=size.min, max=size.max) for key, size in ranges.items()}
    shapes = tuple(
        {index: dims[size.name] for index, size in dynamic.get(key, {}).items()} or None for key in function.example
    )
    module = function.module
    training, learned = module.training, [weight for weight in module.parameters() if weight.requires_grad]
    module.eval()
    for weight in learned:  # a model may compute differently where gradients are wanted
        weight.requires_grad_(False)
    try:
        with torch.no_grad():
            exported = torch.export.export(module, tuple(function.example.values()), dynamic_shapes=shapes)
    except Exception as error:  # torch raises many kinds here, most without a common base
        raise ExportError(f"{name} cannot be captured: {str(error).strip()[:2000]}") from error
    finally:
        module.train(training)
        for weight in learned:
            weight.requires_grad_(True)
    inputs = tuple(
        TensorSpec(key, _dtype(tensor), tuple(dynamic.get(key, {}).get(i, size) for i, size in enumerate(tensor.shape)))
        for key, tensor in function.example.items()
    )
    _shorten(exported)
    example = {key: tensor.detach().clone() for key, tensor in function.example.items()}
    return Program(exported, Signature(inputs, _outputs(exported, inputs, function.outputs)), example)


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidArgument(f"inputs and outputs are {', '.join(DTYPES)}; got {name}")
    return name


def _outputs(
    exported: ExportedProgram, inputs: tuple[TensorSpec, ...], names: tuple[str, ...]
) -> tuple[TensorSpec, ...]:
    """The outputs; a dynamic size that is the same expression as an input's has its name, any other is -1."""
    nodes = {node.name: node for node in exported.graph.nodes}
    symbols = symbols_of(exported, inputs)
    values = [nodes[str(name)].meta["val"] for name in exported.graph_signature.user_outputs]
    many = len(values) > 1
    names = names or tuple(f"output_{i}" if many else "output" for i in range(len(values)))
    if len(names) != len(values) or len(set(names)) != len(names) or not all(map(str.isidentifier, names)):
        raise InvalidArgument(f"there are {len(values)} outputs, which need as many different names, got {names}")
    return tuple(
        TensorSpec(
            name,
            _dtype(value),
            tuple(symbols.get(str(s), -1) if isinstance(s, torch.SymInt) else s for s in value.shape),
        )
        for name, value in zip(names, values, strict=True)
    )


def _shorten(exported: ExportedProgram) -> None:
    """Keep the innermost source line of each operator, without the folders of this machine; forget what was traced."""
    for node in exported.graph.nodes:
        if node.meta.get("stack_trace"):
            node.meta["stack_trace"] = serialization.innermost(node.meta["stack_trace"])


def _record(folder: Path) -> dict[str, Any]:
    """`asset.json`."""
    path = folder / "asset.json"
    if not path.is_file():
        raise ModelNotFound(
            f"{folder} holds no exported model: there is no asset.json; `ExportedModel.save` writes one"
        )
    try:
        record = json.loads(path.read_bytes())
        if record["format"] != FORMAT:
            raise CorruptedFile(f"{path} is of the format {record['format']!r}, not {FORMAT!r}")
        wanted = {"weights.safetensors", "examples.safetensors", *(f"{name}.json" for name in record["functions"])}
        whole = all(isinstance(one["weights"], dict) and one["signature"] for one in record["functions"].values())
        if (
            set(record["files"]) != wanted
            or not whole
            or not {"hash", "note"} <= set(record)
            or not all(map(str.isidentifier, record["functions"]))
        ):
            raise CorruptedFile(f"{path} lists other files than its functions need")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptedFile(f"{path} is no list of an exported model: {error}") from error
    return dict(record)


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise CorruptedFile(f"{path} cannot be read: {error}") from error
