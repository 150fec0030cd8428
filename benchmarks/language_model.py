"""The default model against transformers: same weights, precision and threads, interleaved measurements.

    python benchmarks/language_model.py [--quick] [--json]

Loading is timed in fresh processes (libraries imported before the clock starts, the file in the page cache). For speed
transformers gets the dequantized weights as safetensors, which it runs fastest; decoding is greedy, one request, after
a short prompt; prompt speed is that of 1,024 tokens. Both sides use every core.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from _rows import Row, interleaved, main
from transformers import AutoModelForCausalLM

import pippin
from pippin.core.store import store
from pippin.engine import Engine, Finished, Request, SamplingOptions

PEER = f"transformers {transformers.__version__}"
OURS_LOADS = "from pippin.language import load; clock(); load({path!r}, device='cpu', dtype='float32'); done()"
PEER_LOADS = """
import accelerate
from transformers import AutoModelForCausalLM, AutoTokenizer
clock()
AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={name!r}, dtype=torch.float32)
AutoTokenizer.from_pretrained({folder!r}, gguf_file={name!r})
done()
"""
TIMER = """
import time, torch
def clock():
    global began
    began = time.perf_counter()
def done():
    print(time.perf_counter() - began)
"""


def load_seconds(code: str, path: Path) -> float:
    """Seconds that loading takes in a process of its own."""
    filled = TIMER + code.format(path=str(path), folder=str(path.parent), name=path.name)
    done = subprocess.run([sys.executable, "-c", filled], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    path = Path(store.pull("smollm2-135m"))
    path.read_bytes()  # into the page cache
    ours, peer = interleaved(
        lambda: load_seconds(OURS_LOADS, path), lambda: load_seconds(PEER_LOADS, path), 1 if quick else 3
    )
    rows = [Row("load from GGUF, model and tokenizer", "s", ours, PEER, peer, 10, higher_is_better=False)]
    with tempfile.TemporaryDirectory() as folder:
        pippin.load(path, device="cpu", dtype="float32", pack=False).save(folder)
        for dtype in ("float32", "bfloat16"):
            peer_model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            rows += run(path, dtype, peer_model, quick)
    return rows


def run(path: Path, dtype: str, peer: Any, quick: bool) -> list[Row]:
    """Decode and prompt speed in one precision."""
    model = pippin.load(path, device="cpu", dtype=dtype)
    engine = Engine(model, enable_prefix_caching=False)  # every prompt is computed, however often it comes
    prompt = model.template.encode([{"role": "user", "content": "Write a long story about an apple tree."}])
    count = 32 if quick else 128
    long = (prompt * 40)[:1024]

    def ours_decode() -> float:
        *tokens, last = engine.stream(Request(prompt, SamplingOptions(max_tokens=count)))
        assert isinstance(last, Finished)
        assert len(tokens) == count
        return (count - 1) / (last.total_seconds - last.first_token_seconds)

    @torch.inference_mode()
    def peer_decode() -> float:
        times = []
        for new in (1, count):
            began = time.perf_counter()
            peer.generate(torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False)
            times.append(time.perf_counter() - began)
        return (count - 1) / (times[1] - times[0])

    def ours_prompt() -> float:
        *_, last = engine.stream(Request(long, SamplingOptions(max_tokens=1)))
        assert isinstance(last, Finished)
        return len(long) / last.prompt_seconds

    @torch.inference_mode()
    def peer_prompt() -> float:
        began = time.perf_counter()
        peer(torch.tensor([long]), logits_to_keep=1, use_cache=True)
        return len(long) / (time.perf_counter() - began)

    repeats = 2 if quick else 7
    ours_decode(), peer_decode(), ours_prompt(), peer_prompt()  # warm up
    decode, peer_decoded = interleaved(ours_decode, peer_decode, repeats)
    read, peer_read = interleaved(ours_prompt, peer_prompt, repeats)
    return [
        Row(f"decode, {dtype}", "tokens/s", decode, PEER, peer_decoded, 2),
        Row(f"prompt of 1,024 tokens, {dtype}", "tokens/s", read, PEER, peer_read, 1),
    ]


if __name__ == "__main__":
    main(measure, __doc__)
