"""From noise to clips, frame after frame: what `StarFlow` samples with, all at once or as a stream.

Notable here:
- the deep block goes through the tokens of a frame in windows, each solved by fixed-point rounds that begin from what
  the same places had one frame before: their means and scales, with the new noise, for every frame has noise of its own
- given frames are read in one pass, as are the last frames that are kept when a clip outgrows the model
- shallow blocks invert every frame on its own, so all frames of a clip go at once; in a stream one after another
- a stream takes the noise off a frame when the next one is there, from as many frames as its score depends on: the same
  numbers as for the whole clip
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument, NonFiniteSample
from pippin.generate.condition import Condition
from pippin.generate.contract import OnStep, Step, prepare
from pippin.generate.flow_block import FlowBlock, Guide, Reading, sequential_invert
from pippin.generate.folder import device_of
from pippin.generate.jacobi import Jacobi, SolveInfo, jacobi_invert
from pippin.generate.noise import Noise

if TYPE_CHECKING:
    from pippin.generate.starflow import StarFlow

OnTokens = Callable[[int, Tensor], None]


class _Remembered:
    """A reading that remembers the mean and the scale that each place of a frame had last.

    Args:
        reading: of a block.
        like: tokens of one frame.
    """

    def __init__(self, reading: Reading, like: Float[Tensor, "n places inner"]) -> None:
        self.reading, self.places = reading, like.shape[1]
        self.mean, self.log_scale = torch.zeros_like(like), torch.zeros_like(like)

    def stats(self, x: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """As `Reading.stats`; windows lie within a frame, and what is longer ends with one."""
        mean, log_scale = self.reading.stats(x, first, stop)
        kept = min(stop - first, self.places)
        at = (stop - kept) % self.places
        self.mean[:, at : at + kept], self.log_scale[:, at : at + kept] = mean[:, -kept:], log_scale[:, -kept:]
        return mean, log_scale

    def guess(self, noise: Tensor, first: int, stop: int) -> Tensor:
        """The noise of some tokens of a frame, moved and scaled as at the same places one frame before."""
        at = slice(first % self.places, (stop - 1) % self.places + 1)
        return torch.addcmul(self.mean[:, at], noise[:, first:stop], self.log_scale[:, at].exp())


class Rollout:
    """One drawing of clips.

    Args:
        model: what draws.
        condition: what they are to show, on the model's device.
        n: clips.
        guidance: 1 for none.
        solver: of windows of tokens; None for one token after another.
        warm: whether a search begins from the frame before.
        context: frames that are kept when the deep block is full; None for all but one.

    Raises:
        InvalidArgument: a context that leaves no room or nothing, a negative guidance, or a model whose shallow blocks
            see whole clips.
    """

    def __init__(
        self,
        model: StarFlow,
        condition: Condition | None,
        n: int,
        guidance: float = 1.0,
        solver: Jacobi | None = None,
        *,
        warm: bool = True,
        context: int | None = None,
    ) -> None:
        from pippin.generate.starflow import gaussian_guidance

        config = model.config
        if context is None:
            context = max(config.frames - 1, 1)
        if context < 1 or (context >= config.frames > 1):
            raise InvalidArgument(f"context is {context}; keep 1 to {config.frames - 1} frames of the model's")
        if not config.within_frames:
            raise InvalidArgument("shallow blocks that see whole clips cannot be inverted frame by frame")
        if not guidance >= 0:
            raise InvalidArgument(f"guidance is {guidance}; give a number of 0 or more, 1 for none")
        self.model, self.n, self.warm, self.context = model, n, warm, context
        # a window never reaches beyond its frame, so that a frame is done before the next one begins
        self.solver = (
            None if solver is None else Jacobi(min(solver.window, config.places), solver.tolerance, solver.most)
        )
        self.device = device_of(model)
        condition = None if condition is None else condition.to(self.device)
        self._guide: Guide | None = None
        with torch.no_grad():
            self._embedded = model.embedding(condition, n)
            if guidance != 1 and condition is not None:
                self._guide = Guide(model.embedding(condition.null(), n), guidance - 1, gaussian_guidance)
        self._deep = model.deep.packed()
        self._shallow = [block.packed() for block in model.shallow if isinstance(block, FlowBlock)]
        self._turn = model.turn(config.frames, self.device)
        tokens = config.frames * config.places
        self._x = torch.zeros(n, tokens, config.inner, device=self.device)
        self._z = torch.zeros_like(self._x)
        self._held = 0  # frames that the deep block has read
        self._reading = self._begin()

    def _begin(self) -> _Remembered:
        tokens = self.model.config.frames * self.model.config.places
        reading = self._deep.reading(self._embedded, turn=self._turn, tokens=tokens, guide=self._guide)
        return _Remembered(reading, self._z[:, : self.model.config.places])

    def give(self, u: Float[Tensor, "n frames places inner"]) -> None:
        """Begin with frames that are known; the last ones of more than the deep block holds, in one pass."""
        if u.shape[1] > self.context:
            u = u[:, -self.context :]
        tokens = u.flatten(1, 2)
        known = tokens.shape[1]
        self._x[:, :known] = tokens
        self._reading = self._begin()
        self._reading.stats(self._x, 0, known)
        self._held = u.shape[1]

    @torch.no_grad()
    def frame(
        self, z: Float[Tensor, "n places inner"], on_tokens: OnTokens | None = None
    ) -> tuple[Float[Tensor, "n places inner"], SolveInfo]:
        """The next frame, before the shallow blocks, and how it was solved."""
        config = self.model.config
        places = config.places
        if self._held == config.frames:
            self.give(self._x.view(self.n, config.frames, places, -1)[:, -self.context :].clone())
        start = self._held * places
        stop = start + places
        self._z[:, start:stop] = z
        x, noise = self._x[:, :stop], self._z[:, :stop]

        if self.solver is None:
            _, info = sequential_invert(self._reading.reading, noise, x=x, first=start, on_tokens=on_tokens)
        else:
            told = self._reading

            def guess(x: Tensor, first: int, last: int) -> Tensor:
                return told.guess(noise, first, last)

            warm = guess if self.warm and start else None
            _, info = jacobi_invert(told, noise, self.solver, x=x, first=start, guess=warm, on_tokens=on_tokens)
        self._held += 1
        return self._x[:, start:stop].clone(), info

    @torch.no_grad()
    def latents(
        self, u: Float[Tensor, "n frames places inner"], after: Callable[[], None] | None = None
    ) -> tuple[Float[Tensor, "n frames bands rows columns"], list[SolveInfo]]:
        """The shallow blocks' inverse: every frame on its own; ``after`` is called after each block."""
        model = self.model
        x = u.flatten(0, 1)
        nothing, turn = model.nothing(len(x), x.device), model.turn(None, x.device)
        solver = self.solver
        if solver is not None:
            # near the data all tokens of a frame settle within a few rounds
            solver = Jacobi(model.config.places, solver.tolerance, solver.most)
        solves = []
        for block in reversed(self._shallow):
            reading, z = block.reading(nothing, turn=turn), block.ordered(x).float()
            made, info = sequential_invert(reading, z) if solver is None else jacobi_invert(reading, z, solver)
            x = block.ordered(made)
            solves.append(info)
            if after is not None:
                after()
        return model.from_tokens(x.view(u.shape)), solves

    def all(
        self,
        z: Float[Tensor, "n made places inner"],
        known: Float[Tensor, "n given places inner"] | None,
        on_step: OnStep | None,
        finished: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Float[Tensor, "n frames bands rows columns"], list[SolveInfo]]:
        """Whole clips: see `StarFlow.invert`; ``finished`` makes what `Step.estimate` shows of latents."""
        config = self.model.config
        frames = [] if known is None else list(known.unbind(1))
        if known is not None:
            self.give(known)
        window = 1 if self.solver is None else self.solver.window
        a_frame = -(-config.places // window)
        total, done = z.shape[1] * a_frame + len(self._shallow), 0
        given = len(frames)
        length = given + z.shape[1]
        solves: list[SolveInfo] = []

        def estimate() -> Tensor:
            held = self._x.view(self.n, config.frames, config.places, -1)
            begun = [*frames] if len(frames) == length else [*frames, held[:, self._held]]
            latents, _ = self.latents(torch.stack(begun + begun[-1:] * (length - len(begun)), 1))
            return latents if finished is None else finished(latents)

        def advance() -> None:
            nonlocal done
            done += 1
            if on_step is not None:
                on_step(Step(done, total, estimate))

        for index in range(z.shape[1]):
            u, info = self.frame(z[:, index], lambda _, __: advance())
            frames.append(u)
            solves.append(info)
            self._check(u, len(config.layers) - 1, given + index)
        latents, more = self.latents(torch.stack(frames, 1), advance)
        self._check(latents.flatten(2), 0, None)
        return latents, [*solves, *more]

    def stream(
        self, noise: Noise, known: Tensor | None, frames: int | None, condition: Condition | None, *, noisy: bool
    ) -> Iterator[Float[Tensor, "n channels height width"]]:
        """Frames one by one; see `StarFlow.stream`. Those of the model's source are left out."""
        model, config = self.model, self.model.config
        past = 0 if noisy or config.score is None else config.score.past
        queue: list[Tensor] = []  # latents of the last frames, with noise
        drawn = 0
        if known is not None:
            self.give(known)

        def shown(behind: int) -> Tensor:
            """The frame that has so many behind it in the queue."""
            at = len(queue) - 1 - behind
            latents = torch.stack(queue, 1)
            if noisy:
                return model.from_latents(latents[:, at : at + 1])[:, 0]
            first = max(at - past, 0)
            clean = model.denoise_latents(latents[:, first : at + 2], condition)
            return model.from_latents(clean[:, at - first : at - first + 1])[:, 0]

        while frames is None or drawn < frames:
            if known is not None and drawn < known.shape[1]:
                u = known[:, drawn]
            else:
                u, _ = self.frame(noise.normal((config.places, config.inner)))
                self._check(u, len(config.layers) - 1, drawn)
            latents, _ = self.latents(u[:, None])
            self._check(latents.flatten(2), 0, drawn)
            queue.append(latents[:, 0])
            drawn += 1
            if drawn - 1 > config.source:
                yield shown(1)
            if len(queue) > past + 2:
                queue.pop(0)
        yield shown(0)

    def _check(self, x: Tensor, block: int, frame: int | None) -> None:
        bad = (~x.isfinite()).nonzero()
        if len(bad):
            token = int(bad[0][1])
            where = f"frame {token if frame is None else frame}" if block == 0 else f"token {token} of frame {frame}"
            raise NonFiniteSample(
                f"sample {int(bad[0][0])} is not finite in block {block}, {where}; take less guidance, another seed or "
                "weights in float32",
                step=0 if frame is None else frame,
                block=block,
                token=token,
            )


class Begun(NamedTuple):
    """What a drawing begins with."""

    rollout: Rollout
    noise: Noise
    condition: Condition | None
    known: Float[Tensor, "n given places inner"] | None
    total: int
    """Frames, those known among them."""


def begin(
    model: StarFlow,
    condition: Condition | None,
    n: int | None,
    guidance: float,
    seed: int,
    frames: int | None,
    given: Tensor | None,
    solver: Jacobi | None,
    warm: bool,
    context: int | None,
    steps: int | None = None,
) -> Begun:
    """Check what was asked for, as `StarFlow.sample` tells it, and pass the given frames forward, with noise.

    Raises:
        InvalidArgument: see there.
    """
    config, device = model.config, device_of(model)
    if n is None and condition is None and given is not None:
        n = len(given)
    condition, n = prepare(model.condition, condition, n, guidance, device)
    total = config.frames if frames is None else frames
    if total < 1 or (config.frames == 1 and total != 1):
        raise InvalidArgument(f"frames is {frames}; give at least 1, and no number to a model of one frame")
    if steps is not None:
        if steps < 1 or solver is None:
            raise InvalidArgument(f"steps={steps} bounds the rounds of a solver; give 1 or more, and a solver")
        solver = Jacobi(solver.window, solver.tolerance, steps)
    if given is None and config.source:
        raise InvalidArgument(f"the model makes clips from a source of {config.source} frames; give them")
    if given is not None:
        _check_given(model, given, n, total)
    rollout = Rollout(model, condition, n, guidance, solver, warm=warm, context=context)
    noise = Noise(n, seed=seed, device=device)
    if given is None:
        return Begun(rollout, noise, condition, None, total)
    latents = model.to_latents(given.to(device))
    latents = latents + config.noise * noise.normal(latents.shape[1:])
    with torch.no_grad():
        known, _ = model.shallow_pass(model.to_tokens(latents))
    return Begun(rollout, noise, condition, known, total)


def _check_given(model: StarFlow, given: Tensor, n: int, total: int) -> None:
    source, shape = model.config.source, model.shape
    if len(shape) != 4 or tuple(given.shape[2:]) != shape[1:] or len(given) != n:
        raise InvalidArgument(
            f"given frames of shape {tuple(given.shape)} for {n} samples of shape {shape}; give (n, frames, channels, "
            "height, width)"
        )
    if source and given.shape[1] != source:
        raise InvalidArgument(f"a source of {given.shape[1]} frames; the model was trained with {source}")
    if source and total > model.config.frames:
        raise InvalidArgument(f"{total} frames would lose the source; the model makes {model.config.frames} with it")
    if not 1 <= given.shape[1] < total:
        raise InvalidArgument(f"{given.shape[1]} given frames of {total}; leave at least one to be made")
