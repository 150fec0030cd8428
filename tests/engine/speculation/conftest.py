"""Engines and drafters that the tests of speculative decoding share, and a chi-square test of distributions."""

import math

import pytest
import torch

from pippin.engine.decoding.token_ids import common_prefix
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.engine.output_processor import OutputProcessor
from pippin.engine.request import Request
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.engine.speculation import CachePosition


def write(model, prompt, runner=None, chunk=10**9, room=10**9, **fields):
    """All events of one request, as a scheduler with one sequence would have them."""
    request = Request(prompt, **fields)
    blocks = -(-model.context_size // BLOCK_SIZE)
    runner = runner or TorchRunner(model, blocks)
    table = list(range(blocks - 1, -1, -1))
    output = OutputProcessor(model, request, model.context_size)
    ids, held, draft, events, drafts = list(prompt), 0, None, [], []
    while True:
        tokens = [] if draft is None else draft.tokens
        fed, rest = (
            [*ids[held:], *tokens],
            {} if draft is None else {"resume": draft.resume, "residual": draft.residual},
        )
        model_input = ModelInput(fed, held, table, list(range(len(ids) - held - 1, len(fed))), **rest)
        (logits,) = runner.forward([model_input])
        fed = [*ids, *tokens]
        new = output.process(logits, draft)
        events += new
        ids += [token.id for token in new]
        if output.finish_reason is not None:
            return events, output.finished(output.finish_reason), drafts
        held = min(common_prefix(fed, ids), len(ids) - 1)
        draft = output.propose(ids, room, CachePosition(runner, table, held))
        drafts.append(draft)


@pytest.fixture(name="write", scope="session")
def write_fixture():
    return write


@pytest.fixture(scope="session")
def chi_square():
    """The p-value of counts under a distribution."""
    from scipy import stats

    def value(counts, distribution):
        distribution = torch.as_tensor(distribution, dtype=torch.float64)
        counts = torch.as_tensor(counts, dtype=torch.float64)
        assert not counts[distribution == 0].any(), "something came out that the distribution excludes"
        counts, distribution = counts[distribution > 0], distribution[distribution > 0]
        rare = distribution * counts.sum() < 5
        if rare.any():
            counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
            distribution = torch.cat([distribution[~rare], distribution[rare].sum()[None]])
        return float(stats.chisquare(counts.numpy(), (distribution * counts.sum()).numpy()).pvalue)

    return value


class MemoRunner:
    """A runner over a decoder so small that every prefix is computed once, without a cache, and remembered."""

    invariant, kv_cache_dtype, block_bytes, windows, heads_in_block = True, "float32", BLOCK_SIZE * 8, (None,), 0

    def __init__(self, model, blocks=4):
        self.model, self.blocks, self.passes = model, blocks, []
        self.pool = torch.full((blocks * BLOCK_SIZE,), -1)
        self.known = {}

    def forward(self, inputs):
        results = []
        for model_input in inputs:
            slots = [
                model_input.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                for at in range(model_input.num_computed_tokens + len(model_input.token_ids))
            ]
            self.pool[torch.tensor(slots[model_input.num_computed_tokens :])] = torch.tensor(
                list(model_input.token_ids)
            )
            ids = self.pool[torch.tensor(slots)].tolist()
            rows = [
                self.row(tuple(ids[: model_input.num_computed_tokens + at + 1]), model_input.depth)
                for at in model_input.outputs
            ]
            self.passes.append(len(model_input.token_ids))
            results.append(torch.stack(rows).clone() if rows else torch.empty(0, self.model.config.vocab_size))
        return results

    def row(self, ids, depth=None):
        if (ids, depth) not in self.known:
            module = self.model.module if depth is None else self.lower(depth)
            with torch.no_grad():
                self.known[ids, depth] = module(torch.tensor([ids]))[0, -1].float()
        return self.known[ids, depth]

    def lower(self, depth):
        """A decoder of the first layers alone."""
        from dataclasses import replace

        whole = self.model.module
        module = type(whole)(replace(whole.config, layers=whole.config.layers[:depth])).eval()
        module.load_state_dict({k: v for k, v in whole.state_dict().items() if k in module.state_dict()})
        return module

    def give_back(self, blocks):
        """Nothing: there is no pool."""

    def read_head(self, head_blocks, tokens):
        raise AssertionError("nobody's heads lie apart")

    write_head = read_head

    def copy(self, source, target):
        raise NotImplementedError

    read = write = copy

    def close(self):
        self.pool = None


def small(seed, size=5, spread=8.0, layers=1, sources=()):
    """A random decoder over a few letters; the last one ends an answer."""
    from tokenizers import Tokenizer as Backend, decoders, models

    from pippin.data.text.tokenizer import Tokenizer
    from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
    from pippin.nn.attention.attention import AttentionSpec
    from pippin.nn.feedforward.feedforward import FeedForwardSpec

    letters = "abcdefghijklmnopqrstuvwxyz"[: size - 1]
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    specs = tuple(
        LayerSpec(AttentionSpec(kv_source=sources[i] if i < len(sources) else None), FeedForwardSpec(32))
        for i in range(layers)
    )
    config = DecoderConfig(
        "llama", size, 16, specs, num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64
    )
    module = Decoder(config).initialize(seed=seed).eval()
    for parameter in module.parameters():  # far from uniform
        if parameter.ndim > 1:
            parameter.data *= spread
    return LanguageModel(f"small {seed}", module, Tokenizer(backend, eos_ids=[size - 1]), None)


@pytest.fixture(scope="session")
def make_small():
    return small


def sequence_law(model, prompt, length, options, *, allowed=None):
    """Probabilities of all answers of at most ``length`` tokens, by going through them; an end cuts an answer."""
    from pippin.engine.decoding.sampling import Sampler

    memo, end = MemoRunner(model), model.tokenizer.eos_ids[0]
    distribution = {}

    def go(answer, probability):
        if len(answer) == length:
            distribution[answer] = distribution.get(answer, 0.0) + probability
            return
        sampler = Sampler(options, prompt, model.config.vocab_size)
        for token in answer:
            sampler.observe(token)
        logits = memo.row((*prompt, *answer)).clone()
        sampler.penalize(logits)
        if allowed is not None:
            mask = allowed(answer)
            logits[[token for token in range(len(logits)) if token not in mask]] = -math.inf
        for token, p in enumerate(reference_law(logits, options)):
            if p > 0 and token == end:
                distribution[answer] = distribution.get(answer, 0.0) + probability * p
            elif p > 0:
                go((*answer, token), probability * p)

    go((), 1.0)
    return distribution


def reference_law(logits, options):
    """Temperature, top-k and top-p by transformers' processors."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    steps = LogitsProcessorList([TemperatureLogitsWarper(options.temperature)])
    if options.top_k is not None:
        steps.append(TopKLogitsWarper(options.top_k))
    if options.top_p is not None:
        steps.append(TopPLogitsWarper(options.top_p))
    return steps(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].double().softmax(-1).tolist()


@pytest.fixture(scope="session")
def law_of_answers():
    return sequence_law


@pytest.fixture(scope="session")
def memo_runner():
    return MemoRunner
