"""A teacher for word problems in 2 bits: from the default model's file to a comparison, within an hour on two cores.

1. LoRA: the model learns to work through the problems of GSM8K; the adapter is merged into its weights.
2. QAT: the merged model is trained at 2 bits (its embedding at 4) to say what it said before.
3. The comparison, in the engine: the original as its file has it (4 bits), the teacher at 8 and at 4 bits, and at 2
bits
   rounded, by GPTQ, and with training, which begins where GPTQ ends. Size, speed, held-out loss on new problems and on
   an encyclopedia that no stage saw, problems solved, and five answers.

    python benchmarks/two_bits.py --out build/two_bits [--keep]

Each stage is kept in its folder: after Ctrl-C or a crash, the same command goes on where it was. `--quick` makes every
stage a few steps long. With `--keep`, figures, answers and losses are kept and drawn for the documentation.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # torch's waiting threads soon sleep: other programs keep their share

import torch
from _rows import Row, Watch, parser, say, show

import pippin
from pippin.claims import runner
from pippin.core.files import atomic_write
from pippin.core.store import store
from pippin.core.threads import use_threads
from pippin.data.packing import Packed, token_batches
from pippin.engine import shared_engine
from pippin.engine.measure.measure_speed import measure_speed, prompt_ids, weight_bytes
from pippin.language.language_model import LanguageModel
from pippin.language.likelihood import text_likelihood
from pippin.language.methods.distillation import Distillation
from pippin.language.objectives import NextToken, held_out
from pippin.language.quantized_checkpoint import read_quantized, save_quantized
from pippin.shape.lora import LowRankModel, merge
from pippin.shape.quantize import gptq
from pippin.shape.quantize.calibration import calibration_ids
from pippin.shape.quantize.config import QuantizationConfig
from pippin.shape.quantize.qat import convert, metadata, prepare
from pippin.shape.quantize.rtn import quantize as round_to_nearest
from pippin.train import AdamW, Checkpoints, CosineSchedule, Evaluation, Trainer

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m"
RATE = 3e-4
"""Learning rate of 2-bit training."""
FIELDS = {"prompt": "question", "completion": "answer"}
LENGTH, ROWS = 512, 4
QUESTIONS = (
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves does he sell that day?",
    "Anna has 50 apples. She gives 8 apples to each of her 4 friends. How many apples has she left?",
    "A train runs 60 miles in an hour. How far does it run in 2 and a half hours?",
    "What is the capital of France?",
    "Write one sentence about an old apple tree.",
)


@dataclass(frozen=True)
class Size:
    """How long everything is."""

    lora_steps: int
    qat_steps: int
    test_batches: int
    """Of new problems, 2,048 tokens each; those after them are measured during training."""
    encyclopedia: int
    """Tokens."""
    problems: int
    speeds: int


FULL, QUICK = Size(80, 120, 12, 8192, 200, 7), Size(2, 2, 1, 256, 4, 1)


def batches(model: LanguageModel, file: str, *, epochs: int | None = None) -> Packed:
    """Problems and worked answers as conversations, packed into rows; what the teacher says is learned."""
    path = store.pull("gsm8k") / file
    words, template = model.tokenizer, model.template
    return token_batches(
        path, words, template=template, max_length=LENGTH, batch_size=ROWS, epochs=epochs, fields=FIELDS
    )


def train(
    model: LanguageModel, learner: torch.nn.Module, objective: Any, folder: Path, steps: int, optimizer: AdamW
) -> None:
    """One stage of training, resumed where it was; its losses and held-out losses are in ``folder``."""
    measured = list(batches(model, "test.jsonl", epochs=1))[FULL.test_batches :][: 2 if steps >= 10 else 1]
    every = max(1, steps // 10)
    training = Trainer(
        learner,
        objective,
        batches(model, "train.jsonl"),
        steps=steps,
        optimizer=optimizer,
        schedule=CosineSchedule(warmup_steps=0.05, min_lr_ratio=0.05),
        precision="bfloat16",
        evaluation=Evaluation(held_out(measured), eval_every=every),
        checkpoints=Checkpoints(folder, save_every=every, keep=1, best=False),
        title=folder.name,
    ).fit()
    if training.stopped == "interrupted":
        say("stopped; the same command goes on from here")
        sys.exit(130)


def teach(out: Path, size: Size) -> LanguageModel:
    """Stage 1: the default model with an adapter for word problems merged into it, float32."""
    model = pippin.load(MODEL, dtype="float32", pack=False)
    adapted = LowRankModel(model.module, rank=16, alpha=32, seed=0)
    train(model, adapted, NextToken(), out / "lora", size.lora_steps, AdamW(lr=5e-4, weight_decay=0.0))
    merge(model, adapted.to_adapter("teacher", model))
    return model


def calibration(model: LanguageModel) -> torch.Tensor:
    """Problems and answers of the training file, as ids."""
    with (store.pull("gsm8k") / "train.jsonl").open(encoding="utf-8") as lines:
        texts = (f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines))
        return calibration_ids(model, texts, length=LENGTH)


def squeeze(out: Path, teacher: LanguageModel, size: Size) -> None:
    """Stage 2: the teacher at 2 bits, rounded to nearest, and trained; saved as folders that `pippin.load` opens."""
    settings = QuantizationConfig(bits=2)
    teacher.save(out / "teacher")
    if not (out / "gptq" / "config.json").is_file():
        say("rounding to nearest, then GPTQ")
        save_quantized(out / "rounded", teacher, round_to_nearest(teacher, settings))
        save_quantized(out / "gptq", teacher, gptq.quantize(teacher, settings, calibration(teacher)))
    frozen = pippin.load(str(out / "teacher"), bits=8)
    solved = read_quantized(out / "gptq")
    inner = {name: codes for name, codes in solved.items() if name.startswith("layers.")}
    prepare(teacher.module.requires_grad_(True), settings, start=inner)
    optimizer = AdamW(lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    train(teacher, teacher.module, Distillation(frozen, weight=1.0), out / "qat", size.qat_steps, optimizer)
    save_quantized(out / "trained", teacher, convert(teacher.module), metadata=metadata(teacher.module))


def variants(out: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is compared: the reference and the arguments of `pippin.load`."""
    return {
        "original, 4 bits": (MODEL, {}),
        "teacher, 8 bits": (str(out / "teacher"), {"bits": 8}),
        "teacher, 4 bits, rounded": (str(out / "teacher"), {"bits": 4}),
        "teacher, 2 bits, rounded": (str(out / "rounded"), {}),
        "teacher, 2 bits, GPTQ": (str(out / "gptq"), {}),
        "teacher, 2 bits, trained": (str(out / "trained"), {}),
    }


def compare(out: Path, size: Size) -> dict[str, dict[str, Any]]:
    """Figures and answers of every variant; speeds are taken in turn."""
    models = {name: pippin.load(ref, **options) for name, (ref, options) in variants(out).items()}
    found: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        say(f"measuring: {name}")
        test = [
            batch for batch, _ in zip(batches(model, "test.jsonl", epochs=1), range(size.test_batches), strict=False)
        ]
        encyclopedia = gzip.decompress((store.pull("wikitext-2") / "test.raw.gz").read_bytes()).decode()
        found[name] = {
            "megabytes": weight_bytes(model.module) / 1e6,
            "problems_nats": held_out(test)(model.module)["loss"],
            "encyclopedia_nats": text_likelihood(
                model, encyclopedia, max_length=LENGTH, max_tokens=size.encyclopedia
            ).per_token,
            "solved": solved(model, size.problems),
            "answers": [answer(model, question, 120) for question in QUESTIONS],
            "speeds": [],
        }
    for turn in range(size.speeds):
        for name, model in models.items():
            prompt, stops = prompt_ids(model, 64), model.tokenizer.eos_ids
            found[name]["speeds"].append(
                measure_speed(shared_engine(model), prompt, 128, stops=stops, owner=f"{turn}").answer_tokens_per_second
            )
    for figures in found.values():
        figures["tokens_per_second"] = statistics.median(figures["speeds"])
    return found


def answer(model: LanguageModel, question: str, tokens: int) -> str:
    """What the model says, greedily."""
    options = pippin.GenerationOptions(temperature=0.0, max_tokens=tokens)
    return pippin.Session(model).respond(question, options=options).content


def solved(model: LanguageModel, count: int) -> float:
    """Share of so many test problems whose last number is the right one."""
    lines = (store.pull("gsm8k") / "test.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    with ThreadPoolExecutor(16) as pool:
        said = list(pool.map(lambda row: answer(model, row["question"], 250), rows))
    right = sum(_number(text) == _number(row["answer"]) for text, row in zip(said, rows, strict=True))
    return right / count


def _number(text: str) -> str | None:
    """The last number of a text, without commas; None where there is none."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "").rstrip(".") if numbers else None


def curve(folder: Path) -> dict[str, list[Any]]:
    """Losses by step, held-out losses and seconds, from a stage's log."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {
        "loss": [line["loss"] for line in steps],
        "held_out": [[line["step"], line["evaluation"]["loss"]] for line in lines if "evaluation" in line],
        "seconds": [round(line["seconds"], 3) for line in steps],
        "tokens": [line["units"] for line in steps],
    }


def rows_of(found: dict[str, dict[str, Any]], note: str) -> list[Row]:
    """The trained 2-bit model beside the file it came from, and beside the best without training."""
    ours, original = found["teacher, 2 bits, trained"], found["original, 4 bits"]
    solved = found["teacher, 2 bits, GPTQ"]

    def less(what: str, key: str, unit: str, peer: str, theirs: dict[str, Any], goal: float) -> Row:
        return Row(what, unit, ours[key], peer, theirs[key], goal, higher_is_better=False, note=note)

    speeds = ours["tokens_per_second"], original["tokens_per_second"]
    return [
        less("weights", "megabytes", "MB", "the 4-bit original", original, 2.0),
        Row("answers", "tokens/s", speeds[0], "the 4-bit original", speeds[1], 1.5, note=note),
        less("loss on new problems", "problems_nats", "nats", "2 bits, GPTQ", solved, 1.5),
        less("loss on new problems", "problems_nats", "nats", "the 4-bit original", original, 1.0),
        less("loss on an encyclopedia", "encyclopedia_nats", "nats", "the 4-bit original", original, 1.0),
    ]


def keep(out: Path, found: dict[str, dict[str, Any]]) -> None:
    """Write figures, answers and losses for the documentation, and draw them."""
    commit, changed = runner.commit()
    stages = {name: curve(out / name) for name in ("lora", "qat")}
    kept = {
        "models": found,
        "questions": QUESTIONS,
        "stages": stages,
        "rate": RATE,
        "machine": runner.machine(),
        "versions": runner.versions(),
        "commit": commit,
        "changed": changed,
    }
    with atomic_write(ROOT / "results" / "two_bits.json", mode="w") as file:
        file.write(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    draw_losses(stages, ROOT / "docs" / "pictures" / "two_bits_losses.png")
    draw_comparison(found, ROOT / "docs" / "pictures" / "two_bits_models.png")


def draw_losses(stages: dict[str, dict[str, list[Any]]], path: Path) -> None:
    """Loss and held-out loss of both stages, by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    titles = {"lora": "LoRA: loss of worked answers", "qat": "2-bit training: cross-entropy with the teacher"}
    for panel, (name, stage) in zip(figure.subplots(1, 2), stages.items(), strict=True):
        panel.plot(range(1, len(stage["loss"]) + 1), stage["loss"], linewidth=0.8, alpha=0.7, label="training")
        panel.plot(*zip(*stage["held_out"], strict=True), marker="o", markersize=3, label="new problems, labels")
        panel.set(title=titles[name], xlabel="step", ylabel="nats a token")
        panel.legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=110)


def draw_comparison(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Size, speed and perplexities of every variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    names = list(found)
    panels = {
        "weights, MB": [one["megabytes"] for one in found.values()],
        "answer, tokens/s": [one["tokens_per_second"] for one in found.values()],
        "perplexity, new problems": [math.exp(one["problems_nats"]) for one in found.values()],
        "perplexity, encyclopedia": [math.exp(one["encyclopedia_nats"]) for one in found.values()],
    }
    for panel, (title, values) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        bars = panel.barh(names, values)
        panel.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        panel.set_title(title)
        panel.margins(x=0.3)
        panel.invert_yaxis()
        if title.startswith("perplexity"):
            panel.set_xscale("log")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=110)


def main() -> None:
    """Make what is not there yet, compare, and tell."""
    words = parser(__doc__)
    words.add_argument("--out", type=Path, default=Path("build/two_bits"), help="folder of the stages")
    words.add_argument("--keep", action="store_true", help="write and draw the figures of the documentation")
    options = words.parse_args()
    size = QUICK if options.quick else FULL
    out: Path = options.out / "quick" if options.quick else options.out
    out.mkdir(parents=True, exist_ok=True)
    use_threads()
    began = time.monotonic()
    with Watch() as watch:
        if not (out / "trained" / "config.json").is_file():
            squeeze(out, teach(out, size), size)
        found = compare(out, size)
    say(f"{(time.monotonic() - began) / 60:.0f} minutes")
    if options.keep:
        keep(out, found)
    show(rows_of(found, str(watch)), as_json=options.json)


if __name__ == "__main__":
    main()
