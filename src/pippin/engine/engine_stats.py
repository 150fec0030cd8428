"""Statistics of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an `Engine`: counters since its start, and its present state.

    Args:
        max_num_seqs: requests that can run at the same time.
        active: requests that run. waiting: requests in the queue.
        requests: requests accepted so far. refused: requests rejected because the queue was full.
        finished, cancelled, failed: how accepted requests ended.
        preempted: how often a request was put back in the queue, because blocks ran out or a higher priority arrived.
        prompt_tokens: tokens of the prompts of all admitted requests. cached_tokens: how many of them were found in
            the prefix cache. prefix_hits: requests for which some were found.
        tokens_generated: tokens of all answers.
        drafted, accepted: tokens that speculation proposed, and how many of them became part of an answer.
        steps: passes.
        blocks_total: blocks of 16 tokens in the pool. blocks_free: unused blocks. blocks_cached: blocks that only the
            prefix cache holds, which evicts them when no other is free.
        cache_tokens_used: tokens that fit in the blocks in use. cache_tokens_capacity: tokens that fit in all blocks.
        cache_bytes_used: memory of the blocks in use.
        state_bytes_used: memory of the states of recurrent layers, of running requests and of snapshots; a sequence of
            any length takes the same.
        expert_hits, expert_misses: of the experts that passes needed from storage, how many were in memory, and how
            many had to be waited for. expert_bytes_read: bytes read for experts. expert_bytes_used: their memory.
        neuron_hits, neuron_misses, neuron_bytes_read, neuron_bytes_used: the same of neurons of feed-forward layers;
            those of one pass count once. neuron_stall_seconds: for which passes waited until they were read.
    """

    max_num_seqs: int
    active: int
    waiting: int
    requests: int
    refused: int
    finished: int
    cancelled: int
    failed: int
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    prefix_hits: int
    tokens_generated: int
    drafted: int
    accepted: int
    steps: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    cache_tokens_used: int
    cache_tokens_capacity: int
    cache_bytes_used: int
    state_bytes_used: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes_read: int = 0
    expert_bytes_used: int = 0
    neuron_hits: int = 0
    neuron_misses: int = 0
    neuron_bytes_read: int = 0
    neuron_bytes_used: int = 0
    neuron_stall_seconds: float = 0.0
