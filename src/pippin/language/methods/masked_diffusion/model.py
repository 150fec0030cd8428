r"""Masked diffusion language models, adapted from autoregressive ones: a decoder that fills masked tokens in any order.

Notable here:
- the decoder is unchanged; attention becomes full, and some tokens are masked. There is no time embedding: the number
  of masked tokens determines the time
- shift: a masked token is predicted from the position before it, as in the causal model, so that its pretraining is
  reused
- likelihoods are lower bounds, and called so; the integral over the noise is exact

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
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from jaxtyping import Bool, Float, Int
from tokenizers import AddedToken, Tokenizer as Backend
from torch import Tensor

from pippin.core import device as devices, memory
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import (
    Cancelled,
    ContextOverflow,
    InvalidArgument,
)
from pippin.core.formats import checkpoint
from pippin.core.store.reference import Resolved
from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tokenizer import Tokenizer
from pippin.language.checkpoint_headers import CheckpointHeaders
from pippin.language.chunked_loss import sum_in_chunks
from pippin.language.decoder import Decoder
from pippin.language.language_model import LanguageModel, assemble
from pippin.language.methods.masked_diffusion.config import MaskedDiffusionConfig
from pippin.language.methods.masked_diffusion.loss import MaskedDiffusion, masked_states
from pippin.language.methods.masked_diffusion.sample import DEFAULT, UnmaskingOptions, UnmaskingStep, unmask
from pippin.language.weight_packing import DType, choose_packing
from pippin.nn.packed_layers import check_not_packed

MASK: Final = "<|mask|>"
"""The mask token that is added to a vocabulary."""
_GAP = re.compile(r"\[\[(\d+)\]\]")
_MAX_TOKENS = 4096  # tokens of one pass


class LikelihoodBound(NamedTuple):
    """Estimated lower bounds of log-likelihoods; not to be compared with exact ones."""

    log_likelihood: Float[Tensor, rows]
    """Lower bound for each text, in nats: at most 0, and on average at most the logarithm of its probability."""
    standard_error: Float[Tensor, rows]
    """Standard errors of the estimates (a little larger, as samples are stratified)."""
    num_tokens: Int[Tensor, rows]
    """Number of tokens of each text that the bound covers."""


@dataclass(frozen=True)
class MaskedDiffusionLM:
    """A decoder that fills masked tokens, with its tokenizer and chat template.

    `to_diffusion` makes one of a causal model, `load` opens a saved one.

    Args:
        model: decoder, tokenizer and chat template.
        mask_id: the mask token.
        shift: whether a token is predicted from the position before it.

    Raises:
        InvalidArgument: a mask token outside the vocabulary, or one that is also an end token.
        UnsupportedLayer: recurrent layers; all are listed.
    """

    model_type: ClassVar = "pippin_masked_diffusion"

    model: LanguageModel
    mask_id: int
    shift: bool = True

    def __post_init__(self) -> None:
        _ = self.config  # which checks mask and layers
        if self.mask_id in self.model.tokenizer.eos_ids:
            raise InvalidArgument(f"mask_id {self.mask_id} is an end token of {self.model.name}; take another")

    @property
    def config(self) -> MaskedDiffusionConfig:
        """Decoder, mask token and shift."""
        return MaskedDiffusionConfig(self.model.config, self.mask_id, self.shift)

    @property
    def name(self) -> str:
        """The name of the language model."""
        return self.model.name

    @property
    def module(self) -> Decoder:
        """The decoder."""
        return self.model.module

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the language model."""
        return self.model.tokenizer

    @property
    def context_size(self) -> int:
        """Maximum length of a text, in tokens."""
        return self.model.context_size

    def objective(self, **settings: Any) -> MaskedDiffusion:
        """The objective of its training; arguments as for `MaskedDiffusion`."""
        return MaskedDiffusion(self.mask_id, shift=self.shift, **settings)

    def steps(
        self,
        ids: Int[Tensor, "rows length"],
        masked: Bool[Tensor, "rows length"],
        options: UnmaskingOptions = DEFAULT,
        *,
        seed: int = 0,
        end_ids: Sequence[int] = (),
    ) -> Iterator[UnmaskingStep]:
        """The steps that fill masked tokens, as they are computed; stopping the iteration cancels the rest.

        Args:
            ids: known tokens; any value where masked.
            masked: the positions to fill.
            options: steps, order and sampling.
            seed: seed of the sampling.
            end_ids: the last step is the one after which each row holds one of these among its filled tokens, with
                nothing masked before it.

        Raises:
            InvalidArgument: nothing is masked; with a shift, the first token is; a token outside the vocabulary;
                blocks, where a known token comes after a masked one.
            ContextOverflow: the text is too long.
        """
        self._check(ids, masked, options)
        device = self.model.device
        ids, masked = ids.to(device), masked.to(device)
        generator = torch.Generator(device).manual_seed(seed)
        filling = unmask(self.module, ids, masked, options, mask_id=self.mask_id, shift=self.shift, generator=generator)
        return _until_ended(filling, masked, torch.tensor(list(end_ids), dtype=torch.long, device=device))

    def infill(
        self,
        ids: Int[Tensor, "rows length"],
        masked: Bool[Tensor, "rows length"],
        options: UnmaskingOptions = DEFAULT,
        *,
        seed: int = 0,
        on_step: Callable[[UnmaskingStep], object] | None = None,
        cancel: Event | None = None,
    ) -> Int[Tensor, "rows length"]:
        """The text with its masked tokens filled; known tokens stay as they are.

        Args:
            ids, masked, options, seed: as for `steps`.
            on_step: called with each step; ``list.append`` keeps the whole trajectory.
            cancel: once set, no step follows.

        Raises:
            Cancelled: ``cancel`` was set.
            InvalidArgument, ContextOverflow: as `steps`.
        """
        return self._last(self.steps(ids, masked, options, seed=seed), on_step, cancel).ids

    def infill_text(
        self,
        text: str,
        options: UnmaskingOptions = DEFAULT,
        *,
        seed: int = 0,
        on_step: Callable[[UnmaskingStep], object] | None = None,
        cancel: Event | None = None,
    ) -> str:
        """A text with its gaps filled in: ``[[12]]`` stands for twelve tokens.

        Raises:
            InvalidArgument: no gap, a gap of zero tokens, or with a shift one at the very beginning.
            Cancelled, ContextOverflow: as `infill`.
        """
        ids, masked = self.parse_gaps(text)
        return self.tokenizer.decode(
            self.infill(ids, masked, options, seed=seed, on_step=on_step, cancel=cancel)[0].tolist()
        )

    def parse_gaps(self, text: str) -> tuple[Int[Tensor, "1 length"], Bool[Tensor, "1 length"]]:
        """Token ids of a text with gaps (``[[12]]`` for twelve masked tokens), and which are masked.

        Raises:
            InvalidArgument: no gap, or a gap of zero tokens.
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
                raise InvalidArgument("a gap of [[0]] tokens; leave it out or give its length")
            new = [self.mask_id] * int(part) if index % 2 else plain.encode(part, start=index == 0) if part else []
            ids += new
            masked += [bool(index % 2)] * len(new)
        return torch.tensor([ids]), torch.tensor([masked])

    @checked
    def generate(
        self,
        prompt: Int[Tensor, "rows prompt"] | Sequence[int],
        *,
        max_new_tokens: PositiveInt,
        options: UnmaskingOptions = DEFAULT,
        seed: int = 0,
        stop: bool = True,
        on_step: Callable[[UnmaskingStep], object] | None = None,
        cancel: Event | None = None,
    ) -> Int[Tensor, "rows new"]:
        """Tokens that follow a prompt.

        Args:
            prompt: token ids; several rows must have one length.
            max_new_tokens: number of masked tokens after the prompt, all of which are filled.
            options: steps, order and sampling; with a ``block_size``, from left to right.
            seed: seed of the sampling.
            stop: end at the first end token, which then fills the rest of its row.
            on_step, cancel: as for `infill`.

        Raises:
            InvalidArgument: ``max_new_tokens`` below 1.
            Cancelled, ContextOverflow: as `infill`.
        """
        known = prompt if isinstance(prompt, Tensor) else torch.tensor([list(prompt)], dtype=torch.long)
        rows, length = known.shape
        ids = torch.cat([known, known.new_full((rows, max_new_tokens), self.mask_id)], 1)
        masked = (torch.arange(ids.shape[1], device=ids.device) >= length).expand_as(ids)
        ends = self.tokenizer.eos_ids if stop else ()
        last = self._last(self.steps(ids, masked, options, seed=seed, end_ids=ends), on_step, cancel)
        new = last.ids[:, length:]
        for end in ends[:1]:
            seen = torch.isin(new, torch.tensor(ends, device=new.device)).cumsum(1)
            new = torch.where(seen - torch.isin(new, torch.tensor(ends, device=new.device)).long() > 0, end, new)
        return new

    @torch.no_grad()
    @checked
    def log_likelihood_bound(
        self,
        ids: Int[Tensor, "rows length"],
        *,
        maskable: Bool[Tensor, "rows length"] | None = None,
        samples: Annotated[int, Ge(2)] = 32,
        seed: int = 0,
    ) -> LikelihoodBound:
        r"""A lower bound of the log-probability of texts, given the tokens that are not maskable.

        Integrated over t, the number m of masked ones among n tokens is uniform, and the bound is the mean of
        $\frac nm \sum_{i\ \mathrm{masked}} \log p(x_i \mid x_m)$; m is stratified, and only the positions are sampled.

        Args:
            ids: the texts.
            maskable: the tokens whose probability is bounded; None for all (with a shift: all but the first).
            samples: masks sampled for each text.
            seed: seed of the masks.

        Raises:
            InvalidArgument: fewer than 2 samples, nothing maskable in a row, or with a shift the first token.
            ContextOverflow: a text is too long.
        """
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
        for text, is_maskable in zip(ids, maskable, strict=True):
            n = int(is_maskable.sum())
            even = torch.arange(samples, device=device) + torch.rand(samples, generator=generator, device=device)
            m = 1 + (even / samples * n).long().clamp(max=n - 1)
            chance = torch.rand(samples, len(text), generator=generator, device=device)
            ranks = chance.masked_fill(~is_maskable, 2.0).argsort(1).argsort(1)
            nats = self._nats(text.expand(samples, -1), ranks < m[:, None])
            found.append(-n / m * nats)
        values = torch.stack(found)
        return LikelihoodBound(values.mean(1), values.std(1) / samples**0.5, maskable.sum(1))

    @torch.no_grad()
    @checked
    def masked_loss(
        self, ids: Int[Tensor, "rows length"], mask_rate: Annotated[float, Gt(0), Le(1)], *, seed: int = 0
    ) -> float:
        """Mean cross-entropy of masked tokens, in nats, where each is masked with probability ``mask_rate``.

        Raises:
            InvalidArgument: a rate that is not above 0 and at most 1, or so low that nothing was masked.
            ContextOverflow: too long a text.
        """
        masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < mask_rate
        masked[:, 0] &= not self.shift
        self._check(ids, masked, None)
        device = self.model.device
        return float(self._nats(ids.to(device), masked.to(device)).sum()) / int(masked.sum())

    def save(self, path: str | Path) -> None:
        """Write the model and its tokenizer to a folder that `load` reads.

        Raises:
            InvalidArgument: the model is packed.
            DiskFull: nothing was written.
        """
        check_not_packed(self.module, self.name)
        checkpoint.save(
            self.module, path, model_type=self.model_type, config=self.config, tokenizer=self.model.tokenizer
        )

    @classmethod
    def load(
        cls, path: str | Path, *, device: str | None = None, dtype: DType = "auto", pack: bool = True
    ) -> MaskedDiffusionLM:
        """Open a folder that `save` wrote.

        Args:
            path: the folder.
            device, dtype, pack: as for `pippin.load`.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged, or the tensors do not fit the config.
            InvalidArgument: an unknown device or precision.
        """
        packing = choose_packing(dtype, devices.choose(device), pack=pack)
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=MaskedDiffusionConfig)
        stored, config = saved.checkpoint, saved.config
        with torch.device("meta"):
            module = Decoder(config.decoder)
        checkpoint.check_tensors(module, stored)
        headers = CheckpointHeaders(
            module,
            tuple(stored.names()),
            tensor=lambda name, precision: stored.tensor(name).to(precision),
            tokenizer=lambda: Tokenizer.from_folder(saved.path),
            release=stored.release,
        )
        model = assemble(Resolved(saved.path.name, "folder", saved.path), headers, packing, pack=pack)
        memory.trim()
        return cls(model, config.mask_id, config.shift)

    def _last(
        self, steps: Iterator[UnmaskingStep], on_step: Callable[[UnmaskingStep], object] | None, cancel: Event | None
    ) -> UnmaskingStep:
        """Run steps to the last one."""
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
        size = max(1, _MAX_TOKENS // ids.shape[1])
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            hidden = masked_states(self.module, ids[part], masked[part], self.mask_id, self.shift)
            targets = ids[part][masked[part]]
            row = masked[part].nonzero()[:, 0] + start

            def score(logits: Tensor, some: slice, targets: Tensor = targets, row: Tensor = row) -> Any:
                scores = logits.float().log_softmax(-1).gather(-1, targets[some, None])[:, 0]
                sums.index_add_(0, row[some], -scores)
                return scores.sum(), {}

            sum_in_chunks(self.module, hidden, score)
        return sums

    def _check(self, ids: Tensor, masked: Tensor, options: UnmaskingOptions | None) -> None:
        """Check the arguments before anything is computed."""
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
        if options is not None and options.block_size is not None:
            start = int(masked.any(0).nonzero()[0])
            if bool(masked[:, :start].any()) or not bool(masked[:, start:].all()):
                raise InvalidArgument(
                    f"block_size={options.block_size} caches finished blocks: masked tokens must stand at the end; "
                    "leave it out to fill gaps with full attention"
                )


def to_diffusion(model: LanguageModel, mask_token: str | int | None = None, *, shift: bool = True) -> MaskedDiffusionLM:
    """A masked diffusion model with the weights of a causal one, to be trained with its `objective`.

    Where a token is added, its embedding begins as the mean of the others; the other weights are shared with ``model``.

    Args:
        model: loaded with ``pack=False``.
        mask_token: the mask token: one of the vocabulary by its text or id, or a new one by its text; None takes `MASK`
            and adds it where it is missing.
        shift: keep predicting from the position before; False for models trained from scratch without it.

    Raises:
        InvalidArgument: an id outside the vocabulary, an end token, or a packed model that would have to grow.
        UnsupportedLayer: recurrent layers.
    """
    if isinstance(mask_token, int):
        return MaskedDiffusionLM(model, mask_token, shift)
    text = MASK if mask_token is None else mask_token
    found = model.tokenizer.encode(text, control=True)
    if len(found) == 1:
        return MaskedDiffusionLM(model, found[0], shift)
    check_not_packed(model.module, model.name)
    tokenizer = _extended(model.tokenizer, text)
    (index,) = tokenizer.encode(text, control=True)
    template = None if model.template is None else ChatTemplate(model.template.source, tokenizer)
    module = _grown(model.module, index)
    return MaskedDiffusionLM(
        dataclasses.replace(model, network=module, tokenizer=tokenizer, template=template), index, shift
    )


def _until_ended(steps: Iterator[UnmaskingStep], masked: Tensor, ends: Tensor) -> Iterator[UnmaskingStep]:
    """The steps, up to the first after which each row has a filled end token with nothing masked before it."""
    for step in steps:
        yield step
        if len(ends):
            open_before = step.masked.cumsum(1) > 0
            if bool((torch.isin(step.ids, ends) & masked & ~open_before).any(1).all()):
                return


def _extended(tokenizer: Tokenizer, text: str) -> Tokenizer:
    """The tokenizer with one more control token, to which plain text is never tokenized."""
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
    grown.tie_weights()
    return grown.train(module.training)
