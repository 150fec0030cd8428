r"""STARFlow: a flow of one deep block and several shallow ones, for pictures and, frame by frame, for clips.

From the data to the noise a sample passes shallow autoregressive blocks, which see one frame each and no condition, and
then one deep block, which reads the condition and all tokens before each token, frame after frame:
$p(x) = \prod_n p_D(u_n \mid u_{<n})\, |\det \partial f_S(x_n) / \partial x_n|$ with $u_n = f_S(x_n)$.

Notable here:
- a picture is a clip of one frame: one class serves both
- nothing of a frame depends on later frames, so clips are drawn as a stream, go on beyond the trained length, and begin
  with frames that are given: the forward pass tells the noise of these, and the deep block reads them
- guidance multiplies Gaussians, whose variance stays positive however strong it is; only the deep block is guided
- a flow learns samples with noise and draws such; a score network that is learnt beside it takes the noise off
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.generate.condition import Condition, ConditionEmbedding, ConditionSpec, Embedded
from pippin.generate.contract import OnStep
from pippin.generate.flow_block import FlowBlock, FlowBlockSpec, Turn
from pippin.generate.flow_score import ScoreConfig, ScoreNetwork
from pippin.generate.haar import haar, unhaar
from pippin.generate.jacobi import Jacobi, SolveInfo
from pippin.generate.starflow_streaming import Rollout, begin
from pippin.nn.axial import axial_tables, grid
from pippin.nn.patches import patchify, unpatchify

SOLVER = Jacobi(window=64, tolerance=1e-3)
"""How windows are solved where nothing else is said; none reaches beyond its frame."""


@dataclass(frozen=True)
class StarFlowConfig:
    """The form of a model.

    Attributes:
        shape: (channels, height, width) of a picture, (frames, channels, height, width) of a clip.
        patch: height and width of a token, in latents.
        haar: how often the Haar transform halves frames before that: the latents.
        width: of the hidden states.
        heads: of the attention.
        layers: of each block, from the data to the noise; the last one is the deep block.
        noise: standard deviation of the noise in what it learns, in the units of the samples.
        condition: what the deep block reads: classes, text, a vector.
        score: the network that takes the noise off; None for none.
        source: frames at the start of a clip that are always given, and that the rest is made from (video to video).
        within_frames: whether shallow blocks see one frame each; False lets them see the whole clip, which is no longer
            causal, for comparison.

    Raises:
        InvalidArgument: sizes that do not divide, numbers out of range, or a map as condition.
    """

    shape: tuple[int, ...] = (1, 16, 16)
    patch: int = 2
    haar: int = 1
    width: int = 64
    heads: int = 4
    layers: tuple[int, ...] = (1, 1, 1, 4)
    noise: float = 0.3
    condition: ConditionSpec = field(default_factory=ConditionSpec)
    score: ScoreConfig | None = field(default_factory=ScoreConfig)
    source: int = 0
    within_frames: bool = True

    def __post_init__(self) -> None:
        if len(self.shape) not in (3, 4) or min(self.shape) < 1:
            raise InvalidArgument(
                f"shape is {self.shape}; give (channels, height, width), frames before them for clips"
            )
        side = self.patch * 2**self.haar
        if self.patch < 1 or self.haar < 0 or self.shape[-1] % side or self.shape[-2] % side:
            raise InvalidArgument(
                f"{self.shape[-2]} by {self.shape[-1]} pixels cannot be halved {self.haar} times and cut into patches "
                f"of {self.patch}; height and width must be multiples of {side}"
            )
        if not self.layers or min(self.layers) < 1:
            raise InvalidArgument(f"layers is {self.layers}; give at least 1 for each block")
        if not 0 <= self.noise < math.inf:
            raise InvalidArgument(f"noise is {self.noise}; give 0 or more")
        if self.heads < 1 or self.width % (2 * self.heads) or self.width // self.heads < 6:
            raise InvalidArgument(
                f"{self.heads} heads of a width of {self.width}; a head needs an even width of at least 6"
            )
        if self.condition.map:
            raise InvalidArgument("a StarFlow reads no map; give the condition as classes, text or vector")
        if not 0 <= self.source < self.frames:
            raise InvalidArgument(f"source is {self.source} of {self.frames} frames; leave at least one to be made")

    @property
    def frames(self) -> int:
        """Of a clip; 1 of a picture."""
        return self.shape[0] if len(self.shape) == 4 else 1

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of tokens in a frame."""
        side = self.patch * 2**self.haar
        return self.shape[-2] // side, self.shape[-1] // side

    @property
    def places(self) -> int:
        """Tokens of a frame."""
        return self.size[0] * self.size[1]

    @property
    def inner(self) -> int:
        """Numbers of a token."""
        side: int = self.patch * 2**self.haar
        return self.shape[-3] * side * side


class Passed(NamedTuple):
    """What the forward pass of a flow gives."""

    z: Float[Tensor, "n frames places inner"]
    """The noise."""
    u: Float[Tensor, "n frames places inner"]
    """What lies between the shallow blocks and the deep one."""
    logdet: Float[Tensor, n]
    """Log of the absolute determinant of dz/dx, in nats."""


def gaussian_guidance(
    mean: Tensor, log: Tensor, null_mean: Tensor, null_log: Tensor, w: Tensor | float
) -> tuple[Tensor, Tensor]:
    r"""Mean and log scale of $\mathcal N(\mu_c, \sigma_c^2)^{1+w} / \mathcal N(\mu_u, \sigma_u^2)^w$, normalised.

    With $s = \min(\sigma_c / \sigma_u, 1)^2$: $\sigma = \sigma_c / \sqrt{1 + w - ws}$ and
    $\mu = ((1 + w) \mu_c - ws \mu_u) / (1 + w - ws)$. The minimum keeps the precision positive where the conditional
    Gaussian is the wider one.

    Args:
        mean: with the condition.
        log: log scale with the condition.
        null_mean: without.
        null_log: without.
        w: strength, the guidance - 1; -1 or more.

    Source: arXiv:2506.06276, section on guidance.

    >>> one = torch.ones(1)
    >>> mean, log = gaussian_guidance(one, 0 * one, 0 * one, 0 * one, 3.0)
    >>> mean.item(), log.item()
    (4.0, 0.0)
    """
    share = (2 * (log - null_log).clamp(max=0)).exp()
    precision = 1 + w * (1 - share)
    return ((1 + w) * mean - w * share * null_mean) / precision, log - 0.5 * precision.log()


class StarFlow(nn.Module):
    """A flow of pictures or clips from -1 to 1.

    Args:
        config: its form; begin with `initialise`.

    Source: STARFlow, arXiv:2506.06276; STARFlow-V, arXiv:2511.20462.

    >>> model = StarFlow(StarFlowConfig((3, 1, 8, 8), width=16, heads=2, layers=(1, 2))).initialise(0)
    >>> model.sample(n=2).shape
    torch.Size([2, 3, 1, 8, 8])
    """

    config_type: ClassVar[type[StarFlowConfig]] = StarFlowConfig

    def __init__(self, config: StarFlowConfig) -> None:
        super().__init__()
        self.config = config
        self.facts: dict[str, Any] = {}
        self.embedding = ConditionEmbedding(config.condition, config.width)
        last = len(config.layers) - 1

        def block(number: int) -> FlowBlock:
            spec = FlowBlockSpec(
                config.layers[number],
                config.width,
                config.heads,
                # the deep block goes with the time, the others turn by turn
                reverse=(last - number) % 2 == 1,
                start="token",
                positions="rotary",
                scale="softplus",
                soft_clip=4.0,
                text=number == last and bool(config.condition.text),
            )
            whole = number == last or not config.within_frames
            return FlowBlock(config.inner, config.places * (config.frames if whole else 1), spec)

        self.shallow = nn.ModuleList(block(number) for number in range(last))
        self.deep = block(last)
        size, condition = config.size, config.condition
        self.score_network = None if config.score is None else ScoreNetwork(config.score, config.inner, size, condition)

    @torch.no_grad()
    def initialise(self, seed: int = 0) -> StarFlow:
        """Random weights; the flow is the identity at first, and the score 0."""
        generator = torch.Generator().manual_seed(seed)
        self.embedding.initialise(generator)
        for block in (*self.shallow, self.deep):
            assert isinstance(block, FlowBlock)
            block.initialise(generator)
        if self.score_network is not None:
            self.score_network.initialise(generator)
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.config.shape

    @property
    def condition(self) -> ConditionSpec:
        """What it reads."""
        return self.config.condition

    def flow_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the flow, without those of the score network."""
        for name, parameter in self.named_parameters():
            if not name.startswith("score_network."):
                yield parameter

    # --- samples, latents, tokens -------------------------------------------------------------------------------------

    def to_latents(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n frames bands rows columns"]:
        """The Haar transform of pictures or clips of any number of frames.

        Raises:
            InvalidArgument: another shape.
            InvalidInput: not floating point, or not finite.
        """
        shape = self.shape
        if x.ndim != len(shape) + 1 or tuple(x.shape[-3:]) != shape[-3:]:
            raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the model's are {shape}")
        if not x.is_floating_point() or not bool(x.isfinite().all()):
            raise InvalidInput(f"samples of type {x.dtype} must be finite numbers from -1 to 1 (levels / 127.5 - 1)")
        return haar(x if len(shape) == 4 else x[:, None], self.config.haar)

    def from_latents(self, latents: Float[Tensor, "n frames bands rows columns"]) -> Float[Tensor, "n ..."]:
        """Undo `to_latents`."""
        x = unhaar(latents, self.config.haar)
        return x if len(self.shape) == 4 else x[:, 0]

    def to_tokens(
        self, latents: Float[Tensor, "n frames bands rows columns"]
    ) -> Float[Tensor, "n frames places inner"]:
        """One token for each patch of each frame."""
        return patchify(latents, self.config.patch)

    def from_tokens(
        self, tokens: Float[Tensor, "n frames places inner"]
    ) -> Float[Tensor, "n frames bands rows columns"]:
        """Undo `to_tokens`."""
        rows, columns = self.config.size
        return unpatchify(tokens, self.config.patch, (rows * self.config.patch, columns * self.config.patch))

    def turn(self, frames: int | None, device: torch.device) -> Turn:
        """Rotary places of the tokens of so many frames; of one frame without a time for None."""
        places = grid(*self.config.size) if frames is None else grid(frames, *self.config.size)
        return axial_tables(places.to(device), self.config.width // self.config.heads)

    def nothing(self, n: int, device: torch.device) -> Embedded:
        """What shallow blocks read: no condition."""
        return Embedded(torch.zeros(n, self.config.width, device=device))

    # --- likelihood ---------------------------------------------------------------------------------------------------

    def shallow_pass(self, tokens: Float[Tensor, "n frames places inner"]) -> tuple[Tensor, Float[Tensor, n]]:
        """Tokens to what the deep block reads, frame by frame, and the log-determinant in nats."""
        n, frames, places, inner = tokens.shape
        within = self.config.within_frames
        x = tokens.reshape(n * frames, places, inner) if within else tokens.reshape(n, frames * places, inner)
        turn = self.turn(None if within else frames, x.device)
        nothing = self.nothing(len(x), x.device)
        logdet = torch.zeros(len(x), device=x.device)
        for block in self.shallow:
            x, change = block(x, nothing, turn=turn)
            logdet = logdet + change
        return x.view(n, frames, places, inner), logdet.view(n, -1).sum(1)

    def forward(
        self, latents: Float[Tensor, "n frames bands rows columns"], condition: Condition | None = None
    ) -> Passed:
        """From the data to the noise: clips of up to as many frames as the model's."""
        n, frames = latents.shape[:2]
        u, logdet = self.shallow_pass(self.to_tokens(latents))
        z, change = self.deep(u.flatten(1, 2), self.embedding(condition, n), turn=self.turn(frames, latents.device))
        return Passed(z.view(u.shape), u, logdet + change)

    def latent_log_prob(
        self, latents: Float[Tensor, "n frames bands rows columns"], condition: Condition | None = None
    ) -> Float[Tensor, n]:
        """As `log_prob`, of latents."""
        z, _, logdet = self(latents, condition)
        square = z.square().sum((1, 2, 3)) + z[0].numel() * math.log(2 * math.pi)
        total: Tensor = logdet - 0.5 * square
        return total

    def log_prob(self, x: Float[Tensor, "n ..."], condition: Condition | None = None) -> Float[Tensor, n]:
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
        condition: Condition | None = None,
        *,
        method: Literal["score", "tweedie"] = "score",
    ) -> Float[Tensor, "n ..."]:
        r"""Samples without their noise of ``config.noise``: $x - \sigma s_\phi(x)$.

        Args:
            x: with noise.
            condition: what they show.
            method: "score" asks the score network; "tweedie" the flow: $x + \sigma^2 \nabla \log p(x)$.

        Raises:
            InvalidArgument: another method or shape, or a model without a score network.
        """
        latents = self.to_latents(x)
        return self.from_latents(self.denoise_latents(latents, condition, method=method))

    def denoise_latents(
        self, latents: Tensor, condition: Condition | None = None, *, method: Literal["score", "tweedie"] = "score"
    ) -> Tensor:
        """As `denoise`, of latents."""
        sigma = self.config.noise
        if method == "score":
            if self.score_network is None:
                raise InvalidArgument('the model has no score network; denoise with method="tweedie"')
            with torch.no_grad():
                score = self.score_network(self.to_tokens(latents), condition)
                return latents - sigma * self.from_tokens(score)
        if method != "tweedie":
            raise InvalidArgument(f'method is {method!r}; choose "score" or "tweedie"')
        with torch.enable_grad():
            noisy = latents.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.latent_log_prob(noisy, condition).sum(), noisy)
        return latents + sigma**2 * slope

    # --- samples ------------------------------------------------------------------------------------------------------

    def invert(
        self,
        z: Float[Tensor, "n frames places inner"],
        condition: Condition | None = None,
        *,
        guidance: float = 1.0,
        solver: Jacobi | None = SOLVER,
        warm: bool = True,
        context: int | None = None,
        known: Float[Tensor, "n given places inner"] | None = None,
        on_step: OnStep | None = None,
    ) -> tuple[Float[Tensor, "n frames bands rows columns"], list[SolveInfo]]:
        """From the noise to the latents, still with noise; undoes `forward` where nothing guides.

        Args:
            z: the noise of the frames to be made.
            condition: what they are to show.
            guidance: 1 for none.
            solver: how windows of tokens are solved; None for one token after another, exactly.
            warm: whether a frame's search begins from the frame before, rather than from its noise.
            context: frames that the deep block keeps when the clip gets longer than the model's; None for all but one.
            known: what the shallow blocks make of frames before (`Passed.u`).
            on_step: called after each window of the deep block and after each shallow block.

        Returns:
            Latents of the known frames and of those made, and how each frame of the deep block was solved, then each
            shallow block.

        Raises:
            InvalidArgument: numbers out of range.
            NonFiniteSample: the result is not finite; block (0 is the nearest to the data), frame and token are named.

        Warns:
            JacobiUnconverged: fewer rounds than needed were allowed.
        """
        rollout = Rollout(self, condition, len(z), guidance, solver, warm=warm, context=context)
        return rollout.all(z, known, on_step)

    def sample(
        self,
        condition: Condition | None = None,
        n: int | None = None,
        *,
        steps: int | None = None,
        guidance: float = 1.0,
        seed: int = 0,
        on_step: OnStep | None = None,
        frames: int | None = None,
        given: Float[Tensor, "n given channels height width"] | None = None,
        solver: Jacobi | None = SOLVER,
        warm: bool = True,
        context: int | None = None,
        denoise: bool = True,
    ) -> Float[Tensor, "n ..."]:
        """Draw pictures or clips, about -1 to 1.

        Args:
            condition: as `Generator.sample`.
            n: as `Generator.sample`.
            steps: rounds at most in each window of the solver; None for as many as it takes.
            guidance: 1 for none; papers' w is guidance - 1.
            seed: sample i depends on ``seed + i`` alone.
            on_step: called after each window of tokens of the deep block, and after each shallow block.
            frames: of the clips, those given among them; None for the model's; may be more than the model's.
            given: frames that the clips begin with (image to video, extension), or, for a model with a ``source``, the
                source alone, which does not come back.
            solver: as `invert`.
            warm: as `invert`.
            context: as `invert`.
            denoise: whether the noise is taken off at the end; needs a score network, and is left out without.

        Raises:
            InvalidArgument: numbers out of range, given frames of another shape or too many, no source where the model
                needs one, a condition that it does not read, or guidance that it was not trained for.
            NonFiniteSample: see `invert`.
        """
        begun = begin(self, condition, n, guidance, seed, frames, given, solver, warm, context, steps)
        rollout, noise, condition, known, total = begun
        made = total - (0 if known is None else known.shape[1])
        z = torch.stack([noise.normal((self.config.places, self.config.inner)) for _ in range(made)], 1)

        def finished(latents: Tensor) -> Tensor:
            if denoise and self.score_network is not None:
                latents = self.denoise_latents(latents, condition)
            return self.from_latents(latents[:, self.config.source :])

        latents, _ = rollout.all(z, known, on_step, finished)
        return finished(latents)

    def stream(
        self,
        condition: Condition | None = None,
        n: int | None = None,
        *,
        frames: int | None = None,
        given: Float[Tensor, "n given channels height width"] | None = None,
        guidance: float = 1.0,
        seed: int = 0,
        solver: Jacobi | None = SOLVER,
        warm: bool = True,
        context: int | None = None,
        denoise: bool = True,
    ) -> Iterator[Float[Tensor, "n channels height width"]]:
        """Draw clips frame by frame: the same frames as `sample`, each as soon as it is settled.

        A frame comes when the next one is drawn, since taking its noise off looks one frame ahead. Arguments as
        `sample`; ``frames=None`` never ends.

        Raises:
            As `sample`, before the first frame; and InvalidArgument for a model of pictures.
        """
        if self.config.frames < 2:
            raise InvalidArgument(f"a stream is of clips; the model's samples are of shape {self.shape}")
        endless = frames is None and not self.config.source
        length = self.config.frames if frames is None else frames
        begun = begin(self, condition, n, guidance, seed, length, given, solver, warm, context)
        rollout, noise, condition, known, total = begun
        noisy = not denoise or self.score_network is None
        return rollout.stream(noise, known, None if endless else total, condition, noisy=noisy)
