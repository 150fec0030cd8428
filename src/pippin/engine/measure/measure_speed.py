"""Measured speed of an engine, and its upper bound: memory bandwidth divided by the bytes that one token reads.

Notable here:
- each token of an answer reads every weight once and the cache once, so that decoding is bound by memory: bandwidth
  divided by those bytes is an upper bound of the speed; the bytes are counted and the bandwidth is measured
- the bandwidth is measured between the answers, as often as they are, so that a busy machine lowers both
- only necessary reads are counted: each byte once, of the embedding one row, of a mixture only the experts that a token
  uses
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import torch
from annotated_types import Ge
from torch import nn

from pippin.core import device as devices, native
from pippin.core.checks import PositiveInt, checked
from pippin.engine.engine import Engine
from pippin.engine.model_runner import KVCacheDtype
from pippin.engine.options import SamplingOptions
from pippin.engine.request import Finished, Request
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.feedforward.feedforward import MixtureOfExperts

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

BUFFER_BYTES: Final = 256 * 2**20
"""Bytes read to measure the bandwidth: several times the largest cache of a processor of this class."""

_CACHE_BYTES: Final = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class BandwidthLimit:
    """Bytes that a token of an answer must read, and the resulting upper bound of the speed.

    Attributes:
        weight_bytes: bytes of the model's weights.
        cache_bytes: bytes of the keys and values of the preceding tokens, on average over the answer.
        bandwidth: memory bandwidth of this machine, in bytes per second.
    """

    weight_bytes: int
    cache_bytes: float
    bandwidth: float

    @property
    def tokens_per_second(self) -> float:
        """Upper bound of the decoding speed, in tokens per second.

        >>> BandwidthLimit(weight_bytes=98_000_000, cache_bytes=2_000_000, bandwidth=20e9).tokens_per_second
        200.0
        """
        return self.bandwidth / (self.weight_bytes + self.cache_bytes)

    def share(self, tokens_per_second: float) -> float:
        """A measured speed as a fraction of the upper bound.

        >>> BandwidthLimit(100_000_000, 0, 20e9).share(150.0)
        0.75
        """
        return tokens_per_second / self.tokens_per_second


@dataclass(frozen=True)
class Speed:
    """Speed of one request.

    Attributes:
        prompt_tokens_per_second: prompt tokens per second, up to the first token of the answer.
        answer_tokens_per_second: tokens per second after the first one.
        first_token_seconds: seconds to the first token.
        token_ids: the answer.
        profile: seconds in linear layers, attention, other kernels and synchronization of threads, after the first
            token; zeros without native kernels.
        answer_seconds: seconds after the first token.
    """

    prompt_tokens_per_second: float
    answer_tokens_per_second: float
    first_token_seconds: float
    token_ids: tuple[int, ...]
    profile: tuple[float, float, float, float]
    answer_seconds: float


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of weights that one token of an answer reads.

    Every matrix, bias and norm counts once, in its format in memory; of embeddings one row, unless it is tied to the
    output matrix; of a mixture, the router, shared experts and as many others as a token uses.
    """
    return sum(map(_weight_bytes, decoder.children()))


def _weight_bytes(module: nn.Module) -> int:
    """`weight_bytes` for a submodule of the decoder."""
    own = sum(tensor.nbytes for tensor in module.parameters(recurse=False))
    packed = getattr(module, "packed", None)
    if packed is not None:
        own += packed.nbytes
    if isinstance(module, TokenEmbedding):
        return own // module.rows
    if isinstance(module, MixtureOfExperts):
        used = sum(map(_weight_bytes, module.experts)) * module.spec.num_experts_per_tok // module.spec.num_experts
        return own + used + sum(_weight_bytes(part) for part in module.children() if part is not module.experts)
    return own + sum(map(_weight_bytes, module.children()))


def cache_bytes(config: DecoderConfig, kv_cache_dtype: KVCacheDtype, cached_tokens: int) -> int:
    """Bytes of keys and values that a token reads when the cache holds ``cached_tokens`` tokens before it.

    A layer that reads another layer's keys adds nothing: each byte counts once. A sliding window counts only its size.
    """
    scales = 4 if kv_cache_dtype == "int8" else 0
    per_token = 2 * config.num_key_value_heads * (config.head_dim * _CACHE_BYTES[kv_cache_dtype] + scales)
    total = 0
    for layer in config.cached_layers:
        readers = [spec.attention for i, spec in enumerate(config.layers) if layer in (i, spec.attention.kv_source)]
        seen = max(cached_tokens if spec.window is None else min(cached_tokens, spec.window - 1) for spec in readers)
        total += seen * per_token
    return total


def mean_cache_bytes(config: DecoderConfig, kv_cache_dtype: KVCacheDtype, prompt: int, answer: int) -> float:
    """`cache_bytes`, on average over the tokens of an answer after its first one.

    Args:
        config: the decoder's config.
        kv_cache_dtype: precision of the cache.
        prompt: tokens of the prompt.
        answer: tokens of the answer, at least 2: the first one is computed with the prompt.
    """
    steps = range(prompt, prompt + answer - 1)
    return sum(cache_bytes(config, kv_cache_dtype, cached_tokens) for cached_tokens in steps) / len(steps)


@checked
def read_bandwidth(
    threads: int,
    *,
    device: torch.device | None = None,
    size: Annotated[int, Ge(2**20)] = BUFFER_BYTES,
    repeats: PositiveInt = 3,
) -> float:
    """Memory bandwidth of this machine for reads, in bytes per second: the best of several passes over a buffer.

    Args:
        threads: number of threads that read; ignored on an accelerator.
        device: the device whose memory is read; None for the CPU.
        size: size of the buffer in bytes, at least 1 MiB.
        repeats: passes, at least 1.

    Raises:
        InvalidArgument: more threads than cores.
    """
    devices.check_threads(threads)
    if device is None or device.type == "cpu":
        if native.library() is not None:
            return native.read_bandwidth(size, threads, repeats)
        return _torch_bandwidth(torch.device("cpu"), threads, size, repeats)
    return _torch_bandwidth(device, threads, max(size, 2**30), repeats)


def _torch_bandwidth(device: torch.device, threads: int, size: int, repeats: int) -> float:
    """`read_bandwidth` by a sum in torch, which is bound by memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        buffer = torch.ones(size // 4, device=device)
        best = float("inf")
        for _ in range(repeats + 1):  # the first pass warms up
            began = time.perf_counter()
            buffer.sum().item()  # waits until an accelerator is done
            best = min(best, time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return buffer.nbytes / best


def prompt_ids(model: LanguageModel, count: int) -> list[int]:
    """A prompt of ``count`` tokens: a text of prose, repeated."""
    text = (
        "The old orchard lies behind the mill. In April its trees stand white, and in September the ladders lean "
        "against them from six in the morning; whoever picks two baskets may keep the third. "
    )
    ids: list[int] = model.tokenizer.encode(text)
    return (ids * (count // len(ids) + 1))[:count]


@checked
def measure_speed(
    engine: Engine, prompt: Sequence[int], answer: Annotated[int, Ge(2)], *, stops: Sequence[int] = (), owner: str = ""
) -> Speed:
    """Time one greedy request.

    Args:
        engine: the engine.
        prompt: token ids of the prompt.
        answer: tokens to generate, at least 2.
        stops: token ids that must not be chosen, so that the answer does not end early.
        owner: owner of the request; use another one each time, so that nothing is found in the prefix cache.

    Raises:
        InvalidArgument: arguments that `Engine.stream` refuses.
        ContextOverflow: prompt and answer do not fit.
    """
    options = SamplingOptions(temperature=0.0, max_tokens=answer, logit_bias=dict.fromkeys(stops, -100.0))
    ids: list[int] = []
    before = after = (0.0,) * 4
    finished: Finished | None = None
    for event in engine.stream(Request(prompt, options, owner=owner)):
        if isinstance(event, Finished):
            finished, after = event, _profile()
            break
        if not ids:
            before = _profile()
        ids.append(event.id)
    assert finished is not None
    assert len(ids) == answer, f"{answer} tokens were asked for, {len(ids)} came"
    seconds = finished.total_seconds - finished.first_token_seconds
    parts = tuple(b - a for a, b in zip(before, after, strict=True))
    return Speed(
        prompt_tokens_per_second=(len(prompt) - finished.cached_tokens) / finished.prompt_seconds,
        answer_tokens_per_second=(answer - 1) / seconds,
        first_token_seconds=finished.first_token_seconds,
        token_ids=tuple(ids),
        profile=(parts[0], parts[1], parts[2], parts[3]),
        answer_seconds=seconds,
    )


def _profile() -> tuple[float, float, float, float]:
    """Seconds inside the kernels so far, by kind."""
    return (0.0, 0.0, 0.0, 0.0) if native.library() is None else native.profile()
