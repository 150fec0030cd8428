"""Memory of a loaded model and loading time, in fresh processes.

    python benchmarks/cpu_memory.py [--quick] [--json]

Each process loads the 135M model from its Q4_1 file, answers 64 tokens to a short prompt with one thread, and says its
resident memory. Ours is counted less the packed weights and the blocks of the cache that hold something: what is left
is Python, the libraries, the tokenizer and buffers. Loading is timed from a path to a model that can answer, libraries
imported before, the file in the page cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _rows import Row, Watch, compared, main, say
from _sides import has_llama_cpp, hugging_face_folder, llama_cpp_name, peer_version

from pippin.core.store import store

HERE = Path(__file__).resolve().parent
LIMIT = 150.0
"""Megabytes that a process may use beyond weights and cache."""

OURS = """
import json, resource, sys, time
sys.path.insert(0, {here!r})
import pippin
from pippin.core.threads import use_threads
from pippin.engine import Engine, Request, SamplingOptions
from _sides import rss
import psutil
bare = rss()
began = time.perf_counter()
model = pippin.load({path!r}, device="cpu"{bits})
seconds = time.perf_counter() - began
use_threads(1)
loaded = rss()
engine = Engine(model)
prompt = model.template.encode([dict(role="user", content="Write a long story about an apple tree.")])
tokens = list(engine.stream(Request(prompt, SamplingOptions(temperature=0.0, max_tokens=64))))
assert len(tokens) > 32, tokens
held = {{}}
for part in model.module.modules():
    packed = getattr(part, "packed", None)
    if packed is not None:
        held[id(packed)] = packed.nbytes
    held.update((id(tensor), tensor.nbytes) for tensor in part.parameters(recurse=False))
result = dict(seconds=seconds, bare=bare, loaded=loaded, rss=rss(), weights=sum(held.values()) / 1e6,
              cache=engine.stats().cache_bytes_used / 1e6,
              peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)
print(json.dumps(result))
"""
LLAMA = """
import json, sys, time
sys.path.insert(0, {here!r})
from _sides import LlamaCpp, rss
import llama_cpp, numpy
began = time.perf_counter()
model = LlamaCpp({path!r})
seconds = time.perf_counter() - began
model.threads(1)
model.answer(list(range(100, 120)), 64)
print(json.dumps(dict(seconds=seconds, rss=rss())))
"""
TRANSFORMERS = """
import json, sys, time
sys.path.insert(0, {here!r})
from _sides import Transformers, rss
from transformers import AutoModelForCausalLM, AutoTokenizer
began = time.perf_counter()
model = Transformers({path!r}, "bfloat16")
AutoTokenizer.from_pretrained({path!r})
seconds = time.perf_counter() - began
model.threads(1)
model.answer(list(range(100, 120)), 64)
print(json.dumps(dict(seconds=seconds, rss=rss())))
"""


def fresh(code: str, path: Path, bits: str = "") -> dict[str, float]:
    """Run code in a new process; the figures that it prints."""
    filled = code.format(here=str(HERE), path=str(path), bits=bits)
    done = subprocess.run([sys.executable, "-c", filled], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a measured process ended with code {done.returncode}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    path = Path(store.pull("smollm2-135m"))
    path.read_bytes()  # into the page cache
    repeats = 1 if quick else 3
    with tempfile.TemporaryDirectory() as place, Watch() as watch:
        folder = hugging_face_folder(path, Path(place) / "model")
        kinds = {
            "ours": lambda: fresh(OURS, path),
            "2 bits": lambda: fresh(OURS, path, ", bits=2"),
            "transformers": lambda: fresh(TRANSFORMERS, folder),
        }
        if has_llama_cpp():
            kinds["llama"] = lambda: fresh(LLAMA, path)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
        for turn in range(repeats):
            for name, run in kinds.items():
                found[name].append(run())
            say(f"{turn + 1} of {repeats}")
    return _rows(found, watch)


def _rows(found: dict[str, list[dict[str, float]]], watch: Watch) -> list[Row]:
    """Rows of the measurements."""
    transformers = f"{peer_version('transformers')}, bfloat16"
    rows = []
    for name, what in (("ours", "Q4_1 file"), ("2 bits", "Pippin 2 bits")):
        runs = found[name]
        one = runs[0]
        note = (
            f"{one['rss']:.0f} MB resident, of them {one['weights']:.0f} weights and {one['cache']:.1f} cache; "
            f"{one['bare']:.0f} after imports, {one['peak']:.0f} peak while loading"
        )
        over = [run["rss"] - run["weights"] - run["cache"] for run in runs]
        what = f"memory beyond weights and cache, {what}"
        rows.append(compared(what, "MB", over, "limit", [LIMIT], 1, higher_is_better=False, note=note))
    for figure, unit, what in (("rss", "MB", "resident memory, Q4_1 file"), ("seconds", "s", "load")):
        ours = [run[figure] for run in found["ours"]]
        for peer, key in ((llama_cpp_name(), "llama"), (transformers, "transformers")):
            theirs = [run[figure] for run in found[key]] if key in found else None
            rows.append(compared(what, unit, ours, peer, theirs, 1, higher_is_better=False, note=watch))
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
