r"""Compression of the weights of an exported program, identical for every backend.

Notable here:
- a weight is replaced by its codes and the operators that decode them, so every file format shrinks, and no backend
  quantizes
- codes of a model that is quantized already are kept as they are
- codes below 8 bits are unpacked with multiplication and floor, as not every backend has bit shifts
- scales and palettes are floating-point parameters of the program, which `ExportedModel.module` can train

With $s = \max|w| / (2^{b-1} - 1)$ for a row or a group of a row, linear codes are $q = \mathrm{round}(w / s)$;
a palette is k-means with $2^b$ centers per group of rows; pruning stores the largest $|w|$ and a bit mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from pippin.core.checks import OpenFraction, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.quantization.codes import Codes
from pippin.shape.export.compiled_model import quiet
from pippin.shape.export.exported_model import ExportedModel

_ATEN = torch.ops.aten


@checked
@dataclass(frozen=True)
class LinearQuantization:
    """Equal steps: ``bits`` of 8, 4 or 2, a scale for each row, or for each ``group`` of inputs."""

    bits: Literal[2, 4, 8] = 8
    group: PositiveInt | None = None


@checked
@dataclass(frozen=True)
class Palettization:
    """A table of ``2 ** bits`` values for each ``group`` of rows, or for the whole matrix; ``bits`` of 1, 2 or 4."""

    bits: Literal[1, 2, 4] = 4
    group: PositiveInt | None = None


@checked
@dataclass(frozen=True)
class Pruning:
    """The share ``sparsity`` of the weights, the smallest ones, becomes zero; 0 < sparsity < 1."""

    sparsity: OpenFraction = 0.75


@dataclass(frozen=True)
class JointCompression:
    """Prune, then code what is left; its scale or palette is that of the whole matrix."""

    prune: Pruning = Pruning()
    code: LinearQuantization | Palettization = Palettization()

    def __post_init__(self) -> None:
        if self.code.group is not None:
            raise InvalidArgument(
                f"what is left after pruning has no rows to group, so group must be None: {self.code}"
            )


Compression = LinearQuantization | Palettization | Pruning | JointCompression

# Stored tensors by suffix, and how to get the dense weight back from their nodes.
_Coded = tuple[dict[str, Tensor], Callable[["_Build"], Node]]


def compress(
    model: ExportedModel, config: Compression, *, skip: tuple[str, ...] = (), min_size: int = 1024
) -> ExportedModel:
    """The model with compressed weights.

    Args:
        model: the exported model; it is not changed.
        config: the method.
        skip: parts of names of weights that are not compressed.
        min_size: minimum number of elements of a compressed weight.

    Raises:
        InvalidArgument: no weight to compress, or a config that does not fit a weight.
    """
    coded: dict[int, _Coded] = {}
    programs = {}
    for name, program in model.programs.items():
        chosen = {
            key: weight
            for key, weight in program.exported.state_dict.items()
            if weight.ndim >= 2
            and weight.is_floating_point()
            and weight.numel() >= min_size
            and not any(part in key for part in skip)
        }
        for key, weight in chosen.items():
            if weight.data_ptr() not in coded:
                coded[weight.data_ptr()] = _code(weight.detach().float(), config, key)
        rewritten = _rewrite(program.exported, {key: coded[weight.data_ptr()] for key, weight in chosen.items()})
        programs[name] = replace(program, exported=rewritten)
    if not coded:
        raise InvalidArgument(f"no weight of at least {min_size} elements is left to compress; skipped: {skip}")
    return ExportedModel(programs, {**model.note, "compression": str(config)})


def with_codes(model: ExportedModel, codes: Mapping[str, Codes]) -> ExportedModel:
    """The model with weights that were quantized before it was captured; they decode to the same values, bit for bit.

    Args:
        model: the exported model, with the dequantized weights; it is not changed.
        codes: quantized matrices by the names of their weights in the programs. Another weight with the same memory,
            such as a tied output matrix, is given the same codes. Three bits are stored as four.

    Raises:
        InvalidArgument: no program has a weight of this name, or it has another shape.
    """
    coded: dict[int, _Coded] = {}
    left = dict(codes)
    for program in model.programs.values():
        for key, weight in program.exported.state_dict.items():
            matrix = left.pop(key, None)
            if matrix is None:
                continue
            if tuple(weight.shape) != matrix.shape:
                raise InvalidArgument(f"codes of {key} have shape {matrix.shape}, the weight has {tuple(weight.shape)}")
            coded[weight.data_ptr()] = _given(matrix)
    if left:
        raise InvalidArgument(f"no program has a weight {next(iter(left))!r}, for which codes were given")
    programs = {}
    for name, program in model.programs.items():
        state = program.exported.state_dict.items()
        chosen = {key: coded[weight.data_ptr()] for key, weight in state if weight.data_ptr() in coded}
        programs[name] = replace(program, exported=_rewrite(program.exported, chosen))
    widths = sorted({matrix.bits for matrix in codes.values()})
    return ExportedModel(programs, {**model.note, "compression": f"codes of {', '.join(map(str, widths))} bits"})


def _given(matrix: Codes) -> _Coded:
    """The stored tensors of a matrix that is quantized already."""
    bits = 4 if matrix.bits == 3 else matrix.bits
    scales = matrix.scales.float().expand(matrix.shape[0], -1).reshape(-1, 1).contiguous()
    # eight bits need no unpacking, but are unsigned
    stored = {
        "codes": matrix.codes.flatten().cpu() if bits == 8 else _packed(matrix.codes.cpu(), bits),
        "scales": scales,
    }
    parts, shape = [len(scales), matrix.group_size], list(matrix.shape)

    def dense(build: _Build) -> Node:
        flat = build.floats("codes") if bits == 8 else build.unpack("codes", bits, matrix.codes.numel())
        centered = build(_ATEN.sub.Tensor, build(_ATEN.view.default, flat, parts), matrix.zero_point)
        return build(_ATEN.view.default, build(_ATEN.mul.Tensor, centered, build["scales"]), shape)

    return stored, dense


def palette_of(values: Tensor, bits: int, *, steps: int = 40) -> tuple[Tensor, Tensor]:
    """One-dimensional k-means: codes of the shape of ``values``, and centers in ascending order.

    Lloyd's algorithm, initialized with quantiles.

    >>> codes, centers = palette_of(torch.tensor([0.0, 0.1, 5.0, 5.1]), 1)
    >>> codes.tolist(), [round(c, 2) for c in centers.tolist()]
    ([0, 0, 1, 1], [0.05, 5.05])
    """
    flat, count = values.flatten().float(), 2**bits
    ordered = flat.sort().values
    centers = ordered[((torch.arange(count) + 0.5) / count * len(flat)).long()]  # quantiles
    for _ in range(steps):
        codes = torch.bucketize(flat, (centers[1:] + centers[:-1]) / 2)
        sizes = torch.bincount(codes, minlength=count)
        sums = torch.zeros(count, dtype=torch.float64).index_add_(0, codes, flat.double())
        means = torch.where(sizes > 0, (sums / sizes.clamp(min=1)).float(), centers)
        if torch.equal(means, centers):
            break
        centers = means.sort().values
    return torch.bucketize(flat, (centers[1:] + centers[:-1]) / 2).view(values.shape), centers


def _code(weight: Tensor, config: Compression, name: str) -> _Coded:
    """The stored tensors of one weight."""
    if not weight.isfinite().all():
        raise InvalidArgument(f"{name} holds values that are not finite and cannot be compressed")
    shape, rows = list(weight.shape), weight.reshape(weight.shape[0], -1)
    if isinstance(config, LinearQuantization):
        return _linear(rows, shape, config, name)
    if isinstance(config, Palettization):
        return _palette(rows, shape, config, name)
    return _pruned(rows, shape, config, name)


def _linear(rows: Tensor, shape: list[int], config: LinearQuantization, name: str) -> _Coded:
    group = config.group or rows.shape[1]
    if rows.shape[1] % group:
        raise InvalidArgument(f"groups of {group} do not divide the {rows.shape[1]} inputs of {name}")
    parts = rows.reshape(-1, group)
    top = 2 ** (config.bits - 1) - 1
    scales = parts.abs().amax(1, keepdim=True) / top
    codes = (parts / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-top, top)
    if config.bits == 8:
        stored = {"codes": codes.to(torch.int8), "scales": scales}
        return stored, lambda build: build(
            _ATEN.view.default, build(_ATEN.mul.Tensor, build.floats("codes"), build["scales"]), shape
        )
    stored = {"codes": _packed(codes + top, config.bits), "scales": scales}

    def dense(build: _Build) -> Node:
        unsigned = build(_ATEN.view.default, build.unpack("codes", config.bits, parts.numel()), list(parts.shape))
        centered = build(_ATEN.sub.Tensor, unsigned, float(top))
        return build(_ATEN.view.default, build(_ATEN.mul.Tensor, centered, build["scales"]), shape)

    return stored, dense


def _palette(rows: Tensor, shape: list[int], config: Palettization, name: str) -> _Coded:
    group = config.group or len(rows)
    if len(rows) % group:
        raise InvalidArgument(f"groups of {group} do not divide the {len(rows)} rows of {name}")
    found = [palette_of(part, config.bits) for part in rows.split(group)]
    codes = torch.cat([codes for codes, _ in found])
    stored = {"codes": _packed(codes, config.bits), "palette": torch.cat([table for _, table in found])[:, None]}
    if len(found) > 1:
        stored["first"] = torch.arange(len(found))[:, None] * 2**config.bits

    def dense(build: _Build) -> Node:
        indices = build.int64(build.unpack("codes", config.bits, rows.numel()))
        if "first" in stored:  # several palettes in one table: add the index of each group's first entry
            indices = build(_ATEN.view.default, indices, [len(found), rows.numel() // len(found)])
            indices = build(_ATEN.add.Tensor, indices, build["first"])
        return build(_ATEN.view.default, build(_ATEN.embedding.default, build["palette"], indices), shape)

    return stored, dense


def _pruned(rows: Tensor, shape: list[int], config: Pruning | JointCompression, name: str) -> _Coded:
    sparsity = (config.prune if isinstance(config, JointCompression) else config).sparsity
    flat = rows.flatten()
    nonzero = torch.zeros(len(flat), dtype=torch.bool)
    nonzero[flat.abs().topk(max(1, round(len(flat) * (1 - sparsity)))).indices] = True
    values = flat[nonzero][None]
    stored: dict[str, Tensor] = {"values": values.reshape(-1, 1).contiguous()}
    inner: Callable[[_Build], Node] = lambda build: build["values"]  # noqa: E731
    if isinstance(config, JointCompression):
        stored, inner = _code(values, config.code, name)
    stored = {**stored, "mask": _packed(nonzero.long(), 1)}

    def dense(build: _Build) -> Node:
        table = build(_ATEN.view.default, inner(build), [values.numel(), 1])
        mask = build.unpack("mask", 1, len(flat))
        # the index of each weight's value is the number of unpruned weights before it
        count = build(_ATEN.cumsum.default, build.int64(mask), 0)
        indices = build(_ATEN.clamp.default, build(_ATEN.sub.Tensor, count, 1), 0)
        found = build(_ATEN.view.default, build(_ATEN.embedding.default, table, indices), [len(flat)])
        return build(_ATEN.view.default, build(_ATEN.mul.Tensor, found, mask), shape)

    return stored, dense


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes packed into bytes, the first in the lowest bits; the last byte is padded with zeros."""
    per = 8 // bits
    flat = codes.flatten().to(torch.int64)
    flat = nn.functional.pad(flat, (0, -len(flat) % per)).view(-1, per)
    return (flat << (torch.arange(per) * bits)).sum(1).to(torch.uint8)


class _Build:
    """Adds operators to a graph, each with the fake tensor that later passes need."""

    def __init__(self, graph: Graph, stored: dict[str, Node], like: Node) -> None:
        self.graph, self.stored = graph, stored
        self.notes: dict[str, Any] = {
            key: like.meta[key] for key in ("nn_module_stack", "stack_trace", "torch_fn") if key in like.meta
        }

    def __getitem__(self, name: str) -> Node:
        return self.stored[name]

    def __call__(self, operator: Any, *arguments: Any, **settings: Any) -> Node:
        node = self.graph.call_function(operator, arguments, settings)
        fakes = map_arg(arguments, lambda argument: argument.meta["val"])
        with node.all_input_nodes[0].meta["val"].fake_mode, torch.no_grad():
            node.meta = {**self.notes, "val": operator(*fakes, **settings)}
        return node

    def floats(self, name: str) -> Node:
        """A stored tensor as float32."""
        return self(_ATEN._to_copy.default, self[name], dtype=torch.float32)

    def int64(self, node: Node) -> Node:
        """A node converted to int64, for use as indices."""
        return self(_ATEN._to_copy.default, node, dtype=torch.int64)

    def unpack(self, name: str, bits: int, count: int) -> Node:
        """The first ``count`` codes of a stored tensor as float32: division by a power of two and floor are exact."""
        rest, parts = self.floats(name), []
        for _ in range(8 // bits - 1):
            above = self(_ATEN.floor.default, self(_ATEN.mul.Tensor, rest, 2.0**-bits))
            parts.append(self(_ATEN.sub.Tensor, rest, self(_ATEN.mul.Tensor, above, 2.0**bits)))
            rest = above
        columns = [self(_ATEN.unsqueeze.default, part, 1) for part in [*parts, rest]]
        codes = self(_ATEN.view.default, self(_ATEN.cat.default, columns, 1), [-1])
        return codes if count % (8 // bits) == 0 else self(_ATEN.slice.Tensor, codes, 0, 0, count)


def _rewrite(exported: ExportedProgram, coded: dict[str, _Coded]) -> ExportedProgram:
    """A copy of the program in which these weights are computed from their codes."""
    import copy

    with quiet():
        graph_module = copy.deepcopy(exported.graph_module)
        signature = copy.deepcopy(exported.graph_signature)
    graph = graph_module.graph
    # a copied graph renames nodes that are called as a builtin is ("input")
    renamed = {old.name: new.name for old, new in zip(exported.graph.nodes, graph.nodes, strict=True)}
    for known in (*signature.input_specs, *signature.output_specs):
        known.arg.name = renamed[known.arg.name]
    state: dict[str, Any] = {key: tensor for key, tensor in exported.state_dict.items() if key not in coded}
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    body = next(node for node in graph.nodes if node.op != "placeholder")
    specs = []
    for spec in signature.input_specs:
        if spec.target is None or spec.target not in coded:
            specs.append(spec)
            continue
        stored, dense = coded[spec.target]
        old = placeholders[spec.arg.name]
        nodes = {}
        for suffix, tensor in stored.items():
            target = f"{spec.target}_{suffix}"
            with graph.inserting_before(old):
                node = graph.placeholder(f"{old.name}_{suffix}")
            node.meta["val"] = old.meta["val"].fake_mode.from_tensor(tensor, static_shapes=True)
            trainable = tensor.is_floating_point()
            kind = InputKind.PARAMETER if trainable else InputKind.BUFFER
            specs.append(InputSpec(kind, TensorArgument(node.name), target, None if trainable else True))
            state[target] = nn.Parameter(tensor.clone()) if trainable else tensor
            nodes[suffix] = node
        with graph.inserting_before(body):
            old.replace_all_uses_with(dense(_Build(graph, nodes, next(iter(old.users), old))))
        graph.erase_node(old)
    signature.input_specs[:] = specs
    graph_module.recompile()
    return ExportedProgram(
        root=graph_module,
        graph=graph,
        graph_signature=signature,
        state_dict=state,
        range_constraints=exported.range_constraints,
        module_call_graph=exported.module_call_graph,
        constants=exported.constants,
        verifiers=exported.verifiers,
    )
