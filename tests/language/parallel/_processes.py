"""A decoder in processes that torchrun started: `_processes.py KIND FOLDER`; the first prints what it found as JSON.

KIND: "parts" compares the logits of parts with those of the whole decoder, "train" trains tracks for six steps, "serve"
answers with an engine, also after passes that were refused; in "killed", "memory" and "uneven" it loses its follower.
"""

import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import tiny_model
import torch
from tests.language.dense import DenseCache

from pippin.core.errors import GenerationError, InvalidArgument
from pippin.data.token_batches import TokenBatch
from pippin.engine import Engine, Request, SamplingOptions, Token, follow
from pippin.engine.model_runner import ModelInput
from pippin.engine.runners import leading_runner
from pippin.language import PTMoEConfig, divide
from pippin.language.decoder import Decoder
from pippin.language.objectives import NextToken, held_out
from pippin.language.parallel.divide_model import share_tracks, tensor_parallel
from pippin.language.parallel.track_processes import TrackProcesses
from pippin.language.presets import preset
from pippin.language.router_losses import RouterLosses
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.parallel.collectives import Collectives
from pippin.nn.steering import Steering, SteeringChange
from pippin.train import AdamW, Checkpoints, ConstantSchedule, Evaluation, Trainer

STEPS = 6
CONFIG = PTMoEConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=4,
    num_tracks=4,
    block_depth=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    attention_pattern="LG",
    window=6,
    max_position_embeddings=64,
)


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        ids = torch.randint(0, 50, (2, 13), generator=generator)
        yield TokenBatch(ids[:, :-1], ids[:, 1:] // 2)


def train(processes, folder, steps=STEPS, config=CONFIG):
    # in float64, since AdamW enlarges what is rounded where a gradient is almost 0
    decoder = Decoder(config.decoder()).initialize(seed=processes.rank if processes else 0).double()
    trainer = Trainer(
        decoder,
        NextToken(router_losses=RouterLosses(0.1, 0.01)),
        batches(),
        steps=steps,
        optimizer=AdamW(lr=0.02),
        schedule=ConstantSchedule(),
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        ema=0.8,
        evaluation=Evaluation(held_out(list(batches())[:2]), eval_every=2),
        checkpoints=Checkpoints(Path(folder), save_every=3),
        device=processes.device if processes else "cpu",
        show_progress=False,
        processes=processes,
    )
    result = trainer.fit()
    with torch.no_grad():
        return result, decoder.eval()(torch.arange(24)[None])[0, -1].tolist()


def compare():
    """The largest difference to the whole decoder, and collectives and bytes of a pass, by what was divided."""
    found, ids = {}, torch.arange(48).view(2, 24)
    for join in ("mean", "delta", "sum"):
        decoder = Decoder(replace(CONFIG, join=join).decoder()).initialize(seed=0).eval()
        found[join] = differences(decoder, share_tracks, ids)
    for name in ("nano", "nano-moe"):
        found[name] = differences(Decoder(preset(name, 50)).initialize(seed=0).eval(), tensor_parallel, ids)
    return found


@torch.no_grad()
def differences(decoder, divide, ids):
    whole, collectives = decoder(ids), Collectives()
    part = divide(decoder, collectives)
    at_once = part(ids)
    counted = collectives.count, collectives.bytes
    cache = DenseCache(part.config, 32, batch=2)
    in_turn = torch.cat([part(piece, cache=cache) for piece in ids.split(5, 1)], 1)
    return [float((each - whole).abs().max()) for each in (at_once, in_turn)], *counted


def language_model(kind):
    """A model over bytes with tracks, or without."""
    tracks = replace(CONFIG, vocab_size=260, max_position_embeddings=512).decoder()
    config = tracks if kind == "tracks" else preset(kind, 260, max_position_embeddings=512)
    network = Decoder(config).initialize(seed=0).eval()
    return replace(tiny_model.build(), name=kind, network=network.requires_grad_(False))


def answers(engine):
    """Sampled answers to four prompts at once, one of them long: tokens and their log-probabilities."""
    prompts = [list(b"Tracks meet"), list(b"every"), list(range(40, 120)), [65] * 300]
    options = SamplingOptions(max_tokens=12, temperature=1.0, seed=3, logprobs=0)
    streams = [engine.stream(Request(prompt, options)) for prompt in prompts]
    return [[(event.id, event.logprob) for event in stream if isinstance(event, Token)] for stream in streams]


def refused(engine):
    """The errors of what an engine's runner does not compute: two before a pass, two in it; and of a request."""
    unused = engine._runner.blocks - 1
    tables = {"block_table": [unused], "other_tables": [[unused]] * (len(engine._runner.windows) - 1)}
    few = ExpertMask(torch.ones(1, 8, dtype=torch.bool))  # the model has more layers
    changed = Steering({"layers.1": SteeringChange(shift=torch.ones(5))})  # hidden states are wider
    given = {
        "block": ModelInput([65], 0, outputs=[0], **tables | {"block_table": [10**6]}),
        "outputs": ModelInput([65], 0, outputs=[3], **tables),
        "mask": ModelInput([65, 66], 0, outputs=[0], experts=few, **tables),
        "width": ModelInput([65, 66], 0, outputs=[0], steering=changed, **tables),
    }
    found = {}
    for name, model_input in given.items():
        try:
            engine._loop.call_between_steps(lambda one=model_input: engine._runner.forward([one]))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    try:
        engine.stream(Request([65], experts=few))
    except InvalidArgument as error:
        found["request"] = str(error)
    return found


class Killer:
    """Never cancels a request, but ends a process before its fourth step."""

    def __init__(self, pid):
        self.pid, self.steps = pid, 0

    def is_set(self):
        self.steps += 1
        if self.steps == 4:
            os.kill(self.pid, signal.SIGKILL)
        return False


def fail_once(collectives, error, *, after):
    """Let a process raise an error in place of one of its sums."""
    reduce, calls = collectives.all_reduce, itertools.count()

    def all_reduce(x):
        if next(calls) == after:
            raise error
        return reduce(x)

    collectives.all_reduce = all_reduce


def lose(kind):
    """The errors of two requests at rank 0, which loses the process that follows it during the first one."""
    leading_runner.TIMEOUT = timedelta(seconds=5)  # in "uneven" both live, and one waits for a sum that never comes
    collectives = Collectives()
    part = divide(language_model("tracks"), collectives)
    pids = [None, None]
    torch.distributed.all_gather_object(pids, os.getpid())
    if collectives.rank:
        if kind == "memory":
            fail_once(collectives, MemoryError("too little here"), after=5)
        follow(part)
        return None
    if kind == "uneven":
        fail_once(collectives, ValueError("only here"), after=5)
    found = []
    with Engine(part, cache_tokens=1024) as engine:
        options = SamplingOptions(max_tokens=400, seed=3, logit_bias={256: -100.0})
        for cancel in (Killer(pids[1]) if kind == "killed" else None, None):
            try:
                found.append(len(list(engine.stream(Request([65, 66], options, cancel=cancel)))))
            except GenerationError as error:
                found.append(str(error))
    return found


def serve(folder):
    """The answers of rank 0's engines, and what they refuse; the others follow."""
    found = {}
    for kind in ("tracks", "nano-moe"):
        part = divide(language_model(kind), Collectives())
        if part.module.collectives.rank:
            follow(part)
            continue
        with Engine(part, cache_tokens=1024) as engine:
            found[kind] = answers(engine)
            found[f"{kind} refused"] = refused(engine)
            found[f"{kind} again"] = answers(engine)
            try:
                engine.save_prompt_cache(Path(folder) / "cache")
            except InvalidArgument as error:
                found["save"] = str(error)
    return found


if __name__ == "__main__":
    kind, folder = sys.argv[1:]
    processes = TrackProcesses()
    if kind == "parts":
        found = compare()
        try:
            share_tracks(Decoder(replace(CONFIG, num_tracks=3).decoder()), Collectives())
        except InvalidArgument as error:
            found["error"] = str(error)
    elif kind == "serve":
        found = serve(folder)
    elif kind in ("killed", "memory", "uneven"):
        found = lose(kind)
    else:
        result, logits = train(processes, folder)
        norms = [step.grad_norm for step in result.steps]
        found = {"losses": result.losses, "evaluations": result.evaluations, "norms": norms, "logits": logits}
    if processes.rank == 0:
        print(json.dumps(found))
    processes.close()
    sys.stdout.flush()
    os._exit(0)  # torch's threads abort an ending interpreter now and then on a busy machine
