r"""Instruction-following pruning: the prompt decides, once and before decoding, which feed-forward channels are kept.

Notable here:
- a small decoder reads the prompt, and a head on its last hidden state scores every channel of every layer; the k best
  of a layer are kept, with soft weights that gradients reach (`pippin.nn.soft_top_k`)
- in training the mask multiplies the input of the down projection, and every sequence has its own; for inference the
  chosen rows and columns are gathered once into an ordinary, smaller `Decoder`, with the mask folded into its weights
- the prompt itself is read under the mask that its answer uses; attention, embeddings and norms are never pruned
- scores that do not depend on the prompt (`StaticMask`) are plain structured pruning, trained the same way: the control

Source: Hou et al. 2025, arXiv:2501.02086; static masks by soft top-k: arXiv:2407.21075, section on pruning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, UnsupportedLayer, VocabularyMismatch
from pippin.data.token_batches import TokenBatch
from pippin.language.chunked_loss import hidden_states
from pippin.language.decoder import Decoder, logits_of
from pippin.language.methods.instruction_pruning.config import InstructionPruningConfig, MaskPredictorConfig
from pippin.nn.feedforward.feedforward import FeedForward
from pippin.nn.kv_cache import PackedDocuments
from pippin.nn.linear import Linear
from pippin.nn.packed_layers import PackedLinear
from pippin.nn.soft_top_k import check_top_k, soft_top_k, top_k_indices, top_k_mask

READER_LR_SCALE = 0.1
"""Factor on the learning rate of a reader; at the full rate it soon predicts the same mask for every prompt."""
Prompts = Int[Tensor, "rows length"]
"""Prompts of one length, one in each row; or prompts packed in one row, with their lengths given beside it."""


class MaskPredictor(nn.Module):
    """Scores of all channels, from a prompt: a small decoder and a head of two layers on its last hidden state.

    Args:
        reader: the decoder that reads the prompt; it has the vocabulary of the model that is pruned.
        num_hidden_layers: number of layers of the model that is pruned.
        intermediate_size: channels of each of its feed-forward layers.
        hidden_size: hidden width of the head, whose second layer has
            ``hidden_size * num_hidden_layers * intermediate_size`` weights.

    Source: arXiv:2501.02086, section 3.1.
    """

    @checked
    def __init__(
        self, reader: Decoder, num_hidden_layers: int, intermediate_size: int, hidden_size: PositiveInt = 128
    ) -> None:
        super().__init__()
        self.num_hidden_layers, self.intermediate_size = num_hidden_layers, intermediate_size
        self.reader = reader
        self.inner = Linear(reader.config.hidden_size, hidden_size, bias=True)
        self.outer = Linear(hidden_size, num_hidden_layers * intermediate_size, bias=True)
        self.scale_reader_lr()

    @property
    def config(self) -> MaskPredictorConfig:
        """Sizes of reader and head."""
        return MaskPredictorConfig(self.reader.config, self.inner.outputs)

    def scale_reader_lr(self) -> None:
        """Set the reader's learning-rate factor to `READER_LR_SCALE`; to be repeated if its parameters are replaced."""
        for parameter in self.reader.parameters():
            parameter.lr_scale = READER_LR_SCALE  # type: ignore[attr-defined]

    def forward(self, ids: Prompts, documents: Sequence[int] | None = None) -> Float[Tensor, "prompts layers width"]:
        """The scores for each prompt.

        Args:
            ids: prompts of one length, or one row of packed prompts.
            documents: length of each packed prompt; None where every row is a prompt.
        """
        if documents is None:
            last = self.reader.hidden(ids)[:, -1]
        else:
            ends = torch.tensor(documents, device=ids.device).cumsum(0) - 1
            last = self.reader.hidden(ids, cache=PackedDocuments(documents))[0, ends]
        scores: Tensor = self.outer(nn.functional.silu(self.inner(last)))
        return scores.float().view(-1, self.num_hidden_layers, self.intermediate_size)

    def initialize(self, *, seed: int, reader: bool = True) -> MaskPredictor:
        """Random weights in the head, for scores of standard deviation about 0.1, and in the reader."""
        if reader:
            self.reader.initialize(seed=seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for linear, gain in ((self.inner, 1.0), (self.outer, 0.2)):
            assert linear.bias is not None
            nn.init.normal_(linear.weight, 0.0, gain / math.sqrt(linear.inputs), generator)
            nn.init.zeros_(linear.bias)
        return self

    def set_initial_scores(self, scores: Float[Tensor, "layers width"]) -> None:
        """Begin training from these scores, for every prompt."""
        assert self.outer.bias is not None
        self.outer.bias.data.copy_(scores.flatten())


class StaticMask(nn.Module):
    """Learned scores that are the same for every prompt.

    They are ten times their parameters, to train as quickly as those of a `MaskPredictor`: there a step of Adam moves a
    score by the steps of a whole row of the head.

    Args:
        num_hidden_layers: number of layers of the model that is pruned.
        intermediate_size: channels of each of its feed-forward layers.
    """

    def __init__(self, num_hidden_layers: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_hidden_layers, self.intermediate_size = num_hidden_layers, intermediate_size
        self.scaled_scores = nn.Parameter(torch.empty(num_hidden_layers, intermediate_size))

    def forward(self, ids: Prompts, documents: Sequence[int] | None = None) -> Float[Tensor, "prompts layers width"]:
        """The scores, repeated for each prompt."""
        count = len(ids) if documents is None else len(documents)
        return (10 * self.scaled_scores.float()).expand(count, -1, -1)

    def initialize(self, *, seed: int) -> StaticMask:
        """Random scores with a standard deviation of 0.1, as those of a `MaskPredictor` begin."""
        nn.init.normal_(self.scaled_scores, 0.0, 0.01, torch.Generator().manual_seed(seed))
        return self

    def set_initial_scores(self, scores: Float[Tensor, "layers width"]) -> None:
        """Begin training from these scores."""
        self.scaled_scores.data.copy_(scores / 10)


class InstructionFollowingPruning(nn.Module):
    """A decoder whose feed-forward layers are pruned to ``keep`` channels, selected by the prompt.

    Args:
        base: the unpruned model, not packed, with dense feed-forward layers of one width.
        predictor: the mask predictor, for the base's number of layers and their width.
        keep: number of channels that are kept in each layer.
        eps: temperature of the soft top-k; see `pippin.nn.soft_top_k.soft_top_k`.

    Raises:
        InvalidArgument: ``keep`` outside 1 to the width, ``eps`` not above 0, a predictor of another shape, a packed
            base.
        UnsupportedLayer: the base has feed-forward layers that have no channels to choose from; all are listed.
        VocabularyMismatch: the predictor reads another number of tokens than the base.

    >>> from pippin.language.presets import preset
    >>> base = Decoder(preset("nano", 100)).initialize(seed=0)
    >>> reader = Decoder(preset("nano", 100))
    >>> model = InstructionFollowingPruning(base, MaskPredictor(reader, 4, 352).initialize(seed=1), keep=64)
    >>> model.specialize(torch.tensor([3, 1, 4])).config.layers[0].feedforward.intermediate_size
    64
    """

    def __init__(self, base: Decoder, predictor: MaskPredictor | StaticMask, keep: int, eps: float = 1.0) -> None:
        super().__init__()
        width = prunable_intermediate_size(base)
        check_top_k(torch.zeros(width, device="cpu"), keep, eps)
        if (predictor.num_hidden_layers, predictor.intermediate_size) != (len(base.layers), width):
            raise InvalidArgument(
                f"the predictor scores {predictor.num_hidden_layers} layers of {predictor.intermediate_size} channels, "
                f"the base has {len(base.layers)} of {width}"
            )
        if isinstance(predictor, MaskPredictor) and predictor.reader.config.vocab_size != base.config.vocab_size:
            raise VocabularyMismatch(
                f"the predictor reads {predictor.reader.config.vocab_size} different tokens, the base "
                f"{base.config.vocab_size}; give it a decoder made for the tokenizer of the base"
            )
        self.base, self.predictor = base, predictor
        self.keep, self.eps = keep, eps
        if isinstance(predictor, MaskPredictor):
            predictor.scale_reader_lr()

    @classmethod
    def from_config(cls, config: InstructionPruningConfig) -> InstructionFollowingPruning:
        """A model with uninitialized weights.

        Raises:
            InvalidArgument, UnsupportedLayer, VocabularyMismatch: as for the class.
        """
        base = Decoder(config.base)
        sizes = (len(base.layers), prunable_intermediate_size(base))
        predictor: MaskPredictor | StaticMask = StaticMask(*sizes)
        if config.predictor is not None:
            predictor = MaskPredictor(Decoder(config.predictor.reader), *sizes, config.predictor.hidden_size)
        return cls(base, predictor, config.keep, config.eps)

    @property
    def config(self) -> InstructionPruningConfig:
        """Base, kept channels, softness and predictor."""
        predictor = self.predictor.config if isinstance(self.predictor, MaskPredictor) else None
        return InstructionPruningConfig(self.base.config, self.keep, self.eps, predictor)

    @property
    def intermediate_size(self) -> int:
        """Channels of a feed-forward layer of the base."""
        return self.predictor.intermediate_size

    def masks(
        self,
        ids: Prompts,
        documents: Sequence[int] | None = None,
        *,
        keep: int | None = None,
        eps: float | None = None,
    ) -> Float[Tensor, "prompts layers width"]:
        """Weights of all channels for each prompt, exactly ``keep`` of a layer above 0 (up to underflow).

        Args:
            ids: prompts, as for `MaskPredictor.forward`.
            documents: as there.
            keep: kept channels; None for the model's. Training anneals it.
            eps: temperature of the soft top-k; None for the model's.
        """
        scores = self.predictor(ids, documents)
        return top_k_mask(scores, self.keep if keep is None else keep, self.eps if eps is None else eps)

    def forward(
        self, ids: Int[Tensor, "rows length"], masks: Float[Tensor, "rows layers width"]
    ) -> Float[Tensor, "rows length vocab"]:
        """Logits of the whole model under the mask of each row: as exact as `specialize`, and no quicker than the base.

        Args:
            ids: token ids.
            masks: mask of each row; rows may differ, and a row uses only the channels that it selected.
        """
        logits: Tensor = logits_of(self.base, self.hidden(ids, masks))
        return logits

    def hidden(
        self,
        ids: Int[Tensor, "rows length"],
        masks: Float[Tensor, "texts layers width"],
        documents: Sequence[int] | None = None,
    ) -> Float[Tensor, "rows length model"]:
        """Normalized hidden states under masks, as the output matrix reads them.

        Args:
            ids: rows of one length, or one row with texts end to end.
            masks: mask of each row, or of each text of that row.
            documents: number of tokens of each text of that row.
        """
        with masked(self.base, masks, documents):
            return self.base.hidden(ids, cache=None if documents is None else PackedDocuments(documents))

    @torch.no_grad()
    def specialize(self, ids: Int[Tensor, tokens]) -> Decoder:
        """The pruned model for a prompt: an ordinary decoder whose feed-forward layers have ``keep`` channels.

        Its logits are those of the masked model up to rounding. Attention, embeddings and norms are the tensors of the
        base, not copies, so further small models cost their feed-forward layers only.

        Args:
            ids: token ids of the prompt; any for a `StaticMask`.

        Raises:
            InvalidArgument: no tokens; a base that has been packed.
        """
        if len(ids) == 0:
            raise InvalidArgument("the prompt has no tokens; give the text that the answer will be about")
        prunable_intermediate_size(self.base)
        ids = ids.to(self.base.embed_tokens.device)
        scores = self.predictor(ids[None])[0]
        weights, chosen = soft_top_k(scores, self.keep, self.eps), top_k_indices(scores, self.keep)
        layers = tuple(
            replace(layer, feedforward=replace(layer.feedforward, intermediate_size=self.keep))
            for layer in self.base.config.layers
        )
        with torch.device("meta"):
            small = Decoder(replace(self.base.config, layers=layers))
        tensors = dict(self.base.state_dict())
        for index, (row, weight) in enumerate(zip(chosen, weights, strict=True)):
            stem = f"layers.{index}.mlp"
            for name in (f"{stem}.{part}_proj.{kind}" for part in ("gate", "up") for kind in ("weight", "bias")):
                if name in tensors:
                    tensors[name] = tensors[name].index_select(0, row)
            down = tensors[f"{stem}.down_proj.weight"]
            tensors[f"{stem}.down_proj.weight"] = down.index_select(1, row).float().mul_(weight[row]).to(down.dtype)
        small.load_state_dict(tensors, assign=True)
        small.tie_weights()
        return small.requires_grad_(False).eval()


def prunable_intermediate_size(base: Decoder) -> int:
    """Channels of each feed-forward layer of a decoder that can be pruned.

    Raises:
        UnsupportedLayer: feed-forward layers of another kind, or with weights that are computed (all are listed); or
            with gates that are cut by their distribution, as in Gemma 3n.
        InvalidArgument: packed weights, or layers of several widths.
    """
    wrong = []
    for index, layer in enumerate(base.layers):
        mlp = cast(Any, layer).mlp
        if not isinstance(mlp, FeedForward):
            wrong.append(f"layer {index}: {type(mlp).__name__}")
            continue
        parts = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if mlp.gate_up_proj is not None or any(isinstance(part, PackedLinear) for part in parts):
            raise InvalidArgument("the base is packed, so its channels cannot be chosen; load it with pack=False")
        wrong += [f"layer {index}: {type(part).__name__}" for part in parts if part and type(part) is not Linear]
    sparse = [i for i, layer in enumerate(base.config.layers) if layer.feedforward.activation_sparsity]
    if sparse:  # fewer channels have another distribution, so a small model would cut its gates elsewhere
        raise UnsupportedLayer(
            f"channels of this {base.config.family} cannot be chosen: {len(sparse)} of its feed-forward layers, from "
            f"layer {sparse[0]} on, cut their gates by the distribution over all channels; take another model"
        )
    if wrong:
        raise UnsupportedLayer(
            f"channels can be chosen in dense feed-forward layers, gated or plain; found {', '.join(wrong)}"
        )
    widths = {layer.feedforward.intermediate_size for layer in base.config.layers}
    if len(widths) > 1:
        raise InvalidArgument(f"the feed-forward layers have several widths ({sorted(widths)}); one is needed")
    return widths.pop()


@contextmanager
def masked(
    base: Decoder, masks: Float[Tensor, "texts layers width"], documents: Sequence[int] | None = None
) -> Iterator[None]:
    """Within the block, every feed-forward layer of the base multiplies its channels by the mask of the text.

    Args:
        base: the decoder; restored at the end of the block.
        masks: mask of each row of the passes in the block, or of each text of their single row.
        documents: number of tokens of each of those texts; None if every row is one text.
    """
    each = masks.transpose(0, 1)[:, :, None]  # layers, texts, 1, width
    if documents is not None:
        counts = torch.tensor(documents, device=masks.device)
        each = each.transpose(1, 2).repeat_interleave(counts, dim=2)
    hooks = []
    try:
        for layer, mask in zip(base.layers, each, strict=True):

            def weigh(module: nn.Module, given: tuple[Any, ...], mask: Tensor = mask) -> tuple[Any, ...]:
                return (given[0] * mask.to(given[0].dtype), *given[1:])

            hooks.append(cast(Any, layer).mlp.down_proj.register_forward_pre_hook(weigh))
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def channel_importance(base: Decoder, batches: Iterable[TokenBatch]) -> Float[Tensor, "layers width"]:
    r"""Importance of each channel on some text: $\ln\big(\|W_{down}[:, i]\|\,\mathrm{rms}(h_i)\big)$, standardized.

    Scores that are initialized with it begin as pruning by magnitude, which shortens training.

    Args:
        base: a decoder that is not packed.
        batches: a few batches of text.

    Raises:
        InvalidArgument: no batches; errors of `prunable_intermediate_size`.
    """
    width = prunable_intermediate_size(base)
    device = base.embed_tokens.device
    squares, tokens = torch.zeros(len(base.layers), width, device=device), 0
    hooks = []
    for index, layer in enumerate(base.layers):

        def add(module: nn.Module, given: tuple[Any, ...], index: int = index) -> None:
            squares[index] += given[0].float().square().flatten(0, -2).sum(0)

        hooks.append(cast(Any, layer).mlp.down_proj.register_forward_pre_hook(add))
    try:
        for batch in batches:
            hidden_states(base, replace(batch, ids=batch.ids.to(device)))
            tokens += batch.ids.numel()
    finally:
        for hook in hooks:
            hook.remove()
    if tokens == 0:
        raise InvalidArgument("importance needs at least one batch of text")
    columns = torch.stack([cast(Any, layer).mlp.down_proj.weight.float().norm(dim=0) for layer in base.layers])
    scores = (columns * (squares / tokens).sqrt() + 1e-12).log()
    return (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True)
