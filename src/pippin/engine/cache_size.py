"""How much an engine computes and keeps at once where nobody said it: what fits into memory.

Notable here:
- under a budget of the model, sequences, a pass, rows of logits and snapshots take an eighth each of what it leaves,
  and the least that works if that is more; keys and values get the rest, or a quarter of that where experts share it
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pippin.core import device as devices
from pippin.core.errors import NotEnoughMemory
from pippin.core.files import format_bytes
from pippin.engine.model_runner import BLOCK_SIZE, KVCacheDtypeChoice
from pippin.engine.runners.select import runner_class
from pippin.engine.scheduling.continuation_scores import MAX_ROWS
from pippin.engine.scheduling.request_state import blocks_for
from pippin.language.language_model import LanguageModel
from pippin.language.memory_placement import Placement

_SHARE = 8
_STATES = 2  # of a sequence while a pass replaces them


@dataclass(frozen=True)
class EngineSize:
    """How much an engine computes and keeps at once.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: prompt tokens of a pass.
        max_scored_rows: tokens of continuations in a pass, each with a row of logits.
        num_blocks: blocks in the pool.
        max_snapshots: snapshots of recurrent states that are cached; 0 for a model without states.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_scored_rows: int
    num_blocks: int
    max_snapshots: int


def engine_size(
    model: LanguageModel,
    max_num_seqs: int,
    *,
    max_num_batched_tokens: int | None = None,
    cache_tokens: int | None = None,
    kv_cache_dtype: KVCacheDtypeChoice = "auto",
) -> EngineSize:
    """The size of an engine.

    Args:
        model: the model.
        max_num_seqs: requests that are to run at the same time; fewer do where a budget has no room for so many.
        max_num_batched_tokens: see `Engine`.
        cache_tokens: see `Engine`.
        kv_cache_dtype: precision of keys and values.

    Raises:
        NotEnoughMemory: ``cache_tokens`` is more than the budget of the model leaves; the message names the most.
    """
    block = _block_bytes(model, kv_cache_dtype)
    asked = None if cache_tokens is None else cache_tokens // BLOCK_SIZE * len(model.cache_layout.cache_groups)
    if model.placement is not None and model.device.type == "cpu":
        return _within(model.placement, model, max_num_seqs, max_num_batched_tokens, asked, block)
    if model.device.type == "cuda":
        room = int(torch.cuda.mem_get_info(model.device)[0]) // 4
    else:
        room = devices.memory().available // 4
    blocks = _affordable(model, max_num_seqs, room, block) if asked is None else asked
    tokens = max_num_batched_tokens or (256 if model.device.type == "cpu" else 1024)
    return EngineSize(max_num_seqs, tokens, MAX_ROWS, blocks, max_snapshots(model, max_num_seqs, blocks * block))


def _within(
    placement: Placement, model: LanguageModel, max_num_seqs: int, tokens: int | None, asked: int | None, block: int
) -> EngineSize:
    """The size of an engine within the budget of its model."""
    left = placement.budget.left - placement.least_room
    share, config, state = left // _SHARE, model.config, model.cache_layout.state_bytes
    row = 2 * 4 * config.vocab_size  # its logits, and what is computed from them
    seqs = max(1, min(max_num_seqs, share // (row + _STATES * state)))
    rows = max(1, min(MAX_ROWS, share // (row + _STATES * state)))  # each may be all of a continuation
    snapshots = max(1, min(64 * seqs, share // state)) if state else 0
    if tokens is None:
        tokens = 256
        # a pass over a prompt reads nearly all experts or neurons, however long it is
        while placement.in_storage and tokens < 2048 and placement.workspace_bytes(config, 2 * tokens) <= share:
            tokens *= 2
    most = max(rows, seqs)
    room = left - placement.workspace_bytes(config, tokens) - row * most - state * (_STATES * most + seqs + snapshots)
    if asked is not None and asked * block > max(room, 0):
        groups = len(model.cache_layout.cache_groups)
        raise NotEnoughMemory(
            f"a cache of {asked // groups * BLOCK_SIZE:,} tokens takes {format_bytes(asked * block)}, and the memory "
            f"of {model.name} leaves room for {max(room, 0) // (block * groups) * BLOCK_SIZE:,}; take fewer, or load "
            "it with more memory"
        )
    if placement.in_storage:
        room //= 4
    blocks = _affordable(model, seqs, room, block) if asked is None else asked
    return EngineSize(seqs, tokens, rows, blocks, snapshots)


def _block_bytes(model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice) -> int:
    """Bytes of a block of the pool, which serves any group of layers; 0 for a model without keys and values."""
    row = runner_class(model).block_bytes_of(model, kv_cache_dtype)  # 16 tokens of all layers
    layout = model.cache_layout
    return row * max(map(len, layout.cache_groups)) // max(1, len(layout.cached_layers))


def _affordable(model: LanguageModel, max_num_seqs: int, room: int, block: int) -> int:
    """Blocks for ``max_num_seqs`` full contexts, or as many as fit into some bytes if that is less."""
    groups, whole = model.cache_layout.cache_groups, 0
    for layers in groups:
        window = model.cache_layout.group_window(layers)
        tokens = model.context_size if window is None else min(model.context_size, 2 * window + 2048)
        # one more, because the block in which a continuation diverges from its prompt is allocated twice
        whole += max_num_seqs * blocks_for(tokens) + 1
    return max(len(groups) * max_num_seqs, min(whole, room // block)) if block else whole


def max_snapshots(model: LanguageModel, max_num_seqs: int, pool_bytes: int) -> int:
    """Snapshots of recurrent states that are cached without a budget: at least one for each sequence, in a quarter of
    the pool's memory or an eighth of what is free; 0 for a model without states."""
    if not model.cache_layout.recurrent_layers:
        return 0
    room = max(pool_bytes // 4, devices.memory().available // 8)
    return max(max_num_seqs, min(64 * max_num_seqs, room // max(1, model.cache_layout.state_bytes)))
