r"""DART: a transformer that denoises view by view, and reads every view so far.

Notable here:
- the views of a picture stand one behind the other in one sequence, the noisiest first; one pass trains all levels,
  and sampling is that of a language model: a step adds the tokens of one view to a cache
- what is predicted is the velocity of the clearest view so far, turned into the picture: at the clear end little is
  left to say
- ``order="ar"`` goes token by token within a view, too, so that the patches of a step agree; ``head="fm"`` draws each
  patch by a small flow in place of its mean
- ``sees`` holds the controls: a network that reads its own view only, or the Markov diffusion that knows as much
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, NonFiniteSample
from pippin.generate.condition import Condition, ConditionEmbedding, ConditionSpec
from pippin.generate.contract import OnStep, Step, check_samples, prepare
from pippin.generate.dart_heads import BlockCache, FlowHead
from pippin.generate.folder import device_of
from pippin.generate.noise import Noise
from pippin.generate.nomad import NomadSchedule, draw_views
from pippin.nn.adaptive import AdaptiveBlock
from pippin.nn.axial import axial_tables, grid
from pippin.nn.linear import Linear
from pippin.nn.patches import patchify, unpatchify
from pippin.nn.time_embedding import TimedHead

EIGHT: Final = NomadSchedule.cosine(8)
NOTHING: Final = ConditionSpec()


@dataclass(frozen=True)
class DartConfig:
    """A denoiser over views.

    Attributes:
        shape: (channels, height, width) of a sample.
        patch: side of the square that is one token.
        layers: of the transformer.
        width: of its tokens.
        heads: of its attention.
        schedule: the views; their number is that of the steps.
        condition: classes, text or a vector; text stands before the views in the sequence.
        order: whether the tokens of a step are drawn at once ("parallel") or one after the other ("ar").
        head: "gaussian" for the mean of each token, "fm" for a flow that draws it.
        sees: "all" views so far; "view" for its own alone; "statistic" for the one average of the views so far that
            holds all that they tell, which makes it a Markov diffusion.
        head_layers: of the flow.
        head_steps: Euler steps of the flow.

    Raises:
        InvalidArgument: numbers out of range, sizes that the patch does not divide, a map among the conditions, or an
            order token by token for a network that does not see all.

    Source: Gu et al. 2025, arXiv:2410.08159.
    """

    shape: tuple[int, int, int]
    patch: int = 4
    layers: int = 4
    width: int = 96
    heads: int = 4
    schedule: NomadSchedule = EIGHT
    condition: ConditionSpec = NOTHING
    order: Literal["parallel", "ar"] = "parallel"
    head: Literal["gaussian", "fm"] = "gaussian"
    sees: Literal["all", "view", "statistic"] = "all"
    head_layers: int = 3
    head_steps: int = 20

    def __post_init__(self) -> None:
        _, height, width = self.shape
        if self.patch < 1 or height % self.patch or width % self.patch:
            raise InvalidArgument(f"patch {self.patch} does not divide samples of {height} by {width}")
        if min(self.layers, self.heads, self.head_layers, self.head_steps) < 1:
            raise InvalidArgument("layers, heads, head_layers and head_steps must be at least 1")
        if self.width % self.heads or (self.width // self.heads) % 2 or self.width // self.heads < 6:
            raise InvalidArgument(
                f"{self.heads} heads divide a width of {self.width} into {self.width / self.heads:g} each; give an "
                "even number of at least 6, for a rotation over step, row and column"
            )
        if self.condition.map:
            raise InvalidArgument("this model reads classes, text and vectors, no map; leave condition.map at 0")
        if self.order == "ar" and self.sees != "all":
            raise InvalidArgument(f"order='ar' reads all that stands before a token; sees={self.sees!r} cannot")

    @property
    def steps(self) -> int:
        """T, the number of views."""
        return self.schedule.steps

    @property
    def tokens(self) -> int:
        """K, the tokens of a view."""
        return self.shape[1] * self.shape[2] // self.patch**2

    @property
    def inner(self) -> int:
        """Numbers of a token."""
        return self.shape[0] * self.patch**2


@dataclass
class _Sequence:
    """A sequence that is being read: its cache, and what is known of each sample."""

    cache: BlockCache
    vector: Tensor
    prefix: Tensor | None


class DART(nn.Module):
    """The network, and the sampler.

    Args:
        config: its form. Weights are not set; call `initialise`, or load them.

    Attributes:
        facts: see `pippin.generate.contract.Generator`.

    >>> model = DART(DartConfig((1, 8, 8), layers=1, width=24, schedule=NomadSchedule.cosine(3))).initialise(0)
    >>> model.sample(n=2, seed=5).shape
    torch.Size([2, 1, 8, 8])
    """

    config_type = DartConfig

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.config = config
        self.facts: dict[str, Any] = {}
        c = config
        # token by token, the sample itself is one more level: the clearest
        levels = c.steps + (c.order == "ar")
        self.read = Linear(c.inner, c.width, bias=True)
        # a token says what the next patch is, so it is shown what the view before knows of that one
        self.renew = Linear(c.inner, c.width) if c.order == "ar" else None
        self.levels = nn.Parameter(torch.zeros(levels, c.width))
        self.places = nn.Parameter(torch.zeros(c.tokens, c.width))
        self.embedding = ConditionEmbedding(c.condition, c.width)
        adapting = 0 if c.condition.empty else c.width
        inside = -(-8 * c.width // 24) * 8  # a third matrix for the gate, at the cost of two
        self.blocks = nn.ModuleList(
            AdaptiveBlock(c.width, c.heads, hidden=inside, gated=True, vector=adapting, qk_norm=True)
            for _ in range(c.layers)
        )
        self.head = TimedHead(c.width, c.inner)
        self.flow = FlowHead(c.inner, c.width, c.head_layers) if c.head == "fm" else None
        places = grid(levels, c.shape[1] // c.patch, c.shape[2] // c.patch)
        # the text stands at level 0. Tables follow from the configuration, so no checkpoint can bring others
        cos, sin = axial_tables(places + torch.tensor([1.0, 0.0, 0.0]), c.width // c.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.config.shape

    @property
    def condition(self) -> ConditionSpec:
        """What it reads."""
        return self.config.condition

    @torch.no_grad()
    def initialise(self, seed: int = 0) -> DART:
        """Random weights; the first guess is each view itself, scaled."""
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.read, self.renew):
            if layer is not None and layer.weight is not None:
                layer.weight.normal_(0.0, layer.inputs**-0.5, generator=generator)
            if layer is not None and layer.bias is not None:
                layer.bias.zero_()
        for table in (self.levels, self.places):
            table.normal_(0.0, 0.5, generator=generator)
        self.embedding.initialise(generator)
        for block in self.blocks:
            assert isinstance(block, AdaptiveBlock)
            block.initialise(generator, depth=len(self.blocks))
        self.head.initialise()
        if self.flow is not None:
            self.flow.initialise(generator)
        return self

    # --- the network --------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Float[Tensor, "n channels height width"],
        noise: Float[Tensor, "n steps ..."],
        condition: Condition | None,
    ) -> tuple[Float[Tensor, "n steps tokens inner"], Float[Tensor, "n steps tokens hidden"]]:
        """Guesses of samples from all levels of their views, the noisiest first.

        Args:
            x: the samples.
            noise: of every view, the noisiest first, each of its own.
            condition: what each sample shows.

        Returns:
            The patches that are expected, given the views that a level sees (token by token, and the patches before
            each in the next view), and the states of the network that say so.
        """
        c = self.config
        read = self._read(self.config.schedule.views(x, noise))
        tokens = read.flatten(1, 2)
        if c.order == "ar":
            tokens = torch.cat([tokens, patchify(x, c.patch)], 1)[:, :-1]
        hidden = self._hidden(tokens, self._sequence(condition, len(x), tokens.shape[1]), self._before(tokens))
        states = hidden[:, tokens.shape[1] - c.steps * c.tokens :].unflatten(1, (c.steps, c.tokens))
        vector = self.embedding(condition, len(x)).vector
        return self._guess(states, read, torch.arange(c.steps, device=x.device), vector), states

    def _read(self, views: Tensor) -> Tensor:
        """What the network is shown of views (n, levels, ...), the noisiest first: (n, levels, tokens, inner)."""
        if self.config.sees == "statistic":
            views = self.config.schedule.statistic(views)
        return patchify(views, self.config.patch)

    def _sequence(self, condition: Condition | None, n: int, tokens: int) -> _Sequence:
        """The beginning of sequences with room for so many tokens of views behind their texts."""
        c = self.config
        embedded = self.embedding(condition, n)
        device = self.levels.device
        words = 0 if embedded.tokens is None else embedded.tokens.shape[1]
        size = c.tokens if c.order == "parallel" else 1
        blocks = torch.cat([torch.zeros(words, dtype=torch.long), 1 + torch.arange(tokens) // size]).to(device)
        cache = BlockCache(c.layers, blocks, alone=c.sees != "all", there=embedded.mask)
        return _Sequence(cache, embedded.vector, embedded.tokens)

    def _before(self, tokens: Float[Tensor, "n tokens inner"]) -> Float[Tensor, "n tokens inner"]:
        """The patch that comes after each token of whole sequences, as the view before shows it; zero at first."""
        return F.pad(tokens, (0, 0, self.config.tokens - 1, 0))[:, : tokens.shape[1]]

    def _hidden(
        self,
        tokens: Float[Tensor, "n new inner"],
        sequence: _Sequence,
        before: Float[Tensor, "n new inner"] | None = None,
    ) -> Float[Tensor, "n new width"]:
        """Read on: the states of new tokens; token by token, ``before`` is what `_before` tells of them."""
        words = 0 if sequence.prefix is None else sequence.prefix.shape[1]
        begins = sequence.cache.length == 0
        start = 0 if begins else sequence.cache.length - words
        at = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.read(tokens) + self.levels[at // self.config.tokens] + self.places[at % self.config.tokens]
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
        """The patches that states (n, levels, tokens, width) expect; ``read`` is the newest of what they have read."""
        c = self.config
        known = c.schedule.alphas_bar if c.sees == "statistic" else c.schedule.gammas
        share = torch.tensor(known[::-1], device=states.device)[levels][:, None, None]
        velocity = self.head(states, self.levels[levels] + vector[:, None])
        out: Tensor = share.sqrt() * read - (1 - share).sqrt() * velocity
        return out

    def reading(self, condition: Condition | None, n: int, *, guidance: float = 1.0, seed: int = 0) -> Drawing:
        """Sequences to read views into, one after the other; ``reading(...).guess(views)`` goes on with new ones.

        Raises:
            InvalidArgument: as `prepare`.
        """
        device = device_of(self)
        condition, n = prepare(self.condition, condition, n, guidance, device)
        return Drawing(self, condition, Noise(n, seed=seed, device=device), guidance, self.config.head_steps)

    @torch.no_grad()
    def errors(self, x: Float[Tensor, "n ..."], condition: Condition | None = None, *, seed: int = 0) -> list[float]:
        """Mean squared error of the guesses at each level, the clearest first.

        Raises:
            InvalidArgument: samples of another shape.
        """
        check_samples(x, self.shape)
        noise = Noise(len(x), seed=seed, device=x.device).normal((self.config.steps, *self.shape))
        guess, _ = self(x, noise, condition)
        wrong = (guess - patchify(x, self.config.patch)[:, None]).square().mean((0, 2, 3))
        return [float(value) for value in wrong.flip(0)]

    # --- the sampler --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self,
        condition: Condition | None = None,
        n: int | None = None,
        *,
        steps: int | None = None,
        guidance: float = 1.0,
        seed: int = 0,
        on_step: OnStep | None = None,
        x_init: Float[Tensor, "#n channels height width"] | None = None,
        strength: float = 1.0,
        known: tuple[Float[Tensor, "#n channels height width"], Bool[Tensor, ...]] | None = None,
        head_steps: int | None = None,
    ) -> Float[Tensor, "n channels height width"]:
        """Draw samples of about -1 to 1.

        Args:
            condition: what each is to show.
            n: samples; None for as many as ``condition`` or ``x_init`` has.
            steps: passes of the network, from 1 to T; with fewer than T, several views share a guess. None for T.
            guidance: 1 for none; guesses (the flow's velocities) move away from the unconditional ones.
            seed: sample i depends on ``seed + i`` alone.
            on_step: called after each view.
            x_init: samples to begin from: the noisiest views are views of them.
            strength: the part of the T views that is drawn anew; 0 shows ``x_init`` all the way down.
            known: samples, and where they are known (broadcast to them): there, every view and the result are theirs.
            head_steps: of the flow; None for the model's own.

        Raises:
            InvalidArgument: as `prepare`; more steps than T, or fewer token by token; ``strength`` outside 0 to 1 or
                without ``x_init``; samples of another shape or number.
            NonFiniteSample: a guess is not finite.
        """
        c = self.config
        if x_init is not None and n is None and condition is None:
            n = len(x_init)
        device = device_of(self)
        condition, n = prepare(self.condition, condition, n, guidance, device)
        drawn = self._drawn(steps, x_init, strength, head_steps)
        _check_given(self.shape, n, x_init=x_init, known=None if known is None else known[0])
        noise = Noise(n, seed=seed, device=device)
        settle = None if known is None else _settled(*known, device)
        begun = None
        if x_init is not None and drawn < c.steps:
            x = x_init.to(device) if settle is None else settle(x_init.to(device))
            fresh = noise.normal((c.steps - drawn, *self.shape))
            begun = torch.stack([c.schedule.view(x, fresh[:, i], c.steps - i) for i in range(c.steps - drawn)], 1)
        if c.order == "ar" and steps is not None and steps != drawn + (begun is not None):
            raise InvalidArgument(
                f"token by token, a step is a view: steps={steps} must be {drawn + (begun is not None)}"
            )
        drawing = Drawing(self, condition, noise, guidance, head_steps or c.head_steps)
        if c.order == "ar":
            return drawing.by_token(begun, settle, on_step)
        return draw_views(
            c.schedule, drawing.guess, noise, self.shape, steps=steps, given=begun, settle=settle, on_step=on_step
        )

    def _drawn(self, steps: int | None, x_init: Tensor | None, strength: float, head_steps: int | None) -> int:
        """How many views are drawn anew."""
        total = self.config.steps
        if not 0 <= strength <= 1 or (strength != 1 and x_init is None):
            raise InvalidArgument(f"strength is {strength}; give 0 to 1, and x_init with less than 1")
        drawn = total if x_init is None else round(strength * total)
        most = min(total, drawn + 1)
        if steps is not None and not 1 <= steps <= most:
            raise InvalidArgument(f"steps is {steps}; this model draws {drawn} views: give 1 to {most}")
        if head_steps is not None and (head_steps < 1 or self.flow is None):
            raise InvalidArgument(f"head_steps is {head_steps}; give at least 1, to a model with head='fm'")
        return drawn


class Drawing:
    """One sampling: the sequences with and without their condition, and what was read so far.

    Args:
        model: the network.
        condition: what each sample shows, where the model is.
        noise: of the samples.
        guidance: 1 for none.
        head_steps: of the flow.
    """

    def __init__(
        self, model: DART, condition: Condition | None, noise: Noise, guidance: float, head_steps: int
    ) -> None:
        self.model, self.noise, self.guidance, self.head_steps = model, noise, guidance, head_steps
        both = condition
        if guidance != 1.0 and condition is not None:
            both = Condition.joined([condition, condition.null()])
        c = model.config
        self.copies = 1 if both is condition else 2
        # token by token, the last token is never read
        tokens = c.steps * c.tokens + (c.tokens - 1 if c.order == "ar" else 0)
        self.sequence = model._sequence(both, self.copies * len(noise), tokens)
        self.views: Tensor | None = None
        self.level = -1

    def guess(self, new: Float[Tensor, "n new channels height width"]) -> Float[Tensor, "n channels height width"]:
        """Read new views, the noisiest first, and guess the samples from all so far."""
        c = self.model.config
        self.views = new if self.views is None else torch.cat([self.views, new], 1)
        read = self.model._read(self.views)[:, -new.shape[1] :]
        states = self._states(read.flatten(1, 2))[:, -c.tokens :]
        self.level += new.shape[1]
        return unpatchify(self._patches(states, read[:, -1]), c.patch, (c.shape[1], c.shape[2]))

    def by_token(self, begun: Tensor | None, settle: Any, on_step: OnStep | None) -> Tensor:
        """The whole sampling token by token."""
        c, noise = self.model.config, self.noise
        size = (c.shape[1], c.shape[2])
        if begun is None:
            start = noise.normal(c.shape)
            begun = (start if settle is None else c.schedule.view(settle(0 * start), start, c.steps))[:, None]
        read = patchify(begun, c.patch)
        tokens = read.flatten(1, 2)
        state = self._states(tokens, self.model._before(tokens))[:, -1:]
        level = read[:, -1]
        total = c.steps - begun.shape[1] + 1
        for done in range(1, total + 1):
            self.level = begun.shape[1] + done - 2
            t = total - done
            fresh = patchify(noise.normal(c.shape), c.patch)
            best, following = torch.zeros_like(level), torch.zeros_like(level)
            for k in range(c.tokens):
                best[:, k] = self._patches(state, level[:, k : k + 1])[:, 0]
                if settle is not None:
                    best = patchify(settle(unpatchify(best, c.patch, size)), c.patch)
                following[:, k] = c.schedule.view(best[:, k], fresh[:, k], t)
                if t or k < c.tokens - 1:
                    after = level[:, k + 1 : k + 2] if k < c.tokens - 1 else following[:, :1]
                    state = self._states(following[:, k : k + 1], after)
            level = following
            if on_step is not None:
                on_step(Step(done, total, lambda best=best: unpatchify(best, c.patch, size)))  # type: ignore[misc]
        return unpatchify(level, c.patch, size)

    def _states(self, tokens: Tensor, before: Tensor | None = None) -> Tensor:
        """What the network makes of new tokens, once for each copy."""
        before = None if before is None else before.repeat(self.copies, 1, 1)
        return self.model._hidden(tokens.repeat(self.copies, 1, 1), self.sequence, before)

    def _patches(self, states: Float[Tensor, "copies_n tokens width"], read: Float[Tensor, "n tokens inner"]) -> Tensor:
        """The patches that follow from states: their mean, or drawn by the flow; guided."""
        model, c = self.model, self.model.config
        if model.flow is None:
            levels = torch.tensor([self.level], device=states.device)
            read = read.repeat(self.copies, 1, 1)
            found = self._guided(model._guess(states[:, None], read[:, None], levels, self.sequence.vector)[:, 0])
        else:
            found = self.noise.normal((read.shape[1], c.inner))
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
    """Puts in what is known."""
    image, mask = image.to(device), mask.to(device)
    if mask.dtype != torch.bool:
        raise InvalidArgument(f"the mask of what is known is {mask.dtype}; give booleans, true where it is known")
    try:
        mask = mask.broadcast_to(image.shape)
    except RuntimeError as error:
        raise InvalidArgument(f"a mask of {tuple(mask.shape)} does not fit samples of {tuple(image.shape)}") from error
    return lambda x: torch.where(mask, image, x)
