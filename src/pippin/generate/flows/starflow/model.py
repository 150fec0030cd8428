r"""STARFlow and STARFlow-V: a deep-shallow autoregressive flow for images and for causal video generation.

From the data to the noise a sample passes shallow autoregressive blocks, which see one frame each and no condition, and
then one deep block, which reads the condition and all earlier tokens, frame after frame:
$p(x) = \prod_n p_D(u_n \mid u_{<n})\, |\det \partial f_S(x_n) / \partial x_n|$ with $u_n = f_S(x_n)$.

Notable here:
- an image is a video of one frame, so one class serves both
- no frame depends on later ones, so videos can be streamed, extended beyond the trained length, and continued from
  given frames: the shallow blocks encode these, and the deep block attends to them
- guidance multiplies Gaussians so that the variance stays positive at any scale; only the deep block is guided
- the flow is trained on noisy samples, so its samples are noisy; a score network that is trained with it denoises them
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
from pippin.nn.images.patches import patchify, unpatchify

SOLVER = Jacobi(window=64, tolerance=1e-3)
"""Default options of Jacobi iteration; windows end at frame boundaries."""


class FlowOutput(NamedTuple):
    """Output of the forward pass of a `StarFlow`."""

    z: Float[Tensor, "n frames positions inner"]
    """The noise."""
    u: Float[Tensor, "n frames positions inner"]
    """Output of the shallow blocks, which is the input of the deep block."""
    logdet: Float[Tensor, n]
    """Log of the absolute determinant of dz/dx, in nats."""


class StarFlow(GeneratorModule):
    """A flow of images or videos from -1 to 1.

    Args:
        config: the configuration. Weights are uninitialized; call `initialize`, or load them.

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
                # the deep block goes forward in time; directions alternate
                reverse=(last - number) % 2 == 1,
                start="token",
                position_embedding="rotary",
                scale="softplus",
                soft_clip=4.0,
                text=number == last and bool(config.condition.text_dim),
            )
            sees_video = number == last or not config.within_frames
            return FlowBlock(config.token_dim, config.tokens_per_frame * (config.frames if sees_video else 1), spec)

        self.shallow = nn.ModuleList(block(number) for number in range(last))
        self.deep = block(last)
        size, condition = config.size, config.condition
        self.score_network = (
            None if config.score is None else ScoreNetwork(config.score, config.token_dim, size, condition)
        )

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> StarFlow:
        """Set random weights, with which the flow is the identity and the score network gives 0."""
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
        """The Haar transform of images, or of videos of any number of frames.

        Raises:
            InvalidArgument: samples of another shape.
            InvalidInput: samples that are not floating point, or not finite.
        """
        shape = self.shape
        if x.ndim != len(shape) + 1 or tuple(x.shape[-3:]) != shape[-3:]:
            raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the model's are {shape}")
        if not x.is_floating_point() or not bool(x.isfinite().all()):
            raise InvalidInput(f"samples of type {x.dtype} must be finite numbers from -1 to 1 (levels / 127.5 - 1)")
        return haar(x if len(shape) == 4 else x[:, None], self.config.haar_levels)

    def from_latents(self, latents: Float[Tensor, "n frames bands rows columns"]) -> Float[Tensor, "n ..."]:
        """The inverse of `to_latents`."""
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
        """The inverse of `to_tokens`."""
        rows, columns = self.config.size
        return unpatchify(
            tokens, self.config.patch_size, (rows * self.config.patch_size, columns * self.config.patch_size)
        )

    # --- likelihood ---------------------------------------------------------------------------------------------------

    def shallow_pass(self, tokens: Float[Tensor, "n frames positions inner"]) -> tuple[Tensor, Float[Tensor, n]]:
        """Apply the shallow blocks; return u of `FlowOutput` and the log-determinant of the blocks, in nats."""
        n, frames, positions, inner = tokens.shape
        within = self.config.within_frames
        x = tokens.reshape(n * frames, positions, inner) if within else tokens.reshape(n, frames * positions, inner)
        cos_sin = self.config.rotary_tables(None if within else frames, x.device)
        unconditional = EmbeddedConditioning.zeros(len(x), self.config.hidden_size, x.device)
        logdet = torch.zeros(len(x), device=x.device)
        for block in self.shallow:
            x, change = block(x, unconditional, cos_sin=cos_sin)
            logdet = logdet + change
        return x.view(n, frames, positions, inner), logdet.view(n, -1).sum(1)  # one log-determinant for each frame

    def forward(
        self, latents: Float[Tensor, "n frames bands rows columns"], condition: Conditioning | None = None
    ) -> FlowOutput:
        """Transform latents, of at most the model's number of frames, into noise."""
        n, frames = latents.shape[:2]
        u, logdet = self.shallow_pass(self.to_tokens(latents))
        z, change = self.deep(
            u.flatten(1, 2), self.embedding(condition, n), cos_sin=self.config.rotary_tables(frames, latents.device)
        )
        return FlowOutput(z.view(u.shape), u, logdet + change)

    def latent_log_prob(
        self, latents: Float[Tensor, "n frames bands rows columns"], condition: Conditioning | None = None
    ) -> Float[Tensor, n]:
        """Log density of latents, in nats; see `log_prob`."""
        z, _, logdet = self(latents, condition)
        log_prob: Tensor = logdet - 0.5 * (z.square().sum((1, 2, 3)) + z[0].numel() * math.log(2 * math.pi))
        return log_prob

    def log_prob(self, x: Float[Tensor, "n ..."], condition: Conditioning | None = None) -> Float[Tensor, n]:
        """Log density of each sample, in nats, under the density of samples with noise of ``config.noise_std``.

        The Haar transform is orthogonal, so the density of latents is that of pixels.

        Args:
            x: samples from -1 to 1, with training noise.
            condition: condition of each sample; None for the null condition.

        Raises:
            InvalidArgument: samples of another shape, or a condition that the model does not read.
            InvalidInput: samples that are not floating point, or not finite.
        """
        log_prob: Tensor = self.latent_log_prob(self.to_latents(x), condition)
        return log_prob

    # --- denoising ----------------------------------------------------------------------------------------------------

    def denoise(
        self,
        x: Float[Tensor, "n ..."],
        condition: Conditioning | None = None,
        *,
        method: Literal["score", "tweedie"] = "score",
    ) -> Float[Tensor, "n ..."]:
        r"""Denoise samples with noise of $\sigma$ = ``config.noise_std``.

        Args:
            x: noisy samples.
            condition: condition of each sample; None for the null condition.
            method: "score" for $x - \sigma s_\phi(x)$ with the score network, "tweedie" for
                $x + \sigma^2 \nabla \log p(x)$ with the flow's own density.

        Raises:
            InvalidArgument: an unknown method, samples of another shape, or "score" without a score network.
        """
        latents = self.to_latents(x)
        return self.from_latents(self.denoise_latents(latents, condition, method=method))

    @checked
    def denoise_latents(
        self, latents: Tensor, condition: Conditioning | None = None, *, method: Literal["score", "tweedie"] = "score"
    ) -> Tensor:
        """Denoise latents; arguments and errors as for `denoise`."""
        sigma = self.config.noise_std
        if method == "score":
            if self.score_network is None:
                raise InvalidArgument('the model has no score network; denoise with method="tweedie"')
            with torch.no_grad():
                score = self.score_network(self.to_tokens(latents), condition)
                return latents - sigma * self.from_tokens(score)
        with torch.enable_grad():
            noisy = latents.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.latent_log_prob(noisy, condition).sum(), noisy)
        return latents + sigma**2 * gradient

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
        """Compute latents from noise, without denoising; the inverse of `forward` without guidance.

        Args:
            z: the noise of the frames to be decoded.
            condition: condition of each video; None for the null condition.
            guidance: see `GeneratorOptions`.
            solver: options of Jacobi iteration over windows of tokens; None to compute one token after another.
            warm_start: whether a window starts from means and scales of the frame before, rather than from its noise.
            context_frames: last frames that stay in the context when a video gets longer than the model's; None for all
                but one.
            known: output of the shallow blocks for the frames before (`FlowOutput.u`).
            on_step: called after each window of the deep block and after each shallow block.

        Returns:
            Latents of the known and the decoded frames, and the convergence of each frame in the deep block, then of
            each shallow block.

        Raises:
            InvalidArgument: numbers out of range.
            NonFiniteSample: the result is not finite; block (0 is the first after the data), frame and token are named.

        Warns:
            JacobiUnconverged: a window did not converge within the solver's maximum number of iterations.
        """
        call = self.prepare(condition, len(z), guidance=guidance, on_step=on_step)
        decoding = self._decoding(call, solver, warm_start, context_frames)
        tokens, infos = decoding.decode(z, known, lambda tokens: self.from_latents(self.from_tokens(tokens)), on_step)
        return self.from_tokens(tokens), infos

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
            condition: one for each sample, or one for all; None for no condition.
            n: number of samples; None for as many as the condition or ``given`` has, or 1.
            frames: number of frames of a video, including given ones; it may exceed the model's. None for the model's.
            given: first frames of the videos (image to video, video extension); for a model with a ``source``, the
                source frames, which are not part of the result.
            solver: see `invert`.
            warm_start: see `invert`.
            context_frames: see `invert`.
            denoise: whether the score network denoises the samples; without one they keep the training noise.
            **options: see `GeneratorOptions`; ``steps`` is the maximum number of iterations of a window; ``on_step`` is
                called after each window of the deep block, and after each shallow block.

        Raises:
            InvalidArgument: numbers out of range, given frames of another shape or too many, no source where the model
                needs one, a condition that the model does not read, or guidance without a null condition.
            NonFiniteSample: see `invert`.
        """
        call, total = self._call(condition, n, frames, given, options)
        if call.steps is not None:
            if solver is None:
                raise InvalidArgument(
                    f"steps={call.steps} is a maximum number of iterations, which needs a solver; give one, or no steps"
                )
            solver = replace(solver, max_iterations=call.steps)
        decoding, noise = self._decoding(call, solver, warm_start, context_frames), call.noise()
        known = None if given is None else self._known(given, noise)
        new_frames = total - (0 if known is None else known.shape[1])
        size = (self.config.tokens_per_frame, self.config.token_dim)
        z = torch.stack([noise.normal(size) for _ in range(new_frames)], 1)  # (n, new_frames, positions, inner)

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

        With denoising, a frame is yielded after the next one is decoded, since the score network attends to one frame
        ahead. Arguments as for `sample`; with ``frames=None`` the stream is endless, except for a model with a
        ``source``.

        Raises:
            InvalidArgument: as `sample`, before the first frame; and for a model of images.
            NonFiniteSample: see `invert`.
        """
        if self.config.frames < 2:
            raise InvalidArgument(
                f"a stream is of videos; the model's samples are of shape {self.shape}; call sample for images"
            )
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
        """The frames of `stream`, without source frames."""
        config = self.config
        past = config.score.past if denoise and config.score is not None else 0
        recent: list[Tensor] = []  # latents of the last frames, not denoised
        if known is not None:
            decoding.read(known)

        def finished(offset: int) -> Tensor:
            """The recent frame with this offset from the last one, denoised."""
            index = len(recent) - 1 - offset
            latents = torch.stack(recent, 1)  # (n, frames, bands, rows, columns)
            if not denoise:
                return self.from_latents(latents[:, index : index + 1])[:, 0]
            first = max(index - past, 0)
            # the score of a frame depends on `past` earlier frames and on one later frame
            clean = self.denoise_latents(latents[:, first : index + 2], condition)
            return self.from_latents(clean[:, index - first : index - first + 1])[:, 0]

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
        """The checked arguments of `sample`, and the number of frames, including given ones."""
        if n is None and condition is None and given is not None:
            n = len(given)
        call = self.prepare(condition, n, **options)
        total = self.config.frames if frames is None else frames
        if total < 1 or (self.config.frames == 1 and total != 1):
            raise InvalidArgument(f"frames is {frames}; give at least 1, and leave it None for a model of images")
        if given is None and self.config.source:
            raise InvalidArgument(f"the model makes videos from a source of {self.config.source} frames; give them")
        if given is not None:
            self._check_given(given, call.n, total)
        return call, total

    def _check_given(self, given: Tensor, n: int, total: int) -> None:
        """Refuse given frames of another shape or number."""
        source, shape = self.config.source, self.shape
        if len(shape) != 4 or tuple(given.shape[2:]) != shape[1:] or len(given) != n:
            raise InvalidArgument(
                f"given frames of shape {tuple(given.shape)} for {n} samples of shape {shape}; give (n, frames, "
                "channels, height, width)"
            )
        if source and given.shape[1] != source:
            raise InvalidArgument(f"a source of {given.shape[1]} frames; the model was trained with {source}")
        if source and total > self.config.frames:
            raise InvalidArgument(
                f"{total} frames would lose the source; give at most frames={self.config.frames}, the source included"
            )
        if not 1 <= given.shape[1] < total:
            raise InvalidArgument(f"{given.shape[1]} given frames of {total}; leave at least one to be sampled")

    @torch.no_grad()
    def _known(self, given: Tensor, noise: Noise) -> Float[Tensor, "n given positions inner"]:
        """Output of the shallow blocks for given frames, to which training noise is added."""
        latents = self.to_latents(given.to(self.device))
        latents = latents + self.config.noise_std * noise.normal(latents.shape[1:])
        return self.shallow_pass(self.to_tokens(latents))[0]

    def _decoding(
        self, call: SamplingRun, solver: Jacobi | None, warm_start: bool, context_frames: int | None
    ) -> VideoDecoding:
        """The state of decoding for checked arguments."""
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
