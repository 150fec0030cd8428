"""What the language models of the catalog cost on this machine: disk, memory and time; and which one suits it.

Notable here:
- a token takes the time in which its weights and the cache are read, and a little for each layer: 20 microseconds, what
  the recorded benchmark of the default model takes beyond its reads
- memory is that of the process: libraries, weights, and the keys and values of a short conversation
- a speed that `pippin bench` has measured here replaces the estimate
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pippin.core.files import format_bytes
from pippin.core.store.catalog import Entry, Network
from pippin.engine.measure.machine_speed import MachineSpeed

CONTEXT: Final = 512
"""Tokens of the conversation that memory and speed are estimated for."""
MEMORY_SHARE: Final = 0.6
"""Fraction of the free memory that a recommended model may take: the rest is for longer texts and other programs."""
ENOUGH_SPEED: Final = 8.0
"""Tokens per second of a recommended model, about as fast as one reads."""

_PROCESS: Final = 225_000_000  # what the recorded benchmark of memory has beyond weights and cache
_LAYER_SECONDS: Final = 20e-6
_CACHE_BYTES: Final = 2  # keys and values are bfloat16


@dataclass(frozen=True)
class ModelCost:
    """What a model costs on this machine.

    Attributes:
        name: its catalog name.
        parameters: number of its parameters.
        disk: bytes on disk.
        memory: bytes of memory of a process that answers with it.
        tokens_per_second: of an answer.
        estimated: whether the speed is an estimate; else `pippin bench` has measured it here.
    """

    name: str
    parameters: int
    disk: int
    memory: int
    tokens_per_second: float
    estimated: bool


@dataclass(frozen=True)
class Recommendation:
    """The model that suits this machine.

    Attributes:
        cost: what it costs.
        reason: why this one, in a sentence.
        command: the command that downloads it.
    """

    cost: ModelCost
    reason: str
    command: str


def model_cost(entry: Entry, speed: MachineSpeed) -> ModelCost | None:
    """What a catalog entry costs on a machine; None for encoders and data."""
    network = entry.network
    if network is None:
        return None
    quantized = entry.quantized and speed.quantized > 0
    weights = entry.size if quantized else network.parameters * speed.bytes_per_weight
    cache = cache_bytes(network)
    measured = speed.measured.get(entry.name)
    estimate = tokens_per_second(
        weights - network.embedding_bytes if quantized else weights,
        cache,
        network.num_hidden_layers,
        speed.quantized if quantized else speed.dense,
    )
    return ModelCost(
        name=entry.name,
        parameters=network.parameters,
        disk=entry.size,
        memory=_PROCESS + weights + cache,
        tokens_per_second=estimate if measured is None else measured,
        estimated=measured is None,
    )


def cache_bytes(network: Network) -> int:
    """Bytes of keys and values of `CONTEXT` tokens.

    >>> cache_bytes(Network(parameters=0, num_hidden_layers=30, num_key_value_heads=3, head_dim=64))
    11796480
    """
    per_token = 2 * network.num_hidden_layers * network.num_key_value_heads * network.head_dim * _CACHE_BYTES
    return CONTEXT * per_token


def tokens_per_second(weight_bytes: float, cache: float, layers: int, bandwidth: float) -> float:
    """Estimated speed of an answer.

    Args:
        weight_bytes: bytes of weights that each token reads.
        cache: bytes of keys and values that each token reads.
        layers: number of layers.
        bandwidth: bytes per second that the kernels read.

    >>> round(tokens_per_second(98_000_000, 2_000_000, 30, 50e9))
    385
    """
    return 1 / ((weight_bytes + cache) / bandwidth + layers * _LAYER_SECONDS)


def recommend(
    entries: Sequence[Entry], speed: MachineSpeed, disk: int, installed: Collection[str] = ()
) -> Recommendation | None:
    """The largest chat model that suits a machine: open, not gated, with room in memory and fast enough.

    Args:
        entries: of the catalog.
        speed: of the machine.
        disk: bytes that may be written to the cache folder.
        installed: names of the models that are in it already.

    Returns:
        None where no model fits.
    """
    fitting = []
    for entry in entries:
        cost = model_cost(entry, speed)
        if cost is None or not entry.chat or entry.tier != "A" or entry.gated:
            continue
        here = entry.name in installed or cost.disk <= disk
        if here and cost.memory <= MEMORY_SHARE * speed.memory and cost.tokens_per_second >= ENOUGH_SPEED:
            fitting.append(cost)
    if not fitting:
        return None
    best = max(fitting, key=lambda cost: cost.parameters)
    rate = f"{'~' if best.estimated else ''}{best.tokens_per_second:.0f}"
    reason = (
        f"the largest open chat model that takes at most {100 * MEMORY_SHARE:.0f} % of the "
        f"{format_bytes(speed.memory)} free memory ({format_bytes(best.memory)}) "
        f"and writes at least {ENOUGH_SPEED:.0f} tokens/s ({rate})"
    )
    return Recommendation(best, reason, f"pippin pull {best.name}")
