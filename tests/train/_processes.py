"""A small decoder learns in processes that torchrun started: `_processes.py KIND FOLDER STEPS [LAST STEP OF RANK 1]`.

Each step has the same four micro-batches, whoever works on them. The losses are printed as JSON by the first process.
"""

import json
import os
import sys
from pathlib import Path

import torch

from pippin.data.batches import IGNORE, TokenBatch
from pippin.language.objectives import NextToken
from pippin.language.transformer import Decoder, DecoderConfig, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec
from pippin.train import AdamW, Checkpoints, Constant, Trainer
from pippin.train.parallel import Parallel

MICRO_BATCHES = 4


def decoder():
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(size=24))
    config = DecoderConfig("llama", 50, 16, (layer, layer), heads=2, kv_heads=1, head_dim=8, max_context=32)
    return Decoder(config).initialise(seed=0)


def batches():
    """Rows of which more or fewer tokens are learnt, so that a mean of means would be another number."""
    generator = torch.Generator().manual_seed(1)
    for number in range(400):
        ids = torch.randint(0, 50, (2, 9), generator=generator)
        targets = (ids[:, 1:] // 2).clone()
        targets[:, : number % 6] = IGNORE
        yield TokenBatch(ids[:, :-1], targets)


def train(parallel, folder, steps, until=None):
    size = parallel.size if parallel else 1
    trainer = Trainer(
        decoder(),
        NextToken(),
        batches(),
        steps=steps,
        optimiser=AdamW(lr=0.02),
        schedule=Constant(),
        accumulate=MICRO_BATCHES // size,
        clip=0.5,
        ema=0.8,
        checkpoints=Checkpoints(Path(folder), every=3),
        device=parallel.device if parallel else "cpu",
        show=False,
        parallel=parallel,
    )
    if until is not None:
        trainer.advance(until)
        if parallel.rank == 1:
            os._exit(7)
    return trainer.fit()


if __name__ == "__main__":
    kind, folder, steps, *until = sys.argv[1:]
    if kind == "alone":
        print(json.dumps(train(None, folder, int(steps)).losses))
        raise SystemExit
    parallel = Parallel(kind)
    losses = train(parallel, folder, int(steps), *map(int, until)).losses
    if parallel.rank == 0:
        print(json.dumps(losses))
    parallel.close()
