"""What a request may have beside the tokens of its prompt, and what a pass over a part of it gets of that.

Notable here:
- a token whose embedding was given is known by a negative key, made of what the embedding stands for and of its place
  in it: blocks of one image are reused for the same image only, and no draft or penalty takes it for text
- positions of the answer go on behind the largest of the prompt; a position that does not follow from what stands
  before it is part of the token's key
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.engine.model_runner import Capture, ModelInput
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.steering import Steering


@dataclass(frozen=True, eq=False)
class PromptEmbeddings:
    """Embeddings in place of those of some tokens of a prompt, such as those of an image.

    Args:
        start: index of the first token.
        rows: one for each token, as the first layer reads them (not scaled).
        content: identifies what they stand for, such as a hash of pixels and settings: cached blocks are reused for
            equal contents.
        bidirectional: whether these tokens see each other, and not only those before them.
    """

    start: int
    rows: Float[Tensor, "tokens width"]
    content: bytes
    bidirectional: bool = False

    @property
    def end(self) -> int:
        """Index of the token behind the last one."""
        return self.start + len(self.rows)

    @cached_property
    def keys(self) -> list[int]:
        """The negative key of each token."""
        content = hashlib.sha256(self.content).hexdigest()
        return [_hashed(content, self.bidirectional, len(self.rows), at) for at in range(len(self.rows))]


def _hashed(*parts: Any) -> int:
    """A negative key of some values."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return -1 - (int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True, eq=False)
class PromptExtras:
    """What a request has beside tokens.

    Args:
        prompt_tokens: tokens of the prompt.
        embeddings: given embeddings, which do not overlap.
        positions: position of each token of the prompt, (axes, tokens); None for 0, 1, 2, ...
        steering, experts: see `ModelInput`.
        capture_hidden: whether each pass returns hidden states before the last norm.
    """

    prompt_tokens: int
    embeddings: Sequence[PromptEmbeddings] = ()
    positions: Int[Tensor, "axes tokens"] | None = None
    steering: Steering | None = None
    experts: ExpertMask | None = None
    capture_hidden: bool = False

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Spans of tokens that see each other."""
        return sorted((each.start, each.end) for each in self.embeddings if each.bidirectional)

    @cached_property
    def variant(self) -> str:
        """Digest of all that changes keys and values and is not in the tokens' keys; empty for nothing."""
        parts: list[Any] = []
        if self.steering is not None and self.steering.strength:
            parts.append(("steering", self.steering.digest))
        if self.experts is not None:
            parts.append(("experts", self.experts.digest))
        return hashlib.sha256(repr(parts).encode()).hexdigest() if parts else ""

    @cached_property
    def _next_position(self) -> int:
        assert self.positions is not None
        return int(self.positions.max()) + 1

    def keys(self, token_ids: Sequence[int]) -> list[int]:
        """The key of each token of a prompt."""
        keys = list(token_ids)
        for each in self.embeddings:
            keys[each.start : each.end] = each.keys
        if self.positions is None:
            return keys
        following = 0  # the position of a token that follows all before it
        for index, position in enumerate(self.positions.T.tolist()):
            if any(axis != following for axis in position):
                keys[index] = _hashed(keys[index], [axis - following for axis in position])
            following = max(following, max(position) + 1)
        return keys

    def at_long_positions(self, original: int) -> PromptExtras:
        """The same for a sequence that has outgrown the trained context of LongRoPE, whose positions begin there."""
        return replace(self, positions=torch.arange(original, original + self.prompt_tokens)[None])

    def check(self, hidden_size: int, sites: Any, experts: Sequence[tuple[int, int]]) -> None:
        """Check that a model can use it.

        Args:
            hidden_size: width of the model's hidden states.
            sites: the decoder that is steered.
            experts: number of experts of each layer, and of those that a token takes.

        Raises:
            InvalidArgument: embeddings of another width, beyond the prompt or overlapping; positions for another number
                of tokens; a steering or mask that does not fit.
        """
        end = 0
        for each in sorted(self.embeddings, key=lambda each: each.start):
            if each.rows.ndim != 2 or each.rows.shape[1] != hidden_size or not len(each.rows):
                raise InvalidArgument(
                    f"embeddings must be (tokens, {hidden_size}) for this model, got {tuple(each.rows.shape)}"
                )
            if each.start < end or each.end > self.prompt_tokens:
                raise InvalidArgument(
                    f"embeddings of tokens {each.start} to {each.end} overlap others, or reach beyond the prompt of "
                    f"{self.prompt_tokens} tokens"
                )
            if not bool(each.rows.isfinite().all()):
                raise InvalidArgument(f"embeddings of tokens {each.start} to {each.end} are not finite")
            end = each.end
        if self.positions is not None and (
            self.positions.ndim != 2 or self.positions.shape[1] != self.prompt_tokens or int(self.positions.min()) < 0
        ):
            raise InvalidArgument(
                f"positions must be (axes, {self.prompt_tokens}) for this prompt and not negative, got "
                f"{tuple(self.positions.shape)}"
            )
        if self.steering is not None:
            self.steering.check(sites, hidden_size)
        if self.experts is not None:
            self.experts.check(experts)

    def fill(self, model_input: ModelInput) -> None:
        """Add what a pass over a part of the sequence needs."""
        start = model_input.num_computed_tokens
        end = start + len(model_input.token_ids)
        model_input.steering, model_input.experts = self.steering, self.experts
        if self.capture_hidden and model_input.outputs:
            model_input.capture = Capture(hidden=True)
        if self.positions is not None:
            model_input.positions = self._positions(start, end)
        model_input.embeddings = [
            (max(each.start - start, 0), each.rows[max(start - each.start, 0) : end - each.start])
            for each in self.embeddings
            if each.start < end and start < each.end
        ]
        if any(first < end and start < last for first, last in self.spans):
            visible = list(range(start, end))
            for first, last in self.spans:
                for slot in range(max(first, start), min(last, end)):
                    visible[slot - start] = last - 1
            model_input.visible = visible

    def _positions(self, start: int, end: int) -> Tensor:
        """Positions of the tokens from ``start`` to ``end``."""
        assert self.positions is not None
        known = self.positions[:, start:end]
        later = torch.arange(max(start, self.prompt_tokens), max(end, self.prompt_tokens))
        later = later - self.prompt_tokens + self._next_position
        return torch.cat([known, later.to(known).expand(len(known), -1)], 1)
