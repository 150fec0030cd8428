"""Posteriors over weights beside laplace-torch, and one over an adapter of the default language model.

    python benchmarks/posteriors.py [--quick] [--json] [--only WORD]

Two networks with random weights, in evaluation mode: one of the size of LeNet (35,000 weights, pictures of 28 by 28
pixels, batches of 64) and one of that of ResNet-18 (11 million, 32 by 32, batches of 16; normalisation layers frozen,
since the other side's Kronecker factors have no rule for them). For the last layer with Kronecker factors, for all
weights with a diagonal and with Kronecker factors:

- the fit, the curvature being the exact GGN, each side with its default back end
- the covariance of the outputs for 10,000 pictures; where a side would take many minutes it is timed on fewer, and its
  time multiplied (the note says which)
- the peak of a process's memory above what it held before the fit

Log-determinants of the posterior precision and covariances of eight pictures must agree to 1e-4 of their size, or
nothing is printed. Convolutions have no bias: there the other side approximates what is exact here. The adapter has
rank 8, on queries and values; its answers are restricted to two words, and it is fitted on 64 sentences. One thread on
both sides; the process's own time is taken, which does not count what else the machine does.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _rows import Row, Watch, compared, in_turn, parser, say, show
from torch import Tensor, nn

from pippin.bayes.laplace import Laplace
from pippin.bayes.subset import LastLayer, Named

POINTS = 10_000
PEER = "laplace-torch"
CASES = {"last layer, kron": ("last_layer", "kron"), "all, diag": ("all", "diag"), "all, kron": ("all", "kron")}
Batches = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Two convolutions and a skip.

    Args:
        inputs: channels.
        outputs: channels.
        stride: of the first.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm_a = nn.BatchNorm2d(outputs)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_b = nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """A picture of features."""
        y = self.norm_b(self.b(F.relu(self.norm_a(self.a(x)))))
        return F.relu(y + self.skip(x))


def lenet() -> nn.Module:
    """35,000 weights."""
    features = [nn.Conv2d(1, 6, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(6, 16, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(256, 100), nn.ReLU(), nn.Linear(100, 60), nn.ReLU(), nn.Linear(60, 10))


def resnet() -> nn.Module:
    """11 million weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def network(name: str) -> nn.Module:
    """A network with random weights, its normalisation frozen."""
    torch.manual_seed(99)
    model = (lenet() if name == "lenet" else resnet()).eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.requires_grad_(False)
    return model


def data(name: str, n: int, batch: int) -> Batches:
    """Random pictures and classes."""
    generator = torch.Generator().manual_seed(99)
    shape = (1, 28, 28) if name == "lenet" else (3, 32, 32)
    x = torch.randn(n, *shape, generator=generator)
    y = torch.arange(n) % 10
    return list(zip(x.split(batch), y.split(batch), strict=True))


def ours(model: nn.Module, case: str, batches: Batches) -> Laplace:
    """Our posterior."""
    subset, structure = CASES[case]
    chosen = LastLayer() if subset == "last_layer" else Named()
    return Laplace(model, "classification", subset=chosen, structure=structure).fit(batches)


def theirs(model: nn.Module, case: str, batches: Batches) -> Any:
    """The other side's."""
    from laplace import Laplace as Other
    from torch.utils.data import DataLoader, TensorDataset

    subset, structure = CASES[case]
    whole = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    other = Other(model, "classification", subset_of_weights=subset, hessian_structure=structure)
    other.fit(DataLoader(whole, batch_size=len(batches[0][0])))
    return other


def apart(model: nn.Module, case: str, batches: Batches) -> float:
    """The largest difference of both sides, in terms of the size of what is compared."""
    mine, other = ours(model, case, batches), theirs(model, case, batches)
    x = batches[0][0][:8]
    with torch.no_grad():
        values = [(mine.posterior.log_det, other.log_det_posterior_precision)]
    values.append((mine.outputs_at(x)[1], other._glm_predictive_distribution(x)[1]))
    differences = [float((a - b.detach()).abs().max() / b.detach().abs().max()) for a, b in values]
    if not max(differences) < 1e-4:
        raise SystemExit(f"{case}: the sides differ by {differences}; nothing is compared")
    return max(differences)


def seconds(work: Callable[[], object]) -> float:
    """Of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def taken(what: str, sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each side's seconds; slow ones once, without a round that warms up."""
    if repeats > 1:
        return in_turn(sides, repeats, what)
    say(what)
    return {name: [work()] for name, work in sides.items()}


def fits(name: str, quick: bool) -> list[Row]:
    """Seconds of the fits."""
    model, rows = network(name), []
    for case in CASES:
        slow = name == "resnet" and case != "last layer, kron"
        n, batch = (64 if quick else 256, 32 if quick else 64) if name == "lenet" else (64, 16)
        if slow:
            n, batch = (2, 2) if case == "all, diag" else (16 if quick else 128, 16)
        if slow and quick:
            continue
        batches = data(name, n, batch)
        difference = apart(model, case, data(name, 2, 2) if slow else data(name, 16, 8))
        with Watch() as watch:
            found = taken(
                f"{name}, {case}",
                {
                    "ours": lambda b=batches, c=case: seconds(lambda: ours(model, c, b)),
                    "theirs": lambda b=batches, c=case: seconds(lambda: theirs(model, c, b)),
                },
                1 if slow or case == "all, diag" else 2 if quick else 5,
            )
        note = f"{n} pictures in batches of {batch}; apart by {difference:.1g}; {watch}"
        rows.append(
            compared(
                f"{name}, {case}: fit",
                "s",
                found["ours"],
                PEER,
                found["theirs"],
                20.0 if case == "all, diag" else 2.0,
                higher_is_better=False,
                note=note,
            )
        )
    return rows


def predictions(name: str, quick: bool) -> list[Row]:
    """Seconds of the covariances of 10,000 pictures."""
    model, rows = network(name), []
    for case in CASES:
        if name == "resnet" and case != "last layer, kron":
            continue
        batches = data(name, 16, 8)
        mine, other = ours(model, case, batches), theirs(model, case, batches)
        last = case == "last layer, kron"
        own = POINTS if name == "lenet" and not quick else 512 if name == "lenet" else 64
        few = own if last else 16 if quick else 64
        x = data(name, own, 64)

        def mean(work: Callable[[Tensor], object], n: int, x: Batches = x) -> float:
            pictures = torch.cat([part for part, _ in x])[:n]
            return seconds(lambda: [work(part) for part in pictures.split(64)]) * POINTS / n

        with Watch() as watch:
            found = taken(
                f"{name}, {case}, predictive",
                {
                    "ours": lambda w=mine, n=own, m=mean: m(w.outputs_at, n),
                    "theirs": lambda w=other, n=few, m=mean: m(w._glm_predictive_distribution, n),
                },
                3 if last and not quick else 1,
            )
        note = f"ours timed on {own} pictures, theirs on {few}; {watch}"
        rows.append(
            compared(
                f"{name}, {case}: covariance of 10,000 outputs",
                "s",
                found["ours"],
                PEER,
                found["theirs"],
                2.0,
                higher_is_better=False,
                note=note,
            )
        )
    return rows


def child(side: str, name: str, case: str) -> None:
    """In a process of its own: print by how many megabytes its memory rose for a fit."""
    model = network(name)
    batches = data(name, 64, 64) if name == "lenet" else data(name, 2, 2) if "diag" in case else data(name, 16, 16)
    work = ours if side == "ours" else theirs
    work(lenet().eval(), case, data("lenet", 2, 2))  # what is imported and set up once does not count
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(model, case, batches)
    print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6))


def memory(name: str, quick: bool) -> list[Row]:
    """Peaks of memory."""
    rows = []
    for case in CASES:
        if name == "resnet" and quick:
            continue
        say(f"{name}, {case}, memory")
        peaks = {}
        for side in ("ours", "theirs"):
            words = [sys.executable, __file__, "--child", side, name, case]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            peaks[side] = float(done.stdout.splitlines()[-1])
        what = f"{name}, {case}: memory of the fit"
        rows.append(Row(what, "MB", max(peaks["ours"], 1.0), PEER, max(peaks["theirs"], 1.0), 1.0, False))
    return rows


class Answers(nn.Module):
    """A language model with an adapter, its outputs restricted to the scores of some words.

    Args:
        adapted: the model with the adapter.
        choices: tokens.
    """

    def __init__(self, adapted: nn.Module, choices: list[int]) -> None:
        super().__init__()
        self.adapted, self.choices = adapted, choices

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the words after the last token."""
        adapted: Any = self.adapted
        matrix: Tensor = adapted.embed_tokens.weight if adapted.lm_head.weight is None else adapted.lm_head.weight
        return adapted.hidden(ids)[:, -1] @ matrix[self.choices].T


def sentences(tokenizer: Any, n: int) -> Batches:
    """Reviews of one length in tokens and what they say, in batches of 8."""
    words = {" good": ["wonderful", "great", "lovely", "brilliant"], " bad": ["awful", "boring", "terrible", "dull"]}
    things = ["film", "book", "song", "game", "play", "story", "meal", "room"]
    places = ["at home", "in town", "last night", "this year", "with friends"]
    found: dict[int, list[tuple[list[int], int]]] = {}
    for label, adjectives in enumerate(words.values()):
        for adjective in adjectives:
            for thing in things:
                for place in places:
                    ids = tokenizer.encode(f"Review: The {thing} {place} was {adjective}. In one word, it was")
                    found.setdefault(len(ids), []).append((list(ids), label))
    same = max(found.values(), key=len)
    order = torch.randperm(len(same), generator=torch.Generator().manual_seed(99))[:n]
    ids, labels = torch.tensor([same[i][0] for i in order]), torch.tensor([same[i][1] for i in order])
    return list(zip(ids.split(8), labels.split(8), strict=True))


def adapter(quick: bool) -> list[Row]:
    """Seconds of a posterior over an adapter of the default language model."""
    import pippin
    from pippin.shape.lora import LowRankModel

    model = pippin.load("smollm2-135m", device="cpu", dtype="float32", pack=False)
    choices = [model.tokenizer.encode(word)[0] for word in (" good", " bad")]
    adapted = LowRankModel(model.module, rank=8, targets=["q_proj", "v_proj"], seed=99)
    answers = Answers(adapted, choices).eval()
    batches = sentences(model.tokenizer, 16 if quick else 64)
    optimiser = torch.optim.Adam(adapted.parameters(), lr=2e-3)
    say(f"adapter of {sum(p.numel() for p in adapted.parameters()):,} weights: a few steps of training")
    for ids, labels in batches[: 2 if quick else 6]:
        optimiser.zero_grad()
        F.cross_entropy(answers(ids), labels).backward()
        optimiser.step()
    rows = []
    for structure in ("diag", "kron"):
        say(f"adapter, {structure}")
        posterior = Laplace(answers, "classification", subset=Named(), structure=structure, prior_precision=10.0)
        began = time.perf_counter()
        posterior.fit(batches)
        spent = time.perf_counter() - began
        plain = answers(batches[0][0]).softmax(-1).detach()
        probs = posterior(batches[0][0]).probs
        assert probs is not None
        note = (
            f"{sum(len(y) for _, y in batches)} sentences of {batches[0][0].shape[1]} tokens; evidence "
            f"{float(posterior.log_marginal_likelihood()):.1f}; mean confidence {float(plain.amax(-1).mean()):.3f} "
            f"before, {float(probs.amax(-1).mean()):.3f} with the posterior"
        )
        what = f"adapter of rank 8 of smollm2-135m, {structure}: fit"
        rows.append(Row(what, "s", spent, "ten minutes", 600.0, 1.0, False, note))
    return rows


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "fit lenet": lambda quick: fits("lenet", quick),
    "fit resnet": lambda quick: fits("resnet", quick),
    "predictive lenet": lambda quick: predictions("lenet", quick),
    "predictive resnet": lambda quick: [] if quick else predictions("resnet", quick),
    "memory lenet": lambda quick: memory("lenet", quick),
    "memory resnet": lambda quick: memory("resnet", quick),
    "adapter": adapter,
}


def measure(quick: bool, only: str) -> list[Row]:
    """All parts whose name has the word."""
    return [row for name, part in PARTS.items() if only in name for row in part(quick)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    words = parser(__doc__)
    words.add_argument("--only", default="", help=f"parts whose name has this word: {', '.join(PARTS)}")
    words.add_argument("--child", nargs=3, help="for the measuring of memory")
    options = words.parse_args()
    if options.child:
        child(*options.child)
    else:
        show(measure(options.quick, options.only), as_json=options.json)
