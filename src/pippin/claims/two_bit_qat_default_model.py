"""Two bits a weight on a real model: rounding, GPTQ, a few minutes of training, and a recovery adapter on top.

Notable here:
- the teacher is the model itself before it was quantised, and it is all that is learnt from: on its own predictions a
  full-precision model has nothing to gain, so there is no float control to be owed
- training begins at GPTQ's codes, so whatever it gains is gained over the strongest rounding, not the weakest
- every row is measured on a folder that was written and loaded again, by the kernels that would answer from it; bytes
  are those of the file, scales, embedding and all
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pippin.language import LanguageModel
    from pippin.nn.codes import Codes
    from pippin.shape.quantise.config import QuantisationSettings


@dataclass(frozen=True)
class Size:
    """How much is trained and looked at; a model of None is a small one of bytes, trained for a moment."""

    model: str | None
    steps: int
    adapter_steps: int
    rows: int
    length: int
    calibration: int
    held_out: int
    answer: int


SIZES = {
    "smoke": Size(None, 6, 4, 2, 64, 1024, 1024, 8),
    "laptop": Size("smollm2-135m", 60, 20, 2, 512, 8192, 16_384, 64),
    "gpu": Size("smollm2-135m", 400, 100, 16, 1024, 65_536, 65_536, 64),
}
RATE, ADAPTER_RATE = 5e-4, 1e-3
AVERAGE = 0.9
ARMS = ("rounded, absmax", "rounded, newton", "GPTQ", "trained", "trained, with a recovery adapter")


@claim(
    id="two-bit-qat-default-model",
    source="arXiv:2507.13575",
    paper="a model trained for 2-bit weights (4-bit embedding) keeps nearly all of its quality; recovery adapters give "
    "back more of it",
    setting="SmolLM2-135M as its file holds it (4-bit codes), 2 bits in groups of 64 and an embedding of 4 bits with a "
    "scale a row; trained from GPTQ's codes on the original's own predictions for WikiText-2, 60 steps of 1,024 "
    "tokens; a rank-32 adapter, 20 steps; perplexity on the test text, bytes of the file, tokens per second in the "
    "engine",
    accept="perplexity falls in the order rounded with searched scales, GPTQ, trained, trained with an adapter; "
    "training takes away at least a third of the nats per token that GPTQ adds to the original; every loaded weight "
    "equals the forward pass of training in every bit; the file of 2-bit weights takes at most 60 % of the bytes of "
    "the original's; the engine answers from it at no fewer tokens per second than from the original",
)
def run(scale: Scale) -> Evidence:
    """One model, one seed, five ways down to two bits."""
    evidence = Evidence()
    size = SIZES[scale.name]
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", UserWarning)  # the absmax arm is as bad as it is warned about
        _compare(evidence, size, Path(folder))
    nats = {arm: evidence.mean(f"nats per token, {arm}") for arm in ("original", *ARMS)}
    falling = [nats[arm] for arm in ARMS[1:]]
    return evidence.accept(
        order=all(before > after for before, after in pairwise(falling)),
        recovers=nats["GPTQ"] - nats["trained"] >= (nats["GPTQ"] - nats["original"]) / 3,
        bit_faithful=all(x == 0 for x in evidence.each("weights that differ after export")),
        smaller=evidence.mean("bytes, trained") <= 0.60 * evidence.mean("bytes, original"),
        as_fast=evidence.mean("tokens per second, trained") >= evidence.mean("tokens per second, original"),
    )


@dataclass(frozen=True)
class Given:
    """What every arm works with."""

    size: Size
    teacher: LanguageModel
    train: Path
    held: str
    folder: Path


def _compare(evidence: Evidence, size: Size, folder: Path) -> None:
    """Measure the original and every arm."""
    import copy

    from pippin.data.records import read_records
    from pippin.language.quantised import save_quantised
    from pippin.shape.quantise import gptq, qat, rtn
    from pippin.shape.quantise.calibration import calibration_ids
    from pippin.shape.quantise.config import QuantisationSettings

    original, parent, train, held = _subjects(size, folder)
    given = Given(size, original, train, held, folder)
    settings = QuantisationSettings(group=64)
    assert original.source is not None
    own = original.source.stat().st_size if size.model else _bytes(original.source)
    evidence.add("bytes, original", own, unit="bytes")
    _measure(evidence, "original", original, held, size)
    texts = (record.text for record in read_records(train))
    ids = calibration_ids(parent, texts, tokens=size.calibration, length=size.length)
    absmax = replace(settings, init="absmax")
    made = {
        "rounded, absmax": _by_row(rtn.quantise(parent, absmax), parent, absmax),
        "rounded, newton": _by_row(rtn.quantise(parent, settings), parent, settings),
        "GPTQ": _by_row(gptq.quantise(parent, settings, ids), parent, settings),
    }
    for arm, codes in made.items():
        save_quantised(folder / arm, parent, codes, note={"method": arm})
        _load(evidence, arm, folder / arm, held, size)
    student = replace(parent, module=copy.deepcopy(parent.module).requires_grad_(True), source=None)
    qat.prepare(student.module, settings, start=made["GPTQ"])
    _train(student.module, original, train, size, size.steps, RATE, seed=0)
    codes = qat.convert(student.module)
    save_quantised(folder / "trained", student, codes, note=qat.note(student.module))
    trained = _load(evidence, "trained", folder / "trained", held, size)
    layers, ours = dict(student.module.named_modules()), dict(trained.module.named_modules())
    differ = sum(int((ours[name].dense_weight() != layers[name].weight).sum()) for name in codes)
    evidence.add("weights that differ after export", differ)
    _recover(evidence, parent, trained, given)


def _subjects(size: Size, folder: Path) -> tuple[LanguageModel, LanguageModel, Path, str]:
    """The model as its file holds it, with ordinary weights, a file of text to train on, and held-out text."""
    import pippin
    from pippin.claims import _byte_text as small
    from pippin.core import store
    from pippin.data.records import read_records
    from pippin.language import Decoder

    if size.model is not None:
        text = store.pull("wikitext-2", show_progress=False)
        held = "".join(record.text for record in read_records(text / "test.raw.gz"))
        original, parent = (pippin.load(size.model, device="cpu", pack=pack) for pack in (True, False))
        return original, parent, text / "train.raw.gz", held
    module = small.train_bytes(Decoder(small.byte_config(layers=2)).initialise(seed=0), steps=8, seed=0, rows=2)
    small.byte_model(module).save(folder / "original")
    texts = small.byte_text()
    train, held = (
        bytes(part[part < small.END].tolist()).decode("utf-8", "replace")
        for part in (texts.train[:65_536], texts.held_out[: 4 * size.held_out])
    )
    (folder / "train.txt").write_text(train, encoding="utf-8")
    original, parent = (pippin.load(folder / "original", device="cpu", pack=pack) for pack in (True, False))
    return original, parent, folder / "train.txt", held


def _by_row(codes: Mapping[str, Codes], model: LanguageModel, settings: QuantisationSettings) -> dict[str, Codes]:
    """The same codes with the embedding as training has it: one scale for each row."""
    from pippin.nn.fake_quant import FakeQuantiser, Levels

    table = model.module.embed_tokens.weight
    assert table is not None
    assert settings.embedding_bits is not None
    rows = FakeQuantiser(table, Levels(settings.embedding_bits), "channel", init=settings.init)
    return {**codes, "embed_tokens": rows.codes(table)}


def _train(module: Any, teacher: LanguageModel, text: Path, size: Size, steps: int, rate: float, seed: int) -> None:
    """Learn from the original's predictions; the averaged weights are left in place."""
    import torch

    from pippin.core.device import has_fast_bf16
    from pippin.data.streams import token_batches
    from pippin.language.distillation import Distillation
    from pippin.train import AdamW, Cosine, Trainer

    trainer = Trainer(
        module,
        Distillation(teacher, weight=1.0),
        token_batches(text, teacher.tokenizer, length=size.length, rows=size.rows, seed=seed, show=False),
        steps=steps,
        optimiser=AdamW(lr=rate, weight_decay=0.0),
        schedule=Cosine(warmup=0.05),
        precision="bfloat16" if has_fast_bf16() and size.model else "float32",
        ema=AVERAGE,
        seed=seed,
        show=False,
    )
    trainer.fit()
    assert trainer.ema is not None
    averages = trainer.ema.averages
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in averages:
                parameter.copy_(averages[name])
    module.eval()


def _load(evidence: Evidence, arm: str, folder: Path, held: str, size: Size) -> LanguageModel:
    """Load an arm, count its bytes and measure it."""
    import pippin

    model = pippin.load(folder, device="cpu")
    evidence.add(f"bytes, {arm}", _bytes(folder), unit="bytes")
    _measure(evidence, arm, model, held, size)
    return model


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _measure(evidence: Evidence, arm: str, model: LanguageModel, held: str, size: Size) -> None:
    """Held-out perplexity by the model as it runs, and the speed of its answers."""
    from pippin.engine import Engine
    from pippin.engine.measure import prompt_ids, speed
    from pippin.language.likelihood import likelihood

    found = likelihood(model, held, length=size.length, limit=size.held_out)
    evidence.add(f"nats per token, {arm}", found.per_token, unit="nats")
    evidence.add(f"perplexity, {arm}", found.perplexity)
    engine, stops = Engine(model), model.tokenizer.eos_ids
    rates = [
        speed(engine, prompt_ids(model, 64), size.answer, stops=stops, owner=str(turn)).answer for turn in range(4)
    ]
    evidence.add(f"tokens per second, {arm}", statistics.median(rates[1:]), unit="tokens/s")


def _recover(evidence: Evidence, parent: LanguageModel, trained: LanguageModel, given: Given) -> None:
    """A recovery adapter over the packed weights, begun from the singular vectors of the error."""
    from pippin.language.likelihood import likelihood
    from pippin.shape.recovery import recovery_adapter

    size = given.size
    adapted: Any = recovery_adapter(parent.module, trained.module, rank=32 if size.model else 4, show=False)
    _train(adapted, given.teacher, given.train, size, size.adapter_steps, ADAPTER_RATE, seed=1)
    adapted.save(given.folder / "adapter", trained)
    found = likelihood(replace(trained, module=adapted), given.held, length=size.length, limit=size.held_out)
    arm = "trained, with a recovery adapter"
    evidence.add(f"nats per token, {arm}", found.per_token, unit="nats")
    evidence.add(f"perplexity, {arm}", found.perplexity)
    evidence.add(f"bytes, {arm}", _bytes(given.folder / "trained") + _bytes(given.folder / "adapter"), unit="bytes")
