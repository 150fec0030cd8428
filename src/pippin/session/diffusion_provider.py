"""A masked diffusion model as a provider: an answer of fixed length that fills in any order, shown from the left.

Notable here:
- what is shown is the part with no gap before it: it only ever grows, as a stream's text must
- the answer has a canvas: ``max_tokens`` masked tokens, or the provider's own number; it ends with the first end token
- a grammar holds a text from left to right, and a mask fills it in any order, so there is no guided generation and no
  tool; whatever else cannot be done is refused as well, before anything is computed
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from pippin.core.errors import ContextOverflow, InvalidArgument, UnsupportedCapability
from pippin.engine.request import Token
from pippin.engine.text import TextStream
from pippin.language.diffusion import MaskedDiffusionLM, load_diffusion
from pippin.language.diffusion_sampling import Step, Unmasking
from pippin.session import prompting
from pippin.session.options import GenerationOptions
from pippin.session.provider import Capabilities, Done, Provider, Reason, TextDelta, Turn, TurnEvent, require
from pippin.session.response import Timing, Usage

_PLAIN = GenerationOptions()
_NOT_HERE = ("top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")


class DiffusionModel(Provider):
    """A masked diffusion model on this machine.

    Temperature, top-p, seed, stop strings and the longest answer are those of the request.

    Args:
        model: a folder that `pippin.language.load_diffusion` opens, or an open model.
        steps: of the reverse process, for the whole answer or for each block of it.
        order: "confidence" fixes the surest tokens first, "random" follows the reverse process.
        block_size: fill from left to right in blocks of so many tokens; None fills the answer as one.
        answer_tokens: length of the canvas where the request names none.

    Raises:
        InvalidArgument: a number below 1, or an unknown order. As `load_diffusion`.
    """

    def __init__(
        self,
        model: str | Path | MaskedDiffusionLM,
        *,
        steps: int = 64,
        order: str = "confidence",
        block_size: int | None = None,
        answer_tokens: int = 128,
    ) -> None:
        if answer_tokens < 1:
            raise InvalidArgument(f"answer_tokens must be at least 1, got {answer_tokens}")
        self.how = Unmasking(steps, order, block_size=block_size)
        self.model = model if isinstance(model, MaskedDiffusionLM) else load_diffusion(model)
        self.answer_tokens = answer_tokens
        self.name = self.model.name
        self.context_size: int = self.model.context_size
        self.capabilities = Capabilities()

    def stream(self, turn: Turn) -> Iterator[TurnEvent]:
        """Answer one turn; see `Provider.stream`.

        Raises:
            UnsupportedCapability: guides, tools, reasoning, log-probabilities, adapters, penalties, top-k or min-p.
            ContextOverflow: prompt and answer do not fit.
        """
        require(self, turn)
        options = turn.options
        others = [name for name in _NOT_HERE if getattr(options, name) != getattr(_PLAIN, name)]
        if turn.adapter is not None:
            others.append("adapter")
        if others:
            raise UnsupportedCapability(
                f"{self.name} fills masked tokens and has no {', '.join(others)}; ask without, or take another model"
            )
        prompt = self._encode(turn)
        room = self.context_size - len(prompt)
        length = min(options.max_tokens or self.answer_tokens, room)
        if length < 1:
            raise ContextOverflow(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer; {self.name} was made for "
                f"{self.context_size}",
                context_size=self.context_size,
                token_count=len(prompt) + 1,
            )
        how = Unmasking(self.how.steps, self.how.order, options.temperature, options.top_p, self.how.block_size)
        ids = torch.tensor([prompt + [self.model.mask_id] * length])
        masked = torch.arange(ids.shape[1])[None] >= len(prompt)
        seed = torch.seed() % 2**63 if options.seed is None else options.seed
        steps = self.model.steps(ids, masked, how, seed=seed, ends=self.model.tokenizer.eos_ids)
        return self._events(turn, steps, len(prompt))

    def token_count(self, item: str | Turn) -> int:
        """Tokens of a text, or of all that the model reads in a turn."""
        return len(self._encode(item)) if isinstance(item, Turn) else len(self.model.tokenizer.encode(item))

    def _encode(self, turn: Turn) -> list[int]:
        return list(turn.ids) if turn.ids is not None else prompting.encode(self.model.model, turn.transcript)

    def _events(self, turn: Turn, steps: Iterator[Step], prompt: int) -> Iterator[TurnEvent]:
        start, first = time.perf_counter(), 0.0
        tokenizer, text, shown = self.model.tokenizer, TextStream(turn.options.stop), 0
        reason: Reason = "length"
        while reason == "length":
            if turn.cancel.is_set():
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
