"""Speedup of a model pruned by prompt, against the limit by bytes read.

    python benchmarks/specialized.py [--quick] [--json]

The 135M model, its feed-forward layers pruned to a part of their channels by a predictor of random weights: speed does
not depend on which ones. One greedy answer after a short prompt, tokens per second after the first one, one thread. The
limit is the dense model's rate times the bytes that it reads for a token (attention, embedding and norms too) over
those that the small one reads. Selecting and gathering is done once for a prompt, and is held against 2 % of an answer
of 128 tokens. Every side has its own process, and measurements alternate."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from _rows import Row, Watch, compared, in_turn, main, say
from _sides import Ours, Side, Transformers, hugging_face_folder, peer_version

from pippin.core.store import store

TASK = "You are a math teacher. Explain every step."
STORY = [{"role": "user", "content": "Write a long story about an apple tree."}]
KEEPS = (1024, 768, 512, 256)
"""Of 1536 channels."""
WITHIN = 0.85
"""Of the promise that is to be reached."""
ANSWER = 128


@dataclass(frozen=True)
class Small:
    """A small model on disk, the bytes that it reads for a token, and the seconds that it took to make."""

    folder: Path
    reads: int
    seconds: list[float]


def made(base: Path, keeps: tuple[int, ...], place: Path, repeats: int) -> dict[int, Small]:
    """The small models, and under 0 the whole one."""
    import pippin
    from pippin.engine.measure.measure_speed import weight_bytes
    from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel, mask_predictor

    torch.set_num_threads(1)
    whole = pippin.load(base, device="cpu", pack=False)
    found = {0: Small(base, weight_bytes(pippin.load(base, device="cpu").module), [])}
    for keep in keeps:
        model = PrunedModel.from_language_model(
            whole, mask_predictor(whole, "nano", seed=0).to(whole.dtype), keep, eps=0.3
        )
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            small = model.specialize(TASK)
            seconds.append(time.perf_counter() - began)
        folder = place / f"keep-{keep}"
        small.save(folder)
        found[keep] = Small(folder, weight_bytes(pippin.load(folder, device="cpu").module), seconds[1:])
        say(f"made the model of {keep} channels")
    return found


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    count, few, repeats = (16, 8, 1) if quick else (96, 32, 5)
    keeps = (512,) if quick else KEEPS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        place = Path(temporary)
        base = hugging_face_folder(Path(store.pull("smollm2-135m")), place / "base")
        models = made(base, keeps, place, repeats)
        sides = {keep: stack.enter_context(Side(Ours, path=str(model.folder))) for keep, model in models.items()}
        theirs = stack.enter_context(Side(Transformers, folder=str(base), dtype="float32"))
        for side in (*sides.values(), theirs):
            side.call("threads", 1)
        prompt = sides[0].call("ids", STORY)
        measures = {
            str(keep): lambda side=side: side.call("answer", prompt, count).rate for keep, side in sides.items()
        }
        measures["transformers"] = lambda: theirs.call("answer", prompt, few).rate
        with Watch() as watch:
            found = in_turn(measures, repeats, "135M, one thread")
        whole = found["0"]
        for keep in keeps:
            what, rates = f"decode, 135M, {keep} of 1536 channels, 1 thread", found[str(keep)]
            share = models[0].reads / models[keep].reads
            promise = [rate * share for rate in whole]
            note = f"{watch}; reads {models[keep].reads / 1e6:.0f} of {models[0].reads / 1e6:.0f} MB a token"
            name = f"{peer_version('transformers')}, dense, float32"
            limit = ANSWER / statistics.median(rates) * 0.02
            rows += [
                compared(what, "tokens/s", rates, "limit by bytes read", promise, WITHIN, note=note),
                compared(what, "tokens/s", rates, "pippin, dense", whole, 1, note=note),
                compared(what, "tokens/s", rates, name, found["transformers"], 2, note=note),
                compared(
                    f"select and gather, 135M, {keep} of 1536 channels",
                    "s",
                    models[keep].seconds,
                    f"2 % of {ANSWER} tokens",
                    [limit],
                    1,
                    higher_is_better=False,
                    note=watch,
                ),
            ]
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
