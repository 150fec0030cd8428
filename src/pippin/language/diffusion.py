r"""Masked diffusion language models, made from autoregressive ones: a decoder that fills masked tokens in any order.

Notable here:
- the decoder stays what it is; what changes is the mask of its attention, and that some tokens are hidden. No time goes
  in: how much is masked can be seen
- shift: the state that predicted the next token goes on doing so, hence a masked token is predicted from the place
  before it, and nothing that was learnt is lost
- what is reported is a lower bound of the likelihood, and called one; its integral over the noise is exact

Source: Gong et al. 2024, arXiv:2410.17891, sections 3.1 to 3.3; the bound's form: Ou et al. 2024, arXiv:2406.03736.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from tokenizers import AddedToken, Tokenizer as Backend
from torch import Tensor

from pippin.core import device as devices, memory, reference
from pippin.core.checkpoint import model_type, read_json
from pippin.core.errors import (
    Cancelled,
    ContextOverflow,
    CorruptedFile,
    InvalidArgument,
    UnsupportedLayer,
    UnsupportedModel,
)
from pippin.data.chat import ChatTemplate
from pippin.data.tokenizer import Tokenizer
from pippin.language import families
from pippin.language.diffusion_sampling import DEFAULT, Step, Unmasking, unmask
from pippin.language.diffusion_training import MaskedDiffusion, masked_states
from pippin.language.load import LanguageModel, assemble, survey
from pippin.language.packing import choose_packing
from pippin.language.readout import read_out
from pippin.language.transformer import Decoder

MASK: Final = "<|mask|>"
"""The token that is added to a vocabulary."""
_GAP = re.compile(r"\[\[(\d+)\]\]")
_PASS = 4096  # tokens that are computed together


class Bound(NamedTuple):
    """A lower bound of log-likelihoods: estimates, and what they may be off by; not to be compared with exact ones."""

    nats: Float[Tensor, rows]
    """Of each text, in nats: at most 0, and on average no higher than the logarithm of its probability."""
    error: Float[Tensor, rows]
    """Standard errors of the estimates, or a little more."""
    tokens: Int[Tensor, rows]
    """How many tokens of each text the bound is of."""


@dataclass(frozen=True)
class MaskedDiffusionLM:
    """A decoder that fills masked tokens, with all that turns text into its tokens and back.

    Made by `to_diffusion` or `load_diffusion`. Attention is full: windows of the layers are not applied.

    Args:
        model: decoder, tokenizer and chat template.
        mask_id: the token that stands for what is masked.
        shift: whether a token is predicted from the place before it.

    Raises:
        InvalidArgument: a mask outside the vocabulary, or one that is also an end token.
        UnsupportedLayer: layers that read from left to right only; all are listed.
    """

    model: LanguageModel
    mask_id: int
    shift: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.mask_id < self.model.config.vocab_size:
            raise InvalidArgument(
                f"the mask id {self.mask_id} is outside the vocabulary of {self.model.config.vocab_size} tokens"
            )
        if self.mask_id in self.model.tokenizer.eos_ids:
            raise InvalidArgument(f"the mask id {self.mask_id} is an end token of {self.model.name}; take another")
        if causal := self.model.config.recurrent_layers:
            raise UnsupportedLayer(
                f"{self.model.name} has recurrent layers, which cannot see what comes later: "
                f"{', '.join(map(str, causal))}"
            )

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.name

    @property
    def module(self) -> Decoder:
        """What is trained."""
        return self.model.module

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back."""
        return self.model.tokenizer

    @property
    def context_size(self) -> int:
        """Longest text, in tokens."""
        return self.model.context_size

    def objective(self, **settings: Any) -> MaskedDiffusion:
        """What it is trained with; arguments as for `MaskedDiffusion`."""
        return MaskedDiffusion(self.mask_id, shift=self.shift, **settings)

    def steps(
        self,
        ids: Int[Tensor, "rows length"],
        masked: Bool[Tensor, "rows length"],
        how: Unmasking = DEFAULT,
        *,
        seed: int = 0,
        ends: Sequence[int] = (),
    ) -> Iterator[Step]:
        """The steps that fill what is masked, as they are made; whoever stops asking cancels the rest.

        Args:
            ids: what is known; anything where it is masked.
            masked: what to fill.
            how: steps, order, and how tokens are drawn.
            seed: of the draws.
            ends: once a filled one of these stands in each row with nothing masked before it, no step follows.

        Raises:
            InvalidArgument: nothing is masked, or with a shift the first token, or a token is not of the vocabulary;
                blocks, where something known stands behind what is masked. ContextOverflow: too long a text.
        """
        self._check(ids, masked, how)
        device = self.model.device
        ids, masked = ids.to(device), masked.to(device)
        generator = torch.Generator(device).manual_seed(seed)
        filling = unmask(self.module, ids, masked, how, mask_id=self.mask_id, shift=self.shift, generator=generator)
        return _until_ended(filling, masked, torch.tensor(list(ends), dtype=torch.long, device=device))

    def infill(
        self,
        ids: Int[Tensor, "rows length"],
        masked: Bool[Tensor, "rows length"],
        how: Unmasking = DEFAULT,
        *,
        seed: int = 0,
        on_step: Callable[[Step], object] | None = None,
        cancel: Event | None = None,
    ) -> Int[Tensor, "rows length"]:
        """The text with all that is masked filled in; what is not masked stays as it is.

        Args:
            ids, masked, how, seed: as for `steps`.
            on_step: called with each step; ``list.append`` keeps the whole trajectory.
            cancel: once set, no step follows.

        Raises:
            Cancelled: ``cancel`` was set. As `steps`.
        """
        return self._last(self.steps(ids, masked, how, seed=seed), on_step, cancel).ids

    def infill_text(
        self,
        text: str,
        how: Unmasking = DEFAULT,
        *,
        seed: int = 0,
        on_step: Callable[[Step], object] | None = None,
        cancel: Event | None = None,
    ) -> str:
        """A text with its gaps filled in: ``[[12]]`` stands for twelve tokens.

        Raises:
            InvalidArgument: no gap, one of no tokens, or with a shift one at the very beginning.
            Cancelled: as `infill`. ContextOverflow: as `steps`.
        """
        ids, masked = self.gaps(text)
        return self.tokenizer.decode(
            self.infill(ids, masked, how, seed=seed, on_step=on_step, cancel=cancel)[0].tolist()
        )

    def gaps(self, text: str) -> tuple[Int[Tensor, "1 length"], Bool[Tensor, "1 length"]]:
        """The tokens of a text with gaps, ``[[12]]`` for twelve masked tokens, and where they are.

        Raises:
            InvalidArgument: no gap, or one of no tokens.
        """
        parts, tokenizer = _GAP.split(text), self.tokenizer
        if len(parts) == 1:
            raise InvalidArgument(
                f"the text has no gap ({text!r:.60}); write [[12]] where twelve tokens are to be filled"
            )
        ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        plain = tokenizer.without(())
        masked = [False] * len(ids)
        for index, part in enumerate(parts):
            if index % 2 and not int(part):
                raise InvalidArgument("a gap of [[0]] tokens is none; leave it out or give its length")
            new = [self.mask_id] * int(part) if index % 2 else plain.encode(part, start=index == 0) if part else []
            ids += new
            masked += [bool(index % 2)] * len(new)
        return torch.tensor([ids]), torch.tensor([masked])

    def generate(
        self,
        prompt: Int[Tensor, "rows prompt"] | Sequence[int],
        *,
        max_new_tokens: int,
        how: Unmasking = DEFAULT,
        seed: int = 0,
        stop: bool = True,
        on_step: Callable[[Step], object] | None = None,
        cancel: Event | None = None,
    ) -> Int[Tensor, "rows new"]:
        """What follows a prompt.

        Args:
            prompt: token ids; several rows must be equally long.
            max_new_tokens: how many are filled.
            how: steps, order, and how tokens are drawn; with a ``block_size``, from left to right.
            seed: of the draws.
            stop: end with the first end token; it then fills the rest of its row.
            on_step, cancel: as for `infill`.

        Raises:
            InvalidArgument: ``max_new_tokens`` below 1. As `steps`.
        """
        if max_new_tokens < 1:
            raise InvalidArgument(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        known = prompt if isinstance(prompt, Tensor) else torch.tensor([list(prompt)], dtype=torch.long)
        rows, length = known.shape
        ids = torch.cat([known, known.new_full((rows, max_new_tokens), self.mask_id)], 1)
        masked = (torch.arange(ids.shape[1], device=ids.device) >= length).expand_as(ids)
        ends = self.tokenizer.eos_ids if stop else ()
        last = self._last(self.steps(ids, masked, how, seed=seed, ends=ends), on_step, cancel)
        new = last.ids[:, length:]
        for end in ends[:1]:
            seen = torch.isin(new, torch.tensor(ends, device=new.device)).cumsum(1)
            new = torch.where(seen - torch.isin(new, torch.tensor(ends, device=new.device)).long() > 0, end, new)
        return new

    @torch.no_grad()
    def log_likelihood_bound(
        self,
        ids: Int[Tensor, "rows length"],
        *,
        maskable: Bool[Tensor, "rows length"] | None = None,
        samples: int = 32,
        seed: int = 0,
    ) -> Bound:
        r"""A lower bound of the log-probability of texts, given what of them is not maskable.

        Integrated over t, the number m of masked ones among n tokens is uniform, and the bound is the mean of
        $\frac nm \sum_{i\ \mathrm{masked}} \log p(x_i \mid x_m)$; only which tokens are masked is drawn, and m evenly.

        Args:
            ids: texts.
            maskable: the tokens whose probability is meant; None for all (with a shift: all but the first).
            samples: masks drawn for each text, at least 2.
            seed: of the masks.

        Raises:
            InvalidArgument: fewer than 2 samples, nothing maskable in a row, or with a shift the first token.
            ContextOverflow: too long a text.
        """
        if samples < 2:
            raise InvalidArgument(f"samples must be at least 2, got {samples}; the error is told by their spread")
        if maskable is None:
            maskable = torch.ones_like(ids, dtype=torch.bool)
            maskable[:, 0] = not self.shift
        self._check(ids, maskable, None)
        if not bool(maskable.any(1).all()):
            raise InvalidArgument("a row has no maskable token, so there is no probability to bound")
        device = self.model.device
        ids, maskable = ids.to(device), maskable.to(device)
        generator = torch.Generator(device).manual_seed(seed)
        found = []
        for text, may in zip(ids, maskable, strict=True):
            n = int(may.sum())
            even = torch.arange(samples, device=device) + torch.rand(samples, generator=generator, device=device)
            m = 1 + (even / samples * n).long().clamp(max=n - 1)
            chance = torch.rand(samples, len(text), generator=generator, device=device)
            ranks = chance.masked_fill(~may, 2.0).argsort(1).argsort(1)
            nats = self._nats(text.expand(samples, -1), ranks < m[:, None])
            found.append(-n / m * nats)
        values = torch.stack(found)
        return Bound(values.mean(1), values.std(1) / samples**0.5, maskable.sum(1))

    @torch.no_grad()
    def masked_loss(self, ids: Int[Tensor, "rows length"], rate: float, *, seed: int = 0) -> float:
        """Mean cross-entropy of masked tokens, in nats, where each is masked with probability ``rate``.

        Raises:
            InvalidArgument: a rate that is not above 0 and at most 1, or so low that nothing was masked.
            ContextOverflow: too long a text.
        """
        if not 0 < rate <= 1:
            raise InvalidArgument(f"rate must be above 0 and at most 1, got {rate}")
        masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < rate
        masked[:, 0] &= not self.shift
        self._check(ids, masked, None)
        device = self.model.device
        return float(self._nats(ids.to(device), masked.to(device)).sum()) / int(masked.sum())

    def save(self, folder: str | Path) -> None:
        """Write the model as a folder that `load_diffusion` opens, and `pippin.load` refuses by name.

        Raises:
            InvalidArgument, UnsupportedModel: as `LanguageModel.save`.
        """
        kind = families.to_hf(self.model.config)["model_type"]
        settings = {"model_type": kind, "mask_id": self.mask_id, "shift": self.shift}
        self.model.save(folder, note={"model_type": families.DIFFUSION, "architectures": [], "diffusion": settings})

    def _last(self, steps: Iterator[Step], on_step: Callable[[Step], object] | None, cancel: Event | None) -> Step:
        """Go through steps to the last one."""
        step = None
        while not (cancel is not None and cancel.is_set()):
            following = next(steps, None)
            if following is None:
                assert step is not None
                return step
            step = following
            if on_step is not None:
                on_step(step)
        raise Cancelled(f"{self.name} was cancelled while it filled masked tokens")

    def _nats(self, ids: Tensor, masked: Tensor) -> Float[Tensor, rows]:
        """The cross-entropy of the masked tokens of each row, summed."""
        sums = torch.zeros(len(ids), device=ids.device)
        size = max(1, _PASS // ids.shape[1])
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            hidden = masked_states(self.module, ids[part], masked[part], self.mask_id, self.shift)
            targets = ids[part][masked[part]]
            row = masked[part].nonzero()[:, 0] + start

            def score(logits: Tensor, some: slice, targets: Tensor = targets, row: Tensor = row) -> Any:
                scores = logits.float().log_softmax(-1).gather(-1, targets[some, None])[:, 0]
                sums.index_add_(0, row[some], -scores)
                return scores.sum(), {}

            read_out(self.module, hidden, score)
        return sums

    def _check(self, ids: Tensor, masked: Tensor, how: Unmasking | None) -> None:
        """What can be told before anything is computed."""
        if ids.shape != masked.shape:
            raise InvalidArgument(f"ids {tuple(ids.shape)} and masked {tuple(masked.shape)} must have the same shape")
        if ids.shape[1] > self.context_size:
            raise ContextOverflow(
                f"a text of {ids.shape[1]} tokens, masked ones included, does not fit: {self.name} was made for "
                f"{self.context_size}; shorten it or take another model",
                context_size=self.context_size,
                token_count=ids.shape[1],
            )
        if not bool(masked.any()):
            raise InvalidArgument("no token is masked, so there is nothing to predict")
        if self.shift and bool(masked[:, 0].any()):
            raise InvalidArgument(
                "the first token is masked, and with a shift nothing predicts it; put a begin token or text before it"
            )
        known = ids[~masked]
        if len(known) and not 0 <= int(known.min()) <= int(known.max()) < self.model.config.vocab_size:
            raise InvalidArgument(f"ids must be from 0 to {self.model.config.vocab_size - 1}")
        if how is not None and how.block_size is not None:
            start = int(masked.any(0).nonzero()[0])
            if bool(masked[:, :start].any()) or not bool(masked[:, start:].all()):
                raise InvalidArgument(
                    f"block_size={how.block_size} keeps keys and values, which only text that nothing follows can do; "
                    "leave it out to fill gaps with full attention"
                )


def to_diffusion(model: LanguageModel, mask_token: str | int | None = None, *, shift: bool = True) -> MaskedDiffusionLM:
    """A masked diffusion model with the weights of a causal one, to be trained with its `objective`.

    Where a token is added, its embedding begins as the mean of the others; the other weights are shared with ``model``.

    Args:
        model: loaded with ``pack=False``.
        mask_token: what stands for "masked": a token of the vocabulary by its text or id, or a new one; None adds
            `MASK`, unless it is there.
        shift: keep predicting from the place before; False for models trained from nothing without it.

    Raises:
        InvalidArgument: an id outside the vocabulary, an end token, or a packed model that would have to grow.
        UnsupportedLayer: layers that read from left to right only.
    """
    if isinstance(mask_token, int):
        return MaskedDiffusionLM(model, mask_token, shift)
    text = MASK if mask_token is None else mask_token
    found = model.tokenizer.encode(text, control=True)
    if len(found) == 1:
        return MaskedDiffusionLM(model, found[0], shift)
    if any(getattr(part, "packed", None) is not None for part in model.module.modules()):
        raise InvalidArgument(f"{model.name} is packed for inference; load it with pack=False to add a mask token")
    tokenizer = _extended(model.tokenizer, text)
    (index,) = tokenizer.encode(text, control=True)
    template = None if model.template is None else ChatTemplate(model.template.source, tokenizer)
    module = _grown(model.module, index)
    return MaskedDiffusionLM(
        dataclasses.replace(model, module=module, tokenizer=tokenizer, template=template), index, shift
    )


def load_diffusion(
    ref: str | Path, *, device: str | None = None, dtype: str = "auto", pack: bool = True
) -> MaskedDiffusionLM:
    """Open a folder that `MaskedDiffusionLM.save` wrote; arguments as for `pippin.load`.

    Raises:
        UnsupportedModel: a model of another kind. CorruptedFile: settings that are missing or impossible.
        ModelNotFound, UnsafeCheckpoint, InvalidArgument: as `pippin.load`.
    """
    packing = choose_packing(dtype, devices.choose(device), pack=pack)
    found = reference.resolve(ref)
    config = read_json(found.path / "config.json") if found.kind == "folder" else {}
    if config.get("model_type") != families.DIFFUSION:
        raise UnsupportedModel(f"{found.name} is no masked diffusion model; `pippin train diffusion` makes one of it")
    settings = config.get("diffusion")
    try:
        kind, mask_id, shift = (dict(settings or {})[name] for name in ("model_type", "mask_id", "shift"))
        model = assemble(found, survey(found, {**config, "model_type": kind}), packing, pack=pack)
        memory.trim()
        return MaskedDiffusionLM(model, int(mask_id), bool(shift))
    except (KeyError, TypeError, InvalidArgument) as error:
        raise CorruptedFile(f"{found.path}: the settings of the diffusion model are {settings}: {error}") from error


def is_diffusion(ref: str | Path) -> bool:
    """Whether this is a folder that `load_diffusion` opens; nothing is fetched."""
    return model_type(ref) == families.DIFFUSION


def _until_ended(steps: Iterator[Step], masked: Tensor, ends: Tensor) -> Iterator[Step]:
    """The steps, up to the first after which each row has a filled end token with nothing masked before it."""
    for step in steps:
        yield step
        if len(ends):
            open_before = step.masked.cumsum(1) > 0
            if bool((torch.isin(step.ids, ends) & masked & ~open_before).any(1).all()):
                return


def _extended(tokenizer: Tokenizer, text: str) -> Tokenizer:
    """The tokenizer with one more control token, which no plain text is ever read as."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        backend = Backend.from_file(str(Path(folder) / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    return Tokenizer(
        backend,
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
        add_bos=tokenizer.add_bos,
        chat_template=tokenizer.chat_template,
    )


@torch.no_grad()
def _grown(module: Decoder, index: int) -> Decoder:
    """The decoder with a row for one more token, the mean of the rows before it."""
    state = dict(module.state_dict())
    config = dataclasses.replace(module.config, vocab_size=max(module.config.vocab_size, index + 1))
    for name in ("embed_tokens.weight", "lm_head.weight"):
        rows = state[name][:index]
        state[name] = torch.cat([rows, rows.float().mean(0, keepdim=True).to(rows.dtype), state[name][index + 1 :]])
    with torch.device("meta"):
        grown = Decoder(config)
    grown.load_state_dict(state, assign=True)
    grown.tie()
    return grown.train(module.training)
