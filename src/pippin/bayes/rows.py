r"""Rows of Jacobians, and the sums of their squares, of a model's outputs by its weights.

Notable here:
- GGN, empirical and sampled Fisher have the form $\sum_n J_n^\top S_n S_n^\top J_n$ with a small root $S$ for each
  example, so all that is ever needed of a model are rows $S^\top J$, and often only sums over them
- one forward pass notes what each layer read, one backward pass for each column of $S$ brings what came back to each
  layer's output; their products are the rows, and no pass computes a gradient of weights
- for the last layer nothing goes backward at all: what comes back is $S$ itself
- $J$ is made only where it is asked for
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

from pippin.bayes.batches import running, size
from pippin.bayes.recorder import Recorder
from pippin.bayes.row_rules import CACHE, CHUNK, Call, LinearCall, Matrix
from pippin.bayes.subset import Selection, listed
from pippin.core.errors import InvalidArgument, InvalidInput, UnsupportedLayer

Root = Float[Tensor, "n outputs columns"]
"""S: for each example, a matrix whose product with its own transpose is the curvature of the loss by the outputs."""


@dataclass
class Piece:
    """What some columns brought back to one use of a layer; `Pass.layers` gives them.

    Args:
        names: of the chosen parameters that it holds.
        call: what the layer read; None for parameters without a rule, of which only the rows are known.
        g: what came back to its output: [columns, *output].
        n: examples.
        start: the first of these columns.
    """

    names: list[str]
    call: Call | None
    g: Tensor
    n: int
    start: int
    made: dict[str, Tensor] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        """Whether these are the first columns of this batch, so that what the layer read is new."""
        return self.start == 0

    def rows(self, name: str) -> Float[Tensor, "columns n ..."]:
        """Rows of one of its parameters, in the parameter's shape."""
        return self.made[name] if self.call is None else self.call.rows(name, self.g, self.n)


class Pass:
    """One batch that went through the model: its outputs, and whatever is asked of their Jacobian.

    `Rows.forward` makes it; it is of use only within that ``with`` block.

    Args:
        rows: that made it.
        batch: the input.
        outputs: with their graph.
        calls: the uses of chosen parameters.
        unruled: parameters that have no rule.
    """

    def __init__(self, rows: Rows, batch: Any, outputs: Tensor, calls: list[Call], unruled: list[str]) -> None:
        self._rows, self._batch, self._graph = rows, batch, outputs
        self._calls = [call for call in calls if not set(call.names) <= set(unruled)]
        self._unruled = unruled
        self.outputs: Float[Tensor, "n outputs"] = outputs.detach()

    @property
    def width(self) -> int:
        """How many numbers come back to all layers of an example, for a column."""
        return sum(math.prod(call.output) for call in self._calls) // max(1, len(self.outputs))

    def jacobian(self) -> Float[Tensor, "n outputs weights"]:
        """J, all of it: n x outputs x weights numbers."""
        return self.rows(self._eye())

    def rows(self, root: Root) -> Float[Tensor, "n columns weights"]:
        """S^T J."""
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
        """Diagonal of the sum over examples of J^T S S^T J; J is never made."""
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
        """J diag(weights) J^T for each example; J is made for a few examples of one layer at a time.

        Args:
            weights: not negative.
            joint: of all examples together, [n x outputs, n x outputs]; this makes J.
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

    def layers(self, root: Root | None = None) -> Iterator[Piece]:
        """What came back to each use of a layer, for a few columns at a time.

        Args:
            root: None takes one column for each output, all at once: the pieces of J itself.

        A parameter without a rule comes in a piece of its own, with its rows.
        """
        if root is None:
            yield from self._joined(self._eye())
            return
        for _, pieces in self._columns(root):
            yield from pieces

    def uses(self) -> Iterator[tuple[str, str, int]]:
        """Each use of a parameter: its name, its kind ("matrix", "table" or "other"), and numbers in its factors."""
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
        """Parameters that several calls use, so that their rows must be added up before they are squared."""
        seen: set[str] = set()
        names = [name for call in self._calls for name in call.names]
        return {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]

    def _chosen(self, piece: Piece, name: str) -> Tensor:
        """Rows of the chosen weights of one parameter: [columns, n, weights]."""
        within = self._rows.selection.within(name)
        if within is None:
            return piece.rows(name).flatten(2)
        if isinstance(piece.call, Matrix) and name == piece.call.weight:
            return piece.call.chosen_rows(piece.g, piece.n, within)
        return piece.rows(name).flatten(2)[..., within]

    def _columns(self, root: Tensor) -> Iterator[tuple[int, list[Piece]]]:
        """The first column, and the pieces, of a few columns after the other."""
        n = len(root)
        if root.shape[:2] != self.outputs.shape:
            raise InvalidArgument(f"a root of shape {tuple(root.shape)} for outputs of {tuple(self.outputs.shape)}")
        if self._unruled:
            made = self._by_example(root)
            yield 0, [Piece([name], None, rows, n, 0, {name: rows}) for name, rows in made.items()]
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
                    Piece(own_names, call, g if call.factor == 1.0 else g * call.factor, n, start)
                    for own_names, call, g in zip(names, self._calls, found, strict=True)
                    if g is not None
                ],
            )

    def _backward(self, edges: list[GradientEdge], columns: Tensor) -> list[Tensor | None]:
        """What comes back to each edge for each column; together if every operation allows it."""

        def once(given: Tensor, batched: bool) -> list[Tensor | None]:
            return list(
                torch.autograd.grad(
                    self._graph, edges, given, retain_graph=True, allow_unused=True, is_grads_batched=batched
                )
            )

        if len(columns) > 1:
            try:
                return once(columns, True)
            except RuntimeError:  # an operation with a backward pass of its own, which knows no batches of columns
                single = [once(column, False) for column in columns]
                stacks = zip(*single, strict=True)
                return [
                    None if parts[0] is None else torch.stack([p for p in parts if p is not None]) for parts in stacks
                ]
        return [None if g is None else g[None] for g in once(columns[0], False)]

    def _together(self) -> int:
        """How many columns go backward at once: several where the calls are small, so that each does enough."""
        return max(1, CACHE // max(1, 4 * self.width * len(self.outputs)))

    def _joined(self, root: Tensor) -> Iterator[Piece]:
        """Pieces with all columns."""
        joined: dict[int, list[Piece]] = {}
        for _, pieces in self._columns(root):
            for piece in pieces:
                if piece.call is None:
                    yield piece
                else:
                    joined.setdefault(id(piece.call), []).append(piece)
        for parts in joined.values():
            first = parts[0]
            g = torch.cat([part.g for part in parts]) if len(parts) > 1 else first.g
            yield Piece(first.names, first.call, g, first.n, 0)

    def _only_linear(self) -> LinearCall | None:
        """The one linear layer that holds all chosen weights and reads one vector for each example, if it is so."""
        if len(self._calls) != 1 or self._unruled or self._rows.selection.indices is not None:
            return None
        (call,) = self._calls
        alone = isinstance(call, LinearCall) and call.weight is not None and len(call.x) == call.x[..., 0].numel()
        return call if alone and isinstance(call, LinearCall) and len(call.x) == len(self.outputs) else None

    def _linear_gram(self, call: LinearCall, root: Tensor) -> Tensor:
        """Sum over examples of (what came back, squared) x (features, squared): the root's columns are summed first."""
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
        """Rows of the parameters without a rule, from one example at a time: [columns, n, *shape]."""
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
                "its own; normalise within each example"
            )
        return {name: part.transpose(0, 1) for name, part in rows.items()}


class Rows:
    """Rows of the Jacobian of a model's outputs by a selection of its weights.

    Args:
        model: in eval mode. Called with a tensor, with the parts of a tuple, or with a mapping as named arguments;
            returns a tensor [n, outputs] (or [n]), or something with ``logits``.
        selection: of its weights.

    Raises:
        InvalidArgument: the selection was made for another model.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> from pippin.bayes.subset import All
    >>> with Rows(model, All().resolve(model)).forward(torch.ones(5, 3)) as p:
    ...     tuple(p.jacobian().shape)
    (5, 2, 26)
    """

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        selection.parameters(model)
        self.model, self.selection = model, selection
        self._settled: dict[Any, tuple[list[bool], list[str]]] = {}

    @contextmanager
    def forward(self, batch: Any) -> Iterator[Pass]:
        """Run the model on a batch; what the layers read is kept until the end of the ``with`` block.

        Args:
            batch: inputs, the examples along the first dimension.

        Raises:
            InvalidArgument: the model is in train mode where that matters, its outputs are not one vector for each
                example, or it computes without gradients.
            InvalidInput: outputs that are not finite or not one for each example, or inputs on which the model does not
                run.
        """
        self._check_mode()
        parameters = self.selection.parameters(self.model)
        recorder = Recorder({id(p): name for name, p in parameters.items()})
        chosen = {id(p) for p in parameters.values()}
        kept = [(p, p.requires_grad) for p in self.model.parameters()]
        arguments, named = _arguments(batch)
        try:
            for parameter, _ in kept:
                parameter.requires_grad_(id(parameter) in chosen)
            with torch.enable_grad(), recorder, running(batch):
                outputs = _outputs_of(self.model(*arguments, **named))
            self._check_outputs(outputs)
            if (count := size(batch)) not in (0, len(outputs)):
                raise InvalidInput(
                    f"the model gives {len(outputs)} outputs for inputs of length {count}; the first dimension of "
                    "inputs counts examples, so that a single one is x[None]"
                )
            unruled = self._settle(outputs, recorder)
        finally:
            for parameter, wanted in kept:
                parameter.requires_grad_(wanted)
        result = Pass(self, batch, outputs, recorder.calls, unruled)
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

    def _settle(self, outputs: Tensor, recorder: Recorder) -> list[str]:
        """Tell the calls where their examples lie; return the parameters without a rule."""
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
        """Parameters that the outputs depend on by a way that the recorder cannot see."""
        left = {name: p for name, p in self.selection.parameters(self.model).items() if name not in seen}
        if not left:
            return set()
        found = torch.autograd.grad(outputs.sum(), list(left.values()), retain_graph=True, allow_unused=True)
        return {name for name, gradient in zip(left, found, strict=True) if gradient is not None}


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model is called."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _outputs_of(result: Any) -> Tensor:
    """The model's outputs as a matrix where they are a vector."""
    outputs: Tensor = result["logits"] if isinstance(result, Mapping) else getattr(result, "logits", result)
    return outputs[:, None] if outputs.ndim == 1 else outputs


def _weighted_gram(piece: Piece, name: str, weights: Tensor) -> Tensor:
    """The share of one parameter in J diag(weights) J^T."""
    call = piece.call
    if isinstance(call, Matrix) and name == call.weight:
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
