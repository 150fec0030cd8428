r"""Instruction-following pruning: the prompt decides, once and before decoding, which feed-forward channels there are.

Notable here:
- a small decoder reads the prompt, and a head makes of its last state a score for every channel of every layer; the
  k best of a layer stay, with weights that gradients reach (`pippin.nn.soft_top_k`)
- in training the mask stands in front of the down projection and every row has its own; for inference the chosen rows
  and columns are gathered once, and what decodes is an ordinary, smaller `Decoder` with the weights folded in
- the prompt itself is read under the mask that its answer uses; attention, embeddings and norms are never pruned
- scores that no prompt changes (`StaticMask`) are plain structured pruning, learnt the same way: the control

What it learns from is `pippin.language.pruning_objectives`; on disk it is a `pippin.language.pruned.PrunedModel`.

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

from pippin.core.errors import InvalidArgument, UnsupportedLayer, VocabularyMismatch
from pippin.data.batches import TokenBatch
from pippin.language.readout import hidden_states
from pippin.language.transformer import Decoder
from pippin.nn.cache import Documents
from pippin.nn.feedforward import FeedForward
from pippin.nn.linear import Linear
from pippin.nn.soft_top_k import check_top_k, soft_top_k, top_k_indices, top_k_mask

READER_RATE = 0.1
"""Share of the learning rate at which a reader learns; at all of it, it soon says the same of every prompt."""
Prompts = Int[Tensor, "rows length"]
"""Prompts of one length, each a row; or prompts end to end in one row, with the number of tokens of each beside it."""


class MaskPredictor(nn.Module):
    """Scores of all channels, from a prompt: a small decoder and a head of two layers on its last state.

    Args:
        reader: reads the prompt; it must have the vocabulary of the model that is pruned.
        layers: of the model that is pruned.
        width: channels of each of its feed-forward layers.
        hidden: between the two layers of the head; the second holds ``hidden * layers * width`` weights.

    Source: arXiv:2501.02086, section 3.1.
    """

    def __init__(self, reader: Decoder, layers: int, width: int, hidden: int = 128) -> None:
        super().__init__()
        if hidden < 1:
            raise InvalidArgument(f"hidden must be at least 1, got {hidden}")
        self.layers, self.width = layers, width
        self.reader = reader
        self.inner = Linear(reader.config.width, hidden, bias=True)
        self.outer = Linear(hidden, layers * width, bias=True)
        self.slow_reader()

    def slow_reader(self) -> None:
        """Let the reader learn at `READER_RATE`; to be said again where its parameters were replaced."""
        for parameter in self.reader.parameters():
            parameter.lr_scale = READER_RATE  # type: ignore[attr-defined]

    def forward(self, ids: Prompts, documents: Sequence[int] | None = None) -> Float[Tensor, "prompts layers width"]:
        """The scores for each prompt.

        Args:
            ids: rows of one length, or one row with prompts end to end.
            documents: tokens of each prompt of that row; None where every row is a prompt.
        """
        if documents is None:
            last = self.reader.hidden(ids)[:, -1]
        else:
            ends = torch.tensor(documents, device=ids.device).cumsum(0) - 1
            last = self.reader.hidden(ids, cache=Documents(documents))[0, ends]
        scores: Tensor = self.outer(nn.functional.silu(self.inner(last)))
        return scores.float().view(-1, self.layers, self.width)

    def initialise(self, *, seed: int, reader: bool = True) -> MaskPredictor:
        """Random weights in the head, for scores with a deviation of about 0.1, and in the reader if that is wanted."""
        if reader:
            self.reader.initialise(seed=seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for linear, gain in ((self.inner, 1.0), (self.outer, 0.2)):
            assert linear.weight is not None
            assert linear.bias is not None
            nn.init.normal_(linear.weight, 0.0, gain / math.sqrt(linear.inputs), generator)
            nn.init.zeros_(linear.bias)
        return self

    def set_start(self, scores: Float[Tensor, "layers width"]) -> None:
        """Let the scores of every prompt begin from these."""
        assert self.outer.bias is not None
        self.outer.bias.data.copy_(scores.flatten())


class StaticMask(nn.Module):
    """Learnt scores that are the same for every prompt; ten times their parameters, so that they learn as quickly.

    A step of Adam moves a score of `MaskPredictor` by the steps of a whole row of its head.

    Args:
        layers: of the model that is pruned.
        width: channels of each of its feed-forward layers.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        self.tenths = nn.Parameter(torch.empty(layers, width))

    def forward(self, ids: Prompts, documents: Sequence[int] | None = None) -> Float[Tensor, "prompts layers width"]:
        """The scores, as often as there are prompts."""
        count = len(ids) if documents is None else len(documents)
        return (10 * self.tenths.float()).expand(count, -1, -1)

    def initialise(self, *, seed: int) -> StaticMask:
        """Random scores with a deviation of 0.1, as those of a `MaskPredictor` begin."""
        nn.init.normal_(self.tenths, 0.0, 0.01, torch.Generator().manual_seed(seed))
        return self

    def set_start(self, scores: Float[Tensor, "layers width"]) -> None:
        """Let the scores begin from these."""
        self.tenths.data.copy_(scores / 10)


class InstructionFollowing(nn.Module):
    """A decoder whose feed-forward layers are cut down to ``keep`` channels by what the prompt says.

    Args:
        base: the whole model, not packed, with dense feed-forward layers of one width.
        predictor: made for its number of layers and their width.
        keep: channels that are left in each layer.
        eps: how soft the choice is; see `pippin.nn.soft_top_k.soft_top_k`.

    Raises:
        InvalidArgument: ``keep`` outside 1 to the width, ``eps`` not above 0, a predictor of another shape, a packed
            base.
        UnsupportedLayer: the base has feed-forward layers that have no channels to choose from; all are listed.
        VocabularyMismatch: the predictor reads another number of tokens than the base.

    >>> from pippin.language.presets import preset
    >>> base = Decoder(preset("nano", 100)).initialise(seed=0)
    >>> reader = Decoder(preset("nano", 100))
    >>> model = InstructionFollowing(base, MaskPredictor(reader, 4, 352).initialise(seed=1), keep=64)
    >>> model.specialize(torch.tensor([3, 1, 4])).config.layers[0].feedforward.size
    64
    """

    def __init__(self, base: Decoder, predictor: MaskPredictor | StaticMask, keep: int, eps: float = 1.0) -> None:
        super().__init__()
        width = width_of(base)
        check_top_k(torch.zeros(width), keep, eps)
        if (predictor.layers, predictor.width) != (len(base.layers), width):
            raise InvalidArgument(
                f"the predictor scores {predictor.layers} layers of {predictor.width} channels, the base has "
                f"{len(base.layers)} of {width}"
            )
        if isinstance(predictor, MaskPredictor) and predictor.reader.config.vocab_size != base.config.vocab_size:
            raise VocabularyMismatch(
                f"the predictor reads {predictor.reader.config.vocab_size} different tokens, the base "
                f"{base.config.vocab_size}; give it a decoder made for the tokenizer of the base"
            )
        self.base, self.predictor = base, predictor
        self.keep, self.eps = keep, eps
        if isinstance(predictor, MaskPredictor):
            predictor.slow_reader()

    @property
    def width(self) -> int:
        """Channels of a feed-forward layer before any is taken away."""
        return self.predictor.width

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
            keep: another number of channels than the model's, while it is being trained.
            eps: another softness.
        """
        scores = self.predictor(ids, documents)
        return top_k_mask(scores, self.keep if keep is None else keep, self.eps if eps is None else eps)

    def forward(
        self, ids: Int[Tensor, "rows length"], masks: Float[Tensor, "rows layers width"]
    ) -> Float[Tensor, "rows length vocab"]:
        """Logits of the whole model under the mask of each row: as exact as `specialize`, and no quicker than the base.

        Args:
            ids: token ids.
            masks: of each row; rows may differ, and no channel is used by a row that did not choose it.
        """
        logits: Tensor = self.base.lm_head(self.hidden(ids, masks))
        return logits

    def hidden(
        self,
        ids: Int[Tensor, "rows length"],
        masks: Float[Tensor, "texts layers width"],
        documents: Sequence[int] | None = None,
    ) -> Float[Tensor, "rows length model"]:
        """Normalised hidden states under masks, as the output matrix reads them.

        Args:
            ids: rows of one length, or one row with texts end to end.
            masks: of each row, or of each text of that row.
            documents: tokens of each text of that row.
        """
        with masked(self.base, masks, documents):
            return self.base.hidden(ids, cache=None if documents is None else Documents(documents))

    @torch.no_grad()
    def specialize(self, ids: Int[Tensor, tokens]) -> Decoder:
        """The small model that a prompt asks for: an ordinary decoder whose feed-forward layers are ``keep`` wide.

        Its logits are those of the masked model up to rounding. Attention, embeddings and norms are the tensors of the
        base, not copies, so further small models cost their feed-forward layers only.

        Args:
            ids: the prompt (of a `StaticMask`, any).

        Raises:
            InvalidArgument: no tokens; a base that was packed since.
        """
        if len(ids) == 0:
            raise InvalidArgument("the prompt has no tokens; give the text that the answer will be about")
        width_of(self.base)
        ids = ids.to(self.base.embed_tokens.device)
        scores = self.predictor(ids[None])[0]
        weights, chosen = soft_top_k(scores, self.keep, self.eps), top_k_indices(scores, self.keep)
        layers = tuple(
            replace(layer, feedforward=replace(layer.feedforward, size=self.keep)) for layer in self.base.config.layers
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
        small.tie()
        return small.requires_grad_(False).eval()


def width_of(base: Decoder) -> int:
    """Channels of each feed-forward layer of a decoder that can be pruned.

    Raises:
        UnsupportedLayer: feed-forward layers of another kind, or with weights that are computed; all are listed.
        InvalidArgument: packed weights, or layers of several widths.
    """
    wrong = []
    for index, layer in enumerate(base.layers):
        mlp = cast(Any, layer).mlp
        if not isinstance(mlp, FeedForward):
            wrong.append(f"layer {index}: {type(mlp).__name__}")
            continue
        parts = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if mlp.gate_up_proj is not None or any(part is not None and part.packed is not None for part in parts):
            raise InvalidArgument("the base is packed, so its channels cannot be chosen; load it with pack=False")
        wrong += [f"layer {index}: {type(part).__name__}" for part in parts if part and type(part) is not Linear]
    if wrong:
        raise UnsupportedLayer(
            f"channels can be chosen in dense feed-forward layers, gated or plain; found {', '.join(wrong)}"
        )
    widths = {layer.feedforward.size for layer in base.config.layers}
    if len(widths) > 1:
        raise InvalidArgument(f"the feed-forward layers have several widths ({sorted(widths)}); one is needed")
    return widths.pop()


@contextmanager
def masked(
    base: Decoder, masks: Float[Tensor, "texts layers width"], documents: Sequence[int] | None = None
) -> Iterator[None]:
    """Within the block, every feed-forward layer of the base multiplies its channels by the mask of the text.

    Args:
        base: is left as it was at the end of the block.
        masks: of each row of the passes to come, or of each text of their single row.
        documents: tokens of each of those texts; None where every row is one.
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
def importance(base: Decoder, batches: Iterable[TokenBatch]) -> Float[Tensor, "layers width"]:
    r"""What each channel gives on some text: $\ln\big(\|W_{down}[:, i]\|\,\mathrm{rms}(h_i)\big)$, in standard units.

    Scores that begin from it begin with pruning by size, from which learning has less to mend.

    Args:
        base: not packed.
        batches: a few are enough.

    Raises:
        InvalidArgument: no batches; what `width_of` refuses.
    """
    width = width_of(base)
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
