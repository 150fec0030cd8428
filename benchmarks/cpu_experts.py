"""A mixture of experts on a CPU under budgets of memory, against llama.cpp with the whole file in memory.

    python benchmarks/cpu_experts.py [--quick] [--json]

A random Qwen3 mixture with Q4_0 matrices, written as GGUF by Pippin: prompts of 512 tokens, and tokens per second after
the first one, without a budget, and with budgets that hold a half, a quarter and an eighth of the experts beside the
rest. Its routers are random, so that a token needs other experts than the one before it: the worst case of a cache. The
file is read around the page cache. llama.cpp has no budget; it maps the file, which is in memory as a whole. Every side
has a process of its own and they are asked in turn."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from _rows import Row, Watch, compared, in_turn, main, say, thread_counts
from _sides import LlamaCpp, Ours, Side, has_llama_cpp, llama_cpp_name
from cpu_families import check_agreement, write

from pippin.core.files import format_bytes
from pippin.core.store import store

SHARES = (0.5, 0.25, 0.125)
"""Shares of the experts that budgets hold."""


def budgets(path: Path) -> dict[str, int | None]:
    """The budgets, by what is said of them."""
    import pippin
    from pippin.language.availability import least_memory, memory_needed

    least, whole = least_memory(path, device="cpu"), memory_needed(path, device="cpu", context=0)
    experts = pippin.load(path, device="cpu", memory=least).placement
    assert experts is not None
    assert experts.experts is not None
    total = sum(expert.packed_bytes for layer in experts.experts for expert in layer)
    say(f"{format_bytes(whole)} of weights, {format_bytes(total)} of them experts; the least budget: {least:,}")
    made: dict[str, int | None] = {"no budget": None}
    for share in SHARES:
        nbytes = round(least + share * total)
        made[f"{share:.0%} of the experts, {format_bytes(nbytes)}"] = nbytes
    return made


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    count, repeats, length = (8, 1, 64) if quick else (48, 3, 512)
    prompt = [100 + 7 * at % 1000 for at in range(length)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place, ExitStack() as stack:  # /tmp may be memory
        path = write("qwen3_moe", Path(store.pull("smollm2-135m")), Path(place), quick)
        chosen = budgets(path)
        goals = dict(
            zip(chosen, (1.5, *SHARES), strict=True)
        )  # as much of llama.cpp's speed as there is of the experts
        sides = {
            label: stack.enter_context(Side(Ours, path=str(path), load={} if nbytes is None else {"memory": nbytes}))
            for label, nbytes in chosen.items()
        }
        llama = stack.enter_context(Side(LlamaCpp, path=str(path))) if has_llama_cpp() else None
        if llama is not None:
            check_agreement("qwen3_moe", sides["no budget"], llama)
        for threads in thread_counts():
            measures = {}
            for label, side in {**sides, **({"llama.cpp": llama} if llama is not None else {})}.items():
                side.call("threads", threads)
                measures[f"decode, {label}"] = lambda side=side: side.call("answer", prompt[:16], count).rate
                measures[f"prompt, {label}"] = lambda side=side: length / side.call("answer", prompt, 2).prompt_seconds
            with Watch() as watch:
                found = in_turn(measures, repeats, f"threads: {threads}")
            for label in sides:
                for what in ("decode", "prompt"):
                    rows.append(
                        compared(
                            f"{what}, a mixture of random weights, {label}, {threads} thread{'s'[: threads > 1]}",
                            "tokens/s",
                            found[f"{what}, {label}"],
                            llama_cpp_name(),
                            found.get(f"{what}, llama.cpp"),
                            goals[label] if what == "decode" or label != "no budget" else 1.0,
                            note=f"{watch}; {sides[label].call('memory'):.0f} MB resident",
                        )
                    )
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
