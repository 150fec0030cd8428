r"""Recurrent cells trained in parallel over time: ParaGRU, ParaLSTM, and any custom cell.

Notable here:
- the recurrent matrices are diagonal, so that a state's Jacobian is one number for each channel (GRU) or a 2 x 2 matrix
  (LSTM, whose state is cell and output); the input matrices mix channels
- derivatives are implemented by hand and share the gates, which are computed once
- states are convex combinations of the previous state and a tanh, so no state exceeds 1 (or the first one): Newton's
  iterates are clamped to that, and overflowed ones are reset
- the parallel and the sequential mode compute the same states; the gradient is the same code for both

Source: ParaRNN, arXiv:2510.21450; the cells are those of its published implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.recurrent.newton import (
    Jacobian,
    Newton,
    RecurrenceRule,
    Scratch,
    SolveReport,
    check_steps,
    parallel_recurrence,
    solve,
)

Mode = Literal["auto", "parallel", "sequential"]
SHORT = 16
"""Maximum number of steps for which "auto" uses a sequential scan."""
WIDE = 512
"""Channels of a whole batch beyond which it does so on a CPU, too: arithmetic then takes longer than calls."""


class _Cell(nn.Module):
    """Base class of both cells: input matrices, choice of the mode, checks.

    Args:
        gates: number of gates.
        peepholes: diagonal matrices from the cell state to gates.
    """

    rule: RecurrenceRule
    state_shape: tuple[int, ...]

    @checked
    def __init__(
        self,
        inputs: PositiveInt,
        size: PositiveInt,
        gates: int,
        peepholes: int,
        heads: PositiveInt,
        newton: Newton,
        mode: Mode,
    ) -> None:
        super().__init__()
        if inputs % heads or size % heads:
            raise InvalidArgument(f"{heads} heads do not divide {inputs} inputs and {size} states")
        self.inputs, self.size, self.gates, self.heads = inputs, size, gates, heads
        self.newton, self.mode = newton, mode
        # three dimensions, so that optimizers do not treat them as matrices
        self.weight = nn.Parameter(torch.empty(heads, inputs // heads, gates * size // heads))
        self.bias = nn.Parameter(torch.empty(gates, 1, size))
        self.recurrent = nn.Parameter(torch.empty(gates, 1, size))
        self.peephole = nn.Parameter(torch.empty(peepholes, 1, size)) if peepholes else None
        for parameter in self._kept_small():
            parameter.no_decay = True  # type: ignore[attr-defined]
        self.last_solve: SolveReport | None = None
        self._warned = False
        self.initialize()

    def _kept_small(self) -> list[nn.Parameter]:
        return [one for one in (self.bias, self.recurrent, self.peephole) if one is not None]

    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Random weights, small in the recurrence; the bias of the first gate varies over the channels.

        Args:
            generator: on the CPU; None for torch's own.

        Source: the published implementation of ParaRNN.
        """
        _, inputs, outputs = self.weight.shape
        bound = math.sqrt(6 / (inputs + outputs // self.gates))
        with torch.no_grad():
            drawn = torch.empty(self.weight.shape).uniform_(-bound, bound, generator=generator)
            self.weight.copy_(drawn)
            for parameter in (self.recurrent, self.peephole):
                if parameter is not None:
                    drawn = torch.empty(parameter.shape).normal_(0, 2 / math.sqrt(5 * self.size), generator=generator)
                    parameter.copy_(drawn)
            self.bias.zero_()
            self.bias[0, 0].copy_(-torch.linspace(0, 1, self.size))

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, " batch *state"]:
        """A state of zeros."""
        return torch.zeros(batch, *self.state_shape, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "batch time inputs"],
        state: Float[Tensor, " batch *state"] | None = None,
        *,
        starts: Bool[Tensor, "batch time"] | None = None,
    ) -> tuple[Float[Tensor, "batch time size"], Float[Tensor, " batch *state"]]:
        """All outputs, and the last state; later steps do not affect earlier ones.

        Args:
            x: inputs.
            state: before the first step, float32 or wider; None for zeros.
            starts: true where a new document begins: the state before such a step is zero.

        Returns:
            Outputs in the precision of ``x``; the state in float32, or float64 where ``x`` or the weights are.

        Raises:
            InvalidArgument: no steps, or shapes that do not fit.
            NewtonDivergence: it did not converge, and ``newton`` says to raise.

        The first pass that falls back to the sequential scan warns; ``last_solve`` records whether one did.
        """
        check_steps(x, starts)
        pre = self._pre(x)
        parameters = self._recurrence(pre.dtype)
        before = self._state(state, x, pre.dtype)
        slow = x.shape[1] <= SHORT or (x.device.type == "cpu" and len(x) * self.size > WIDE)
        one_by_one = self.mode == "sequential" or (self.mode == "auto" and slow)
        newton = None if one_by_one else self.newton
        states, self.last_solve = solve(self.rule, pre, before, parameters, newton, starts, quiet=self._warned)
        self._warned |= self.last_solve.fell_back
        return self._out(states).to(x.dtype), states[:, -1]

    def step(
        self, x: Float[Tensor, "batch inputs"], state: Float[Tensor, " batch *state"] | None = None
    ) -> tuple[Float[Tensor, "batch size"], Float[Tensor, " batch *state"]]:
        """One output and the state after it, in constant memory.

        Raises:
            InvalidArgument: shapes that do not fit.
        """
        pre = self._pre(x[:, None])
        after = self._after(pre[:, 0], self._state(state, x, pre.dtype), self._recurrence(pre.dtype))
        return self._out(after).to(x.dtype), after

    def _pre(self, x: Tensor) -> Float[Tensor, "batch time gates size"]:
        """The contribution of the inputs to each gate; in float32 at least, whatever precision multiplied them."""
        if x.shape[-1] != self.inputs:
            raise InvalidArgument(f"a cell of {self.inputs} inputs was given {x.shape[-1]}")
        batch, time = x.shape[:2]
        x = x.to(self.weight.dtype) if not torch.is_autocast_enabled(x.device.type) else x
        if self.heads == 1:
            product = F.linear(x, self.weight[0].T)
        else:
            split = x.reshape(batch * time, self.heads, -1).transpose(0, 1)
            product = (split @ self.weight).view(self.heads, batch, time, self.gates, -1).permute(1, 2, 3, 0, 4)
        wide = torch.promote_types(product.dtype, torch.float32)
        return product.reshape(batch, time, self.gates, self.size).to(wide) + self.bias[:, 0].to(wide)

    def _recurrence(self, dtype: torch.dtype) -> list[Tensor]:
        """The diagonal recurrent matrices."""
        return [one[:, 0].to(dtype) for one in (self.recurrent, self.peephole) if one is not None]

    def _state(self, state: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
        if state is None:
            return self.initial_state(len(x), x.device, dtype)
        if tuple(state.shape) != (len(x), *self.state_shape):
            raise InvalidArgument(
                f"the state has shape {tuple(state.shape)}; for {len(x)} sequences it is {(len(x), *self.state_shape)}"
            )
        return state.to(dtype)

    def _after(self, pre: Tensor, state: Tensor, parameters: list[Tensor]) -> Tensor:
        """One step in plain torch."""
        raise NotImplementedError

    def _out(self, states: Tensor) -> Tensor:
        """The part of the state that is the output."""
        return states

    def extra_repr(self) -> str:
        """For printing."""
        return f"{self.inputs}, {self.size}, heads={self.heads}, mode={self.mode!r}"


class ParaGRU(_Cell):
    r"""A gated recurrent unit with diagonal recurrent matrices.

    $z = \sigma(A_z h + u_z)$, $r = \sigma(A_r h + u_r)$, $n = \tanh(A_n (r h) + u_n)$, $h' = (1 - z) h + z n$ with
    $u = B x + b$.

    Args:
        inputs: width of the inputs.
        size: width of state and output.
        heads: number of blocks of $B$; inputs and state are split into as many parts.
        newton: settings of the solver.
        mode: "parallel" uses the solver, "sequential" a sequential scan, "auto" the faster of both: the solver for more
            than `SHORT` steps, on a CPU only up to `WIDE` channels of all sequences together. States and gradients are
            the same.

    Attributes:
        state_shape: ``(size,)``.
        last_solve: report of the last pass over a sequence.

    Raises:
        InvalidArgument: sizes below 1 or not divisible by the heads, or an unknown mode.

    Source: arXiv:2510.21450.

    >>> cell = ParaGRU(8, 16)
    >>> y, state = cell(torch.randn(2, 100, 8))
    >>> y.shape, torch.equal(state, y[:, -1])
    (torch.Size([2, 100, 16]), True)
    """

    def __init__(
        self, inputs: int, size: int, *, heads: int = 1, newton: Newton = Newton(), mode: Mode = "auto"
    ) -> None:
        super().__init__(inputs, size, 3, 0, heads, newton, mode)
        self.state_shape, self.rule = (size,), _GRU()

    def _after(self, pre: Tensor, state: Tensor, parameters: list[Tensor]) -> Tensor:
        (a,) = parameters
        z, r = (a[:2] * state[:, None] + pre[:, :2]).sigmoid().unbind(1)
        return torch.lerp(state, (a[2] * (r * state) + pre[:, 2]).tanh(), z)


class ParaLSTM(_Cell):
    r"""A long short-term memory with diagonal recurrent matrices, peepholes, and a coupled input and forget gate.

    $f = \sigma(A_f h + C_f c + u_f)$, $g = \tanh(A_c h + u_c)$, $c' = f c + (1 - f) g$,
    $o = \sigma(A_o h + C_o c' + u_o)$, $h' = o \tanh(c')$ with $u = B x + b$; the output is $h'$.

    Args:
        inputs: width of the inputs.
        size: width of cell and output.
        heads: number of blocks of $B$; inputs and state are split into as many parts.
        newton: settings of the solver.
        mode: "parallel" uses the solver, "sequential" a sequential scan, "auto" the faster of both: the solver for more
            than `SHORT` steps, on a CPU only up to `WIDE` channels of all sequences together. States and gradients are
            the same.

    Attributes:
        state_shape: ``(2, size)``: c, then h.
        last_solve: report of the last pass over a sequence.

    Raises:
        InvalidArgument: sizes below 1 or not divisible by the heads, or an unknown mode.

    Source: arXiv:2510.21450.

    >>> cell = ParaLSTM(8, 16, heads=2)
    >>> y, state = cell(torch.randn(2, 100, 8))
    >>> state.shape, torch.equal(state[:, 1], y[:, -1])
    (torch.Size([2, 2, 16]), True)
    """

    def __init__(
        self, inputs: int, size: int, *, heads: int = 1, newton: Newton = Newton(), mode: Mode = "auto"
    ) -> None:
        super().__init__(inputs, size, 3, 2, heads, newton, mode)
        self.state_shape, self.rule = (2, size), _LSTM()

    def _after(self, pre: Tensor, state: Tensor, parameters: list[Tensor]) -> Tensor:
        a, peep = parameters
        c, h = state.unbind(1)
        f = (a[0] * h + peep[0] * c + pre[:, 0]).sigmoid()
        c = torch.lerp((a[1] * h + pre[:, 1]).tanh(), c, f)
        o = (a[2] * h + peep[1] * c + pre[:, 2]).sigmoid()
        return torch.stack([c, o * c.tanh()], 1)

    def _out(self, states: Tensor) -> Tensor:
        return states.select(-2, 1)


class _GRU:
    """ParaGRU's step with its derivatives."""

    def value(self, before: Tensor, x: Tensor, parameters: Sequence[Tensor], scratch: Scratch) -> tuple[Tensor, Any]:
        (a,) = parameters
        z, r, reset, n, after = (scratch(name, *before.shape) for name in ("z", "r", "reset", "n", "after"))
        torch.addcmul(x[:, :, 0], a[0], before, out=z).sigmoid_()
        torch.addcmul(x[:, :, 1], a[1], before, out=r).sigmoid_()
        torch.mul(r, before, out=reset)
        torch.addcmul(x[:, :, 2], a[2], reset, out=n).tanh_()
        return torch.lerp(before, n, z, out=after), (before, z, r, reset, n, a)

    def slope(self, found: Any, scratch: Scratch) -> Tensor:
        before, z, r, reset, n, a = found
        j, part, rest = (scratch(name, *z.shape) for name in ("j", "part", "rest"))
        # (1 - z) (1 + A_z z (n - h)) + A_n z (1 - n^2) (r + A_r h r (1 - r)), where h r is already computed
        torch.addcmul(reset, r, reset, value=-1, out=part)
        torch.addcmul(r, part, a[1], out=j).mul_(z).mul_(a[2])
        j.mul_(_slope_of_tanh(n, part))
        torch.sub(n, before, out=part).mul_(z).mul_(a[0]).add_(1)
        return j.addcmul_(part, torch.sub(z.new_ones(()), z, out=rest))

    def pull(self, found: Any, worth: Tensor, of_x: Tensor, scratch: Scratch) -> list[Tensor]:
        before, z, r, reset, n, a = found
        part, rest = (scratch(name, *z.shape) for name in ("part", "rest"))
        of_z, of_r, of_n = of_x.unbind(2)
        torch.addcmul(z, z, z, value=-1, out=part).mul_(torch.sub(n, before, out=rest))
        torch.mul(part, worth, out=of_z)
        torch.mul(_slope_of_tanh(n, part).mul_(z), worth, out=of_n)
        torch.mul(torch.addcmul(reset, r, reset, value=-1, out=part).mul_(a[2]), of_n, out=of_r)
        pairs = ((of_z, before), (of_r, before), (of_n, reset))
        return [torch.stack([torch.mul(one, other, out=part).sum((0, 1)) for one, other in pairs])]

    def walk(
        self, states: Tensor, x: Tensor, parameters: Sequence[Tensor], steps: range, starts: Tensor | None
    ) -> None:
        (a,) = parameters
        gates, new = a[:2], a[2]
        for t in steps:
            before = states[:, t] if starts is None else states[:, t].masked_fill(starts[:, t, None], 0.0)
            z, r = torch.addcmul(x[:, t, :2], gates, before[:, None]).sigmoid_().unbind(1)
            torch.lerp(before, torch.addcmul(x[:, t, 2], new, r.mul_(before)).tanh_(), z, out=states[:, t + 1])

    def bound(self, initial: Tensor) -> float | None:
        return max(1.0, float(initial.abs().max())) if initial.numel() else 1.0


class _LSTM:
    """ParaLSTM's step with its derivatives."""

    def value(self, before: Tensor, x: Tensor, parameters: Sequence[Tensor], scratch: Scratch) -> tuple[Tensor, Any]:
        a, peep = parameters
        c, h = before.unbind(2)
        f, g, o, new, squashed = (scratch(name, *c.shape) for name in ("f", "g", "o", "new", "squashed"))
        after = scratch("after", *before.shape)
        torch.addcmul(x[:, :, 0], a[0], h, out=f).addcmul_(peep[0], c).sigmoid_()
        torch.addcmul(x[:, :, 1], a[1], h, out=g).tanh_()
        torch.lerp(g, c, f, out=new)
        torch.addcmul(x[:, :, 2], a[2], h, out=o).addcmul_(peep[1], new).sigmoid_()
        after[:, :, 0] = new
        torch.mul(o, torch.tanh(new, out=squashed), out=after[:, :, 1])
        return after, (c, h, f, g, o, new, squashed, a, peep)

    def slope(self, found: Any, scratch: Scratch) -> Tensor:
        c, _, f, g, o, _, squashed, a, peep = found
        j = scratch("j", *f.shape[:2], 2, 2, f.shape[2])
        forget, part, q = (scratch(name, *f.shape) for name in ("forget", "part", "q"))
        of_c, of_h = j.unbind(2)
        torch.addcmul(f, f, f, value=-1, out=forget).mul_(torch.sub(c, g, out=part))
        torch.addcmul(f, forget, peep[0], out=of_c[:, :, 0])
        _slope_of_tanh(g, part)
        part.addcmul_(f, part, value=-1)
        torch.addcmul(forget.mul_(a[0]), part, a[1], out=of_c[:, :, 1])
        opened = torch.addcmul(o, o, o, value=-1, out=part).mul_(squashed)
        _slope_of_tanh(squashed, q).mul_(o).addcmul_(opened, peep[1])
        torch.mul(of_c[:, :, 0], q, out=of_h[:, :, 0])
        torch.mul(of_c[:, :, 1], q, out=of_h[:, :, 1]).addcmul_(opened, a[2])
        return j

    def pull(self, found: Any, worth: Tensor, of_x: Tensor, scratch: Scratch) -> list[Tensor]:
        c, h, f, g, o, new, squashed, _, peep = found
        part, of_new, rest = (scratch(name, *c.shape) for name in ("part", "q", "forget"))
        of_f, of_g, of_o = of_x.unbind(2)
        torch.addcmul(o, o, o, value=-1, out=part).mul_(squashed)
        torch.mul(part, worth[:, :, 1], out=of_o)
        _slope_of_tanh(squashed, of_new).mul_(o).mul_(worth[:, :, 1]).add_(worth[:, :, 0]).addcmul_(of_o, peep[1])
        torch.addcmul(f, f, f, value=-1, out=part).mul_(torch.sub(c, g, out=rest))
        torch.mul(part, of_new, out=of_f)
        _slope_of_tanh(g, part)
        torch.mul(part.addcmul_(f, part, value=-1), of_new, out=of_g)
        recurrent = [torch.mul(one, h, out=part).sum((0, 1)) for one in (of_f, of_g, of_o)]
        peepholes = [torch.mul(one, other, out=part).sum((0, 1)) for one, other in ((of_f, c), (of_o, new))]
        return [torch.stack(recurrent), torch.stack(peepholes)]

    def walk(
        self, states: Tensor, x: Tensor, parameters: Sequence[Tensor], steps: range, starts: Tensor | None
    ) -> None:
        a, peep = parameters
        for t in steps:
            before = states[:, t] if starts is None else states[:, t].masked_fill(starts[:, t, None, None], 0.0)
            pre = torch.addcmul(x[:, t], a, before[:, 1:])
            c, after = before[:, 0], states[:, t + 1]
            f = pre[:, 0].addcmul_(peep[0], c).sigmoid_()
            torch.lerp(pre[:, 1].tanh_(), c, f, out=after[:, 0])
            torch.mul(pre[:, 2].addcmul_(peep[1], after[:, 0]).sigmoid_(), after[:, 0].tanh(), out=after[:, 1])

    def bound(self, initial: Tensor) -> float | None:
        return max(1.0, float(initial.abs().max())) if initial.numel() else 1.0


def _slope_of_tanh(y: Tensor, out: Tensor) -> Tensor:
    """1 - y^2."""
    return torch.addcmul(y.new_ones(()), y, y, value=-1, out=out)


# --- any cell ---------------------------------------------------------------------------------------------------------


class ParallelCell(nn.Module):
    """A custom cell, applied to whole sequences.

    Args:
        cell: a module whose `forward(x, state)` returns the next state, such as `torch.nn.GRUCell`; its parameters are
            trained.
        state: the shape of a state; None for ``(cell.hidden_size,)``.
        step: another way to call it: ``step(cell, x, state)`` returns the next state.
        jacobian: as in `parallel_recurrence`.
        newton: settings of the solver.

    Attributes:
        last_solve: report of the last pass.

    >>> cell = torch.nn.GRUCell(3, 4)
    >>> y, last = ParallelCell(cell)(torch.randn(2, 50, 3))
    >>> y.shape, torch.equal(last, y[:, -1])
    (torch.Size([2, 50, 4]), True)
    """

    def __init__(
        self,
        cell: nn.Module,
        state: Sequence[int] | None = None,
        *,
        step: Callable[[Any, Tensor, Tensor], Tensor] | None = None,
        jacobian: Jacobian = "dense",
        newton: Newton = Newton(),
    ) -> None:
        super().__init__()
        size = getattr(cell, "hidden_size", None)
        if state is None and not isinstance(size, int):
            raise InvalidArgument(f"{type(cell).__name__} has no hidden_size: give the shape of its state")
        self.state_shape = tuple(state) if state is not None else (int(size or 0),)
        self.step = _Step(cell, step)
        self.jacobian, self.newton = jacobian, newton
        self.last_solve: SolveReport | None = None

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, starts: Bool[Tensor, "batch time"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """All states (batch, time, *state), and the last.

        Raises:
            InvalidArgument: as `parallel_recurrence`.
            NewtonDivergence: likewise.
        """
        parameters, buffers = dict(self.step.named_parameters()), dict(self.step.named_buffers())

        def f(before: Tensor, x: Tensor, *values: Tensor) -> Tensor:
            given = buffers | dict(zip(parameters, values, strict=True))
            result: Tensor = torch.func.functional_call(self.step, given, (x, before))
            return result

        first = x.new_zeros(len(x), *self.state_shape) if state is None else state
        states, self.last_solve = parallel_recurrence(
            f, x, first, [*parameters.values()], jacobian=self.jacobian, newton=self.newton, starts=starts
        )
        return states, states[:, -1]


class _Step(nn.Module):
    """A cell with its call function."""

    def __init__(self, cell: nn.Module, step: Callable[[Any, Tensor, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.cell, self.how = cell, step

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        after: Tensor = self.cell(x, state) if self.how is None else self.how(self.cell, x, state)
        return after
