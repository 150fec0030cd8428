"""Families of models on a CPU, against llama.cpp on the same file.

    python benchmarks/cpu_families.py [--quick] [--json]

A random model of each family, of the size of a small one, with Q4_0 matrices, written as GGUF by Pippin: prompts of 512
tokens, and tokens per second after the first one, with one thread and with every core. Nothing is measured of a family
unless both sides name the same likeliest token after most of some short prompts (random weights have near ties, which
the rounding of activations decides). FAMILIES="llama gpt_oss" measures these alone. Every side has a process of its own
and they are asked in turn."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from _rows import Row, Watch, compared, in_turn, main, say, thread_counts
from _sides import LlamaCpp, Ours, Side, has_llama_cpp, llama_cpp_name

from pippin.core.store import store

SIZES: Final = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
_EXPERTS: Final = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": 256},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": 16},
    "starcoder2": {"sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 1024},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 512, "sliding_window": 128},
}
"""What a family's config has beside `SIZES`."""


def write(family: str, tokenizer_from: Path, folder: Path, quick: bool) -> Path:
    """A random model of a family as a GGUF file with Q4_0 matrices."""
    from transformers import AutoConfig

    import pippin
    from pippin.language import Decoder, LanguageModel, families
    from pippin.shape.export.gguf import export_gguf

    source = pippin.load(tokenizer_from, device="cpu")
    sizes = SIZES | FAMILIES[family] | ({"num_hidden_layers": 2} if quick else {})
    config = families.from_hf(AutoConfig.for_model(family, vocab_size=source.config.vocab_size, **sizes).to_dict())
    model = LanguageModel(f"random-{family}", Decoder(config).initialize(seed=0), source.tokenizer, None)
    return export_gguf(model, folder / f"{family}.gguf", "Q4_0", show_progress=False)


def check_agreement(family: str, ours: Side, llama: Side) -> None:
    """Refuse to measure a family that the two sides compute differently.

    Raises:
        SystemExit: they name different tokens after more than a third of the prompts.
    """
    prompts = [[1 + (start * 37 + 11 * at) % 5000 for at in range(24)] for start in range(24)]
    same = sum(_first(ours, prompt) == _first(llama, prompt) for prompt in prompts)
    say(f"{family}: the likeliest token is the same after {same} of {len(prompts)} prompts")
    if 3 * same < 2 * len(prompts):
        raise SystemExit(f"{family}: the sides agree after {same} of {len(prompts)} prompts; nothing was measured")


def _first(side: Side, prompt: list[int]) -> int:
    return int(side.call("answer", prompt, 2).ids[0])


def measure_family(family: str, path: Path, quick: bool) -> list[Row]:
    """The rows of one family."""
    count, repeats, length = (8, 1, 64) if quick else (48, 3, 512)
    rows: list[Row] = []
    prompt = [100 + 7 * at % 1000 for at in range(length)]
    with ExitStack() as stack:
        ours = stack.enter_context(Side(Ours, path=str(path)))
        llama = stack.enter_context(Side(LlamaCpp, path=str(path))) if has_llama_cpp() else None
        if llama is not None:
            check_agreement(family, ours, llama)
        for threads in thread_counts():
            named = f"{threads} thread{'s'[: threads > 1]}"
            ours.call("threads", threads)
            measures = {
                "decode": lambda: ours.call("answer", prompt[:16], count).rate,
                "prompt": lambda: length / ours.call("answer", prompt, 2).prompt_seconds,
            }
            if llama is not None:
                llama.call("threads", threads)
                measures["llama decode"] = lambda: llama.call("answer", prompt[:16], count).rate
                measures["llama prompt"] = lambda: length / llama.call("answer", prompt, 2).prompt_seconds
            with Watch() as watch:
                found = in_turn(measures, repeats, f"{family}, threads: {threads}")
            note = f"{watch}; {ours.call('kernels')}; {ours.call('profile', prompt[:16], count)}"
            for what, goal in (("decode", 1.5), ("prompt", 1.0)):
                theirs = found.get(f"llama {what}")
                rows.append(
                    compared(
                        f"{what}, {family} of random weights, Q4_0, {named}",
                        "tokens/s",
                        found[what],
                        llama_cpp_name(),
                        theirs,
                        goal,
                        note=note,
                    )
                )
    return rows


def measure(quick: bool) -> list[Row]:
    """Measure all rows."""
    tokenizer_from = Path(store.pull("smollm2-135m"))
    chosen = os.environ.get("FAMILIES", "").split() or list(FAMILIES)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for family in chosen:
            say(f"writing a random {family}")
            path = write(family, tokenizer_from, Path(place), quick)
            rows += measure_family(family, path, quick)
            path.unlink()
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
