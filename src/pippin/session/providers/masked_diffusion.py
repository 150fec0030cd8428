"""Provider for masked diffusion models: an answer of fixed length that is filled in any order, streamed from the left.

Notable here:
- snapshots show the part before the first masked token: it only ever grows, as a stream's text must
- the answer starts as ``max_tokens`` masked tokens, or the provider's own number; it ends with the first end token
- a grammar works from left to right, and a masked model fills in any order, so there is no guided generation and no
  tool calling; other unsupported options are refused as well, before anything is computed
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import ContextOverflow, UnsupportedCapability
from pippin.engine.decoding.detokenizer import Detokenizer
from pippin.engine.request import Token
from pippin.language.methods.masked_diffusion.model import MaskedDiffusionLM
from pippin.language.methods.masked_diffusion.sample import UnmaskingOptions, UnmaskingStep
from pippin.session import chat_format
from pippin.session.options import GenerationOptions
from pippin.session.providers.provider import (
    Capabilities,
    Done,
    Provider,
    ProviderEvent,
    ProviderRequest,
    Reason,
    TextDelta,
    require,
)
from pippin.session.response import Timing, Usage

_PLAIN = GenerationOptions()
_NOT_HERE = ("top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")


class DiffusionModel(Provider):
    """A masked diffusion model on this machine.

    Temperature, top-p, seed, stop strings and maximum length are those of the request.

    Args:
        model: a folder that `MaskedDiffusionLM.load` opens, or a loaded model.
        steps: steps of the reverse process, for the whole answer or for each block of it.
        order: "confidence" fixes the most confident tokens first, "random" follows the reverse process.
        block_size: fill from left to right in blocks of this many tokens; None fills the answer as one.
        max_tokens: number of masked tokens if the request sets none.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptedFile: as `MaskedDiffusionLM.load`.
    """

    @checked
    def __init__(
        self,
        model: str | Path | MaskedDiffusionLM,
        *,
        steps: int = 64,
        order: Literal["random", "confidence"] = "confidence",
        block_size: int | None = None,
        max_tokens: PositiveInt = 128,
    ) -> None:
        self.how = UnmaskingOptions(steps, order, block_size=block_size)
        self.model = model if isinstance(model, MaskedDiffusionLM) else MaskedDiffusionLM.load(model)
        self.answer_tokens = max_tokens
        self.name = self.model.name
        self.context_size: int = self.model.context_size
        self.capabilities = Capabilities()

    def stream(self, request: ProviderRequest) -> Iterator[ProviderEvent]:
        """Answer one request; see `Provider.stream`.

        Raises:
            UnsupportedCapability: guides, tools, reasoning, log-probabilities, adapters, penalties, top-k or min-p.
            ContextOverflow: prompt and answer do not fit.
        """
        require(self, request)
        options = request.options
        others = [name for name in _NOT_HERE if getattr(options, name) != getattr(_PLAIN, name)]
        if request.adapter is not None:
            others.append("adapter")
        if others:
            raise UnsupportedCapability(
                f"{self.name} fills masked tokens and has no {', '.join(others)}; ask without, or take another model"
            )
        prompt = self._encode(request)
        room = self.context_size - len(prompt)
        length = min(options.max_tokens or self.answer_tokens, room)
        if length < 1:
            raise ContextOverflow(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer; {self.name} was made for "
                f"{self.context_size}",
                context_size=self.context_size,
                token_count=len(prompt) + 1,
            )
        how = UnmaskingOptions(
            self.how.steps, self.how.order, options.temperature or 0.0, options.top_p, self.how.block_size
        )
        ids = torch.tensor([prompt + [self.model.mask_id] * length])
        masked = torch.arange(ids.shape[1])[None] >= len(prompt)
        seed = torch.seed() % 2**63 if options.seed is None else options.seed
        steps = self.model.steps(ids, masked, how, seed=seed, end_ids=self.model.tokenizer.eos_ids)
        return self._events(request, steps, len(prompt))

    def token_count(self, item: str | ProviderRequest) -> int:
        """Tokens of a text, or of all that the model reads for a request."""
        return len(self._encode(item)) if isinstance(item, ProviderRequest) else len(self.model.tokenizer.encode(item))

    def _encode(self, request: ProviderRequest) -> list[int]:
        return (
            list(request.ids) if request.ids is not None else chat_format.encode(self.model.model, request.transcript)
        )

    def _events(self, request: ProviderRequest, steps: Iterator[UnmaskingStep], prompt: int) -> Iterator[ProviderEvent]:
        start, first = time.perf_counter(), 0.0
        tokenizer, text, shown = self.model.tokenizer, Detokenizer(request.options.stop), 0
        reason: Reason = "length"
        while reason == "length":
            if request.cancel.is_set():
                reason = "cancelled"
                break
            step = next(steps, None)
            if step is None:
                break
            ids, gaps = step.ids[0, prompt:].tolist(), step.masked[0, prompt:].tolist()
            ready, tokens = "", []
            while shown < len(ids) and not gaps[shown] and reason == "length":
                if ids[shown] in tokenizer.eos_ids:
                    reason = "stop"
                    break
                more = text.push(tokenizer.token_bytes(ids[shown]))
                tokens.append(Token(ids[shown], more))
                ready, shown = ready + more, shown + 1
                reason = "stop" if text.stopped else reason
            if tokens:
                first = first or time.perf_counter() - start
                yield TextDelta(ready, tuple(tokens))
        rest = "" if reason == "cancelled" else text.finish()
        if rest:
            yield TextDelta(rest)
        spent = Timing(answer_seconds=time.perf_counter() - start, first_token_seconds=first)
        yield Done(reason, Usage(input_tokens=prompt, output_tokens=shown), spent)
