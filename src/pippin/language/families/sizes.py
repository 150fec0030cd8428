"""Configurations that contradict themselves, and sizes that are impossible: refused before anything is built.

Notable here:
- sizes are bounded beyond any model and below what overflows, because building the modules takes time and memory before
  a tensor is compared
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pippin.core.errors import CorruptedFile
from pippin.language.decoder_config import DecoderConfig
from pippin.nn.feedforward.feedforward import NO_FEED_FORWARD

MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 16
"""Most experts in all layers together."""
_MAX_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": (1 << 31) - 1,
}
_MAX_INTERMEDIATE_SIZE = 1 << 24
_MAX_STATE_SIZE = 1 << 30


@contextmanager
def contradictions(what: str) -> Iterator[None]:
    """Raise `CorruptedFile` for a field that is missing, of the wrong type or impossible."""
    try:
        yield
    except KeyError as error:
        raise CorruptedFile(f"{what} has no {error.args[0]!r}, which the model needs") from error
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise CorruptedFile(f"{what} contradicts itself: {error}") from error


def check_size(name: str, value: Any, most: int) -> None:
    """Check that a size is an integer from 1 to ``most``.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most:,}, got {value!r:.40}")


def bounded(config: DecoderConfig) -> DecoderConfig:
    """The config, if each of its sizes is possible.

    Raises:
        ValueError: one is not.
    """
    for name, most in _MAX_SIZES.items():
        check_size(name, getattr(config, name), most)
    inner = [layer.feedforward for layer in config.layers]
    inner += [layer.experts for layer in config.layers if layer.experts is not None]
    for spec in set(inner) - {NO_FEED_FORWARD}:
        check_size("intermediate_size", spec.intermediate_size, _MAX_INTERMEDIATE_SIZE)
        if spec.num_experts:
            check_size("num_experts", spec.num_experts, MAX_EXPERTS)
            check_size("num_experts_per_tok", spec.num_experts_per_tok, spec.num_experts)
            router = spec.router
            check_size("n_group", router.num_groups, spec.num_experts)
            check_size("topk_group", router.num_chosen_groups, router.num_groups)
            size, odd = divmod(spec.num_experts, router.num_groups)
            if odd or size < (2 if router.group_score == "top two" and router.num_groups > 1 else 1):
                raise ValueError(f"{spec.num_experts} experts cannot form {router.num_groups} groups")
            if spec.num_experts_per_tok > size * router.num_chosen_groups:
                raise ValueError(
                    f"{router.num_chosen_groups} groups of {size} experts are fewer than {spec.num_experts_per_tok}"
                )
        if spec.shared_intermediate_size:
            check_size("shared_expert_intermediate_size", spec.shared_intermediate_size, _MAX_INTERMEDIATE_SIZE)
    experts = sum(spec.num_experts for spec in inner)
    check_size("num_experts in all layers", 1 + experts, MAX_EXPERTS)
    for recurrent in {layer.recurrent for layer in config.layers if layer.recurrent is not None}:
        check_size("elements of a recurrent state", 1 + recurrent.state_size(config.hidden_size), _MAX_STATE_SIZE)
    for attention in {layer.attention for layer in config.layers}:
        if attention.window is not None:
            check_size("sliding_window", attention.window, _MAX_SIZES["max_position_embeddings"])
        if (latent := attention.latent) is not None:
            for name in ("kv_rank", "rotated_dim", "plain_dim", "value_dim"):
                check_size(name, getattr(latent, name), _MAX_SIZES["head_dim"])
            if latent.q_rank is not None:
                check_size("q_lora_rank", latent.q_rank, _MAX_SIZES["hidden_size"])
        if attention.rotary is not None:
            rotary = attention.rotary
            for name, value in (("rope_theta", rotary.theta), ("factor", rotary.factor)):
                if not isinstance(value, int | float) or not 0 < value < math.inf:
                    raise ValueError(f"{name} must be positive and finite, got {value!r:.40}")
            width = config.rotary_dim(attention)
            if rotary.dims is not None and not (0 < rotary.dims <= width and rotary.dims % 2 == 0):
                raise ValueError(f"{rotary.dims} of {width} dimensions of a head cannot be rotated")
    return config
