"""Decoding speed on a CPU, against llama.cpp, transformers and the memory bandwidth limit.

    python benchmarks/cpu_decode.py [--quick] [--json]

One greedy answer after a short prompt, tokens per second after the first one, with one thread and with every core. The
135M model is its Q4_1 file for llama.cpp and Pippin (and once Pippin's 2 bits, packed from that file); transformers
gets the dequantized weights. The 1B model is random, in the shape of TinyLlama, Q4_1 for both. The memory bandwidth
limit is the bandwidth measured in the same round, divided by the bytes per token (weights and cache). Every side has a
process of its own and they are asked in turn."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from _random_model import write
from _rows import Row, Watch, compared, in_turn, main, say, thread_counts
from _sides import (
    LlamaCpp,
    Ours,
    Side,
    Transformers,
    check,
    has_llama_cpp,
    hugging_face_folder,
    llama_cpp_name,
    peer_version,
)

from pippin.core.store import store

STORY = [{"role": "user", "content": "Write a long story about an apple tree."}]
LIMIT = "memory bandwidth limit"


def small(path: Path, folder: Path, quick: bool) -> list[Row]:
    """The 135M model."""
    count, few, repeats = (16, 8, 1) if quick else (128, 48, 5)
    rows: list[Row] = []
    with ExitStack() as stack:

        def side(kind: type, **settings: object) -> Side:
            return stack.enter_context(Side(kind, **settings))

        ours, two_bits = side(Ours, path=str(path)), side(Ours, path=str(path), load={"bits": 2})
        hugging = hugging_face_folder(path, folder / "model")
        others = {
            f"{peer_version('transformers')}, {dtype}": side(Transformers, folder=str(hugging), dtype=dtype)
            for dtype in ("bfloat16", "float32")
        }
        llama = side(LlamaCpp, path=str(path)) if has_llama_cpp() else None
        check(ours, others | ({llama_cpp_name(): llama} if llama else {}))
        prompt = ours.call("ids", STORY)
        for threads in thread_counts():
            for one in (ours, two_bits, llama, *others.values()):
                if one is not None:
                    one.call("threads", threads)
            measures = {
                "ours": lambda: ours.call("answer", prompt, count).rate,
                "2 bits": lambda: two_bits.call("answer", prompt, count).rate,
                LIMIT: lambda threads=threads: ours.call("limit", threads, len(prompt), count),
            }
            for name, one in others.items():
                measures[name] = lambda one=one: one.call("answer", prompt, few).rate
            if llama is not None:
                measures["llama"] = lambda: llama.call("answer", prompt, count).rate
            with Watch() as watch:
                found = in_turn(measures, repeats, f"135M, threads: {threads}")
            profiles = [one.call("profile", prompt, count) for one in (ours, two_bits)]
            rows += _small_rows(found, list(others), threads, f"{watch}; {ours.call('kernels')}", profiles)
    return rows


def _small_rows(
    found: dict[str, list[float]], others: list[str], threads: int, note: str, profiles: list[str]
) -> list[Row]:
    """Measure the rows for a number of threads."""
    named = f"{threads} thread{'s'[: threads > 1]}"
    llama, theirs = llama_cpp_name(), found.get("llama")
    what = f"decode, 135M, Q4_1 file, {named}"
    rows = [
        compared(what, "tokens/s", found["ours"], llama, theirs, 2, note=note),
        compared(
            f"decode, 135M, Pippin 2 bits, {named}",
            "tokens/s",
            found["2 bits"],
            f"{llama}, Q4_1",
            theirs,
            3,
            note=f"{note}; {profiles[1]}",
        ),
        compared(what, "tokens/s", found["ours"], LIMIT, found[LIMIT], 0.6, note=f"{note}; {profiles[0]}"),
    ]
    return rows + [compared(what, "tokens/s", found["ours"], name, found[name], 2, note=note) for name in others]


def large(tokenizer_from: Path, folder: Path, quick: bool) -> list[Row]:
    """The 1B model of random weights."""
    count, repeats = (4, 1) if quick else (32, 3)
    say("writing a random model")
    path = write(folder / "random-1b.gguf", tokenizer_from, **({"layers": 2} if quick else {}))
    rows: list[Row] = []
    with ExitStack() as stack:
        ours = stack.enter_context(Side(Ours, path=str(path)))
        llama = stack.enter_context(Side(LlamaCpp, path=str(path))) if has_llama_cpp() else None
        prompt = list(range(100, 116))
        for threads in thread_counts():
            ours.call("threads", threads)
            measures = {
                "ours": lambda: ours.call("answer", prompt, count).rate,
                LIMIT: lambda threads=threads: ours.call("limit", threads, len(prompt), count),
            }
            if llama is not None:
                llama.call("threads", threads)
                measures["llama"] = lambda: llama.call("answer", prompt, count).rate
            with Watch() as watch:
                found = in_turn(measures, repeats, f"1B, threads: {threads}")
            profile = ours.call("profile", prompt, count)
            what = f"decode, 1B of random weights, Q4_1, {threads} thread{'s'[: threads > 1]}"
            rows += [
                compared(what, "tokens/s", found["ours"], LIMIT, found[LIMIT], 0.75, note=f"{watch}; {profile}"),
                compared(what, "tokens/s", found["ours"], llama_cpp_name(), found.get("llama"), 1, note=watch),
            ]
    return rows


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    path = Path(store.pull("smollm2-135m"))
    with tempfile.TemporaryDirectory() as place:
        return [*small(path, Path(place), quick), *large(path, Path(place), quick)]


if __name__ == "__main__":
    main(measure, __doc__)
