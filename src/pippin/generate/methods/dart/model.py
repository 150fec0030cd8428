r"""DART: a denoising autoregressive transformer, which attends to all noisier views of an image to predict the next.

Notable here:
- the views of an image are concatenated in one sequence, the noisiest first; one pass trains all levels, and sampling
  is like that of a language model: a step adds the tokens of one view to a cache
- the network predicts the velocity of the clearest view so far, which is converted to the image: at the clear end
  little is left to predict
- ``order="ar"`` also goes token by token within a view, so that the patches of a step are consistent; ``head="fm"``
  samples each patch with a small flow instead of its mean
- ``attends_to`` selects the controls: a network that reads its own view only, or the equivalent Markov diffusion
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
from pippin.nn.adaptive_norm import AdaptiveBlock
from pippin.nn.axial_rotary import axial_tables, grid_positions
from pippin.nn.linear import Linear
from pippin.nn.patches import patchify, unpatchify
from pippin.nn.time_embedding import TimedHead

EIGHT: Final = NomadSchedule.cosine(8)
NOTHING: Final = ConditioningSpec()


@checked
@dataclass(frozen=True)
class DartConfig:
    """Configuration of DART.

    Attributes:
        shape: (channels, height, width) of a sample.
        patch_size: side of the square of pixels that is one token.
        num_hidden_layers: layers of the transformer.
        hidden_size: width of its tokens.
        num_attention_heads: heads of its attention.
        schedule: the views; their number is the number of steps.
        condition: classes, text or a vector; text is before the views in the sequence.
        order: whether the tokens of a step are sampled in parallel ("parallel") or one after the other ("ar").
        head: "gaussian" for the mean of each token, "fm" for a flow that samples it.
        attends_to: "all" views so far; "view" for its own alone; "statistic" for the one average of the views so far
            that is a sufficient statistic, which makes it a Markov diffusion.
        head_layers: layers of the flow.
        head_steps: Euler steps of the flow.

    Raises:
        InvalidArgument: numbers out of range, sizes that the patch does not divide, a map among the conditions, or
            ``order="ar"`` for a network that does not attend to all views.

    Source: Gu et al. 2025, arXiv:2410.08159.
    """

    shape: tuple[int, int, int]
    patch_size: PositiveInt = 4
    num_hidden_layers: PositiveInt = 4
    hidden_size: PositiveInt = 96
    num_attention_heads: PositiveInt = 4
    schedule: NomadSchedule = EIGHT
    condition: ConditioningSpec = NOTHING
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
                "head "
                "must be even and at least 6, for rotary positions over step, row and column"
            )
        if self.condition.map_channels:
            raise InvalidArgument(
                "this model reads classes, text and vectors, no map; leave condition.map_channels at 0"
            )
        if self.order == "ar" and self.attends_to != "all":
            raise InvalidArgument(
                f"order='ar' reads all that stands before a token; attends_to={self.attends_to!r} cannot"
            )

    @property
    def steps(self) -> int:
        """T, the number of views."""
        return self.schedule.steps

    @property
    def tokens_per_view(self) -> int:
        """K, the tokens of a view."""
        return self.shape[1] * self.shape[2] // self.patch_size**2

    @property
    def token_dim(self) -> int:
        """Elements of a token."""
        return self.shape[0] * self.patch_size**2


@dataclass
class _Sequence:
    """The state of a sequence during sampling: its cache, and the condition of each sample."""

    cache: BlockCache
    vector: Tensor
    prefix: Tensor | None


class DART(GeneratorModule):
    """The network, and the sampler.

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
        # with order="ar", the sample itself is one more level: the clearest
        levels = c.steps + (c.order == "ar")
        self.read = Linear(c.token_dim, c.hidden_size, bias=True)
        # a token predicts the next patch, so it also reads the view before at that patch
        self.renew = Linear(c.token_dim, c.hidden_size) if c.order == "ar" else None
        self.levels = nn.Parameter(torch.zeros(levels, c.hidden_size))
        self.position_embedding = nn.Parameter(torch.zeros(c.tokens_per_view, c.hidden_size))
        self.embedding = ConditionEmbedding(c.condition, c.hidden_size)
        adapting = 0 if c.condition.empty else c.hidden_size
        inside = -(-8 * c.hidden_size // 24) * 8  # a third matrix for the gate, at the cost of two
        self.blocks = nn.ModuleList(
            AdaptiveBlock(
                c.hidden_size, c.num_attention_heads, hidden=inside, gated=True, vector=adapting, qk_norm=True
            )
            for _ in range(c.num_hidden_layers)
        )
        self.head = TimedHead(c.hidden_size, c.token_dim)
        self.flow = FlowHead(c.token_dim, c.hidden_size, c.head_layers) if c.head == "fm" else None
        positions = grid_positions(levels, c.shape[1] // c.patch_size, c.shape[2] // c.patch_size)
        # the text is at level 0. Tables follow from the configuration, so no checkpoint can contain others
        cos, sin = axial_tables(positions + torch.tensor([1.0, 0.0, 0.0]), c.hidden_size // c.num_attention_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> DART:
        """Random weights; the initial prediction is each view itself, scaled."""
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
        """Predictions of samples from all levels of their views, the noisiest first.

        Args:
            x: the samples.
            noise: noise of every view, the noisiest first, independent.
            condition: condition of each sample.

        Returns:
            The expected patches, given the views that a level attends to (with ``order="ar"``, also the patches before
            each in the next view), and the network's states for them.
        """
        c = self.config
        read = self._read(self.config.schedule.views(x, noise))
        tokens = read.flatten(1, 2)
        if c.order == "ar":
            tokens = torch.cat([tokens, patchify(x, c.patch_size)], 1)[:, :-1]
        hidden = self._hidden(tokens, self._sequence(condition, len(x), tokens.shape[1]), self._before(tokens))
        states = hidden[:, tokens.shape[1] - c.steps * c.tokens_per_view :].unflatten(1, (c.steps, c.tokens_per_view))
        vector = self.embedding(condition, len(x)).vector
        return self._guess(states, read, torch.arange(c.steps, device=x.device), vector), states

    def _read(self, views: Tensor) -> Tensor:
        """The network's input for views (n, levels, ...), the noisiest first: (n, levels, tokens, inner)."""
        if self.config.attends_to == "statistic":
            views = self.config.schedule.statistic(views)
        return patchify(views, self.config.patch_size)

    def _sequence(self, condition: Conditioning | None, n: int, tokens: int) -> _Sequence:
        """A new sequence with room for ``tokens`` tokens of views after their texts."""
        c = self.config
        embedded = self.embedding(condition, n)
        device = self.levels.device
        words = 0 if embedded.tokens is None else embedded.tokens.shape[1]
        size = c.tokens_per_view if c.order == "parallel" else 1
        blocks = torch.cat([torch.zeros(words, dtype=torch.long), 1 + torch.arange(tokens) // size]).to(device)
        cache = BlockCache(c.num_hidden_layers, blocks, alone=c.attends_to != "all", there=embedded.mask)
        return _Sequence(cache, embedded.vector, embedded.tokens)

    def _before(self, tokens: Float[Tensor, "n tokens inner"]) -> Float[Tensor, "n tokens inner"]:
        """The patch after each token of whole sequences, in the view before; zero at first."""
        return F.pad(tokens, (0, 0, self.config.tokens_per_view - 1, 0))[:, : tokens.shape[1]]

    def _hidden(
        self,
        tokens: Float[Tensor, "n new inner"],
        sequence: _Sequence,
        before: Float[Tensor, "n new inner"] | None = None,
    ) -> Float[Tensor, "n new width"]:
        """The states of new tokens; with ``order="ar"``, ``before`` is the result of `_before` for them."""
        words = 0 if sequence.prefix is None else sequence.prefix.shape[1]
        begins = sequence.cache.length == 0
        start = 0 if begins else sequence.cache.length - words
        at = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = (
            self.read(tokens)
            + self.levels[at // self.config.tokens_per_view]
            + self.position_embedding[at % self.config.tokens_per_view]
        )
        if self.renew is not None and before is not None:
            x = x + self.renew(before)
        cos, sin = self.get_buffer("cos")[at], self.get_buffer("sin")[at]
        if sequence.prefix is not None and begins:
            x = torch.cat([sequence.prefix, x], 1)
            cos = torch.cat([torch.ones_like(cos[:1]).expand(words, -1), cos])
            sin = torch.cat([torch.zeros_like(sin[:1]).expand(words, -1), sin])
        vector = None if self.config.condition.empty else sequence.vector[:, None]
        for layer, block in enumerate(self.blocks):
            x = block(x, (cos, sin), sequence.cache, layer, vector=vector)
        sequence.cache.advance(x.shape[1])
        states: Tensor = x[:, -tokens.shape[1] :]
        return states

    def _guess(self, states: Tensor, read: Tensor, levels: Tensor, vector: Tensor) -> Tensor:
        """The expected patches for states (n, levels, tokens, width); ``read`` is the newest view that they attend
        to."""
        c = self.config
        known = c.schedule.alphas_bar if c.attends_to == "statistic" else c.schedule.gammas
        share = torch.tensor(known[::-1], device=states.device)[levels][:, None, None]
        velocity = self.head(states, self.levels[levels] + vector[:, None])
        out: Tensor = share.sqrt() * read - (1 - share).sqrt() * velocity
        return out

    def decoding(self, condition: Conditioning | None, n: int, *, guidance: float = 1.0, seed: int = 0) -> ViewSampler:
        """A sampler that reads views one after the other; ``decoding(...).guess(views)`` continues with new ones.

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
        """
        check_samples(x, self.shape)
        noise = Noise(len(x), seed=seed, device=x.device).normal((self.config.steps, *self.shape))
        guess, _ = self(x, noise, condition)
        wrong = (guess - patchify(x, self.config.patch_size)[:, None]).square().mean((0, 2, 3))
        return [float(value) for value in wrong.flip(0)]

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
            condition: what each image is to show; of one image for all of them; None for no condition.
            n: number of images; None for as many as ``condition`` or ``x_init`` has, or 1.
            x_init: images to start from: the noisiest views are views of them.
            strength: fraction of the T views that is sampled anew; 0 takes all views from ``x_init``.
            known: images, and where they are known (broadcast to them): there, every view and the result are theirs.
            head_steps: Euler steps of the flow head; None for the configured number.
            **options: see `GeneratorOptions`; ``steps`` are evaluations of the network, from 1 to T: with fewer than T,
                several views share a prediction; ``guidance`` extrapolates predictions (velocities of the flow head).

        Raises:
            InvalidArgument: as `prepare_sampling`; more steps than T, or fewer token by token; ``strength`` outside 0
                to 1 or without ``x_init``; images of another shape or number.
            NonFiniteSample: a prediction is not finite.
        """
        c = self.config
        if n is None and condition is None and x_init is not None:
            n = len(x_init)
        call = self.prepare(condition, n, **options)
        steps, device, noise = call.steps, call.device, call.noise()
        fresh_views = self._fresh_views(steps, x_init, strength, head_steps)
        _check_given(self.shape, call.n, x_init=x_init, known=None if known is None else known[0])
        settle = None if known is None else _settled(*known, device)
        given = None
        if x_init is not None and fresh_views < c.steps:
            x = x_init.to(device) if settle is None else settle(x_init.to(device))
            eps = noise.normal((c.steps - fresh_views, *self.shape))
            given = torch.stack([c.schedule.view(x, eps[:, i], c.steps - i) for i in range(c.steps - fresh_views)], 1)
        by_token = fresh_views + (given is not None)
        if c.order == "ar" and steps is not None and steps != by_token:
            raise InvalidArgument(f"token by token, a step is a view: steps={steps} must be {by_token}")
        sampler = ViewSampler(self, call.condition, noise, call.guidance, head_steps or c.head_steps)
        if c.order == "ar":
            return sampler.by_token(given, settle, call.on_step)
        return sample_views(
            c.schedule, sampler.guess, noise, self.shape, steps=steps, given=given, settle=settle, on_step=call.on_step
        )

    def _fresh_views(self, steps: int | None, x_init: Tensor | None, strength: float, head_steps: int | None) -> int:
        """Number of views that are sampled again."""
        total = self.config.steps
        if strength != 1 and x_init is None:
            raise InvalidArgument(f"strength={strength} needs x_init")
        fresh = total if x_init is None else round(strength * total)
        max_steps = min(total, fresh + 1)
        if steps is not None and steps > max_steps:
            raise InvalidArgument(f"steps must be at most {max_steps} for {fresh} views, got {steps}")
        if head_steps is not None and self.flow is None:
            raise InvalidArgument(f"head_steps={head_steps} needs a model with head='fm'")
        return fresh


class ViewSampler:
    """State of one sampling run: the sequences with and without their condition, and the views so far.

    Args:
        model: the network.
        condition: condition of each sample, on the model's device.
        noise: noise of the samples.
        guidance: 1 for none.
        head_steps: Euler steps of the flow.
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
        # with order="ar", the last token is never read
        tokens = c.steps * c.tokens_per_view + (c.tokens_per_view - 1 if c.order == "ar" else 0)
        self.sequence = model._sequence(both, self.copies * len(noise), tokens)
        self.views: Tensor | None = None
        self.level = -1

    def guess(self, new: Float[Tensor, "n new channels height width"]) -> Float[Tensor, "n channels height width"]:
        """Read new views, the noisiest first, and predict the samples from all so far."""
        c = self.model.config
        self.views = new if self.views is None else torch.cat([self.views, new], 1)
        read = self.model._read(self.views)[:, -new.shape[1] :]
        states = self._states(read.flatten(1, 2))[:, -c.tokens_per_view :]
        self.level += new.shape[1]
        return unpatchify(self._patches(states, read[:, -1]), c.patch_size, (c.shape[1], c.shape[2]))

    def by_token(self, begun: Tensor | None, settle: Any, on_step: OnStep | None) -> Tensor:
        """Sample token by token."""
        c, noise = self.model.config, self.noise
        size = (c.shape[1], c.shape[2])
        if begun is None:
            start = noise.normal(c.shape)
            begun = (start if settle is None else c.schedule.view(settle(0 * start), start, c.steps))[:, None]
        read = patchify(begun, c.patch_size)
        tokens = read.flatten(1, 2)
        state = self._states(tokens, self.model._before(tokens))[:, -1:]
        level = read[:, -1]
        total = c.steps - begun.shape[1] + 1
        for done in range(1, total + 1):
            self.level = begun.shape[1] + done - 2
            t = total - done
            fresh = patchify(noise.normal(c.shape), c.patch_size)
            best, following = torch.zeros_like(level), torch.zeros_like(level)
            for k in range(c.tokens_per_view):
                best[:, k] = self._patches(state, level[:, k : k + 1])[:, 0]
                if settle is not None:
                    best = patchify(settle(unpatchify(best, c.patch_size, size)), c.patch_size)
                following[:, k] = c.schedule.view(best[:, k], fresh[:, k], t)
                if t or k < c.tokens_per_view - 1:
                    after = level[:, k + 1 : k + 2] if k < c.tokens_per_view - 1 else following[:, :1]
                    state = self._states(following[:, k : k + 1], after)
            level = following
            if on_step is not None:
                on_step(SamplingStep(done, total, lambda best=best: unpatchify(best, c.patch_size, size)))  # type: ignore[misc]
        return unpatchify(level, c.patch_size, size)

    def _states(self, tokens: Tensor, before: Tensor | None = None) -> Tensor:
        """The network's states for new tokens, for each copy (with and without the condition)."""
        before = None if before is None else before.repeat(self.copies, 1, 1)
        return self.model._hidden(tokens.repeat(self.copies, 1, 1), self.sequence, before)

    def _patches(self, states: Float[Tensor, "copies_n tokens width"], read: Float[Tensor, "n tokens inner"]) -> Tensor:
        """The patches for states: their mean, or sampled by the flow; with guidance."""
        model, c = self.model, self.model.config
        if model.flow is None:
            levels = torch.tensor([self.level], device=states.device)
            read = read.repeat(self.copies, 1, 1)
            found = self._guided(model._guess(states[:, None], read[:, None], levels, self.sequence.vector)[:, 0])
        else:
            found = self.noise.normal((read.shape[1], c.token_dim))
            for i in range(self.head_steps):
                tau = states.new_full(states.shape[:2], 1 - i / self.head_steps)
                velocity = self._guided(model.flow(found.repeat(self.copies, 1, 1), tau, states))
                found = found - velocity / self.head_steps
        if not bool(found.isfinite().all()):
            raise NonFiniteSample(
                f"the guess at view {c.steps - self.level} of {c.steps} is not finite; give less guidance, or train "
                "in bfloat16 or float32",
                step=self.level + 1,
            )
        return found

    def _guided(self, both: Tensor) -> Tensor:
        if self.copies == 1:
            return both
        with_it, without = both.chunk(2)
        return torch.lerp(without, with_it, self.guidance)


def _check_given(shape: tuple[int, ...], n: int, **given: Tensor | None) -> None:
    for name, x in given.items():
        if x is not None:
            check_samples(x, shape)
            if len(x) not in (1, n):
                raise InvalidArgument(f"{name} holds {len(x)} samples for n={n}; give one for each, or one for all")


def _settled(image: Tensor, mask: Tensor, device: torch.device) -> Any:
    """A function that inserts the known pixels."""
    image, mask = image.to(device), mask.to(device)
    if mask.dtype != torch.bool:
        raise InvalidArgument(f"the mask of what is known is {mask.dtype}; give booleans, true where it is known")
    try:
        mask = mask.broadcast_to(image.shape)
    except RuntimeError as error:
        raise InvalidArgument(f"a mask of {tuple(mask.shape)} does not fit samples of {tuple(image.shape)}") from error
    return lambda x: torch.where(mask, image, x)
