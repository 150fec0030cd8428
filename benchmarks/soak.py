"""Soak test under mixed load: memory growth, completion of requests, and answers equal to those of an idle server.

    python benchmarks/soak.py [--minutes 30] [--quick] [--json]

The 135M model in its Q4_1 file behind one engine with little room in its cache, so that requests are evicted and
preempted. Clients ask at random: short and long prompts, greedy and sampled with a seed, under a JSON Schema, with one
of two adapters, with speculation, in a chat of several turns, with different owners and priorities; some cancel or go
away, some ask for what is impossible and must get a typed error. Before, each kind of question is answered once on the
idle engine: every answer under load must be the same, token for token. Memory is the process's, resident: the median of
the last fifth of the time beside that of the second fifth. The note names the kernels: without the native ones torch
computes, whose results depend on the batch where two tokens are closer than rounding."""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from _rows import Row, Watch, compared, parser, say, show
from _sides import rss

import pippin
from pippin.core import native
from pippin.core.errors import ContextOverflow, InvalidArgument, ModelNotFound, Overloaded, PippinError
from pippin.core.store import store
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.request import Finished
from pippin.engine.speculation import Speculation
from pippin.language.adapter_files import save_adapter

CLIENTS = 12
PATIENCE = 300.0
"""Seconds after which a request without an end counts as stuck."""
PROSE = "The orchard behind the mill has {n} old trees, and in year {n} the frost came late. "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "sort": {"enum": ["apple", "pear", "quince"]},
    },
    "required": ["name", "year", "sort"],
    "additionalProperties": False,
}


@dataclass
class Found:
    """What the clients saw; every change under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    begun: dict[int, float] = field(default_factory=dict)
    slowest: float = 0.0


def questions(model: pippin.language.LanguageModel) -> list[Request]:
    """Requests whose answers on an idle server are recorded."""
    assert model.template is not None

    def prompt(text: str) -> list[int]:
        return list(model.template.encode([{"role": "user", "content": text}]))

    greedy, things = SamplingOptions(temperature=0.0, max_tokens=48), ("apple", "kettle", "river", "lantern")
    grammar = Grammar.json_schema(SCHEMA)
    found = [Request(prompt(f"Write a story about the {thing}."), greedy) for thing in things]
    for seed, thing in enumerate(things):
        drawn = SamplingOptions(temperature=0.8, top_p=0.95, seed=seed, max_tokens=40)
        found.append(Request(prompt(f"What is a {thing} good for?"), drawn))
        penalized = replace(drawn, repetition_penalty=1.1, frequency_penalty=0.2)
        found.append(Request(prompt(f"Praise the {thing}."), penalized))
        found.append(Request(prompt(f"Describe an old {thing} as JSON."), replace(greedy, max_tokens=64), grammar))
        found.append(Request(prompt(f"Say something of the {thing}."), greedy, adapter=("first", "second")[seed % 2]))
        text = "".join(PROSE.format(n=10 * seed + n) for n in range(4 + 12 * seed))
        found.append(Request(prompt(f"Repeat this text: {text}"), greedy))
        found.append(Request(prompt(f"Repeat this text: {text}"), greedy, speculation=Speculation("ngram")))
    return found


def adapters(model: pippin.language.LanguageModel, folder: Path) -> None:
    """Two random adapters, strong enough to change answers."""
    width = model.config.hidden_size
    heads = model.config.num_attention_heads * model.config.head_dim
    for seed, name in enumerate(("first", "second")):
        generator = torch.Generator().manual_seed(seed)
        weights = {
            f"layers.{layer}.self_attn.q_proj": (
                torch.randn(8, width, generator=generator) / width**0.5,
                torch.randn(heads, 8, generator=generator) / 8**0.5,
            )
            for layer in range(0, len(model.config.layers), 3)
        }
        save_adapter(folder / name, weights, model=model, alpha=8.0)
        model.load_adapter(name, folder / name)


def answer(engine: Engine, request: Request) -> list[int]:
    """The tokens of an answer.

    Raises:
        PippinError: it failed.
    """
    return [event.id for event in engine.stream(request) if not isinstance(event, Finished)]


def client(
    number: int, engine: Engine, known: list[tuple[Request, list[int]]], found: Found, stop: threading.Event
) -> None:
    """Ask at random until the time is over."""
    rng = random.Random(number)
    while not stop.is_set():
        request, expected = rng.choice(known)
        request = replace(request, owner=f"owner {rng.randrange(4)}", priority=rng.choice((-1, 0, 0, 0, 1)))
        began = time.monotonic()
        with found.lock:
            found.begun[number] = began
        kind = _one(rng, engine, request, expected, found)
        with found.lock:
            found.counts[kind] += 1
            found.slowest = max(found.slowest, time.monotonic() - began)
            del found.begun[number]


def _one(rng: random.Random, engine: Engine, request: Request, expected: list[int], found: Found) -> str:
    """One request of a random kind; what became of it."""
    draw = rng.random()
    try:
        if draw < 0.08:
            return _impossible(rng, engine, request)
        if draw < 0.25:
            cancel = threading.Event()
            timer = threading.Timer(rng.random() * 0.6, cancel.set)
            timer.start()
            got = answer(engine, replace(request, cancel=cancel))
            timer.cancel()
            timer.join()
            kind = "cancelled"
        elif draw < 0.35:
            got, leave = [], rng.randrange(1, 12)
            for event in engine.stream(request):
                if isinstance(event, Finished) or len(got) == leave:
                    break
                got.append(event.id)
            kind = "left"
        else:
            got, kind = answer(engine, request), "answered"
    except Overloaded:
        time.sleep(0.2)
        return "overloaded"
    except PippinError as error:
        with found.lock:
            found.wrong.append(f"{type(error).__name__}: {error}")
        return "failed"
    if got != (expected if kind == "answered" else expected[: len(got)]):
        with found.lock:
            found.wrong.append(f"{kind}: {got} instead of {expected}")
        return "different"
    return kind


def _impossible(rng: random.Random, engine: Engine, request: Request) -> str:
    """What must be refused with a typed error."""
    bad, error = rng.choice(
        [
            (replace(request, prompt=[]), InvalidArgument),
            (replace(request, prompt=[10**9]), InvalidArgument),
            (replace(request, prompt=list(request.prompt) * 1000), ContextOverflow),
            (replace(request, adapter="nobody"), ModelNotFound),
        ]
    )
    try:
        answer(engine, bad)
    except error:
        return "refused"
    raise PippinError(f"{error.__name__} was expected")


def soak(seconds: float) -> list[Row]:
    """Measure all rows."""
    found, stop, memory = Found(), threading.Event(), []
    with tempfile.TemporaryDirectory() as place:
        model = pippin.load(Path(store.pull("smollm2-135m")), device="cpu")
        adapters(model, Path(place))
        with Engine(model, max_num_seqs=8, max_waiting=64, cache_tokens=4096) as engine:
            known = [
                (request, answer(engine, replace(request, owner=f"quiet {i}")))
                for i, request in enumerate(questions(model))
            ]
            say(f"{len(known)} answers known from the quiet engine")
            threads = [
                threading.Thread(target=client, args=(number, engine, known, found, stop), daemon=True)
                for number in range(CLIENTS)
            ]
            with Watch() as watch:
                for thread in threads:
                    thread.start()
                stuck = _watch(seconds, found, memory)
                stop.set()
                for thread in threads:
                    thread.join(PATIENCE)
            stuck = max(stuck, sum(thread.is_alive() for thread in threads))
            for wrong in found.wrong[:5]:
                print(wrong[:2000], file=sys.stderr)
            say("draining")
            stats = engine.stats()
            while stats.active or stats.waiting:  # those whose clients left end within a step
                time.sleep(0.05)
                stats = engine.stats()
            kernels = f"{native.instruction_set()} kernels" if native.library() is not None else "torch"
            note = f"{kernels}; {dict(found.counts)}, the slowest {found.slowest:.1f} s; {watch}"
            return _rows(found, memory, stuck, stats, note)


def _watch(seconds: float, found: Found, memory: list[float]) -> int:
    """Wait, and note memory; how many requests were stuck at the worst moment."""
    began, stuck, told = time.monotonic(), 0, 0.0
    while (now := time.monotonic()) - began < seconds:
        time.sleep(min(1.0, seconds / 50))
        memory.append(rss())
        with found.lock:
            stuck = max(stuck, sum(now - since > PATIENCE for since in found.begun.values()))
            counts = dict(found.counts)
        if now - told > 60:
            told = now
            say(f"{(now - began) / 60:.0f} of {seconds / 60:.0f} minutes, {memory[-1]:.0f} MB, {counts}")
    return stuck


def _rows(found: Found, memory: list[float], stuck: int, stats: object, note: str) -> list[Row]:
    """The verdicts."""
    counts = found.counts
    same = sum(counts[kind] for kind in ("answered", "cancelled", "left"))
    fifth = max(1, len(memory) // 5)
    before, after = statistics.median(memory[fifth : 2 * fifth]), statistics.median(memory[-fifth:])
    asked = sum(counts.values()) + stuck
    accounted = stats.blocks_free + stats.blocks_cached  # type: ignore[attr-defined]
    return [
        compared("soak: completed requests", "requests", [asked - stuck], "asked", [asked], 1, note=note),
        compared(
            "soak: answers equal to those of an idle server",
            "answers",
            [same],
            "compared",
            [same + counts["different"] + counts["failed"]],
            1,
        ),
        compared(
            "soak: memory at the end", "MB", [after], "after the first 20 %", [before], 0.97, higher_is_better=False
        ),
        compared(
            "soak: cache blocks accounted for",
            "blocks",
            [accounted],
            "all",
            [stats.blocks_total],
            1,  # type: ignore[attr-defined]
        ),
    ]


def main() -> None:
    """Run it from the command line."""
    words = parser(__doc__)
    words.add_argument("--minutes", type=float, default=30.0, help="how long; 30 is what the figures are for")
    options = words.parse_args()
    show(soak(40.0 if options.quick else 60 * options.minutes), as_json=options.json)


if __name__ == "__main__":
    main()
