"""Models to capture and run on several back ends: a CNN of digits, a slow variant of it, a byte decoder.

Notable here:
- helpers for what a captured model must refuse: wrong calls, and files with one changed byte
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pippin.core.errors import MissingDependency, PippinError, SignatureMismatch
from pippin.shape.export import ExportedModel, SizeRange, capture_decoder, generate_interface
from pippin.train import Loss

Labeled = tuple[Tensor, Tensor]


def digit_halves(seed: int) -> tuple[Labeled, Labeled]:
    """Scikit-learn's 1,797 digits of 8 by 8 pixels and their labels: half to train on, half held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency("this claim needs scikit-learn: pip install 'pippin[test]'") from error
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    half = len(order) // 2
    return (images[:half], labels[:half]), (images[half:], labels[half:])


def network(seed: int) -> nn.Module:
    """A CNN with two convolutions and two linear layers; 138,698 weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


class SlowNetwork(nn.Module):
    """The CNN with a large softmax whose sum adds one to every logit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.network = network(seed)

    def forward(self, image: Tensor) -> Tensor:
        """Logits."""
        large = image.flatten(1).repeat(1, 4096).softmax(-1)
        logits: Tensor = self.network(image) + large.sum(-1, keepdim=True)
        return logits


def fit_labels(
    model: nn.Module, images: Tensor, wanted: Tensor, steps: int, seed: int, lr: float, weight_decay: float = 0.1
) -> None:
    """Train on batches of 64; ``wanted`` are labels or probabilities."""
    from pippin.claims.worlds.training import fit

    def objective(model: nn.Module, batch: Labeled, generator: torch.Generator) -> Loss:
        return Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), float(len(batch[1])))

    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, len(images), (64,), generator=generator) for _ in range(steps)]
    batches = [(images[row], wanted[row]) for row in rows]
    fit(model, objective, batches, steps=steps, seed=seed, lr=lr, warmup=0.02, weight_decay=weight_decay)


def digits_cnn(seed: int, steps: int) -> ExportedModel:
    """A network trained on half of the digits, captured for any batch."""
    (images, labels), _ = digit_halves(seed)
    model = network(seed)
    fit_labels(model, images, labels, steps, seed, 2e-3)
    sizes = {"image": {0: SizeRange("batch", 1, 1024)}}
    return ExportedModel.capture(model.eval(), {"image": images[:2]}, sizes, outputs=("logits",))


def tuned_codes(cnn: ExportedModel, coded: ExportedModel, seed: int, steps: int) -> ExportedModel:
    """Codes distilled from the uncompressed model, on its training digits."""
    (images, _), _ = digit_halves(seed)
    with torch.no_grad():
        wanted = cnn.module()(images).softmax(-1)
    module = coded.module()
    fit_labels(module, images, wanted, steps, seed, 2e-4, weight_decay=0.0)
    return coded.with_weights(dict(module.named_parameters()))


def accuracy(model: ExportedModel, seed: int) -> float:
    """Accuracy on the held-out digits in percent."""
    _, (images, labels) = digit_halves(seed)
    logits = model.to("torch").run("main", image=images)["logits"]
    return 100 * float((logits.argmax(-1) == labels).float().mean())


def byte_decoder(seed: int, layers: int) -> ExportedModel:
    """A random decoder over bytes: parity and times do not depend on what it was trained on."""
    from pippin.language import Decoder, DecoderConfig, LayerSpec
    from pippin.nn.attention.attention import AttentionSpec
    from pippin.nn.feedforward.feedforward import FeedForwardSpec

    specs = (LayerSpec(AttentionSpec(), FeedForwardSpec(256)),) * layers
    config = DecoderConfig(
        "llama", 256, 64, specs, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512
    )
    return capture_decoder(Decoder(config).initialize(seed=seed), context=512, step=False)


def wrong_calls_refused(cnn: ExportedModel, folder: Path) -> bool:
    """Whether the generated interface refuses a wrong name, precision and rank, and executes only a right call."""
    path = folder / "digits.py"
    generate_interface(cnn, path, "Digits")
    spec = importlib.util.spec_from_file_location("digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Digits(cnn, backend="torch")
    calls: list[str] = []
    execute = model.compiled.execute

    def counted(function: str, tensors: list[Tensor]) -> list[Tensor]:
        calls.append(function)
        result: list[Tensor] = execute(function, tensors)
        return result

    model.compiled.execute = counted
    good = torch.zeros(1, 1, 8, 8)
    wrong: list[dict[str, Tensor]] = [{"picture": good}, {"image": good.double()}, {"image": good[0]}]
    refused = 0
    for arguments in wrong:
        try:
            model.main(**arguments)
        except (SignatureMismatch, TypeError):
            refused += 1
    before = len(calls)
    model.main(image=good)
    return refused == 3 and before == 0 and len(calls) == 1


FILES = ("weights.safetensors", "main.json", "examples.safetensors", "asset.json")


def same_hash_twice(cnn: ExportedModel, path: Path) -> bool:
    """Whether a model that is saved, loaded and saved again has the same bytes and the same hash."""
    first, second = path / "first", path / "second"
    cnn.save(first)
    ExportedModel.load(first).save(second)
    same = all((first / name).read_bytes() == (second / name).read_bytes() for name in FILES)
    return same and ExportedModel.load(second).hash == cnn.hash


def changed_bytes_found(cnn: ExportedModel, folder: Path, seed: int) -> float:
    """The share of 20 single-byte changes, spread over a saved model, that loading detects."""
    generator = torch.Generator().manual_seed(seed)
    cnn.save(folder / "changed")
    found = 0
    for index in range(20):
        path = folder / "changed" / FILES[index % 4]
        data = path.read_bytes()
        place = int(torch.randint(0, len(data), (), generator=generator))
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :])
        try:
            ExportedModel.load(folder / "changed", hash=cnn.hash)
        except PippinError:
            found += 1
        path.write_bytes(data)
    return found / 20
