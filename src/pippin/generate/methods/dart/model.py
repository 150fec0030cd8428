r"""DART: a denoising autoregressive transformer, which predicts an image from all its noisier views so far.

Notable here:
- the views of an image are concatenated in one sequence, the noisiest first; one pass trains all levels, and sampling
  is like that of a language model: a step adds the tokens of one view to a KV cache
- the network predicts the velocity at the clearest view so far, which is converted to the image
- ``order="ar"`` also samples token by token within a view, so that the patches of a step are consistent; ``head="fm"``
  samples each patch with a small flow-matching head instead of its mean
- ``attends_to`` selects the ablations: a network that reads the last view only, or the equivalent Markov diffusion
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument, NonFiniteSample
from pippin.generate.conditions import ConditionEmbedding, Conditioning, ConditioningSpec
from pippin.generate.contract import GeneratorModule, GeneratorOptions, OnStep, SamplingStep, check_samples
from pippin.generate.methods.dart.heads import BlockCache, FlowHead
from pippin.generate.methods.dart.schedule import NomadSchedule, sample_views
from pippin.generate.noise import Noise
from pippin.nn.attention.axial_rotary import axial_tables, grid_positions
from pippin.nn.images.adaptive_norm import AdaptiveBlock
from pippin.nn.images.patches import patchify, unpatchify
from pippin.nn.images.time_embedding import TimedHead
from pippin.nn.linear import Linear

DEFAULT_SCHEDULE: Final = NomadSchedule.cosine(8)
UNCONDITIONAL: Final = ConditioningSpec()


@checked
@dataclass(frozen=True)
class DartConfig:
    """Configuration of DART.

    Attributes:
        shape: (channels, height, width) of a sample.
        patch_size: height and width of the patch that is one token.
        num_hidden_layers: number of transformer layers.
        hidden_size: dimension of the hidden states.
        num_attention_heads: number of attention heads.
        schedule: the noise levels of the views; their number is the number of steps.
        condition: classes, text or a vector; text is before the views in the sequence.
        order: whether the tokens of a step are sampled in parallel ("parallel") or one after the other ("ar").
        head: "gaussian" for the mean of each token, "fm" for a flow-matching head that samples it.
        attends_to: "all" views so far; "view" for the last one only; "statistic" for the average of the views so far
            that is a sufficient statistic, which makes the model a Markov diffusion.
        head_layers: layers of the flow-matching head.
        head_steps: Euler steps of the flow-matching head.

    Raises:
        InvalidArgument: numbers out of range, sizes that the patch does not divide, a map among the conditions, or
            ``order="ar"`` with ``attends_to`` other than "all".

    Source: Gu et al. 2025, arXiv:2410.08159.
    """

    shape: tuple[int, int, int]
    patch_size: PositiveInt = 4
    num_hidden_layers: PositiveInt = 4
    hidden_size: PositiveInt = 96
    num_attention_heads: PositiveInt = 4
    schedule: NomadSchedule = DEFAULT_SCHEDULE
    condition: ConditioningSpec = UNCONDITIONAL
    order: Literal["parallel", "ar"] = "parallel"
    head: Literal["gaussian", "fm"] = "gaussian"
    attends_to: Literal["all", "view", "statistic"] = "all"
    head_layers: PositiveInt = 3
    head_steps: PositiveInt = 20

    def __post_init__(self) -> None:
        _, height, width = self.shape
        if height % self.patch_size or width % self.patch_size:
            raise InvalidArgument(f"patch_size={self.patch_size} does not divide samples of {height} by {width}")
        if (
            self.hidden_size % self.num_attention_heads
            or (self.hidden_size // self.num_attention_heads) % 2
            or self.hidden_size // self.num_attention_heads < 6
        ):
            raise InvalidArgument(
                f"hidden_size={self.hidden_size} with num_attention_heads={self.num_attention_heads}; the size of a "
                "head must be even and at least 6, for rotary positions over step, row and column"
            )
        if self.condition.map_channels:
            raise InvalidArgument(
                "this model reads classes, text and vectors, no map; leave condition.map_channels at 0"
            )
        if self.order == "ar" and self.attends_to != "all":
            raise InvalidArgument(
                f"order='ar' attends to all tokens before; attends_to={self.attends_to!r} does not; choose 'all'"
            )

    @property
    def steps(self) -> int:
        """T, the number of views."""
        return self.schedule.steps

    @property
    def tokens_per_view(self) -> int:
        """K, the number of tokens of a view."""
        return self.shape[1] * self.shape[2] // self.patch_size**2

    @property
    def token_dim(self) -> int:
        """Number of elements of a token."""
        return self.shape[0] * self.patch_size**2


@dataclass
class _Sequence:
    """The state of a sequence: its cache, the condition vector (n, width) and the text tokens before the views."""

    cache: BlockCache
    vector: Tensor
    prefix: Tensor | None


class DART(GeneratorModule):
    """A DART model; images are from -1 to 1.

    Args:
        config: the configuration. Weights are uninitialized; call `initialize`, or load them.

    Attributes:
        metadata: see `pippin.generate.contract.Generator`.

    >>> model = DART(DartConfig((1, 8, 8), num_hidden_layers=1, hidden_size=24,
    ...     schedule=NomadSchedule.cosine(3))).initialize(0)
    >>> model.sample(n=2, seed=5).shape
    torch.Size([2, 1, 8, 8])
    """

    config: DartConfig
    model_type = "pippin_dart"
    config_type = DartConfig

    def __init__(self, config: DartConfig) -> None:
        super().__init__(config)
        c = config
        # with order="ar", the sample itself is one more level, the clearest
        levels = c.steps + (c.order == "ar")
        self.read = Linear(c.token_dim, c.hidden_size, bias=True)
        # a token predicts the next patch, so it also reads that patch in the view before
        self.renew = Linear(c.token_dim, c.hidden_size) if c.order == "ar" else None
        self.levels = nn.Parameter(torch.zeros(levels, c.hidden_size))
        self.position_embedding = nn.Parameter(torch.zeros(c.tokens_per_view, c.hidden_size))
        self.embedding = ConditionEmbedding(c.condition, c.hidden_size)
        vector_dim = 0 if c.condition.empty else c.hidden_size
        # 8/3 of the width, rounded up to a multiple of 8: three gated matrices cost as much as two of 4 times the width
        intermediate = -(-8 * c.hidden_size // 24) * 8
        self.blocks = nn.ModuleList(
            AdaptiveBlock(
                c.hidden_size, c.num_attention_heads, hidden=intermediate, gated=True, vector=vector_dim, qk_norm=True
            )
            for _ in range(c.num_hidden_layers)
        )
        self.head = TimedHead(c.hidden_size, c.token_dim)
        self.flow = FlowHead(c.token_dim, c.hidden_size, c.head_layers) if c.head == "fm" else None
        positions = grid_positions(levels, c.shape[1] // c.patch_size, c.shape[2] // c.patch_size)
        # levels count from 1, since text is at level 0; tables follow from the configuration, so they are not saved
        cos, sin = axial_tables(positions + torch.tensor([1.0, 0.0, 0.0]), c.hidden_size // c.num_attention_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> DART:
        """Set random weights, with which the prediction is each view times a factor."""
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.read, self.renew):
            if layer is not None and layer.weight is not None:
                layer.weight.normal_(0.0, layer.inputs**-0.5, generator=generator)
            if layer is not None and layer.bias is not None:
                layer.bias.zero_()
        for table in (self.levels, self.position_embedding):
            table.normal_(0.0, 0.5, generator=generator)
        self.embedding.initialize(generator)
        for block in self.blocks:
            assert isinstance(block, AdaptiveBlock)
            block.initialize(generator, depth=len(self.blocks))
        self.head.initialize()
        if self.flow is not None:
            self.flow.initialize(generator)
        return self

    # --- the network --------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Float[Tensor, "n channels height width"],
        noise: Float[Tensor, "n steps ..."],
        condition: Conditioning | None,
    ) -> tuple[Float[Tensor, "n steps tokens inner"], Float[Tensor, "n steps tokens hidden"]]:
        """Predict samples from their noisy views at all levels, the noisiest first.

        Args:
            x: the samples.
            noise: independent noise of every view, the noisiest first.
            condition: condition of each sample; None for the null condition.

        Returns:
            The expected patches, given the views that a level attends to (with ``order="ar"``, also the patches before
            each in the next view), and the network's hidden states for them.
        """
        c = self.config
        inputs = self._inputs(self.config.schedule.views(x, noise))  # (n, steps, tokens, inner)
        tokens = inputs.flatten(1, 2)
        if c.order == "ar":  # the sample's tokens are read, too; nothing follows the last one
            tokens = torch.cat([tokens, patchify(x, c.patch_size)], 1)[:, :-1]
        hidden = self._hidden(tokens, self._sequence(condition, len(x), tokens.shape[1]), self._before(tokens))
        # the last K T states; with order="ar" the first K - 1 predict patches of the noisiest view, which is noise
        states = hidden[:, tokens.shape[1] - c.steps * c.tokens_per_view :].unflatten(1, (c.steps, c.tokens_per_view))
        vector = self.embedding(condition, len(x)).vector
        return self._predict(states, inputs, torch.arange(c.steps, device=x.device), vector), states

    def _inputs(self, views: Tensor) -> Tensor:
        """The network's input for views (n, levels, ...), the noisiest first: (n, levels, tokens, inner)."""
        if self.config.attends_to == "statistic":
            views = self.config.schedule.statistic(views)
        return patchify(views, self.config.patch_size)

    def _sequence(self, condition: Conditioning | None, n: int, tokens: int) -> _Sequence:
        """A new sequence with a cache for ``tokens`` tokens of views, after the tokens of the text."""
        c = self.config
        embedded = self.embedding(condition, n)
        device = self.levels.device
        text_tokens = 0 if embedded.tokens is None else embedded.tokens.shape[1]
        block_size = c.tokens_per_view if c.order == "parallel" else 1
        # block 0 is the text
        blocks = torch.cat([torch.zeros(text_tokens, dtype=torch.long), 1 + torch.arange(tokens) // block_size])
        cache = BlockCache(
            c.num_hidden_layers, blocks.to(device), only_own=c.attends_to != "all", prefix_mask=embedded.mask
        )
        return _Sequence(cache, embedded.vector, embedded.tokens)

    def _before(self, tokens: Float[Tensor, "n tokens inner"]) -> Float[Tensor, "n tokens inner"]:
        """For each token of a complete sequence, the patch that it predicts as it is in the view before; else zero."""
        return F.pad(tokens, (0, 0, self.config.tokens_per_view - 1, 0))[:, : tokens.shape[1]]

    def _hidden(
        self,
        tokens: Float[Tensor, "n new inner"],
        sequence: _Sequence,
        before: Float[Tensor, "n new inner"] | None = None,
    ) -> Float[Tensor, "n new width"]:
        """Hidden states of new tokens; with ``order="ar"``, ``before`` is the result of `_before` for them."""
        text_tokens = 0 if sequence.prefix is None else sequence.prefix.shape[1]
        is_first = sequence.cache.length == 0
        start = 0 if is_first else sequence.cache.length - text_tokens
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = (
            self.read(tokens)
            + self.levels[positions // self.config.tokens_per_view]
            + self.position_embedding[positions % self.config.tokens_per_view]
        )
        if self.renew is not None and before is not None:
            x = x + self.renew(before)
        cos, sin = self.get_buffer("cos")[positions], self.get_buffer("sin")[positions]
        if sequence.prefix is not None and is_first:  # text tokens are not rotated
            x = torch.cat([sequence.prefix, x], 1)
            cos = torch.cat([torch.ones_like(cos[:1]).expand(text_tokens, -1), cos])
            sin = torch.cat([torch.zeros_like(sin[:1]).expand(text_tokens, -1), sin])
        vector = None if self.config.condition.empty else sequence.vector[:, None]
        for layer, block in enumerate(self.blocks):
            x = block(x, (cos, sin), sequence.cache, layer, vector=vector)
        sequence.cache.advance(x.shape[1])
        states: Tensor = x[:, -tokens.shape[1] :]
        return states

    def _predict(self, states: Tensor, inputs: Tensor, levels: Tensor, vector: Tensor) -> Tensor:
        """Expected patches (n, levels, tokens, inner) from states; ``inputs`` are the last views they attend to."""
        c = self.config
        squared_signal = c.schedule.alphas_bar if c.attends_to == "statistic" else c.schedule.gammas
        gamma = torch.tensor(squared_signal[::-1], device=states.device)[levels][:, None, None]  # (levels, 1, 1)
        velocity = self.head(states, self.levels[levels] + vector[:, None])
        out: Tensor = gamma.sqrt() * inputs - (1 - gamma).sqrt() * velocity
        return out

    def decoding(self, condition: Conditioning | None, n: int, *, guidance: float = 1.0, seed: int = 0) -> ViewSampler:
        """A sampler that reads views one after the other; ``decoding(...).predict(views)`` continues with new ones.

        Raises:
            InvalidArgument: as `prepare_sampling`.
        """
        call = self.prepare(condition, n, guidance=guidance, seed=seed)
        return ViewSampler(self, call.condition, call.noise(), call.guidance, self.config.head_steps)

    @torch.no_grad()
    def errors(self, x: Float[Tensor, "n ..."], condition: Conditioning | None = None, *, seed: int = 0) -> list[float]:
        """Mean squared error of the predictions at each level, the clearest first.

        Raises:
            InvalidArgument: samples of another shape.
            InvalidInput: samples that are not finite floating point.
        """
        check_samples(x, self.shape)
        noise = Noise(len(x), seed=seed, device=x.device).normal((self.config.steps, *self.shape))
        predicted, _ = self(x, noise, condition)
        error = (predicted - patchify(x, self.config.patch_size)[:, None]).square().mean((0, 2, 3))  # (steps,)
        return [float(value) for value in error.flip(0)]

    # --- the sampler --------------------------------------------------------------------------------------------------

    @checked
    @torch.no_grad()
    def sample(
        self,
        condition: Conditioning | None = None,
        n: int | None = None,
        *,
        x_init: Float[Tensor, "#n channels height width"] | None = None,
        strength: Probability = 1.0,
        known: tuple[Float[Tensor, "#n channels height width"], Bool[Tensor, "*mask"]] | None = None,
        head_steps: PositiveInt | None = None,
        **options: Unpack[GeneratorOptions],
    ) -> Float[Tensor, "n channels height width"]:
        """Sample images, from about -1 to 1.

        Args:
            condition: one for each image, or one for all; None for no condition.
            n: number of images; None for as many as ``condition`` or ``x_init`` has, or 1.
            x_init: images to start from: the noisiest views are views of them.
            strength: fraction of the T views that is sampled; the noisier ones are views of ``x_init``.
            known: images, and a mask (broadcast to them) that is true where pixels are known, for inpainting.
            head_steps: Euler steps of the flow-matching head; None for the configured number.
            **options: see `GeneratorOptions`; ``steps`` are evaluations of the network, from 1 to T: with fewer than T,
                several views share a prediction; ``guidance`` extrapolates predictions, or velocities of the
                flow-matching head.

        Raises:
            InvalidArgument: as `prepare_sampling`; more steps than T, or fewer with ``order="ar"``; ``strength``
                outside 0 to 1 or without ``x_init``; images of another shape or number.
            NonFiniteSample: a prediction is not finite.
        """
        c = self.config
        if n is None and condition is None and x_init is not None:
            n = len(x_init)
        call = self.prepare(condition, n, **options)
        steps, device, noise = call.steps, call.device, call.noise()
        fresh_views = self._fresh_views(steps, x_init, strength, head_steps)
        _check_given(self.shape, call.n, x_init=x_init, known=None if known is None else known[0])
        project = None if known is None else _known_pixels(*known, device)
        given = None
        if x_init is not None and fresh_views < c.steps:
            x = x_init.to(device) if project is None else project(x_init.to(device))
            eps = noise.normal((c.steps - fresh_views, *self.shape))
            given = torch.stack([c.schedule.view(x, eps[:, i], c.steps - i) for i in range(c.steps - fresh_views)], 1)
        ar_steps = fresh_views + (given is not None)
        if c.order == "ar" and steps is not None and steps != ar_steps:
            raise InvalidArgument(f"with order='ar' a step is a view: steps={steps} must be {ar_steps}, or None")
        sampler = ViewSampler(self, call.condition, noise, call.guidance, head_steps or c.head_steps)
        if c.order == "ar":
            return sampler.sample_tokens(given, project, call.on_step)
        return sample_views(
            c.schedule,
            sampler.predict,
            noise,
            self.shape,
            steps=steps,
            given=given,
            project=project,
            on_step=call.on_step,
        )

    def _fresh_views(self, steps: int | None, x_init: Tensor | None, strength: float, head_steps: int | None) -> int:
        """Number of views that are sampled, checked; the others are views of ``x_init``."""
        total = self.config.steps
        if strength != 1 and x_init is None:
            raise InvalidArgument(f"strength={strength} needs x_init, the images to start from")
        fresh = total if x_init is None else round(strength * total)
        max_steps = min(total, fresh + 1)
        if steps is not None and steps > max_steps:
            raise InvalidArgument(f"steps must be at most {max_steps} for {fresh} views, got {steps}")
        if head_steps is not None and self.flow is None:
            raise InvalidArgument(f"head_steps={head_steps} needs a model with head='fm'")
        return fresh


class ViewSampler:
    """State of one sampling run: the conditional and unconditional sequences, and the views so far.

    Args:
        model: the model.
        condition: condition of each sample, on the model's device.
        noise: source of the samples' noise.
        guidance: scale of classifier-free guidance; 1 for none.
        head_steps: Euler steps of the flow-matching head.
    """

    def __init__(
        self, model: DART, condition: Conditioning | None, noise: Noise, guidance: float, head_steps: int
    ) -> None:
        self.model, self.noise, self.guidance, self.head_steps = model, noise, guidance, head_steps
        both = condition
        if guidance != 1.0 and condition is not None:
            both = Conditioning.concatenate([condition, condition.null()])
        c = model.config
        self.copies = 1 if both is condition else 2
        # with order="ar", the sample's tokens are read, too, but not the last one
        tokens = c.steps * c.tokens_per_view + (c.tokens_per_view - 1 if c.order == "ar" else 0)
        self.sequence = model._sequence(both, self.copies * len(noise), tokens)
        self.views: Tensor | None = None
        self.level = -1

    def predict(self, new: Float[Tensor, "n new channels height width"]) -> Float[Tensor, "n channels height width"]:
        """Read new views, the noisiest first, and predict the samples from all views so far."""
        c = self.model.config
        self.views = new if self.views is None else torch.cat([self.views, new], 1)
        inputs = self.model._inputs(self.views)[:, -new.shape[1] :]  # (n, new, tokens, inner)
        states = self._states(inputs.flatten(1, 2))[:, -c.tokens_per_view :]  # those of the last view
        self.level += new.shape[1]
        return unpatchify(self._patches(states, inputs[:, -1]), c.patch_size, (c.shape[1], c.shape[2]))

    def sample_tokens(self, given: Tensor | None, project: Any, on_step: OnStep | None) -> Tensor:
        """Sample with ``order="ar"``, token by token; arguments as for `sample_views`."""
        c, noise = self.model.config, self.noise
        size = (c.shape[1], c.shape[2])
        if given is None:
            start = noise.normal(c.shape)
            given = (start if project is None else c.schedule.view(project(0 * start), start, c.steps))[:, None]
        inputs = patchify(given, c.patch_size)  # (n, given, tokens, inner)
        tokens = inputs.flatten(1, 2)
        state = self._states(tokens, self.model._before(tokens))[:, -1:]
        view = inputs[:, -1]
        total = c.steps - given.shape[1] + 1
        for done in range(1, total + 1):
            self.level = given.shape[1] + done - 2
            t = total - done
            new_noise = patchify(noise.normal(c.shape), c.patch_size)
            predicted, next_view = torch.zeros_like(view), torch.zeros_like(view)
            for k in range(c.tokens_per_view):
                predicted[:, k] = self._patches(state, view[:, k : k + 1])[:, 0]
                if project is not None:
                    predicted = patchify(project(unpatchify(predicted, c.patch_size, size)), c.patch_size)
                next_view[:, k] = c.schedule.view(predicted[:, k], new_noise[:, k], t)
                if t or k < c.tokens_per_view - 1:  # the patch that the new state predicts, in the view before
                    before = view[:, k + 1 : k + 2] if k < c.tokens_per_view - 1 else next_view[:, :1]
                    state = self._states(next_view[:, k : k + 1], before)
            view = next_view
            if on_step is not None:
                on_step(SamplingStep(done, total, lambda x=predicted: unpatchify(x, c.patch_size, size)))  # type: ignore[misc]
        return unpatchify(view, c.patch_size, size)

    def _states(self, tokens: Tensor, before: Tensor | None = None) -> Tensor:
        """Hidden states of new tokens (n, new, inner), for each branch: (copies * n, new, width)."""
        before = None if before is None else before.repeat(self.copies, 1, 1)
        return self.model._hidden(tokens.repeat(self.copies, 1, 1), self.sequence, before)

    def _patches(
        self, states: Float[Tensor, "copies_n tokens width"], inputs: Float[Tensor, "n tokens inner"]
    ) -> Float[Tensor, "n tokens inner"]:
        """Guided patches for states: their mean, or samples of the flow-matching head."""
        model, c = self.model, self.model.config
        if model.flow is None:
            levels = torch.tensor([self.level], device=states.device)
            inputs = inputs.repeat(self.copies, 1, 1)
            means = model._predict(states[:, None], inputs[:, None], levels, self.sequence.vector)[:, 0]
            patches = self._guided(means)
        else:
            patches = self.noise.normal((inputs.shape[1], c.token_dim))
            for i in range(self.head_steps):
                tau = states.new_full(states.shape[:2], 1 - i / self.head_steps)
                velocity = self._guided(model.flow(patches.repeat(self.copies, 1, 1), tau, states))
                patches = patches - velocity / self.head_steps
        if not bool(patches.isfinite().all()):
            raise NonFiniteSample(
                f"the prediction at view {c.steps - self.level} of {c.steps} is not finite; lower guidance, or train "
                "in bfloat16 or float32",
                step=self.level + 1,
            )
        return patches

    def _guided(self, outputs: Tensor) -> Tensor:
        """Classifier-free guidance of outputs whose second half is the unconditional branch."""
        if self.copies == 1:
            return outputs
        conditional, unconditional = outputs.chunk(2)
        return torch.lerp(unconditional, conditional, self.guidance)


def _check_given(shape: tuple[int, ...], n: int, **given: Tensor | None) -> None:
    """Refuse given images of another shape, or neither of one sample nor of n."""
    for name, x in given.items():
        if x is not None:
            check_samples(x, shape)
            if len(x) not in (1, n):
                raise InvalidArgument(f"{name} holds {len(x)} samples for n={n}; give one for each, or one for all")


def _known_pixels(image: Tensor, mask: Tensor, device: torch.device) -> Any:
    """A function that replaces pixels of samples by the known ones, where the mask is true."""
    image, mask = image.to(device), mask.to(device)
    if mask.dtype != torch.bool:
        raise InvalidArgument(f"the mask of known pixels is {mask.dtype}; give booleans, true where pixels are known")
    try:
        mask = mask.broadcast_to(image.shape)
    except RuntimeError as error:
        raise InvalidArgument(f"a mask of {tuple(mask.shape)} does not fit samples of {tuple(image.shape)}") from error
    return lambda x: torch.where(mask, image, x)
