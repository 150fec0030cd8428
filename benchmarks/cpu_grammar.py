"""Cost of a grammar on a CPU: masks of real schemas against the time of a decode step.

    python benchmarks/cpu_grammar.py [--quick] [--json]

The schemas are the arguments of real functions (Berkeley function-calling set), the answers those of the default model
under each of them. The time of a mask is that of computing it, applying it to the logits, taking in the token that was
chosen and looking for tokens that must follow, per step of the model; the step is that of the same model without a
grammar. One thread, where a step is longest, and every core, where it is shortest.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from _rows import Row, Watch, compared, main, say, thread_counts

import pippin
from pippin.core.errors import SchemaError
from pippin.core.store import store
from pippin.core.threads import use_threads
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.grammar.constraint import Constraint, Grammar
from pippin.engine.measure import measure_speed as measuring

KINDS = {"dict": "object", "float": "number", "tuple": "array"}
COUNT = 96


class Clock:
    """Adds up the seconds spent in some methods of a class while the block runs."""

    def __init__(self, owner: type, names: tuple[str, ...]) -> None:
        self.owner, self.names, self.seconds, self.calls = owner, names, 0.0, 0

    def __enter__(self) -> Clock:
        self._kept = {name: getattr(self.owner, name) for name in self.names}
        for name, method in self._kept.items():
            setattr(self.owner, name, self._timed(method, count=name == self.names[0]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._kept.items():
            setattr(self.owner, name, method)

    def _timed(self, method: Any, *, count: bool) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += count

        return timed


def schemas(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Questions and the schemas of the functions that answer them."""
    path = Path(store.pull("bfcl")) / "BFCL_v4_simple_python.json"
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        schema = _schema(row["function"][0]["parameters"])
        try:
            Grammar.json_schema(schema)
        except SchemaError:  # one that says what cannot be enforced is refused when it is declared
            continue
        found.append((row["question"][0][0]["content"], schema))
    return found[:: max(1, len(found) // count)][:count]


def _schema(node: Any) -> Any:
    """The set's dialect of types as JSON Schema has them."""
    if isinstance(node, dict):
        fixed = {name: _schema(value) for name, value in node.items()}
        if isinstance(fixed.get("type"), str):
            if fixed["type"] == "any":
                del fixed["type"]
            else:
                fixed["type"] = KINDS.get(fixed["type"], fixed["type"])
        return fixed
    return [_schema(item) for item in node] if isinstance(node, list) else node


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    model = pippin.load("smollm2-135m", device="cpu")
    chosen = schemas(3 if quick else 40)
    rows = []
    for threads in thread_counts():
        use_threads(threads)
        with Watch() as watch, Engine(model) as engine:
            shares, masks, steps = [], [], []
            for turn, (question, schema) in enumerate(chosen):
                step = (
                    1
                    / measuring.measure_speed(
                        engine, measuring.prompt_ids(model, 64), 32, owner=str(turn)
                    ).answer_tokens_per_second
                )
                mask = _mask_seconds(engine, model, question, schema)
                shares.append(100 * mask / step)
                masks.append(mask)
                steps.append(step)
                if turn % 10 == 9:
                    say(f"threads: {threads}, schema {turn + 1} of {len(chosen)}")
        named = f"{threads} thread{'s'[: threads > 1]}"
        note = (
            f"{1e6 * statistics.median(masks):.0f} µs of {1e3 * statistics.median(steps):.2f} ms, "
            f"medians over {len(chosen)} schemas; {watch}"
        )
        share = [statistics.median(shares)]
        rows.append(
            compared(
                f"grammar mask per token, {named}",
                "% of a step",
                share,
                "limit",
                [3.0],
                1,
                higher_is_better=False,
                note=note,
            )
        )
    return rows


def _mask_seconds(engine: Engine, model: pippin.language.LanguageModel, question: str, schema: dict[str, Any]) -> float:
    """Seconds that a grammar takes per step of one answer."""
    assert model.template is not None
    text = f"{question}\nAnswer with the arguments of the function, as JSON."
    prompt = model.template.encode([{"role": "user", "content": text}])
    request = Request(prompt, SamplingOptions(temperature=0.0, max_tokens=COUNT), Grammar.json_schema(schema))
    with Clock(Constraint, ("apply", "accept", "forced")) as clock:
        for _ in engine.stream(request):
            pass
    return clock.seconds / clock.calls


if __name__ == "__main__":
    main(measure, __doc__)
