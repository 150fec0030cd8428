"""The token sequence of a training pass: its attention mask, its positions, and its batch.

Notable here:
- thought tokens of one block attend to each other in both directions, everything else is causal; blocks have different
  ids, so no block attends to a later one
- noisy copies of every block follow the whole sequence, at the positions of their block, and attend to the same tokens
  as their block: one pass computes the flow-matching loss of any number of noise levels
- problems of unequal length share one layout: tokens that a problem does not have are masked

Source: arXiv:2510.04573, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.nn.kv_cache import MaskedCache

NUM_MARKS = 3
"""Embeddings around the thought tokens of a block: begin of thought (BOT), time, and end of thought (EOT)."""


@dataclass(frozen=True)
class ThoughtBatch:
    """A batch of problems.

    Attributes:
        questions: token ids, padded on the left.
        padding: number of padding tokens of each question.
        latents: clean thought tokens of each block, in units of the data; any values where a problem has fewer blocks.
        num_blocks: blocks of each problem.
        answers: token ids with the end token, padded on the right.
        targets: the same, with -100 for padding.
    """

    questions: Int[Tensor, "batch question"]
    padding: Int[Tensor, batch]
    latents: Float[Tensor, "batch blocks tokens latent"]
    num_blocks: Int[Tensor, batch]
    answers: Int[Tensor, "batch answer"]
    targets: Int[Tensor, "batch answer"]


def block_bidirectional_mask(
    block_ids: Int[Tensor, "#batch tokens"], pad_mask: Bool[Tensor, "#batch tokens"] | None = None
) -> Bool[Tensor, "batch tokens tokens"]:
    """The attention mask that is causal between blocks and bidirectional within each.

    Args:
        block_ids: the block of each token; -1 for a token outside of any block.
        pad_mask: False for padding, to which only it itself attends; None for no padding.

    Returns:
        True where the row's token attends to the column's.

    Source: arXiv:2510.04573, section 3.2.

    >>> block_bidirectional_mask(torch.tensor([[-1, 0, 0, -1]]))[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    index = torch.arange(block_ids.shape[1], device=block_ids.device)
    mask = index[None, :, None] >= index[None, None, :]
    mask = mask | ((block_ids[:, :, None] == block_ids[:, None, :]) & (block_ids >= 0)[:, :, None])
    if pad_mask is not None:
        mask = (mask & pad_mask[:, None, :]) | (index[:, None] == index)
    return mask


class SequenceLayout:
    """Mask and positions of a training pass: question, clean blocks, answer, and noisy copies of every block.

    A clean block is ``BOT, time, thought tokens, EOT``; a noisy copy lacks the EOT.

    Args:
        question_length: tokens of the longest question, padded on the left.
        num_blocks: blocks of the problem with the most.
        answer_length: tokens of the longest answer, with SOA (start of answer) before it.
        num_copies: noisy copies of each block.
        block_size: thought tokens of a block.
        device: device of the masks.
    """

    def __init__(
        self,
        question_length: int,
        num_blocks: int,
        answer_length: int,
        num_copies: int,
        block_size: int,
        device: torch.device | None = None,
    ) -> None:
        self.question_length, self.num_blocks, self.block_size = question_length, num_blocks, block_size
        size, noisy_size = block_size + NUM_MARKS, block_size + NUM_MARKS - 1
        clean, noisy = num_blocks * size, num_blocks * num_copies * noisy_size
        self._answer_start = question_length + clean

        def join(for_clean: Tensor, for_question: int, for_answer: int, for_noisy: Tensor) -> Tensor:
            """One number for each token of the sequence."""
            question, answer = torch.full((question_length,), for_question), torch.full((answer_length,), for_answer)
            return torch.cat([question, for_clean, answer, for_noisy]).to(device)

        block, copy = torch.arange(clean) // size, torch.arange(noisy) // noisy_size
        clean_offset, noisy_offset = torch.arange(clean) % size, torch.arange(noisy) % noisy_size
        is_thought = (clean_offset >= 2) & (clean_offset < 2 + block_size)
        # 0 for the question, then the number of the block (of a copy: of the one it copies), then the answer
        self.stage = join(block + 1, 0, num_blocks + 1, copy // max(num_copies, 1) + 1)
        # 0 for the sequence itself, else the number of the noisy copy
        self.copy = join(torch.zeros_like(block), 0, 0, copy + 1)
        # the index within a block
        self.offset = join(clean_offset, 0, 0, noisy_offset)
        # ids for the bidirectional mask: every clean block and every copy has its own
        block_ids = join(
            torch.where(is_thought, block, -1), -1, -1, torch.where(noisy_offset >= 2, num_blocks + copy, -1)
        )
        within = block_bidirectional_mask(block_ids[None])[0] & (self.copy[:, None] == self.copy)
        # a copy attends to the question and to the clean blocks before its own, and no other token attends to it
        before = (self.copy > 0)[:, None] & (self.copy == 0) & (self.stage < self.stage[:, None])
        self.mask = within | before

    def cache(self, padding: Int[Tensor, batch], num_blocks: Int[Tensor, batch]) -> MaskedCache:
        """Mask and positions for problems with that much padding and that many blocks."""
        real = self.real(padding, num_blocks)
        mask = (self.mask & real[:, None]) | torch.eye(len(self.stage), dtype=torch.bool, device=real.device)
        return MaskedCache(mask[:, None], positions=self.positions(padding, num_blocks))

    def real(self, padding: Int[Tensor, batch], num_blocks: Int[Tensor, batch]) -> Bool[Tensor, "batch sequence"]:
        """Tokens that are neither padding nor of a block that a problem does not have."""
        index = torch.arange(len(self.stage), device=padding.device)
        answer = self.stage > self.num_blocks
        return (index >= padding[:, None]) & ((self.stage <= num_blocks[:, None]) | answer)

    def positions(self, padding: Int[Tensor, batch], num_blocks: Int[Tensor, batch]) -> Int[Tensor, "batch sequence"]:
        """The position of each token: a question begins at 0, and tokens that a problem does not have take none."""
        size, index = self.block_size + NUM_MARKS, torch.arange(len(self.stage), device=padding.device)
        is_answer = self.stage > self.num_blocks
        start = torch.where(is_answer, num_blocks[:, None], self.stage - 1) * size  # after the question
        offset = torch.where(is_answer, index - self._answer_start, self.offset)
        in_question = (index - padding[:, None]).clamp(min=0)
        return torch.where(self.stage == 0, in_question, self.question_length - padding[:, None] + start + offset)
