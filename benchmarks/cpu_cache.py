"""Prefix caching: the second turn of a chat, and a prompt cache restored from disk.

    python benchmarks/cpu_cache.py [--quick] [--json]

A chat with about 1,000 tokens of history gets its second question; the time to the first token of the answer, with what
the first turn left in the cache and without it. llama.cpp keeps the first turn in its cache too and computes what is
new. From disk: a new engine that opens a saved prompt cache, opening included, beside one that computes the prompt. The
135M model in its Q4_1 file, every core; the same tokens for both; each side has its own process, and measurements
alternate."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _rows import Row, Watch, compared, in_turn, main, thread_counts
from _sides import LlamaCpp, Ours, Side, check, has_llama_cpp, llama_cpp_name

from pippin.core.store import store

HISTORY = 1000
ANSWER = 48
PROSE = (
    "The orchard behind the mill has {n} old trees. In year {n} they stood white in April, the frost came on a {d}, "
    "and whoever picked {n} baskets in September kept the next one. "
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Chatting(Ours):
    """Our engine, asked for the second turn of a chat in several ways. Times are milliseconds to the first token."""

    def first(self, prompt: list[int]) -> list[int]:
        """Answer the first turn, which stays cached for a new owner."""
        self.owner += 1
        return self._ask(prompt, ANSWER)[1]

    def second(self, prompt: list[int]) -> float:
        """The second turn, for the same owner."""
        return self._ask(prompt, 1)[0]

    def cold(self, prompt: list[int]) -> float:
        """The second turn, for an owner without a cache."""
        self.owner += 1
        return self._ask(prompt, 1)[0]

    def save(self, prompt: list[int], path: str) -> None:
        """Save the prompt cache to a file."""
        with self._engine() as engine:
            engine.prefill(prompt)
            engine.save_prompt_cache(Path(path))

    def restored(self, prompt: list[int], path: str) -> float:
        """A new engine with the file: opening it, and the first token."""
        return self._new(prompt, prompt_cache=Path(path))

    def fresh(self, prompt: list[int]) -> float:
        """A new engine without one."""
        return self._new(prompt)

    def _engine(self, **settings: Any) -> Any:
        from pippin.engine import Engine

        return Engine(self.model, **settings)

    def _new(self, prompt: list[int], **settings: Any) -> float:
        import time

        from pippin.engine import Request, SamplingOptions

        began = time.perf_counter()
        engine = self._engine(**settings)
        for _ in engine.stream(Request(prompt, SamplingOptions(temperature=0.0, max_tokens=1))):
            seconds = time.perf_counter() - began
            break
        engine.close(drain=False)
        return 1000 * seconds

    def _ask(self, prompt: list[int], count: int) -> tuple[float, list[int]]:
        from pippin.engine import Request, SamplingOptions

        options = SamplingOptions(temperature=0.0, max_tokens=count, logit_bias=dict.fromkeys(self.stops, -100.0))
        *tokens, last = self.engine.stream(Request(prompt, options, owner=str(self.owner)))
        return 1000 * last.first_token_seconds, [token.id for token in tokens]


def conversation(ours: Side) -> tuple[list[int], list[int], list[int]]:
    """Token ids of the first prompt, its answer, and the second prompt."""
    sentences = [PROSE.format(n=n, d=DAYS[n % 7]) for n in range(3, 60)]
    count = next(
        n
        for n in range(1, 60)
        if len(ours.call("ids", [{"role": "user", "content": "".join(sentences[:n])}])) >= HISTORY
    )
    messages = [{"role": "user", "content": "".join(sentences[:count]) + "What happened in April?"}]
    prompt = ours.call("ids", messages)
    answer = ours.call("first", prompt)
    messages += [
        {"role": "assistant", "content": ours.call("text", answer)},
        {"role": "user", "content": "And how many baskets did they pick in September?"},
    ]
    return prompt, answer, ours.call("ids", messages)


def common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix of two lists."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    path = Path(store.pull("smollm2-135m"))
    repeats = 1 if quick else 7
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        kept = str(Path(place) / "prompt.cache")
        ours = stack.enter_context(Side(Chatting, path=str(path)))
        llama = stack.enter_context(Side(LlamaCpp, path=str(path))) if has_llama_cpp() else None
        check(ours, {llama_cpp_name(): llama} if llama else {})
        threads = thread_counts()[-1]
        ours.call("threads", threads)
        prompt, answer, second = conversation(ours)
        held = common([*prompt, *answer], second)
        assert held > HISTORY, f"the second prompt shares only {held} tokens with the first turn"

        def warm() -> float:
            ours.call("first", prompt)
            return ours.call("second", second)

        measures = {
            "cold": lambda: ours.call("cold", second),
            "warm": warm,
            "restored": lambda: ours.call("restored", second, kept),
            "fresh": lambda: ours.call("fresh", second),
        }
        ours.call("save", second, kept)
        if llama is not None:
            llama.call("threads", threads)

            def theirs() -> float:
                llama.call("turn", [*prompt, *answer], 0, 1)
                return 1000 * llama.call("turn", second, held, 1).prompt_seconds

            measures["llama"] = theirs
        with Watch() as watch:
            found = in_turn(measures, repeats, "second turn")
        note = f"{len(second):,} tokens of which {held:,} are cached, {threads} threads; {watch}"
        return _rows(found, note)


def _rows(found: dict[str, list[float]], note: str) -> list[Row]:
    """Rows of the measurements."""
    rows = (
        ("second turn of a chat, first token", "warm", "pippin, no cache", "cold", 10),
        ("second turn of a chat, first token", "warm", f"{llama_cpp_name()}, prefix cached", "llama", 1),
        ("prompt cache from disk, first token", "restored", "pippin, prefill", "fresh", 5),
    )
    return [
        compared(what, "ms", found[ours], peer, found.get(theirs), goal, higher_is_better=False, note=note)
        for what, ours, peer, theirs, goal in rows
    ]


if __name__ == "__main__":
    main(measure, __doc__)
