"""Posteriors over weights against laplace-torch, and one over an adapter of the default language model.

    python benchmarks/posteriors.py [--quick] [--json] [--only WORD]

Two networks with random weights, in evaluation mode: one of the size of LeNet (35,000 weights, images of 28 by 28
pixels, batches of 64) and one of that of ResNet-18 (11 million, 32 by 32, batches of 16; normalization layers frozen,
since laplace-torch's Kronecker factors have no rule for them). For the last layer with Kronecker factors, for all
weights with a diagonal and with Kronecker factors:

- the fit and the evidence, the curvature being the exact GGN, each side with its default backend; the evidence is
  part of it, since laplace-torch decomposes its factors in the fit and Pippin where they are needed
- the covariance of the outputs for 10,000 images; where a side would take many minutes it is timed on fewer, and its
  time multiplied (the note says which)
- the peak of a process's memory above what it held before the fit

Log-determinants of the posterior precision and covariances of a few images (for a diagonal, the variances of all
weights) must agree to 1e-4 of their size, or nothing is printed. Over 11 million weights laplace-torch adds products
in float32, which puts the log-determinant of its diagonal 1.4 % and its covariances 0.2 to 0.3 % from those in float64;
ours are within 1e-4. The covariances under Kronecker factors are therefore compared on a narrow copy in float64.
Convolutions have no bias: there laplace-torch approximates what is exact here. The adapter has rank 8, on queries and
values; its answers are restricted to two words, and it is fitted on 64 sentences. One thread on both sides; the
process's own time is taken, which does not count what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _rows import Row, Watch, compared, in_turn, parser, say, show
from torch import Tensor, nn

from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.weight_subset import LastLayer, Named
from pippin.core.device import peak_memory

POINTS = 10_000
PEER = "laplace-torch"
SIDES = ("ours", "theirs")
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
        """Feature maps in, feature maps out."""
        y = self.norm_b(self.b(F.relu(self.norm_a(self.a(x)))))
        return F.relu(y + self.skip(x))


def lenet() -> nn.Module:
    """35,000 weights."""
    features = [nn.Conv2d(1, 6, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(6, 16, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(256, 100), nn.ReLU(), nn.Linear(100, 60), nn.ReLU(), nn.Linear(60, 10))


def resnet(width: int = 64) -> nn.Module:
    """11 million weights at the usual width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for inputs, outputs, stride in ((1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)):
        inputs, outputs = inputs * width, outputs * width
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def network(name: str) -> nn.Module:
    """A network with random weights, its normalization frozen."""
    torch.manual_seed(99)
    model = {"lenet": lenet, "resnet": resnet, "narrow resnet": lambda: resnet(8)}[name]().eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.requires_grad_(False)
    return model


def data(name: str, n: int, batch: int) -> Batches:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(99)
    shape = (1, 28, 28) if name == "lenet" else (3, 32, 32)
    x = torch.randn(n, *shape, generator=generator)
    y = torch.arange(n) % 10
    return list(zip(x.split(batch), y.split(batch), strict=True))


def ours(model: nn.Module, case: str, batches: Batches) -> Laplace:
    """Our posterior."""
    subset, structure = CASES[case]
    chosen = LastLayer() if subset == "last_layer" else Named()
    return Laplace(model, "classification", subset_of_weights=chosen, hessian_structure=structure).fit(batches)


def theirs(model: nn.Module, case: str, batches: Batches) -> Any:
    """The other side's."""
    from laplace import Laplace as Other
    from torch.utils.data import DataLoader, TensorDataset

    subset, structure = CASES[case]
    whole = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    other = Other(model, "classification", subset_of_weights=subset, hessian_structure=structure)
    other.fit(DataLoader(whole, batch_size=len(batches[0][0])))
    return other


def evidence(posterior: Any) -> Any:
    """The posterior, after its evidence was asked for, which needs the eigenvalues of every factor."""
    float(posterior.log_marginal_likelihood())
    return posterior


def apart(name: str, case: str, mine: Laplace, other: Any, x: Tensor) -> float:
    """The largest difference of both sides, in terms of the size of what is compared."""
    with torch.no_grad():
        if case == "all, diag":
            values = [(mine.posterior.variances(), other.posterior_variance)]
        else:
            values = [(mine.posterior.log_det, other.log_det_posterior_precision)]
            if (name, case) == ("resnet", "all, kron"):
                mine, other, x = _narrow(case)
            values.append((mine.outputs_at(x)[1], other._glm_predictive_distribution(x)[1]))
    differences = [float((a - b.detach()).abs().max() / b.detach().abs().max()) for a, b in values]
    if not max(differences) < 1e-4:
        raise SystemExit(f"{case}: the sides differ by {differences}; nothing is compared")
    return max(differences)


def _narrow(case: str) -> tuple[Laplace, Any, Tensor]:
    """Both sides over a narrow residual network in double precision.

    In single precision the other side's covariances lose digits with the size of the network (7e-6 at width 8, 7e-5 at
    16, 3e-3 at 64; ours 3e-7 to 7e-7), in double precision both are equal to 1e-14.
    """
    model = network("narrow resnet").double()
    batches = [(x.double(), y) for x, y in data("resnet", 16, 16)]
    with torch.enable_grad():
        return ours(model, case, batches), theirs(model, case, batches), batches[0][0][:2]


def seconds(work: Callable[[], object]) -> float:
    """Of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        fitted: images of the fit.
        batch: of them in each batch.
        repeats: of the fit; 1 goes without a round that warms up.
        ours: images that Pippin predicts.
        theirs: images that laplace-torch predicts.
    """

    fitted: int
    batch: int
    repeats: int
    ours: int
    theirs: int


SIZES = {
    ("lenet", "last layer, kron"): Size(256, 64, 5, POINTS, POINTS),
    ("lenet", "all, diag"): Size(128, 64, 3, 2048, 64),
    ("lenet", "all, kron"): Size(256, 64, 5, 2048, 64),
    ("resnet", "last layer, kron"): Size(64, 16, 3, 256, 256),
    ("resnet", "all, diag"): Size(8, 8, 1, 8, 2),
    ("resnet", "all, kron"): Size(32, 16, 1, 8, 2),
}
QUICK = {
    ("lenet", "last layer, kron"): Size(64, 32, 2, 512, 512),
    ("lenet", "all, diag"): Size(32, 32, 2, 64, 16),
    ("lenet", "all, kron"): Size(64, 32, 2, 64, 16),
    ("resnet", "last layer, kron"): Size(16, 16, 1, 32, 32),
}


def compare(name: str, quick: bool) -> list[Row]:
    """Measure seconds of the fits, with the evidence, and of the covariances of 10,000 outputs."""
    sizes = {case: size for (net, case), size in (QUICK if quick else SIZES).items() if net == name}
    return [row for case, size in sizes.items() for row in _compared(name, case, size)]


def _compared(name: str, case: str, size: Size) -> list[Row]:
    model, batches = network(name), data(name, size.fitted, size.batch)
    kept: dict[str, Any] = {}

    def fit(side: str) -> float:
        work = ours if side == "ours" else theirs
        return seconds(lambda: kept.update({side: evidence(work(model, case, batches))}))

    say(f"{name}, {case}")
    with Watch() as watch:
        if size.repeats > 1:
            found = in_turn({side: lambda s=side: fit(s) for side in SIDES}, size.repeats, f"{name}, {case}")
        else:
            found = {side: [fit(side)] for side in SIDES}
    mine, other = kept["ours"], kept["theirs"]
    few = data(name, 8 if name == "lenet" else 2, 8)[0][0]
    first = seconds(lambda: mine.outputs_at(few[:1]))  # finds the eigenvectors
    difference = apart(name, case, mine, other, few)
    note = f"{size.fitted} images in batches of {size.batch}; differing by {difference:.1g}; {watch}"
    goal = 20.0 if case == "all, diag" else 2.0
    what = f"{name}, {case}: fit with evidence"
    rows = [compared(what, "s", found["ours"], PEER, found["theirs"], goal, higher_is_better=False, note=note)]
    most = torch.cat([x for x, _ in data(name, max(size.ours, size.theirs), 64)])
    parts = most[: size.theirs].split(64)
    with Watch() as watch:
        spent = first + seconds(lambda: mine.outputs_at(most[: size.ours])) * POINTS / size.ours
        taken = seconds(lambda: [other._glm_predictive_distribution(x) for x in parts]) * POINTS / size.theirs
    note = f"ours timed on {size.ours} images ({first:.2g} s of it for eigenvectors), theirs on {size.theirs}"
    what = f"{name}, {case}: covariance of 10,000 outputs"
    return [*rows, Row(what, "s", spent, PEER, taken, 2.0, False, f"{note}; {watch}")]


def child(side: str, name: str, case: str) -> None:
    """In a process of its own: print by how many megabytes its memory rose for a fit."""
    model = network(name)
    batches = data(name, 64, 64) if name == "lenet" else data(name, 2, 2) if "diag" in case else data(name, 16, 16)
    work = ours if side == "ours" else theirs
    work(lenet().eval(), case, data("lenet", 2, 2))  # what is imported and set up once does not count
    before = peak_memory()
    work(model, case, batches)
    print(json.dumps((peak_memory() - before) / 1e6))


def memory(name: str, quick: bool) -> list[Row]:
    """Peaks of memory."""
    rows = []
    for case in ["all, diag"] if quick and name == "lenet" else [] if quick else CASES:
        say(f"{name}, {case}, memory")
        peaks = {}
        for side in SIDES:
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
    optimizer = torch.optim.Adam(adapted.parameters(), lr=2e-3)
    say(f"adapter of {sum(p.numel() for p in adapted.parameters()):,} weights: a few steps of training")
    for ids, labels in batches[: 2 if quick else 6]:
        optimizer.zero_grad()
        F.cross_entropy(answers(ids), labels).backward()
        optimizer.step()
    rows = []
    for structure in ("diag", "kron"):
        say(f"adapter, {structure}")
        posterior = Laplace(
            answers, "classification", subset_of_weights=Named(), hessian_structure=structure, prior_precision=10.0
        )
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
    "times lenet": lambda quick: compare("lenet", quick),
    "times resnet": lambda quick: compare("resnet", quick),
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
