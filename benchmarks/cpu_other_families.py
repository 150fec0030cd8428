"""The slow path on a CPU: a model that transformers computes, against Pippin's kernels and transformers alone.

    python benchmarks/cpu_other_families.py [--quick] [--json]

Families without a decoder in Pippin open through transformers. How much slower that is shows on a model that Pippin
has: the 135M model, dequantized, once through the kernels and once as such a family (its layers computed by
transformers, its cache and requests by our engine). And the engine's work on top must not cost anything: transformers
alone decodes with its own cache, and batches with its own `generate`. Decoding after a prompt of 16 tokens, prompts of
512, and 8 concurrent requests, prompts included. Each side has its own process, and measurements alternate.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from _rows import Row, Watch, compared, in_turn, main, thread_counts
from _sides import Ours, Side, ThroughTransformers, Transformers, check, hugging_face_folder, peer_version

from pippin.core.store import store

REQUESTS = 8
DTYPE = os.environ.get("DTYPE", "float32")
"""Precision of transformers' weights; that of the kernels is bfloat16, as they load them."""


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    count, repeats, length = (8, 1, 64) if quick else (64, 3, 512)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = str(hugging_face_folder(Path(store.pull("smollm2-135m")), Path(place) / "model"))
        engine = {"max_num_seqs": REQUESTS}
        kernels = stack.enter_context(Side(Ours, path=folder, engine=engine))
        through = stack.enter_context(Side(ThroughTransformers, path=folder, dtype=DTYPE, engine=engine))
        alone = stack.enter_context(Side(Transformers, folder=folder, dtype=DTYPE))
        check(kernels, {"through transformers": through, "transformers": alone})
        prompt = [100 + 7 * at % 1000 for at in range(length)]
        prompts = [prompt[at : at + 40 + 4 * at] for at in range(REQUESTS)]
        total = REQUESTS * count
        for threads in thread_counts():
            named = f"{threads} thread{'s'[: threads > 1]}"
            measures = {}
            for name, side in (("kernels", kernels), ("through", through), ("alone", alone)):
                side.call("threads", threads)
                measures |= {
                    f"{name} decode": lambda side=side: side.call("answer", prompt[:16], count).rate,
                    f"{name} prompt": lambda side=side: length / side.call("answer", prompt, 2).prompt_seconds,
                    f"{name} {REQUESTS} requests": lambda side=side: total / side.call("together", prompts, count),
                }
            with Watch() as watch:
                found = in_turn(measures, repeats, f"threads: {threads}")
            for what in ("decode", "prompt", f"{REQUESTS} requests"):
                mine, note = found[f"through {what}"], str(watch)
                alone_name, through_name = f"{peer_version('transformers')}, {DTYPE}", f"through transformers, {DTYPE}"
                label = f"{what}, 135M {through_name}, {named}"
                rows.append(compared(label, "tokens/s", mine, alone_name, found[f"alone {what}"], 1.0, note=note))
                label = f"{what}, 135M in Pippin's kernels, {named}"
                rows.append(compared(label, "tokens/s", found[f"kernels {what}"], through_name, mine, 1.0, note=note))
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
