"""Speed on one GPU: decode at batch 1, 16 and 128, time to the first token, and weights of 4 and 2 bits.

    python benchmarks/gpu/decode.py [--quick] [--json]

A model of 1.1 billion random weights in bfloat16 (TinyLlama's shape), prompts of 1,024 tokens that all differ, answers
of 256. Beside the engine runs a static loop in the manner of gpt-fast: the same layers, one batch of fixed shape with a
contiguous cache, compiled by torch and recorded as a graph, and nothing around it; it is the ceiling of what an engine
can reach on this machine. The share of the memory's bandwidth is counted from the bytes of weights and cache that a
step must read, and the bandwidth is measured by copying a large buffer.

Without a CUDA device it says so and measures nothing.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _rows import Row, compared, main, say

from pippin.data.text.tokenizer import Tokenizer
from pippin.engine import Engine, Request, SamplingOptions, Token
from pippin.engine.measure.measure_speed import mean_cache_bytes, weight_bytes
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.linear import Linear
from pippin.nn.packed_layers import PackedLinear, replace_submodule
from pippin.nn.quantization.packed import quantize
from pippin.nn.triton.triton_matvec import TritonWeight

PEER = "static loop (torch.compile, CUDA graph)"
ROOM = 256
"""Tokens of the cache beyond prompt and answer."""


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    prompt: int = 1024
    answer: int = 256
    batches: tuple[int, ...] = (1, 16, 128)
    repeats: int = 3
    layers: int = 22
    width: int = 2048
    device: str = "cuda"


def measure(quick: bool) -> list[Row]:
    """All rows."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none here; nothing was measured")
    return rows(Setting(answer=64, batches=(1, 16), repeats=1) if quick else Setting())


def rows(setting: Setting) -> list[Row]:
    """All rows of a setting."""
    model, bandwidth = random_model(setting), read_bandwidth(setting.device)
    name = torch.cuda.get_device_name() if setting.device == "cuda" else setting.device
    note = f"{name}, {bandwidth / 1e9:.0f} GB/s copied, torch {torch.__version__}"
    found: list[Row] = []
    medians: dict[int, float] = {}
    for batch in setting.batches:
        static = StaticLoop(model, batch, setting)
        with engine_for(model, batch, setting) as engine:
            answer(engine, batch, setting)  # records and compiles
            answers, loops = [], []
            for _ in range(setting.repeats):
                answers.append(answer(engine, batch, setting))
                loops.append(static.tokens_per_second())
                say(f"batch {batch}: {answers[-1].rate:.0f} tokens/s, static loop {loops[-1]:.0f}")
        del static
        speeds = [run.rate for run in answers]
        medians[batch] = statistics.median(speeds)
        found.append(compared(f"decode, bfloat16, batch {batch}", "tokens/s", speeds, PEER, loops, 0.6, note=note))
        found.append(_share(model, batch, medians[batch], bandwidth, setting, note))
        found += _first_tokens(answers, batch, bare_prefill(model, setting), note)
    if 16 in medians:
        growth = medians[16] / medians[1]
        found.append(Row("growth of throughput from batch 1 to 16", "times", growth, "linear", 16.0, 0.8, note=note))
    return found + packed_rows(model, medians[1], setting, note)


def random_model(setting: Setting) -> LanguageModel:
    """Random weights, and a tokenizer whose every token is a word."""
    from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(setting.width * 11 // 4))
    heads = {"heads": setting.width // 64, "kv_heads": max(1, setting.width // 512), "head_dim": 64}
    config = DecoderConfig(
        "llama", 32_000, setting.width, (layer,) * setting.layers, max_position_embeddings=4096, **heads
    )
    with torch.device("meta"):
        decoder = Decoder(config)
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    decoder.to(dtype).to_empty(device=setting.device).tie_weights()
    torch.manual_seed(0)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02) if parameter.ndim == 2 else torch.nn.init.ones_(parameter)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{index}" for index in range(config.vocab_size - len(alphabet)))]
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    return LanguageModel("random", decoder.requires_grad_(False).eval(), tokenizer, None)


def read_bandwidth(device: str) -> float:
    """Bytes per second that memory delivers and takes, best of 10 copies of a buffer far larger than any cache."""
    source = torch.zeros(2**31 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(timed(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.nbytes / best


def timed(work: Callable[[], Any]) -> float:
    """Seconds that some work takes on the device."""
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until the device has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """One round of requests that came at the same time: tokens per second while all wrote, seconds to first tokens."""

    rate: float
    first: list[float]


def engine_for(model: LanguageModel, batch: int, setting: Setting) -> Engine:
    """An engine with a slot for each request, which reuses nothing."""
    tokens = batch * (setting.prompt + setting.answer + ROOM)
    return Engine(model, max_num_seqs=batch, max_waiting=batch, cache_tokens=tokens, enable_prefix_caching=False)


def answer(engine: Engine, batch: int, setting: Setting) -> Answers:
    """Send requests from as many threads, each with a prompt of its own."""
    times: list[list[float]] = [[] for _ in range(batch)]

    def ask(index: int) -> None:
        prompt = [random.randrange(engine.model.config.vocab_size) for _ in range(setting.prompt)]
        request = Request(prompt, SamplingOptions(max_tokens=setting.answer))
        times[index].append(time.perf_counter())
        times[index].extend(time.perf_counter() for event in engine.stream(request) if isinstance(event, Token))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(len(moments) != setting.answer + 1 for moments in times):
        raise SystemExit("a request ended before its time")
    # while every request was writing; a batch whose prompts take longer than its answers has no such moment
    start, end = max(moments[1] for moments in times), min(moments[-1] for moments in times)
    if end <= start:
        start, end = min(moments[1] for moments in times), max(moments[-1] for moments in times)
    tokens = sum(start < moment <= end for moments in times for moment in moments[1:])
    return Answers(tokens / (end - start), [moments[1] - moments[0] for moments in times])


def _share(model: LanguageModel, batch: int, speed: float, bandwidth: float, setting: Setting, note: str) -> Row:
    """The share of the memory's bandwidth that a step reaches."""
    kind = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    cache = mean_cache_bytes(model.config, kind, setting.prompt, setting.answer)
    reached = (weight_bytes(model.module) + batch * cache) * speed / batch
    what = f"bandwidth reached, bfloat16, batch {batch}"
    return Row(what, "GB/s", reached / 1e9, "copying", bandwidth / 1e9, 0.6 if batch == 1 else 0.4, note=note)


def _first_tokens(answers: Sequence[Answers], batch: int, bare: float, note: str) -> list[Row]:
    """Time to the first token: the median and the slow end, beside the passes over all prompts and nothing else."""
    first = sorted(1000 * seconds for run in answers for seconds in run.first)
    found = []
    for name, at in (("p50", 0.5), ("p95", 0.95)):
        value = first[min(len(first) - 1, int(at * len(first)))]
        what = f"time to first token, {name}, {batch} prompts at once"
        row = Row(what, "ms", value, "their passes alone", 1000 * bare * batch, 0.5, False, note)
        found.append(row)
    return found


def bare_prefill(model: LanguageModel, setting: Setting) -> float:
    """Seconds of one pass over a prompt, with nothing around it; the best of 5."""
    ids = torch.randint(0, model.config.vocab_size, (1, setting.prompt), device=setting.device)
    with torch.inference_mode():
        return min(timed(lambda: model.module(ids, logits_to_keep=1)) for _ in range(6))


# --- the static loop --------------------------------------------------------------------------------------------------


class StaticCache:
    """A contiguous cache of fixed shape for sequences of equal length; a `pippin.nn.kv_cache.KVCache`."""

    def __init__(self, model: LanguageModel, batch: int, tokens: int) -> None:
        config = model.config
        shape = (len(config.layers), 2, batch, config.num_key_value_heads, tokens, config.head_dim)
        self.store = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.length = tokens - 1
        self.key = torch.arange(tokens, device=model.device)
        self.positions: Tensor = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Write at the common position; all tokens up to it are seen."""
        keys, values = self.store[layer]
        keys.index_copy_(2, self.positions[0], k)
        values.index_copy_(2, self.positions[0], v)
        return keys, values, (self.key <= self.positions)[:, None, None]

    def advance(self, new: int) -> None:
        """The position is set by the loop."""


class StaticLoop:
    """A batch that writes token after token and does nothing else."""

    def __init__(self, model: LanguageModel, batch: int, setting: Setting) -> None:
        self.batch, self.setting = batch, setting
        self.cache = StaticCache(model, batch, setting.prompt + setting.answer)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        decoder = model.module

        def step() -> Tensor:
            logits: Tensor = decoder(self.ids, cache=self.cache)
            return logits[:, -1].argmax(-1, keepdim=True)

        # the rotary tables are made before they are compiled into a constant
        with torch.inference_mode():
            step()
        self.step = torch.compile(step, mode="reduce-overhead") if setting.device == "cuda" else step

    @torch.inference_mode()
    def tokens_per_second(self) -> float:
        """Of all sequences together, from the end of their prompts on."""
        for _ in range(3):  # compiles, records, replays
            self._write(self.setting.prompt)
        seconds = timed(self._answer)
        return self.batch * self.setting.answer / seconds

    def _answer(self) -> None:
        for position in range(self.setting.prompt, self.setting.prompt + self.setting.answer):
            self._write(position)

    def _write(self, position: int) -> None:
        self.cache.positions.fill_(position)
        self.ids.copy_(self.step())


# --- packed weights ---------------------------------------------------------------------------------------------------


def packed_rows(model: LanguageModel, dense: float, setting: Setting, note: str) -> list[Row]:
    """Decode at batch 1 with weights of 4 and 2 bits, beside bfloat16; the embedding stays, the head takes 4 bits."""
    if (missing := TritonWeight.missing()) is not None:
        say(f"no packed weights: {missing}")
        return []
    found = []
    kept = {name: layer for name, layer in model.module.named_modules() if isinstance(layer, Linear)}
    for bits, goal in ((4, 2.0), (2, 2.5)):
        for name, layer in kept.items():
            stored = max(bits, 4) if name == "lm_head" else bits
            codes, scales = quantize(layer.weight.data, stored)
            weight = TritonWeight.from_codes(codes, scales, stored, 64, dtype=model.dtype)
            replace_submodule(model.module, name, PackedLinear(weight, layer.inputs, layer.outputs, layer.bias))
        with engine_for(model, 1, setting) as engine:
            answer(engine, 1, setting)
            speeds = [answer(engine, 1, setting).rate for _ in range(setting.repeats)]
        found.append(
            compared(f"decode, {bits} bits, batch 1", "tokens/s", speeds, "bfloat16", [dense], goal, note=note)
        )
    return found


if __name__ == "__main__":
    main(measure, __doc__)
