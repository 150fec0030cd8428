"""Prefill speed on a CPU, and decoding after a long prompt, against llama.cpp and transformers.

    python benchmarks/cpu_prefill.py [--quick] [--json]

A prompt of 1,024 tokens of prose that no side has seen before, tokens per second up to the first token of the answer;
then 32 tokens of answer, which read the whole cache. The 135M model: its Q4_1 file for llama.cpp and for us, the
dequantized weights for transformers. Every side has its own process, and measurements alternate.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from _rows import Row, Watch, compared, in_turn, main, thread_counts
from _sides import (
    LlamaCpp,
    Ours,
    Side,
    Timed,
    Transformers,
    check,
    has_llama_cpp,
    hugging_face_folder,
    llama_cpp_name,
    peer_version,
)

from pippin.core.store import store

LENGTH = 1024
PROSE = "The old orchard lies behind the mill. In April its trees stand white, and in September the ladders lean. "


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    path = Path(store.pull("smollm2-135m"))
    repeats, answer = (1, 4) if quick else (4, 32)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        sides = {"ours": stack.enter_context(Side(Ours, path=str(path)))}
        if has_llama_cpp():
            sides[llama_cpp_name()] = stack.enter_context(Side(LlamaCpp, path=str(path)))
        hugging = hugging_face_folder(path, Path(place) / "model")
        for dtype in ("bfloat16", "float32"):
            name = f"{peer_version('transformers')}, {dtype}"
            sides[name] = stack.enter_context(Side(Transformers, folder=str(hugging), dtype=dtype))
        ours = sides["ours"]
        check(ours, {name: side for name, side in sides.items() if side is not ours})
        prompt = (ours.call("ids", [{"role": "user", "content": PROSE * 60}]))[:LENGTH]
        for threads in thread_counts():
            for side in sides.values():
                side.call("threads", threads)
            measures = {name: lambda side=side: side.call("answer", prompt, answer) for name, side in sides.items()}
            with Watch() as watch:
                found = in_turn(measures, repeats, f"threads: {threads}")
            rows += _rows(found, threads, str(watch))
    return rows


def _rows(found: dict[str, list[Timed]], threads: int, note: str) -> list[Row]:
    """Measure the rows for a number of threads."""
    named = f"{threads} thread{'s'[: threads > 1]}"
    read = {name: [LENGTH / timed.prompt_seconds for timed in every] for name, every in found.items()}
    wrote = {name: [timed.rate for timed in every] for name, every in found.items()}
    names = [name for name in found if name != "ours"]
    if not has_llama_cpp():
        names.insert(0, llama_cpp_name())
    rows = [
        compared(f"prompt of {LENGTH:,} tokens, {named}", "tokens/s", read["ours"], name, read.get(name), 1, note=note)
        for name in names
    ]
    what = f"decode after {LENGTH:,} tokens, {named}"
    return rows + [compared(what, "tokens/s", wrote["ours"], name, wrote.get(name), 1, note=note) for name in names]


if __name__ == "__main__":
    main(measure, __doc__)
