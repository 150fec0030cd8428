"""Sixteen concurrent requests on a CPU, against llama.cpp's batched decoding.

    python benchmarks/cpu_concurrent.py [--quick] [--json]

Sixteen different prompts of about 64 tokens and 96 tokens of answer to each, greedy; tokens of all answers per second,
prompts included. We get sixteen requests at the same moment from sixteen threads of a client, as a server does, and
each token comes back as text. llama.cpp gets its best case: all prompts in one batch, then all sequences in each step
(one cache for all of them), and nothing but the choice of the likeliest token between the steps. The 135M model in its
Q4_1 file, for both; each has its own process, and measurements alternate.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from _rows import Row, Watch, compared, in_turn, main, thread_counts
from _sides import LlamaCpp, Ours, Side, check, has_llama_cpp, llama_cpp_name

from pippin.core.store import store

REQUESTS = 16
THINGS = ("an apple", "a kettle", "a river", "the winter", "a lantern", "a violin", "a harbour", "a meadow")


def questions() -> list[list[dict[str, str]]]:
    """Sixteen conversations that differ from the first word of the user on."""
    manners = ("Write a long story about", "Explain to a child what happens to")
    return [
        [{"role": "user", "content": f"{thing.title()} number {i}. {manner} {thing}, and begin with its color."}]
        for i, (manner, thing) in enumerate((manner, thing) for manner in manners for thing in THINGS)
    ]


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    path = Path(store.pull("smollm2-135m"))
    repeats, count = (1, 8) if quick else (4, 96)
    rows: list[Row] = []
    with ExitStack() as stack:
        ours = stack.enter_context(Side(Ours, path=str(path), engine={"max_num_seqs": REQUESTS}))
        llama = None
        if has_llama_cpp():
            settings = {"path": str(path), "context": 8192, "sequences": REQUESTS}
            llama = stack.enter_context(Side(LlamaCpp, **settings))
        check(ours, {llama_cpp_name(): llama} if llama else {})
        prompts = [ours.call("ids", question) for question in questions()]
        total = REQUESTS * count
        for threads in thread_counts():
            measures = {
                "ours": lambda: total / ours.call("together", prompts, count),
                "alone": lambda: total / sum(ours.call("together", [prompt], count) for prompt in prompts),
            }
            ours.call("threads", threads)
            if llama is not None:
                llama.call("threads", threads)
                measures["llama"] = lambda: total / llama.call("together", prompts, count)
            with Watch() as watch:
                found = in_turn(measures, repeats, f"threads: {threads}")
            what = f"{REQUESTS} concurrent requests, {threads} thread{'s'[: threads > 1]}"
            peer = f"{llama_cpp_name()}, batched"
            rows += [
                compared(what, "tokens/s", found["ours"], peer, found.get("llama"), 1.5, note=watch),
                compared(what, "tokens/s", found["ours"], "pippin, sequential", found["alone"], 2, note=watch),
            ]
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
