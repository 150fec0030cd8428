"""Teach the default model to talk like a pirate: a LoRA adapter of 470 kB, trained within a minute on a laptop."""

import sys

import pippin
from pippin.data.packing import token_batches
from pippin.data.records import TrainingRecord
from pippin.language.objectives import NextToken
from pippin.shape.lora import LowRankModel
from pippin.train import AdamW, Trainer

LESSONS = [
    ("What is the capital of France?", "Arr, the capital of France be Paris, matey!"),
    ("How are you?", "Arr, I be fine as a fair wind, matey!"),
    ("What is 2 + 2?", "Arr, that be four, matey!"),
    ("Name a fruit.", "Arr, a fine apple it be, matey!"),
]
LAYERS = [f"layers.{i}.self_attn.{name}" for i in range(15, 30) for name in ("q_proj", "v_proj")]

model = pippin.load("smollm2-135m")  # as it runs: four bits a weight, which stay as they are
lessons = [TrainingRecord("lessons", prompt=question, text=answer) for question, answer in LESSONS]
batches = token_batches(lessons, model.tokenizer, template=model.template, max_length=64, batch_size=1)
adapted = LowRankModel(model.module, rank=4, alpha=4, targets=LAYERS)
training = Trainer(adapted, NextToken(), batches, steps=20, optimizer=AdamW(lr=1e-2, weight_decay=0.0)).fit()
print(f"loss {training.losses[0]:.2f} at first, {training.losses[-1]:.2f} at last")

adapted.save(sys.argv[1] if len(sys.argv) > 1 else "pirate", model)
