"""Two processes that answer together over links of any speed: how often they wait, and what a token takes.

    torchrun --standalone --nproc-per-node 2 -m pippin.claims.worlds.sequences.slow_links SETTINGS

Notable here:
- the engine answers as for a user; only the sums over the processes take longer
- SETTINGS is JSON: of each arm the fields of a `PTMoEConfig`; one with a single track is divided by its matrices
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import TrainingError
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.parallel.pt_moe import PTMoEConfig
from pippin.nn.parallel.collectives import Collectives

DELAYS = (0.0, 0.004)
"""Seconds that a sum over the processes takes longer."""
_TOKENS, _PROMPT = 24, 32


class SlowCollectives(Collectives):
    """Sums that take a while longer."""

    delay = 0.0

    def all_reduce(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The sum over all processes."""
        total = super().all_reduce(x)
        time.sleep(self.delay)
        return total


def measure(arms: Mapping[str, PTMoEConfig]) -> dict[str, dict[str, float]]:
    """Figures of each arm with two processes, by name; an arm with one track is divided by its matrices.

    Raises:
        TrainingError: the processes failed.
    """
    settings = {arm: asdict(config) for arm, config in arms.items()}
    run = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", __spec__.name]
    found = subprocess.run(
        [sys.executable, *run, json.dumps(settings)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise TrainingError(f"two processes failed: {found.stderr.strip().splitlines()[-1]}")
    figures: dict[str, dict[str, float]] = json.loads(found.stdout.splitlines()[-1])
    return figures


def _figures(config: DecoderConfig, collectives: SlowCollectives) -> dict[str, float]:
    """What the first process measures; nothing in the others."""
    from pippin.claims.worlds.sequences.byte_text import byte_model
    from pippin.engine import Engine, follow
    from pippin.language.parallel.divide_model import divide

    part = divide(byte_model(Decoder(config).initialize(seed=0).eval().requires_grad_(False)), collectives)
    found: dict[str, float] = {}
    if collectives.rank:
        for _ in DELAYS:
            follow(part)
        return found
    for delay in DELAYS:
        with Engine(part, cache_tokens=256) as engine:
            collectives.delay = 0.0
            _seconds(engine)  # warm
            collectives.delay, before = delay, collectives.count
            seconds = _seconds(engine)
            found[f"seconds for a token, sums {1000 * delay:g} ms slower"] = statistics.median(seconds)
            found["sums over processes in a pass"] = (collectives.count - before) / len(seconds)
    return found


def _seconds(engine: Any) -> list[float]:
    """Seconds of each pass of an answer: of the prompt, and of each token after the first."""
    from pippin.engine import Request, SamplingOptions, Token

    options = SamplingOptions(max_tokens=_TOKENS, temperature=1.0, seed=0, logit_bias={256: -100.0})
    found, last = [], time.perf_counter()
    for event in engine.stream(Request(list(range(_PROMPT)), options)):
        if isinstance(event, Token):
            now = time.perf_counter()
            found.append(now - last)
            last = now
    return found


def _main(settings: Mapping[str, Mapping[str, Any]]) -> None:
    torch.distributed.init_process_group("gloo")
    found = {}
    for arm, fields in settings.items():
        config = PTMoEConfig(**fields).decoder()
        if config.tracks is not None and config.tracks.num_tracks == 1:  # one decoder
            config = replace(config, tracks=None)
        found[arm] = _figures(config, SlowCollectives())
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's threads abort an ending interpreter now and then on a busy machine


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
