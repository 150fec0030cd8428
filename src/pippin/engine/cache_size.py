"""How large caches are where nobody said it: what fits into memory."""

from __future__ import annotations

import torch

from pippin.core import device as devices
from pippin.engine.model_runner import KVCacheDtypeChoice
from pippin.engine.request_state import blocks_for
from pippin.engine.runners.select import runner_class
from pippin.language.language_model import LanguageModel
from pippin.language.memory_placement import LEAST_CONTEXT, workspace_bytes


def num_affordable_blocks(model: LanguageModel, max_num_seqs: int, kv_cache_dtype: KVCacheDtypeChoice = "auto") -> int:
    """Blocks for ``max_num_seqs`` full contexts, or as many as fit if that is less.

    They fit in a quarter of the free memory; under a budget in all that it leaves, or in a quarter of that where
    experts share it.
    """
    room = _cache_room(model)
    groups, whole = model.cache_layout.cache_groups, 0
    for layers in groups:
        window = model.cache_layout.group_window(layers)
        tokens = model.context_size if window is None else min(model.context_size, 2 * window + 2048)
        # one more, because the block in which a continuation diverges from its prompt is allocated twice
        whole += max_num_seqs * blocks_for(tokens) + 1
    row = runner_class(model).block_bytes_of(model, kv_cache_dtype)  # 16 tokens of all layers
    block = row * max(map(len, groups)) // max(1, len(model.cache_layout.cached_layers))
    # a model without keys and values has blocks of size 0
    return max(len(groups) * max_num_seqs, min(whole, room // block)) if block else whole


def _cache_room(model: LanguageModel) -> int:
    """Bytes that keys and values may take."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0]) // 4
    if (placement := model.placement) is None:
        return devices.memory().available // 4
    left = placement.budget.left - workspace_bytes(model.config, LEAST_CONTEXT) - placement.least_experts
    return left if placement.experts is None else left // 4


def max_batched_tokens(model: LanguageModel) -> int:
    """Prompt tokens of a pass: 256 on a CPU, 1,024 on an accelerator.

    With experts in storage as many as an eighth of the memory that is left allows, at most 2,048: a pass over a prompt
    reads nearly all experts, however long it is.
    """
    if model.device.type != "cpu":
        return 1024
    placement, tokens = model.placement, 256
    if placement is None or placement.experts is None:
        return tokens
    while tokens < 2048 and workspace_bytes(model.config, 2 * tokens) <= placement.budget.left // 8:
        tokens *= 2
    return tokens


def max_snapshots(model: LanguageModel, max_num_seqs: int, pool_bytes: int) -> int:
    """Snapshots of recurrent states that are cached: at least one for each sequence, in a quarter of the pool's memory
    or an eighth of what is free; 0 for a model without states."""
    if not model.cache_layout.recurrent_layers:
        return 0
    room = max(pool_bytes // 4, devices.memory().available // 8)
    return max(max_num_seqs, min(64 * max_num_seqs, room // max(1, model.cache_layout.state_bytes)))
