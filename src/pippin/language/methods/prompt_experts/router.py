r"""Experts chosen for a stretch of text: the leading layers of a decoder read it, a router scores all experts.

Notable here:
- the few layers that read are always in memory; what they read decides, once for many tokens, which experts of all
  later mixtures have to be
- tokens still route themselves, among the experts of the set
- a text is read in stretches as long as those of the training, each alone: what a long prompt costs grows with its
  length, and a later choice reads the newest stretch as the training did
- with soft weights, gradients of the language model's loss reach the router (`pippin.nn.soft_top_k`)

Source: a reconstruction of AFM 3 Core Advanced as it was announced (Apple 2026: a small dense block chooses the experts
of a prompt, and again from time to time); masks of stretches for the next ones: Hou et al. 2025, arXiv:2501.02086.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument, UnsupportedModel
from pippin.core.formats import checkpoint
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.kv_cache import NoCache
from pippin.nn.linear import Linear
from pippin.nn.soft_top_k import soft_top_k

_TOGETHER = 256  # tokens that are read in one pass: no more memory than a pass of the engine takes
_LEAST_WEIGHT = 1e-6  # of an expert that was chosen although its soft weight is nearly 0


@checked
@dataclass(frozen=True)
class PromptRouterConfig:
    """The sizes of a `PromptRouter`.

    Args:
        hidden_size: of the decoder.
        depth: leading layers that read; 0 for the embeddings alone.
        layers: the mixtures whose experts are chosen, all from ``depth`` on.
        num_hidden_layers: layers of the decoder.
        num_experts: experts of each of these mixtures.
        num_experts_per_tok: experts that a token takes, of those that were chosen.
        keep: experts of a mixture that are chosen.
        stretch: tokens that are read together.
        inner_size: width of the hidden layer of the router.
        eps: temperature of the weights of chosen experts (`pippin.nn.soft_top_k`); 0 for weights of 1.
    """

    hidden_size: PositiveInt
    depth: NonNegativeInt
    layers: tuple[int, ...]
    num_hidden_layers: PositiveInt
    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    keep: PositiveInt
    stretch: PositiveInt = 64
    inner_size: PositiveInt = 128
    eps: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        self.check_keep(self.keep)

    def check_keep(self, keep: int) -> None:
        """Check a number of chosen experts.

        Raises:
            InvalidArgument: it is below what a token takes, or above the number of experts.
        """
        if not self.num_experts_per_tok <= keep <= self.num_experts:
            raise InvalidArgument(
                f"keep must be from {self.num_experts_per_tok}, which each token takes, to {self.num_experts} experts, "
                f"got {keep}"
            )

    @classmethod
    def for_decoder(
        cls,
        config: DecoderConfig,
        keep: int,
        *,
        depth: int | None = None,
        stretch: int = 64,
        inner_size: int = 128,
        eps: float = 0.0,
    ) -> PromptRouterConfig:
        """The sizes for a decoder.

        Args:
            config: of the decoder.
            keep: experts of a mixture that are chosen.
            depth: leading layers that read; None for all before the first mixture.
            stretch: as for the class.
            inner_size: as for the class.
            eps: as for the class.

        Raises:
            InvalidArgument: ``keep`` out of range.
            UnsupportedModel: no mixtures from ``depth`` on, or mixtures that differ in their numbers of experts.

        >>> from pippin.language.presets import preset
        >>> PromptRouterConfig.for_decoder(preset("nano-moe", 100), 4).layers
        (0, 1, 2, 3)
        """
        specs = [layer.experts or layer.feedforward for layer in config.layers]
        mixtures = [index for index, spec in enumerate(specs) if spec.num_experts]
        depth = (mixtures[0] if mixtures else 0) if depth is None else depth
        layers = tuple(index for index in mixtures if index >= depth)
        sizes = {(specs[index].num_experts, specs[index].num_experts_per_tok) for index in layers}
        if len(sizes) != 1:
            raise UnsupportedModel(
                f"experts can be chosen by the prompt where mixtures follow the leading layers, all with the same "
                f"number of experts; this decoder has {len(layers)} mixtures from layer {depth} on, of "
                f"{len(sizes)} sizes"
            )
        experts, active = sizes.pop()
        sizes_of = (config.hidden_size, depth, layers, len(config.layers), experts, active, keep)
        return cls(*sizes_of, stretch, inner_size, eps)


class PromptRouter(nn.Module):
    """Scores of the experts of all mixtures, from a text.

    Args:
        config: its sizes.

    >>> from pippin.language.presets import preset
    >>> base = Decoder(preset("nano-moe", 100)).initialize(seed=0)
    >>> router = PromptRouter(PromptRouterConfig.for_decoder(base.config, 4, depth=1)).initialize(seed=0)
    >>> router.scores(base, torch.arange(50)).shape
    torch.Size([3, 8])
    """

    model_type: ClassVar = "pippin_prompt_router"

    def __init__(self, config: PromptRouterConfig) -> None:
        super().__init__()
        self.config = config
        self.inner = Linear(config.hidden_size, config.inner_size, bias=True)
        self.outer = Linear(config.inner_size, len(config.layers) * config.num_experts, bias=True)

    def initialize(self, *, seed: int) -> PromptRouter:
        """Random weights, for scores of standard deviation about 0.1."""
        generator = torch.Generator().manual_seed(seed)
        for linear, gain in ((self.inner, 1.0), (self.outer, 0.2)):
            assert linear.bias is not None
            nn.init.normal_(linear.weight, 0.0, gain / math.sqrt(linear.inputs), generator)
            nn.init.zeros_(linear.bias)
        return self

    def forward(self, states: Float[Tensor, "texts width"]) -> Float[Tensor, "texts layers experts"]:
        """The scores of each text.

        Args:
            states: results of `read`.
        """
        scores: Tensor = self.outer(F.silu(self.inner(states)))
        return scores.float().view(-1, len(self.config.layers), self.config.num_experts)

    def read(self, base: Decoder, ids: Int[Tensor, "texts tokens"]) -> Float[Tensor, "texts width"]:
        """The mean of the normalized states behind the leading layers, of each text alone.

        Args:
            base: the decoder.
            ids: texts of one length.
        """
        x = base.embed(ids)
        per_layer = base.per_layer_inputs(ids, x)
        if self.config.depth:
            x = base.forward_layers(x, NoCache(), layers=range(self.config.depth), per_layer=per_layer)
        if x.ndim == 4:  # several streams
            x = x.mean(2)
        return F.rms_norm(x.float(), x.shape[-1:]).mean(1)

    @torch.no_grad()
    def scores(self, base: Decoder, ids: Int[Tensor, tokens]) -> Float[Tensor, "layers experts"]:
        """The scores for what follows a text.

        Args:
            base: the decoder.
            ids: the text, which is read in stretches; at least one token.

        Raises:
            InvalidArgument: no tokens.
        """
        if len(ids) == 0:
            raise InvalidArgument("no experts can be chosen for a text without tokens")
        parts = ids.split(self.config.stretch)
        whole = [part for part in parts if len(part) == self.config.stretch]
        states = [
            self.read(base, torch.stack(some)) for some in _batches(whole, max(1, _TOGETHER // self.config.stretch))
        ]
        counts = [float(self.config.stretch)] * len(whole)
        if len(parts) > len(whole):
            states.append(self.read(base, parts[-1][None]))
            counts.append(float(len(parts[-1])))
        weights = torch.tensor(counts) / len(ids)
        state = (torch.cat(states).cpu() * weights[:, None]).sum(0)
        scores: Tensor = self(state[None].to(self.outer.weight.device))[0].cpu()
        return scores

    def mask(
        self, chosen: Int[Tensor, "layers kept"], scores: Float[Tensor, "layers experts"], eps: float | None = None
    ) -> ExpertMask:
        """The mask of a set of experts; gradients reach the scores through its weights.

        Args:
            chosen: experts of each of ``config.layers``.
            scores: what they were chosen by.
            eps: temperature of the weights; None for the router's own.
        """
        config = self.config
        allowed = torch.ones(config.num_hidden_layers, config.num_experts, dtype=torch.bool, device=scores.device)
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        layers = torch.tensor(config.layers, device=scores.device)
        allowed[layers] = kept
        eps = config.eps if eps is None else eps
        if eps == 0:
            return ExpertMask(allowed)
        weights = torch.ones(allowed.shape, dtype=scores.dtype, device=scores.device)
        soft = soft_top_k(scores, chosen.shape[1], eps).clamp(min=_LEAST_WEIGHT)
        return ExpertMask(allowed, weights.index_copy(0, layers, soft))

    def check(self, config: DecoderConfig) -> None:
        """Check that it was made for a decoder.

        Raises:
            InvalidArgument: for another one.
        """
        own = self.config
        wanted = PromptRouterConfig.for_decoder(
            config, own.keep, depth=own.depth, stretch=own.stretch, inner_size=own.inner_size, eps=own.eps
        )
        if wanted != own:
            raise InvalidArgument(
                f"the router chooses among {own.num_experts} experts of {len(own.layers)} mixtures in a decoder of "
                f"width {own.hidden_size}; this one has {wanted.num_experts} in {len(wanted.layers)}, and width "
                f"{wanted.hidden_size}"
            )

    def save(self, path: str | Path) -> None:
        """Write it to a folder that `load` reads.

        Raises:
            DiskFull: nothing was written.
        """
        checkpoint.save(self, path, model_type=self.model_type, config=self.config)

    @classmethod
    def load(cls, path: str | Path) -> PromptRouter:
        """Read what `save` wrote.

        Raises:
            ModelNotFound: there is no such folder, or no weights in it.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged, or the tensors do not fit the config.
        """

        def build(saved: checkpoint.SavedModel[PromptRouterConfig]) -> PromptRouter:
            with torch.device("meta"):
                return cls(saved.config)

        return checkpoint.load(path, build, model_type=cls.model_type, config_type=PromptRouterConfig)


def _batches(parts: list[Tensor], size: int) -> list[list[Tensor]]:
    return [parts[start : start + size] for start in range(0, len(parts), size)]
