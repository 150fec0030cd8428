"""Sequential decoding of videos by STARFlow: the deep block frame by frame, the shallow blocks within each frame.

Notable here:
- windows of Jacobi iteration end at frame boundaries, so a frame is complete before the next one begins
- with a warm start, a window starts from the means and scales of the same positions in the frame before
- when the context of the deep block is full, it is replaced by the last ``context_frames`` frames, in one pass
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, NonFiniteSample
from pippin.generate.conditions import ConditionEmbedding, Conditioning, EmbeddedConditioning
from pippin.generate.contract import OnStep, SamplingStep
from pippin.generate.flows.block import FlowBlock
from pippin.generate.flows.decoding import LinearGuidance, SequentialDecoding, gaussian_guidance, sequential_invert
from pippin.generate.flows.jacobi import Jacobi, SolveInfo, jacobi_invert
from pippin.generate.flows.starflow.config import StarFlowConfig

OnTokens = Callable[[int, Tensor], None]


class _WarmStart:
    """A decoding that stores the last mean and log scale of each position of a frame, for warm starts."""

    def __init__(self, decoding: SequentialDecoding, like: Float[Tensor, "n positions inner"]) -> None:
        self.decoding, self.positions = decoding, like.shape[1]
        self.mean, self.log_scale = torch.zeros_like(like), torch.zeros_like(like)

    def stats(self, x: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `SequentialDecoding.stats`; ``stop`` is the end of a frame if more than one frame is computed."""
        mean, log_scale = self.decoding.stats(x, first, stop)
        count = min(stop - first, self.positions)
        start = (stop - count) % self.positions
        positions = slice(start, start + count)
        self.mean[:, positions], self.log_scale[:, positions] = mean[:, -count:], log_scale[:, -count:]
        return mean, log_scale

    def guess(self, noise: Tensor, first: int, stop: int) -> Tensor:
        """Initial values of tokens from their noise, with mean and scale of the same positions in the frame before."""
        positions = slice(first % self.positions, (stop - 1) % self.positions + 1)
        return torch.addcmul(self.mean[:, positions], noise[:, first:stop], self.log_scale[:, positions].exp())


class VideoDecoding:
    """The inverse of a deep-shallow flow for one batch of videos, frame after frame.

    Args:
        config: the model's configuration.
        embedding: embeds the condition for the deep block.
        deep: the deep block.
        shallow: the shallow blocks, from the data to the deep block.
        condition: conditions of the n videos, on the model's device; None for the null condition.
        n: number of videos.
        guidance: scale of classifier-free guidance of the deep block; 1 for none.
        solver: options of Jacobi iteration over windows of tokens; None to compute one token after another.
        warm_start: whether a window starts from means and scales of the frame before, rather than from its noise.
        context_frames: number of last frames that stay in the context of the deep block when it is full; None for all
            but one.

    Raises:
        InvalidArgument: more context frames than the model's frames minus one, or a model whose shallow blocks see
            whole videos.
    """

    @checked
    def __init__(
        self,
        config: StarFlowConfig,
        embedding: ConditionEmbedding,
        deep: FlowBlock,
        shallow: Sequence[FlowBlock],
        condition: Conditioning | None,
        n: int,
        *,
        guidance: float = 1.0,
        solver: Jacobi | None = None,
        warm_start: bool = True,
        context_frames: PositiveInt | None = None,
    ) -> None:
        if context_frames is None:
            context_frames = max(config.frames - 1, 1)
        if context_frames >= config.frames > 1:
            raise InvalidArgument(
                f"context_frames is {context_frames}; keep 1 to {config.frames - 1} frames of the model's"
            )
        if not config.within_frames:
            raise InvalidArgument("shallow blocks that see whole videos cannot be inverted frame by frame")
        self.config, self.n, self.warm_start, self.context_frames = config, n, warm_start, context_frames
        # no window is longer than a frame, so that a frame is complete before the next one begins
        self.solver = None
        if solver is not None:
            window = min(solver.window, config.tokens_per_frame)
            self.solver = Jacobi(window, solver.tolerance, solver.max_iterations)
        self.device = next(deep.parameters()).device
        self._guide: LinearGuidance | None = None
        with torch.no_grad():
            self._embedded = embedding(condition, n)
            if guidance != 1 and condition is not None:
                self._guide = LinearGuidance(embedding(condition.null(), n), guidance - 1, gaussian_guidance)
        self._deep = deep.packed()
        self._shallow = [block.packed() for block in shallow]
        self._cos_sin = config.rotary_tables(config.frames, self.device)
        # u and its noise for every token in the context of the deep block
        self._x = torch.zeros(n, config.frames * config.tokens_per_frame, config.token_dim, device=self.device)
        self._z = torch.zeros_like(self._x)
        self._num_frames = 0  # number of frames in the context
        self._decoding = self._begin()

    def _begin(self) -> _WarmStart:
        """A decoding with an empty context."""
        tokens = self.config.frames * self.config.tokens_per_frame
        decoding = self._deep.decoding(self._embedded, cos_sin=self._cos_sin, tokens=tokens, guide=self._guide)
        return _WarmStart(decoding, self._z[:, : self.config.tokens_per_frame])

    def read(self, u: Float[Tensor, "n frames positions inner"]) -> None:
        """Replace the context by known frames, in one pass; only the last ``context_frames`` of them are used."""
        if u.shape[1] > self.context_frames:
            u = u[:, -self.context_frames :]
        tokens = u.flatten(1, 2)
        known = tokens.shape[1]
        self._x[:, :known] = tokens
        self._decoding = self._begin()
        self._decoding.stats(self._x, 0, known)
        self._num_frames = u.shape[1]

    @torch.no_grad()
    def frame(
        self, z: Float[Tensor, "n positions inner"], on_tokens: OnTokens | None = None
    ) -> tuple[Float[Tensor, "n positions inner"], SolveInfo]:
        """Decode u of the next frame from its noise; return it and the convergence of the inversion."""
        config = self.config
        positions = config.tokens_per_frame
        if self._num_frames == config.frames:
            self.read(self._x.view(self.n, config.frames, positions, -1)[:, -self.context_frames :].clone())
        start = self._num_frames * positions
        stop = start + positions
        self._z[:, start:stop] = z
        x, noise = self._x[:, :stop], self._z[:, :stop]

        if self.solver is None:
            _, info = sequential_invert(self._decoding.decoding, noise, x=x, first=start, on_tokens=on_tokens)
        else:
            decoding = self._decoding

            def guess(x: Tensor, first: int, last: int) -> Tensor:
                return decoding.guess(noise, first, last)

            warm = guess if self.warm_start and start else None
            _, info = jacobi_invert(decoding, noise, self.solver, x=x, first=start, guess=warm, on_tokens=on_tokens)
        self._num_frames += 1
        return self._x[:, start:stop].clone(), info

    @torch.no_grad()
    def shallow_inverse(
        self, u: Float[Tensor, "n frames positions inner"], after: Callable[[], None] | None = None
    ) -> tuple[Float[Tensor, "n frames positions inner"], list[SolveInfo]]:
        """Compute tokens of the latents from u, frame by frame; return them and the convergence of each block.

        ``after`` is called after each block.
        """
        x = u.flatten(0, 1)  # frames are further samples of the batch
        unconditional, cos_sin = (
            EmbeddedConditioning.zeros(len(x), self.config.hidden_size, x.device),
            self.config.rotary_tables(None, x.device),
        )
        solver = self.solver
        if solver is not None:
            # a whole frame is one window: in the shallow blocks all tokens converge within a few iterations
            solver = Jacobi(self.config.tokens_per_frame, solver.tolerance, solver.max_iterations)
        infos = []
        for block in reversed(self._shallow):
            decoding, z = block.decoding(unconditional, cos_sin=cos_sin), block.ordered(x).float()
            inverse, info = sequential_invert(decoding, z) if solver is None else jacobi_invert(decoding, z, solver)
            x = block.ordered(inverse)
            infos.append(info)
            if after is not None:
                after()
        return x.view(u.shape), infos

    def decode(
        self,
        z: Float[Tensor, "n new positions inner"],
        known: Float[Tensor, "n given positions inner"] | None,
        finish: Callable[[Tensor], Tensor],
        on_step: OnStep | None,
    ) -> tuple[Float[Tensor, "n frames positions inner"], list[SolveInfo]]:
        """Decode complete videos; see `StarFlow.invert`.

        Args:
            z: noise of the frames to decode.
            known: u of the frames before them.
            finish: converts tokens of latents to samples, for `SamplingStep.estimate`.
            on_step: called after each window of the deep block and after each shallow block.

        Returns:
            Tokens of the latents of all frames, and the convergence of each inversion.

        Raises:
            NonFiniteSample: block, frame and token are named.
        """
        config = self.config
        frames = [] if known is None else list(known.unbind(1))
        if known is not None:
            self.read(known)
        window = 1 if self.solver is None else self.solver.window
        windows_per_frame = -(-config.tokens_per_frame // window)
        total, done = z.shape[1] * windows_per_frame + len(self._shallow), 0
        num_known = len(frames)
        length = num_known + z.shape[1]
        infos: list[SolveInfo] = []

        def estimate() -> Tensor:
            """The videos so far; the frame that is being decoded is repeated for all later ones."""
            context = self._x.view(self.n, config.frames, config.tokens_per_frame, -1)
            current = [*frames] if len(frames) == length else [*frames, context[:, self._num_frames]]
            tokens, _ = self.shallow_inverse(torch.stack(current + current[-1:] * (length - len(current)), 1))
            return finish(tokens)

        def advance() -> None:
            nonlocal done
            done += 1
            if on_step is not None:
                on_step(SamplingStep(done, total, estimate))

        for index in range(z.shape[1]):
            u, info = self.frame(z[:, index], lambda _, __: advance())
            frames.append(u)
            infos.append(info)
            self.check_finite(u, len(config.layers_per_block) - 1, num_known + index)
        tokens, shallow_infos = self.shallow_inverse(torch.stack(frames, 1), advance)
        self.check_finite(tokens.flatten(2), 0, None)
        return tokens, [*infos, *shallow_infos]

    def check_finite(self, x: Tensor, block: int, frame: int | None) -> None:
        """Refuse values that are not finite.

        Args:
            x: tokens of one frame (n, positions, inner); with ``frame`` None, frames of a video (n, frames, elements).
            block: the block that computed x.
            frame: index of the frame; None for a whole video.
        """
        nonfinite = (~x.isfinite()).nonzero()  # one row of indices for each value
        if len(nonfinite):
            token = int(nonfinite[0][1])
            where = f"frame {token if frame is None else frame}" if block == 0 else f"token {token} of frame {frame}"
            raise NonFiniteSample(
                f"sample {int(nonfinite[0][0])} is not finite in block {block}, {where}; lower guidance, take another "
                "seed, or use weights in float32",
                step=0 if frame is None else frame,
                block=block,
                token=token,
            )
