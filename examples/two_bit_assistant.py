"""An assistant for word problems in 2 bits, from the default model's file to a comparison, within an hour on two cores.

1. LoRA: the model learns to work through the problems of GSM8K (7,473 of them), and the adapter is merged.
2. QAT: the merged model is trained at 2 bits (embedding 4) to say what it said before.
3. Comparison in the engine, beside the 4-bit original and beside 2 bits without training: size, speed, held-out
   perplexity on new problems and on an encyclopaedia that neither stage saw, and five answers.

    python examples/two_bit_assistant.py --out build/two_bits

Each stage is kept in its folder; run it again after Ctrl-C or a crash and it goes on where it was. `--quick` makes every
stage a few steps long, to see that all of it works.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # torch's waiting threads soon sleep: other programs keep their share

import torch
from rich.console import Console
from rich.table import Table

import pippin
from pippin.core import device, files, store
from pippin.data.streams import token_batches
from pippin.language.distillation import Distillation
from pippin.language.likelihood import likelihood
from pippin.language.load import LanguageModel
from pippin.language.objectives import NextToken
from pippin.language.quantised import save_quantised
from pippin.shape.lora import LowRankModel, merge
from pippin.shape.quantise import QuantisationSettings, convert, prepare
from pippin.shape.quantise.rtn import round_to_nearest
from pippin.train import AdamW, Checkpoints, Cosine, Trainer

MODEL = "smollm2-135m"
HELD_OUT = 200  # problems of the test file that the comparison reads; the answers come from the ones after them
console = Console()


def problems(name: str) -> list[dict[str, str]]:
    """Questions and worked answers of GSM8K's "train" or "test" file."""
    lines = (store.pull("gsm8k") / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [{"prompt": row["question"], "completion": row["answer"]} for row in map(json.loads, lines)]


def batches(model: LanguageModel, records: list[dict[str, str]], *, seed: int, rows: int) -> Any:
    """Conversations, packed into rows; what the assistant says is learnt."""
    return token_batches(
        records, model.tokenizer, template=model.template, length=512, rows=rows, seed=seed, learn="assistant"
    )


def adapt(out: Path, steps: int) -> LanguageModel:
    """The default model, float32, with the adapter for word problems merged into it."""
    model = pippin.load(MODEL, dtype="float32", pack=False)
    adapted = LowRankModel(model.module, rank=16, alpha=32, seed=0)
    trainer = Trainer(
        adapted,
        NextToken(),
        batches(model, problems("train"), seed=0, rows=4),
        steps=steps,
        optimiser=AdamW(lr=5e-4, weight_decay=0.0),
        schedule=Cosine(warmup=0.05),
        precision="bfloat16",
        checkpoints=Checkpoints(out / "lora", every=25),
        title="LoRA on word problems",
    )
    _finish(trainer)
    return merge(model, adapted.to_adapter("problems"))
