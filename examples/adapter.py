"""Teach the default model to talk like a pirate: a LoRA adapter of 470 kB, trained within a minute on a laptop."""

import sys

import torch

import pippin
from pippin.language.adapters import save_adapter
from pippin.nn.lora import Adapter, LowRank

LESSONS = [
    ("What is the capital of France?", "Arr, the capital of France be Paris, matey!"),
    ("How are you?", "Arr, I be fine as a fair wind, matey!"),
    ("What is 2 + 2?", "Arr, that be four, matey!"),
    ("Name a fruit.", "Arr, a fine apple it be, matey!"),
]
RANK = 4

torch.manual_seed(0)
model = pippin.load("smollm2-135m", pack=False)
names = [f"layers.{i}.self_attn.{name}" for i in range(15, 30) for name in ("q_proj", "v_proj")]
weights, changes = {}, {}
for name in names:
    layer = model.module.get_submodule(name)
    down, up = torch.randn(RANK, layer.inputs) / layer.inputs**0.5, torch.zeros(layer.outputs, RANK)
    weights[name] = down.requires_grad_(), up.requires_grad_()
    changes[layer] = (LowRank(down, up),)
shares = [(Adapter("pirate", changes), slice(None))]

model.module.requires_grad_(False)
optimiser = torch.optim.AdamW([factor for pair in weights.values() for factor in pair], lr=1e-2)
for _ in range(4):
    for question, answer in LESSONS:
        prompt = model.template.encode([{"role": "user", "content": question}])
        target = [*model.tokenizer.encode(answer), model.tokenizer.eos_ids[0]]
        logits = model.module(torch.tensor([prompt + target]), adapters=shares)[0, len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(target))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"loss {loss.item():.2f}")

folder = sys.argv[1] if len(sys.argv) > 1 else "pirate"
save_adapter(folder, weights, model=model, alpha=RANK)
