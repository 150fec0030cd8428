"""A small decoder learns in processes that torchrun started: `_processes.py KIND FOLDER STEPS [LAST STEP OF RANK 1]`.

Each step has the same four micro-batches, whoever works on them. The losses are printed as JSON by the first process.
"""

import json
import os
import sys
from pathlib import Path

import torch

from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.objectives import NextToken
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.train import AdamW, Checkpoints, ConstantSchedule, Trainer
from pippin.train.distributed import DistributedProcesses

MICRO_BATCHES = 4


def decoder():
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(intermediate_size=24))
    config = DecoderConfig(
        "llama",
        50,
        16,
        (layer, layer),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
    )
    return Decoder(config).initialize(seed=0)


def batches():
    """Rows of which more or fewer tokens are learned, so that a mean of means would be another number."""
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
        optimizer=AdamW(lr=0.02),
        schedule=ConstantSchedule(),
        gradient_accumulation_steps=MICRO_BATCHES // size,
        max_grad_norm=0.5,
        ema=0.8,
        checkpoints=Checkpoints(Path(folder), save_every=3),
        device=parallel.device if parallel else "cpu",
        show_progress=False,
        processes=parallel,
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
    parallel = DistributedProcesses(kind)
    losses = train(parallel, folder, int(steps), *map(int, until)).losses
    if parallel.rank == 0:
        print(json.dumps(losses))
    parallel.close()
    # All is written. While an interpreter ends, torch's own threads abort it now and then on a busy machine
    # ("terminate called without an active exception"), which is not what is tested here.
    sys.stdout.flush()
    os._exit(0)
