"""How fast an engine answers, and how fast this machine could: the bytes of a token over the bandwidth of its memory.

Notable here:
- a token of an answer reads every weight once and the cache once, and does little else: what the memory delivers per
  second, divided by those bytes, is the speed that no engine can exceed; both are counted and measured, not guessed
- the bandwidth is measured between the answers, as often as they are, so that a busy machine lowers both
- only what must come from memory is counted: each byte once, the embedding as one row, of a mixture's experts those
  that a token uses
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from pippin.core import device as devices, native
from pippin.core.errors import InvalidArgument
from pippin.engine.engine import Engine
from pippin.engine.request import Finished, Request
from pippin.engine.runner import CacheType
from pippin.engine.sampling import SamplingOptions
from pippin.language.transformer import Decoder, DecoderConfig
from pippin.nn.feedforward import MixtureOfExperts

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel

BUFFER: Final = 256 * 2**20
"""Bytes read to measure the bandwidth: several times the largest cache of a processor of this class."""

_CACHE_BYTES: Final = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Limit:
    """What a token of an answer must read, and how many of them the memory allows per second (the bandwidth floor).

    Attributes:
        weight_bytes: of the model's weights.
        cache_bytes: of the keys and values of the tokens before, on average over the answer.
        bandwidth: bytes per second that this machine reads.
    """

    weight_bytes: int
    cache_bytes: float
    bandwidth: float

    @property
    def tokens_per_second(self) -> float:
        """The speed that memory allows.

        >>> Limit(weight_bytes=98_000_000, cache_bytes=2_000_000, bandwidth=20e9).tokens_per_second
        200.0
        """
        return self.bandwidth / (self.weight_bytes + self.cache_bytes)

    def share(self, tokens_per_second: float) -> float:
        """How much of that speed was reached.

        >>> Limit(100_000_000, 0, 20e9).share(150.0)
        0.75
        """
        return tokens_per_second / self.tokens_per_second


@dataclass(frozen=True)
class Speed:
    """One request, timed.

    Attributes:
        prompt: prompt tokens per second, up to the first token of the answer.
        answer: tokens per second after the first one.
        first_token: seconds to the first token.
        ids: the answer.
        profile: seconds in linear layers, attention, other kernels and waiting for threads, after the first token;
            zeros without native kernels.
        seconds: seconds after the first token.
    """

    prompt: float
    answer: float
    first_token: float
    ids: tuple[int, ...]
    profile: tuple[float, float, float, float]
    seconds: float


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of weights that one token of an answer reads.

    Every matrix, bias and norm counts once, in the format that it has in memory; of the embedding one row, unless it is
    the output matrix too; of a mixture, the router and as many experts as a token uses.
    """
    embedding: nn.Module = decoder.embed_tokens
    inner = sum(_weight_bytes(part) for part in decoder.children() if part is not embedding)
    return inner + _weight_bytes(embedding) // decoder.config.vocab_size


def _weight_bytes(module: nn.Module) -> int:
    """The same for a part of the decoder, its own weights and those of its parts."""
    own = sum(tensor.nbytes for tensor in module.parameters(recurse=False))
    packed = getattr(module, "packed", None)
    if packed is not None:
        own += packed.nbytes
    if isinstance(module, MixtureOfExperts):
        used = sum(map(_weight_bytes, module.experts)) * module.spec.active // module.spec.experts
        return own + used + _weight_bytes(module.gate)
    return own + sum(map(_weight_bytes, module.children()))


def cache_bytes(config: DecoderConfig, cache_type: CacheType, held: int) -> int:
    """Bytes of keys and values that a token reads when the cache holds ``held`` tokens before it.

    A layer that reads another one's keys adds nothing: each byte counts once. A window counts only what it shows.
    """
    scales = 4 if cache_type == "int8" else 0
    per_token = 2 * config.kv_heads * (config.head_dim * _CACHE_BYTES[cache_type] + scales)
    total = 0
    for layer in config.cached_layers:
        readers = [spec.attention for i, spec in enumerate(config.layers) if layer in (i, spec.attention.source)]
        seen = max(held if spec.window is None else min(held, spec.window - 1) for spec in readers)
        total += seen * per_token
    return total


def mean_cache_bytes(config: DecoderConfig, cache_type: CacheType, prompt: int, answer: int) -> float:
    """`cache_bytes`, on average over the tokens of an answer after its first one.

    Args:
        config: the decoder.
        cache_type: precision of the cache.
        prompt: tokens of the prompt.
        answer: tokens of the answer, at least 2: the first one comes out of the prompt's pass.
    """
    steps = range(prompt, prompt + answer - 1)
    return sum(cache_bytes(config, cache_type, held) for held in steps) / len(steps)


def read_bandwidth(threads: int, *, device: torch.device | None = None, size: int = BUFFER, repeats: int = 3) -> float:
    """Bytes per second that this machine reads from its memory: the best of several passes over a buffer.

    Args:
        threads: how many read at once; of no account on an accelerator.
        device: where the memory is; None for the processor's own.
        size: of the buffer, in bytes; at least 1 MiB.
        repeats: passes, at least 1.

    Raises:
        InvalidArgument: a number outside its range, or more threads than cores.
    """
    devices.check_threads(threads)
    if size < 2**20 or repeats < 1:
        raise InvalidArgument(
            f"a bandwidth needs at least 1 MiB read at least once, got {size} bytes, {repeats} repeats"
        )
    if device is None or device.type == "cpu":
        if native.library() is not None:
            return native.read_bandwidth(size, threads, repeats)
        return _torch_bandwidth(torch.device("cpu"), threads, size, repeats)
    return _torch_bandwidth(device, threads, max(size, 2**30), repeats)


def _torch_bandwidth(device: torch.device, threads: int, size: int, repeats: int) -> float:
    """The same by a sum in torch, which is as quick as the memory is."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        buffer = torch.ones(size // 4, device=device)
        best = float("inf")
        for _ in range(repeats + 1):  # the first pass warms up
            began = time.perf_counter()
            buffer.sum().item()  # which waits for an accelerator
            best = min(best, time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return buffer.nbytes / best


def prompt_ids(model: LanguageModel, count: int) -> list[int]:
    """A prompt of so many tokens: plain prose, over and over, in the model's own tokens."""
    text = (
        "The old orchard lies behind the mill. In April its trees stand white, and in September the ladders lean "
        "against them from six in the morning; whoever picks two baskets may keep the third. "
    )
    ids: list[int] = model.tokenizer.encode(text)
    return (ids * (count // len(ids) + 1))[:count]


def speed(engine: Engine, prompt: Sequence[int], answer: int, *, stops: Sequence[int] = (), owner: str = "") -> Speed:
    """Time one greedy request.

    Args:
        engine: what answers.
        prompt: its token ids.
        answer: tokens to write, at least 2.
        stops: token ids that must not be chosen, so that the answer does not end before its time.
        owner: whose request it is; another one each time, so that nothing is found in the cache.

    Raises:
        InvalidArgument: fewer than two tokens, or what `Engine.stream` refuses.
        ContextOverflow: prompt and answer do not fit.
    """
    if answer < 2:
        raise InvalidArgument(f"the speed of an answer needs at least 2 tokens, got {answer}")
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
        prompt=(len(prompt) - finished.cached_tokens) / finished.prompt_seconds,
        answer=(answer - 1) / seconds,
        first_token=finished.first_token_seconds,
        ids=tuple(ids),
        profile=(parts[0], parts[1], parts[2], parts[3]),
        seconds=seconds,
    )


def _profile() -> tuple[float, float, float, float]:
    """Seconds inside the kernels so far, by part."""
    return (0.0, 0.0, 0.0, 0.0) if native.library() is None else native.profile()
