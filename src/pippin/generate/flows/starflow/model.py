r"""STARFlow: a flow of one deep block and several shallow ones, for images and, frame by frame, for videos.

From the data to the noise a sample passes shallow autoregressive blocks, which see one frame each and no condition, and
then one deep block, which reads the condition and all tokens before each token, frame after frame:
$p(x) = \prod_n p_D(u_n \mid u_{<n})\, |\det \partial f_S(x_n) / \partial x_n|$ with $u_n = f_S(x_n)$.

Notable here:
- an image is a video of one frame: one class serves both
- nothing of a frame depends on later frames, so videos are drawn as a stream, go on beyond the trained length, and
  begin with frames that are given: the forward pass tells the noise of these, and the deep block reads them
- guidance multiplies Gaussians, whose variance stays positive however strong it is; only the deep block is guided
- a flow learns samples with noise and draws such; a score network that is learned beside it takes the noise off
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.generate.conditions import ConditionEmbedding, Conditioning, EmbeddedConditioning
from pippin.generate.contract import GeneratorModule, GeneratorOptions, OnStep, SamplingRun
from pippin.generate.flows.block import FlowBlock, FlowBlockSpec
from pippin.generate.flows.haar import haar, unhaar
from pippin.generate.flows.jacobi import Jacobi, SolveInfo
from pippin.generate.flows.starflow.config import StarFlowConfig
from pippin.generate.flows.starflow.sample import VideoDecoding
from pippin.generate.flows.starflow.score_network import ScoreNetwork
from pippin.generate.noise import Noise
from pippin.nn.patches import patchify, unpatchify

SOLVER = Jacobi(window=64, tolerance=1e-3)
"""How windows are solved where nothing else is said; none reaches beyond its frame."""


class FlowOutput(NamedTuple):
    """What the forward pass of a flow gives."""

    z: Float[Tensor, "n frames positions inner"]
    """The noise."""
    u: Float[Tensor, "n frames positions inner"]
    """What lies between the shallow blocks and the deep one."""
    logdet: Float[Tensor, n]
    """Log of the absolute determinant of dz/dx, in nats."""


class StarFlow(GeneratorModule):
    """A flow of images or videos from -1 to 1.

    Args:
        config: the configuration; initialize the weights with `initialize`.

    Source: STARFlow, arXiv:2506.06276; STARFlow-V, arXiv:2511.20462.

    >>> model = StarFlow(StarFlowConfig((3, 1, 8, 8), hidden_size=16, num_attention_heads=2, layers_per_block=(1,
    ...     2))).initialize(0)
    >>> model.sample(n=2).shape
    torch.Size([2, 3, 1, 8, 8])
    """

    config: StarFlowConfig
    model_type = "pippin_starflow"
    config_type = StarFlowConfig

    def __init__(self, config: StarFlowConfig) -> None:
        super().__init__(config)
        self.embedding = ConditionEmbedding(config.condition, config.hidden_size)
        last = len(config.layers_per_block) - 1

        def block(number: int) -> FlowBlock:
            spec = FlowBlockSpec(
                config.layers_per_block[number],
                config.hidden_size,
                config.num_attention_heads,
                # the deep block goes with the time, the others turn by turn
                reverse=(last - number) % 2 == 1,
                start="token",
                position_embedding="rotary",
                scale="softplus",
                soft_clip=4.0,
                text=number == last and bool(config.condition.text_dim),
            )
            whole = number == last or not config.within_frames
            return FlowBlock(config.token_dim, config.tokens_per_frame * (config.frames if whole else 1), spec)

        self.shallow = nn.ModuleList(block(number) for number in range(last))
        self.deep = block(last)
        size, condition = config.size, config.condition
        self.score_network = (
            None if config.score is None else ScoreNetwork(config.score, config.token_dim, size, condition)
        )

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> StarFlow:
        """Random weights; the flow is the identity at first, and the score 0."""
        generator = torch.Generator().manual_seed(seed)
        self.embedding.initialize(generator)
        for block in (*self.shallow, self.deep):
            assert isinstance(block, FlowBlock)
            block.initialize(generator)
        if self.score_network is not None:
            self.score_network.initialize(generator)
        return self

    def flow_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the flow, without those of the score network."""
        for name, parameter in self.named_parameters():
            if not name.startswith("score_network."):
                yield parameter

    # --- samples, latents, tokens -------------------------------------------------------------------------------------

    def to_latents(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n frames bands rows columns"]:
        """The Haar transform of images or videos of any number of frames.

        Raises:
            InvalidArgument: another shape.
            InvalidInput: not floating point, or not finite.
        """
        shape = self.shape
        if x.ndim != len(shape) + 1 or tuple(x.shape[-3:]) != shape[-3:]:
            raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the model's are {shape}")
        if not x.is_floating_point() or not bool(x.isfinite().all()):
            raise InvalidInput(f"samples of type {x.dtype} must be finite numbers from -1 to 1 (levels / 127.5 - 1)")
        return haar(x if len(shape) == 4 else x[:, None], self.config.haar_levels)

    def from_latents(self, latents: Float[Tensor, "n frames bands rows columns"]) -> Float[Tensor, "n ..."]:
        """Undo `to_latents`."""
        x = unhaar(latents, self.config.haar_levels)
        return x if len(self.shape) == 4 else x[:, 0]

    def to_tokens(
        self, latents: Float[Tensor, "n frames bands rows columns"]
    ) -> Float[Tensor, "n frames positions inner"]:
        """One token for each patch of each frame."""
        return patchify(latents, self.config.patch_size)

    def from_tokens(
        self, tokens: Float[Tensor, "n frames positions inner"]
    ) -> Float[Tensor, "n frames bands rows columns"]:
        """Undo `to_tokens`."""
        rows, columns = self.config.size
        return unpatchify(
            tokens, self.config.patch_size, (rows * self.config.patch_size, columns * self.config.patch_size)
        )

    # --- likelihood ---------------------------------------------------------------------------------------------------

    def shallow_pass(self, tokens: Float[Tensor, "n frames positions inner"]) -> tuple[Tensor, Float[Tensor, n]]:
        """Tokens to what the deep block reads, frame by frame, and the log-determinant in nats."""
        n, frames, positions, inner = tokens.shape
        within = self.config.within_frames
        x = tokens.reshape(n * frames, positions, inner) if within else tokens.reshape(n, frames * positions, inner)
        cos_sin = self.config.rotary_tables(None if within else frames, x.device)
        unconditional = EmbeddedConditioning.zeros(len(x), self.config.hidden_size, x.device)
        logdet = torch.zeros(len(x), device=x.device)
        for block in self.shallow:
            x, change = block(x, unconditional, cos_sin=cos_sin)
            logdet = logdet + change
        return x.view(n, frames, positions, inner), logdet.view(n, -1).sum(1)

    def forward(
        self, latents: Float[Tensor, "n frames bands rows columns"], condition: Conditioning | None = None
    ) -> FlowOutput:
        """From the data to the noise: videos of up to as many frames as the model's."""
        n, frames = latents.shape[:2]
        u, logdet = self.shallow_pass(self.to_tokens(latents))
        z, change = self.deep(
            u.flatten(1, 2), self.embedding(condition, n), cos_sin=self.config.rotary_tables(frames, latents.device)
        )
        return FlowOutput(z.view(u.shape), u, logdet + change)

    def latent_log_prob(
        self, latents: Float[Tensor, "n frames bands rows columns"], condition: Conditioning | None = None
    ) -> Float[Tensor, n]:
        """As `log_prob`, of latents."""
        z, _, logdet = self(latents, condition)
        square = z.square().sum((1, 2, 3)) + z[0].numel() * math.log(2 * math.pi)
        total: Tensor = logdet - 0.5 * square
        return total

    def log_prob(self, x: Float[Tensor, "n ..."], condition: Conditioning | None = None) -> Float[Tensor, n]:
        """In nats, of each whole sample: the density of samples with noise of ``config.noise``, which x is to have.

        The Haar transform is a rotation, so the density is that of the pixels.

        Raises:
            InvalidArgument: another shape, or a condition that the model does not read.
            InvalidInput: not floating point, or not finite.
        """
        total: Tensor = self.latent_log_prob(self.to_latents(x), condition)
        return total

    # --- noise off ----------------------------------------------------------------------------------------------------

    def denoise(
        self,
        x: Float[Tensor, "n ..."],
        condition: Conditioning | None = None,
        *,
        method: Literal["score", "tweedie"] = "score",
    ) -> Float[Tensor, "n ..."]:
        r"""Samples without their noise of ``config.noise``: $x - \sigma s_\phi(x)$.

        Args:
            x: with noise.
            condition: of each sample.
            method: "score" asks the score network; "tweedie" the flow: $x + \sigma^2 \nabla \log p(x)$.

        Raises:
            InvalidArgument: another method or shape, or a model without a score network.
        """
        latents = self.to_latents(x)
        return self.from_latents(self.denoise_latents(latents, condition, method=method))

    @checked
    def denoise_latents(
        self, latents: Tensor, condition: Conditioning | None = None, *, method: Literal["score", "tweedie"] = "score"
    ) -> Tensor:
        """As `denoise`, of latents."""
        sigma = self.config.noise_std
        if method == "score":
            if self.score_network is None:
                raise InvalidArgument('the model has no score network; denoise with method="tweedie"')
            with torch.no_grad():
                score = self.score_network(self.to_tokens(latents), condition)
                return latents - sigma * self.from_tokens(score)
        with torch.enable_grad():
            noisy = latents.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.latent_log_prob(noisy, condition).sum(), noisy)
        return latents + sigma**2 * slope

    # --- samples ------------------------------------------------------------------------------------------------------

    def invert(
        self,
        z: Float[Tensor, "n frames positions inner"],
        condition: Conditioning | None = None,
        *,
        guidance: float = 1.0,
        solver: Jacobi | None = SOLVER,
        warm_start: bool = True,
        context_frames: int | None = None,
        known: Float[Tensor, "n given positions inner"] | None = None,
        on_step: OnStep | None = None,
    ) -> tuple[Float[Tensor, "n frames bands rows columns"], list[SolveInfo]]:
        """From the noise to the latents, not denoised; the inverse of `forward` without guidance.

        Args:
            z: the noise of the frames to be decoded.
            condition: what the videos are to show.
            guidance: see `GeneratorOptions`.
            solver: how windows of tokens are solved; None for token by token, exactly.
            warm_start: whether a window's iteration begins from the frame before, rather than from its noise.
            context_frames: frames that the deep block keeps when the video gets longer than the model's; None for all
                but one.
            known: output of the shallow blocks for the frames before (`FlowOutput.u`).
            on_step: called after each window of the deep block and after each shallow block.

        Returns:
            Latents of the known and the decoded frames, and how each frame of the deep block was solved, then each
            shallow block.

        Raises:
            InvalidArgument: numbers out of range.
            NonFiniteSample: the result is not finite; block (0 is the nearest to the data), frame and token are named.

        Warns:
            JacobiUnconverged: fewer iterations than needed were allowed.
        """
        call = self.prepare(condition, len(z), guidance=guidance, on_step=on_step)
        decoding = self._decoding(call, solver, warm_start, context_frames)
        tokens, solves = decoding.decode(z, known, lambda made: self.from_latents(self.from_tokens(made)), on_step)
        return self.from_tokens(tokens), solves

    def sample(
        self,
        condition: Conditioning | None = None,
        n: int | None = None,
        *,
        frames: int | None = None,
        given: Float[Tensor, "n given channels height width"] | None = None,
        solver: Jacobi | None = SOLVER,
        warm_start: bool = True,
        context_frames: int | None = None,
        denoise: bool = True,
        **options: Unpack[GeneratorOptions],
    ) -> Float[Tensor, "n ..."]:
        """Sample images or videos, from about -1 to 1.

        Args:
            condition: what each sample is to show; of one sample for all of them; None for no condition.
            n: number of samples; None for as many as the condition or ``given`` has, or 1.
            frames: of a video, those given among them; None for the model's; may be more than the model's.
            given: frames that the videos begin with (image to video, extension), or, for a model with a ``source``, the
                source alone, which is not part of the result.
            solver: see `invert`.
            warm_start: see `invert`.
            context_frames: see `invert`.
            denoise: whether the score network denoises the samples; without one they keep the training noise.
            **options: see `GeneratorOptions`; ``steps`` bounds the iterations of each window of the solver; ``on_step``
                is called after each window of the deep block, and after each shallow block.

        Raises:
            InvalidArgument: numbers out of range, given frames of another shape or too many, no source where the model
                needs one, a condition that it does not read, or guidance that it was not trained for.
            NonFiniteSample: see `invert`.
        """
        call, total = self._call(condition, n, frames, given, options)
        if call.steps is not None:
            if solver is None:
                raise InvalidArgument(f"steps={call.steps} bounds the iterations of a solver; give a solver")
            solver = replace(solver, max_iterations=call.steps)
        decoding, noise = self._decoding(call, solver, warm_start, context_frames), call.noise()
        known = None if given is None else self._known(given, noise)
        made = total - (0 if known is None else known.shape[1])
        size = (self.config.tokens_per_frame, self.config.token_dim)
        z = torch.stack([noise.normal(size) for _ in range(made)], 1)

        def finish(tokens: Tensor) -> Tensor:
            latents = self.from_tokens(tokens)
            if denoise and self.score_network is not None:
                latents = self.denoise_latents(latents, call.condition)
            return self.from_latents(latents[:, self.config.source :])

        tokens, _ = decoding.decode(z, known, finish, call.on_step)
        return finish(tokens)

    def stream(
        self,
        condition: Conditioning | None = None,
        n: int | None = None,
        *,
        frames: int | None = None,
        given: Float[Tensor, "n given channels height width"] | None = None,
        guidance: float = 1.0,
        seed: int = 0,
        solver: Jacobi | None = SOLVER,
        warm_start: bool = True,
        context_frames: int | None = None,
        denoise: bool = True,
    ) -> Iterator[Float[Tensor, "n channels height width"]]:
        """Sample videos frame by frame: the same frames as `sample`, each as soon as it is decoded.

        With denoising a frame comes after the next one is decoded, since the score network looks one frame ahead.
        Arguments as `sample`; ``frames=None`` never ends.

        Raises:
            As `sample`, before the first frame; and InvalidArgument for a model of images.
        """
        if self.config.frames < 2:
            raise InvalidArgument(f"a stream is of videos; the model's samples are of shape {self.shape}")
        endless = frames is None and not self.config.source
        call, total = self._call(condition, n, frames, given, {"guidance": guidance, "seed": seed})
        decoding, noise = self._decoding(call, solver, warm_start, context_frames), call.noise()
        known = None if given is None else self._known(given, noise)
        denoise = denoise and self.score_network is not None
        return self._stream(decoding, noise, known, None if endless else total, call.condition, denoise)

    def _stream(
        self,
        decoding: VideoDecoding,
        noise: Noise,
        known: Float[Tensor, "n given positions inner"] | None,
        frames: int | None,
        condition: Conditioning | None,
        denoise: bool,
    ) -> Iterator[Float[Tensor, "n channels height width"]]:
        """The frames of `stream`; those of the model's source are left out."""
        config = self.config
        past = config.score.past if denoise and config.score is not None else 0
        recent: list[Tensor] = []  # latents of the last frames, not denoised
        if known is not None:
            decoding.read(known)

        def finished(behind: int) -> Tensor:
            """The frame with so many behind it among the recent ones."""
            at = len(recent) - 1 - behind
            latents = torch.stack(recent, 1)
            if not denoise:
                return self.from_latents(latents[:, at : at + 1])[:, 0]
            first = max(at - past, 0)
            clean = self.denoise_latents(latents[:, first : at + 2], condition)
            return self.from_latents(clean[:, at - first : at - first + 1])[:, 0]

        done = 0
        while frames is None or done < frames:
            if known is not None and done < known.shape[1]:
                u = known[:, done]
            else:
                u, _ = decoding.frame(noise.normal((config.tokens_per_frame, config.token_dim)))
                decoding.check_finite(u, len(config.layers_per_block) - 1, done)
            tokens, _ = decoding.shallow_inverse(u[:, None])
            decoding.check_finite(tokens.flatten(2), 0, done)
            recent.append(self.from_tokens(tokens)[:, 0])
            done += 1
            if done - 1 > config.source:
                yield finished(1)
            if len(recent) > past + 2:
                recent.pop(0)
        yield finished(0)

    def _call(
        self, condition: Conditioning | None, n: int | None, frames: int | None, given: Tensor | None, options: Any
    ) -> tuple[SamplingRun, int]:
        """The checked arguments, and the number of frames, those given among them."""
        if n is None and condition is None and given is not None:
            n = len(given)
        call = self.prepare(condition, n, **options)
        total = self.config.frames if frames is None else frames
        if total < 1 or (self.config.frames == 1 and total != 1):
            raise InvalidArgument(f"frames is {frames}; give at least 1, and no number to a model of one frame")
        if given is None and self.config.source:
            raise InvalidArgument(f"the model makes videos from a source of {self.config.source} frames; give them")
        if given is not None:
            self._check_given(given, call.n, total)
        return call, total

    def _check_given(self, given: Tensor, n: int, total: int) -> None:
        source, shape = self.config.source, self.shape
        if len(shape) != 4 or tuple(given.shape[2:]) != shape[1:] or len(given) != n:
            raise InvalidArgument(
                f"given frames of shape {tuple(given.shape)} for {n} samples of shape {shape}; give (n, frames, "
                "channels, height, width)"
            )
        if source and given.shape[1] != source:
            raise InvalidArgument(f"a source of {given.shape[1]} frames; the model was trained with {source}")
        if source and total > self.config.frames:
            raise InvalidArgument(f"{total} frames would lose the source; the model makes {self.config.frames} with it")
        if not 1 <= given.shape[1] < total:
            raise InvalidArgument(f"{given.shape[1]} given frames of {total}; leave at least one to be made")

    @torch.no_grad()
    def _known(self, given: Tensor, noise: Noise) -> Float[Tensor, "n given positions inner"]:
        """The output of the shallow blocks for given frames, with training noise."""
        latents = self.to_latents(given.to(self.device))
        latents = latents + self.config.noise_std * noise.normal(latents.shape[1:])
        return self.shallow_pass(self.to_tokens(latents))[0]

    def _decoding(
        self, call: SamplingRun, solver: Jacobi | None, warm_start: bool, context_frames: int | None
    ) -> VideoDecoding:
        return VideoDecoding(
            self.config,
            self.embedding,
            self.deep,
            [block for block in self.shallow if isinstance(block, FlowBlock)],
            call.condition,
            call.n,
            guidance=call.guidance,
            solver=solver,
            warm_start=warm_start,
            context_frames=context_frames,
        )
