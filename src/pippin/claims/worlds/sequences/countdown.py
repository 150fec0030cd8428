"""Three numbers and a target to be made of them: problems with several solutions, each of which can be checked.

Notable here:
- problems have three numbers, + and -, and no negative intermediate result; a solution has two steps
- a training problem comes with a random one of its solutions, so a good model knows several
- held-out problems differ from all others in their numbers or their target, whatever the order of the numbers
- each number and each sign is one token, so all texts of one kind have equal length
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import permutations

import torch
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
from torch import Tensor

from pippin.data.text.tokenizer import Tokenizer
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.language.methods.ladir.data import Problem
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec

LARGEST = 9
"""The numbers of a problem are 1 to this."""
EVERY = 10
"""One problem of so many is held out."""
_ANSWER = re.compile(r"(\d+)([+-])(\d+)([+-])(\d+)")


def solutions(numbers: Sequence[int], target: int) -> list[tuple[str, str, str]]:
    """All solutions of a problem: the two steps, and the answer as one expression.

    >>> solutions([3, 2, 1], 2)
    [('3-2=1', '1+1=2', '3-2+1'), ('3+1=4', '4-2=2', '3+1-2'), ('1+3=4', '4-2=2', '1+3-2')]
    """
    found = []
    for x, y, z in dict.fromkeys(permutations(numbers)):
        for first in "+-":
            middle = x + y if first == "+" else x - y
            for second in "+-":
                end = middle + z if second == "+" else middle - z
                if middle >= 0 and end == target:
                    found.append((f"{x}{first}{y}={middle}", f"{middle}{second}{z}={end}", f"{x}{first}{y}{second}{z}"))
    return found


def is_solution(question: str, answer: str) -> bool:
    """Whether an answer uses the question's numbers once each and makes its target without a negative number.

    >>> is_solution("3,8,5=6", "8+3-5"), is_solution("3,8,5=6", "3+3+0"), is_solution("3,8,5=6", "3-5+8")
    (True, False, False)
    """
    match = _ANSWER.fullmatch(answer)
    if match is None:
        return False
    numbers, target = question.split("=")
    x, y, z = (int(match[i]) for i in (1, 3, 5))
    middle = x + y if match[2] == "+" else x - y
    end = middle + z if match[4] == "+" else middle - z
    return sorted((x, y, z)) == sorted(map(int, numbers.split(","))) and middle >= 0 and end == int(target)


def problems(count: int, *, seed: int, held_out: bool = False) -> list[Problem]:
    """Random problems, each with one of its solutions.

    Args:
        count: number of problems; held-out ones are distinct.
        seed: seed of the problems.
        held_out: whether they come from the held-out problems.
    """
    source = random.Random(2 * seed + held_out)
    made: dict[str, Problem] = {}
    sampled: list[Problem] = []
    while len(sampled) < count:
        numbers = [source.randint(1, LARGEST) for _ in range(3)]
        x, y, z = numbers
        target = x + source.choice((1, -1)) * y + source.choice((1, -1)) * z
        if target < 0 or _is_held_out(sorted(numbers), target) != held_out:
            continue
        found = solutions(numbers, target)
        if not found:
            continue
        *steps, answer = source.choice(found)
        source.shuffle(numbers)
        problem = Problem(f"{','.join(map(str, numbers))}={target}", tuple(steps), answer)
        if not (held_out and problem.question in made):
            made[problem.question] = problem
            sampled.append(problem)
    return sampled


def _is_held_out(numbers: Sequence[int], target: int) -> bool:
    """Whether a problem is held out; the same for every seed."""
    return random.Random(f"{numbers} {target}").randrange(EVERY) == 0


def model(*, layers: int, width: int, seed: int) -> LanguageModel:
    """A decoder over numbers and signs with random weights."""
    signs = ["+", "-", "=", ",", "\n", *map(str, range(10))]
    pairs = [(ten, one) for ten in "123456789" for one in "0123456789"]
    alphabet = {"\n": "Ċ"}
    vocabulary = {alphabet.get(sign, sign): index for index, sign in enumerate(signs)}
    vocabulary |= {"".join(pair): len(signs) + index for index, pair in enumerate(pairs)}
    backend = Backend(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    size = len(vocabulary) + 1
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(3 * width))
    config = DecoderConfig(
        "llama", size, width, (layer,) * layers, width // 16, width // 16, 16, max_position_embeddings=256
    )
    module = Decoder(config).initialize(seed=seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)  # the scale is made for widths near 1,000
    return LanguageModel("arithmetic", module, Tokenizer(backend, eos_ids=[size - 1]), None)


class Chains:
    """Endless batches of problems with written solutions, to train chains of thought.

    Args:
        tokenizer: tokenizer of the model.
        learned: the training problems.
        rows: batch size.
        seed: seed of the order.
    """

    def __init__(self, tokenizer: Tokenizer, learned: Sequence[Problem], rows: int, *, seed: int) -> None:
        self.prompt = len(tokenizer.encode(prompt(learned[0].question)))
        whole = [prompt(p.question) + "\n".join((*p.steps, p.answer)) for p in learned]
        self.ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_ids[0]] for text in whole])
        self.rows, self.seed = rows, seed

    def __iter__(self) -> Iterator[TokenBatch]:
        """Yield batches; tokens of the question are excluded from the loss."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            ids = self.ids[torch.randint(len(self.ids), (self.rows,), generator=generator)]
            targets = ids[:, 1:].clone()
            targets[:, : self.prompt - 1] = IGNORE
            yield TokenBatch(ids[:, :-1], targets)


def prompt(question: str) -> str:
    """The prompt of a chain of thought."""
    return f"{question}\n"


def write_chains(
    language_model: LanguageModel, questions: Sequence[str], *, temperature: float, seed: int, batch_size: int = 1024
) -> list[str]:
    """Sample chains of thought and return their answers; temperature 0 is greedy."""
    from pippin.language.methods.ladir.sample import decode_text
    from pippin.nn.kv_cache import PastKeyValues

    module, tokenizer = language_model.module, language_model.tokenizer
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]

    answers: list[str] = []
    for start in range(0, len(questions), batch_size):
        ids = torch.tensor([tokenizer.encode(prompt(question)) for question in questions[start : start + batch_size]])
        with torch.no_grad():
            written = decode_text(
                module,
                module.embed(ids),
                PastKeyValues(),
                torch.ones(len(ids), 0, dtype=torch.bool),
                torch.zeros(len(ids), dtype=torch.long),
                end_ids=tokenizer.eos_ids,
                max_new_tokens=24,
                choose=choose if temperature > 0 else None,
            )
        answers += [tokenizer.decode(row).rpartition("\n")[2] for row in written]
    return answers
