r"""Rows of the Jacobian of a model's outputs in its weights, and sums of their squares.

Notable here:
- GGN, empirical and sampled Fisher have the form $\sum_n J_n^\top S_n S_n^\top J_n$ with a small root $S$ for each
  example, so only rows $S^\top J$ are needed, and often only sums over them
- one forward pass records the input of each layer, one backward pass per column of $S$ gives the gradients at each
  layer's output; rows are products of the two, and no pass computes weight gradients
- for the last layer there is no backward pass: the gradients at its output are $S$ itself
- $J$ is formed only on request
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from pippin.bayes.batches import errors_of_inputs, num_examples
from pippin.bayes.laplace.jacobians.layer_rules import CACHE, CHUNK, Call, LinearCall, MatrixCall
from pippin.bayes.laplace.jacobians.layer_tracing import CallTracer
from pippin.bayes.weight_subset import Selection, listed
from pippin.core.errors import InvalidArgument, InvalidInput, UnsupportedLayer

Root = Float[Tensor, "n outputs columns"]
"""S: for each example, a square root of the Hessian of the loss in the outputs, S S^T."""


@dataclass
class RowBlock:
    """The gradients of some columns at the output of one use of a layer; made by `JacobianPass.layers`.

    Args:
        names: names of the selected parameters.
        call: the recorded call; None for parameters without a rule, of which only the rows are known.
        g: gradients at the output: [columns, *output].
        n: number of examples.
        start: index of the first column.
    """

    names: list[str]
    call: Call | None
    g: Tensor
    n: int
    start: int
    made: dict[str, Tensor] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        """Whether these are the first columns of the batch, so that the layer's inputs were not yet processed."""
        return self.start == 0

    def rows(self, name: str) -> Float[Tensor, "columns n ..."]:
        """Jacobian rows of one of the parameters, in the parameter's shape."""
        return self.made[name] if self.call is None else self.call.rows(name, self.g, self.n)


class JacobianPass:
    """A forward pass of one batch: its outputs, and products with their Jacobian.

    `JacobianBackend.forward` makes it; it is valid only within that ``with`` block.

    Args:
        rows: the backend that made it.
        batch: the inputs.
        outputs: outputs with their graph.
        calls: the recorded uses of selected parameters.
        unruled: parameters without a rule.
    """

    def __init__(
        self, rows: JacobianBackend, batch: Any, outputs: Tensor, calls: list[Call], unruled: list[str]
    ) -> None:
        self._rows, self._batch, self._graph = rows, batch, outputs
        self._calls = [call for call in calls if not set(call.names) <= set(unruled)]
        self._unruled = unruled
        self.outputs: Float[Tensor, "n outputs"] = outputs.detach()

    @property
    def width(self) -> int:
        """Gradient elements of one column at the outputs of all layers, for one example."""
        return sum(math.prod(call.output) for call in self._calls) // max(1, len(self.outputs))

    def jacobian(self) -> Float[Tensor, "n outputs weights"]:
        """The Jacobian J, n x outputs x weights elements."""
        return self.rows(self._eye())

    def rows(self, root: Root) -> Float[Tensor, "n columns weights"]:
        """S^T J for each example."""
        n, _, columns = root.shape
        selection = self._rows.selection
        filled = root.new_zeros(n, columns, selection.size)
        for start, pieces in self._columns(root):
            for piece in pieces:
                stop = start + len(piece.g)
                for name in piece.names:
                    filled[:, start:stop, selection.of(name)] += self._chosen(piece, name).transpose(0, 1)
        return filled

    def diagonal(self, root: Root) -> Float[Tensor, " weights"]:
        """Diagonal of the sum over examples of J^T S S^T J, without forming J."""
        selection = self._rows.selection
        total = root.new_zeros(selection.size)
        shared = self.shared()
        for _, pieces in self._columns(root):
            sums: dict[str, Tensor] = {}
            for piece in pieces:
                for name in piece.names:
                    if name in shared:
                        sums[name] = sums.get(name, 0) + self._chosen(piece, name)
                        continue
                    if piece.call is not None:
                        whole = piece.call.diagonal(name, piece.g, piece.n)
                    else:
                        whole = piece.rows(name).flatten(2).square().sum((0, 1))
                    within = selection.within(name)
                    total[selection.of(name)] += whole if within is None else whole[within]
            for name, rows in sums.items():
                total[selection.of(name)] += rows.square().sum((0, 1))
        return total

    def gram(self, root: Root) -> Float[Tensor, "weights weights"]:
        """Sum over examples of J^T S S^T J."""
        layer = self._only_linear()
        if layer is not None:
            return self._linear_gram(layer, root)
        size = self._rows.selection.size
        total = root.new_zeros(size, size)
        step = max(1, 16 * CHUNK // (size * len(root)))
        for start in range(0, root.shape[2], step):
            rows = self.rows(root[..., start : start + step]).flatten(0, 1)
            total.addmm_(rows.mT, rows)
        return total

    def weighted_gram(
        self, weights: Float[Tensor, " weights"], joint: bool = False
    ) -> Float[Tensor, "n outputs outputs"] | Float[Tensor, "all all"]:
        """J diag(weights) J^T for each example; J is formed for a few examples of one layer at a time.

        Args:
            weights: not negative.
            joint: whether to compute it jointly over the batch, [n x outputs, n x outputs]; this forms J.
        """
        selection, eye = self._rows.selection, self._eye()
        n, outputs, _ = eye.shape
        if joint or self.shared() or selection.indices is not None:
            rows = self.jacobian()
            rows = rows.flatten(0, 1) if joint else rows
            return (rows * weights) @ rows.mT
        total = eye.new_zeros(n, outputs, outputs)
        for piece in self.layers():
            for name in piece.names:
                total += _weighted_gram(piece, name, weights[selection.of(name)])
        return total

    def layers(self, root: Root | None = None) -> Iterator[RowBlock]:
        """The gradients at each use of a layer, for a few columns at a time.

        A parameter without a rule comes in a block of its own, with its rows.

        Args:
            root: None takes the identity, one column for each output and all at once: the blocks of J itself.
        """
        if root is None:
            yield from self._joined(self._eye())
            return
        for _, pieces in self._columns(root):
            yield from pieces

    def uses(self) -> Iterator[tuple[str, str, int]]:
        """Each use of a parameter: its name, kind ("matrix", "table" or "other"), and elements of its factors."""
        for call in self._calls:
            for name in call.names:
                if name not in self._unruled:
                    yield (name, *call.factors(name))
        for name in self._unruled:
            yield name, "other", 0

    def _eye(self) -> Tensor:
        n, outputs = self.outputs.shape
        eye = torch.eye(outputs, dtype=self.outputs.dtype, device=self.outputs.device)
        return eye.expand(n, outputs, outputs)

    def shared(self) -> set[str]:
        """Parameters that several calls use, whose rows must be summed before they are squared."""
        seen: set[str] = set()
        names = [name for call in self._calls for name in call.names]
        return {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]

    def _chosen(self, piece: RowBlock, name: str) -> Tensor:
        """Rows of the selected weights of one parameter: [columns, n, weights]."""
        within = self._rows.selection.within(name)
        if within is None:
            return piece.rows(name).flatten(2)
        if isinstance(piece.call, MatrixCall) and name == piece.call.weight:
            return piece.call.chosen_rows(piece.g, piece.n, within)
        return piece.rows(name).flatten(2)[..., within]

    def _columns(self, root: Tensor) -> Iterator[tuple[int, list[RowBlock]]]:
        """Yield blocks for a few columns at a time, with the index of the first column."""
        n = len(root)
        if root.shape[:2] != self.outputs.shape:
            raise InvalidArgument(f"a root of shape {tuple(root.shape)} for outputs of {tuple(self.outputs.shape)}")
        if self._unruled:
            made = self._by_example(root)
            yield 0, [RowBlock([name], None, rows, n, 0, {name: rows}) for name, rows in made.items()]
        if not self._calls:
            return
        edges = [call.edge for call in self._calls]
        names = [[name for name in call.names if name not in self._unruled] for call in self._calls]
        back = root.permute(2, 0, 1)
        own = get_gradient_edge(self._graph)
        outermost = all(edge == own for edge in edges)
        step = len(back) if outermost else self._together()
        for start in range(0, len(back), step):
            part = back[start : start + step]
            found = [part] * len(edges) if outermost else self._backward(edges, part)
            yield (
                start,
                [
                    RowBlock(own_names, call, g if call.factor == 1.0 else g * call.factor, n, start)
                    for own_names, call, g in zip(names, self._calls, found, strict=True)
                    if g is not None
                ],
            )

    def _backward(self, edges: list[GradientEdge], columns: Tensor) -> list[Tensor | None]:
        """Gradients at each edge for each column; batched over columns if every operation supports it."""

        def once(given: Tensor, batched: bool) -> list[Tensor | None]:
            return list(
                torch.autograd.grad(
                    self._graph, edges, given, retain_graph=True, allow_unused=True, is_grads_batched=batched
                )
            )

        if len(columns) > 1:
            try:
                return once(columns, True)
            except RuntimeError:  # a custom backward pass that does not support batched gradients
                single = [once(column, False) for column in columns]
                stacks = zip(*single, strict=True)
                return [
                    None if parts[0] is None else torch.stack([p for p in parts if p is not None]) for parts in stacks
                ]
        return [None if g is None else g[None] for g in once(columns[0], False)]

    def _together(self) -> int:
        """The number of columns per backward pass: more for small layers, to use the hardware well."""
        return max(1, CACHE // max(1, 4 * self.width * len(self.outputs)))

    def _joined(self, root: Tensor) -> Iterator[RowBlock]:
        """Blocks with all columns."""
        joined: dict[int, list[RowBlock]] = {}
        for _, pieces in self._columns(root):
            for piece in pieces:
                if piece.call is None:
                    yield piece
                else:
                    joined.setdefault(id(piece.call), []).append(piece)
        for parts in joined.values():
            first = parts[0]
            g = torch.cat([part.g for part in parts]) if len(parts) > 1 else first.g
            yield RowBlock(first.names, first.call, g, first.n, 0)

    def _only_linear(self) -> LinearCall | None:
        """The linear layer that holds all selected weights and has one input vector per example; None otherwise."""
        if len(self._calls) != 1 or self._unruled or self._rows.selection.indices is not None:
            return None
        (call,) = self._calls
        alone = isinstance(call, LinearCall) and call.weight is not None and len(call.x) == call.x[..., 0].numel()
        return call if alone and isinstance(call, LinearCall) and len(call.x) == len(self.outputs) else None

    def _linear_gram(self, call: LinearCall, root: Tensor) -> Tensor:
        """Sum over examples of the Kronecker product of outer products of gradients and of inputs."""
        ((_, (piece,)),) = list(self._columns(root)) if len(root.mT[0]) else [(0, [])]
        g = piece.g.flatten(2) if piece.g.ndim > 3 else piece.g
        x = call.x.reshape(len(g[0]), -1)
        if call.bias is not None:
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        a, b = x.shape[1], g.shape[2]
        total = x.new_zeros(b * b, a * a)
        step = max(1, 4 * CHUNK // (a * a))
        for start in range(0, len(x), step):
            some = x[start : start + step]
            came = torch.einsum("rnb,rnc->nbc", g[:, start : start + step], g[:, start : start + step])
            total.addmm_(came.flatten(1).mT, (some[:, :, None] * some[:, None]).flatten(1))
        full = total.view(b, b, a, a).permute(0, 2, 1, 3).reshape(b * a, b * a)
        if call.bias is None:
            return full
        places = torch.arange(b * a, device=x.device).view(b, a)
        order = torch.cat([places[:, :-1].flatten(), places[:, -1]])
        return full[order][:, order]

    def _by_example(self, root: Tensor) -> dict[str, Tensor]:
        """Rows of the parameters without a rule, by per-example differentiation: [columns, n, *shape]."""
        model, n = self._rows.model, len(root)
        own: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters() if n in self._unruled}
        leaves, structure = tree_flatten(self._batch)
        dims = tuple(0 if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n else None for leaf in leaves)

        def one(s: Tensor, *example: Any) -> tuple[dict[str, Tensor], Tensor]:
            fed = [leaf if dim is None else leaf[None] for leaf, dim in zip(example, dims, strict=True)]
            arguments, named = _arguments(tree_unflatten(fed, structure))

            def outputs(parameters: dict[str, Tensor]) -> Tensor:
                return _outputs_of(functional_call(model, parameters, arguments, named))[0]

            value, pull = vjp(outputs, own)[:2]
            return vmap(lambda column: pull(column)[0], 1)(s), value

        width = sum(p.numel() for p in own.values())
        step = max(1, 8 * CHUNK // (width * root.shape[2]))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                rows, value = vmap(one, (0, *dims), chunk_size=step)(root, *leaves)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedLayer(
                f"there is no rule for how the model uses {listed(list(own))}, and torch cannot differentiate it one "
                f"example at a time ({str(error).splitlines()[0]}); leave these out: Named([...])"
            ) from error
        if not torch.allclose(value, self.outputs, rtol=1e-2, atol=1e-3 * float(self.outputs.abs().max())):
            raise InvalidArgument(
                "the outputs of an example depend on the other examples of its batch, so that it has no Jacobian of "
                "its own; normalize within each example"
            )
        return {name: part.transpose(0, 1) for name, part in rows.items()}


class JacobianBackend:
    """Rows of the Jacobian of a model's outputs by a selection of its weights.

    Args:
        model: in evaluation mode. Called with a tensor, with the elements of a tuple, or with a mapping as keyword
            arguments; returns a tensor [n, outputs] (or [n]), or an object with ``logits``.
        selection: the selected weights.

    Raises:
        InvalidArgument: the selection was made for another model.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> from pippin.bayes.weight_subset import All
    >>> with JacobianBackend(model, All().resolve(model)).forward(torch.ones(5, 3)) as p:
    ...     tuple(p.jacobian().shape)
    (5, 2, 26)
    """

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        selection.parameters(model)
        self.model, self.selection = model, selection
        self._settled: dict[Any, tuple[list[bool], list[str]]] = {}

    @contextmanager
    def forward(self, batch: Any) -> Iterator[JacobianPass]:
        """Run the model on a batch; the layers' inputs are stored until the end of the ``with`` block.

        Args:
            batch: inputs, with the examples along the first dimension.

        Raises:
            InvalidArgument: batch norm or dropout in training mode, outputs that are not one vector for each example,
                or a model that computes without gradients.
            InvalidInput: outputs that are not finite or not one for each example, or inputs on which the model does not
                run.
        """
        self._check_mode()
        parameters = self.selection.parameters(self.model)
        recorder = CallTracer({id(p): name for name, p in parameters.items()})
        chosen = {id(p) for p in parameters.values()}
        kept = [(p, p.requires_grad) for p in self.model.parameters()]
        arguments, named = _arguments(batch)
        try:
            for parameter, _ in kept:
                parameter.requires_grad_(id(parameter) in chosen)
            with torch.enable_grad(), recorder, errors_of_inputs(batch):
                outputs = _outputs_of(self.model(*arguments, **named))
            self._check_outputs(outputs)
            if (count := num_examples(batch)) not in (0, len(outputs)):
                raise InvalidInput(
                    f"the model gives {len(outputs)} outputs for inputs of length {count}; the first dimension of "
                    "inputs counts examples, so that a single one is x[None]"
                )
            unruled = self._settle(outputs, recorder)
        finally:
            for parameter, wanted in kept:
                parameter.requires_grad_(wanted)
        result = JacobianPass(self, batch, outputs, recorder.calls, unruled)
        try:
            yield result
        finally:
            result._graph = result.outputs
            recorder.calls.clear()
            result._calls = []

    def _check_mode(self) -> None:
        for name, part in self.model.named_modules():
            random = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
            if part.training and (random or isinstance(part, _BatchNorm)):
                raise InvalidArgument(
                    f"{name or 'the model'} ({type(part).__name__}) is in train mode, where the outputs of an example "
                    "depend on chance or on the other examples; call model.eval() first"
                )

    def _check_outputs(self, outputs: Tensor) -> None:
        if outputs.ndim != 2:
            raise InvalidArgument(
                f"the model's outputs have shape {tuple(outputs.shape)}; a posterior needs one vector for each example "
                "[n, outputs]: wrap the model so that it returns that (the scores of one position, say)"
            )
        if not outputs.requires_grad:
            raise InvalidArgument(
                "the model's outputs do not depend on the chosen weights, or it computes them under no_grad or "
                "inference_mode"
            )
        if not bool(outputs.isfinite().all()):
            bad = int((~outputs.isfinite()).any(1).nonzero()[0, 0])
            raise InvalidInput(f"the model's outputs for example {bad} of the batch are not finite; look at its input")

    def _settle(self, outputs: Tensor, recorder: CallTracer) -> list[str]:
        """Find the example dimension of each call; returns the parameters without a rule."""
        calls, n = recorder.calls, len(outputs)
        key = (tuple((type(call), tuple(call.names), len(call.output)) for call in calls), frozenset(recorder.unruled))
        known = self._settled.get(key)
        if known is None:
            unruled = set(recorder.unruled)
            if n > 1 and calls:
                touched = torch.arange(n, device=outputs.device) % 2 == 0
                weights = torch.linspace(1.0, 2.0, outputs.shape[1]).to(outputs) * touched[:, None]
                edges = [call.edge for call in calls]
                probes = torch.autograd.grad(outputs, edges, weights, retain_graph=True, allow_unused=True)
                for call, probe in zip(calls, probes, strict=True):
                    if probe is not None and not call.settle(probe, touched):
                        unruled |= set(call.names)
            unruled |= self._unseen(outputs, {name for call in calls for name in call.names} | unruled)
            known = [call.second for call in calls], sorted(unruled)
            if n > 1:
                self._settled[key] = known
        for call, second in zip(calls, known[0], strict=True):
            call.second = second
        return known[1]

    def _unseen(self, outputs: Tensor, seen: set[str]) -> set[str]:
        """Parameters that the outputs depend on without a recorded call."""
        left = {name: p for name, p in self.selection.parameters(self.model).items() if name not in seen}
        if not left:
            return set()
        found = torch.autograd.grad(outputs.sum(), list(left.values()), retain_graph=True, allow_unused=True)
        return {name for name, gradient in zip(left, found, strict=True) if gradient is not None}


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the model."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _outputs_of(result: Any) -> Tensor:
    """The model's outputs; a vector becomes a column."""
    outputs: Tensor = result["logits"] if isinstance(result, Mapping) else getattr(result, "logits", result)
    return outputs[:, None] if outputs.ndim == 1 else outputs


def _weighted_gram(piece: RowBlock, name: str, weights: Tensor) -> Tensor:
    """The contribution of one parameter to J diag(weights) J^T, [n, outputs, outputs]."""
    call = piece.call
    if isinstance(call, MatrixCall) and name == call.weight:
        call.check()
        g = piece.g.transpose(1, 2) if call.second else piece.g
        columns, x = call.columns(g, piece.n), call.inputs(piece.n)
        n, groups, r, b, positions = columns.shape
        if positions == 1:
            strength = torch.einsum("nga,gba->ngb", x[..., 0].square(), weights.view(groups, b, -1))
            columns = columns[..., 0]
            return ((columns * strength[:, :, None]) @ columns.mT).sum(1)
        step = max(1, CHUNK // (groups * r * b * x.shape[2]))
        parts = []
        for start in range(0, n, step):
            rows = columns[start : start + step].flatten(2, 3) @ x[start : start + step].mT
            rows = rows.view(-1, groups, r, b * x.shape[2]).transpose(1, 2).flatten(2)
            parts.append((rows * weights) @ rows.mT)
        return torch.cat(parts)
    rows = piece.rows(name).flatten(2).transpose(0, 1)
    return (rows * weights) @ rows.mT
