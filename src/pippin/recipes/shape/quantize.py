"""Quantization: a language model in fewer bits, by rounding, by calibration on text, or by training.

Notable here:
- `choose_method` says which of RTN, GPTQ, AWQ and QAT suits the settings that were given
- QAT starts from GPTQ's codes, and distills the model before quantization beside the text
- what it cost is measured on the model that was saved, as it will run: on the held-out data, or without data on a
  short passage; a model that lost much of what it knew is warned of
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from pippin.core import progress
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, QualityLoss
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.options import DATA
from pippin.recipes.shape.stored_bits import stored_bits
from pippin.recipes.train.text_training import TextTrainingConfig, TrainingBatches, TrainingOutcome, read_batches, train

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.core.report import Report
    from pippin.language.language_model import LanguageModel
    from pippin.nn.quantization.codes import Codes
    from pippin.shape.quantize.config import QuantizationConfig

Method = Literal["rtn", "gptq", "awq", "qat"]
MAX_EVALUATED = 8192
"""Held-out tokens that the loss is evaluated on, at most."""
DESTROYED = math.log(2)
"""Nats per token by which the loss may grow before a warning: twice the perplexity."""
PASSAGE = """\
The library on Mill Street opens at nine. On Mondays, children from the school next door come in pairs and return the
books that they borrowed a week before. Most of them read about animals, ships or planets; a few ask for recipes. The
librarian, who has worked there for almost thirty years, knows what each of them liked last time and puts two or three
new titles on the table by the window.

A bridge carries its own weight and that of the traffic. When engineers design one, they first estimate the largest load
that could ever stand on it, then multiply that number by a safety factor, because materials vary and estimates are
sometimes wrong. Steel stretches a little before it breaks, so a beam that is overloaded gives a warning.

To make bread you need flour, water, salt and yeast. Mix them, cover the bowl and wait until the dough has doubled in
size, which takes about an hour in a warm kitchen. Bake it for forty minutes, and let it cool before you cut it.
"""
"""What the loss is measured on where no data are given."""
SENSITIVE_BITS = 8
"""Bits of the embedding where the layers have four or more: at four bits it alone costs as much as all of them."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config(TextTrainingConfig):
    """The settings of a run; those of training (steps, lr, ...) are for the method "qat"."""

    data: options.Data = ()
    lr: options.LearningRate = 2e-4
    batch_size: options.BatchSize = 4
    bits: Annotated[Literal[2, 3, 4, 8] | None, Option("Of each weight: 2, 3, 4 or 8.")] = None
    average_bits: Annotated[
        Annotated[float, Ge(2), Le(8)] | None,
        Option("In place of --bits: an average, more for the matrices that need it.", metavar="BITS"),
    ] = None
    method: Annotated[
        Method | None,
        Option("rtn, gptq, awq or qat; without it rtn, with data gptq, with data and 2 bits qat."),
    ] = None
    group_size: Annotated[Literal[32, 64, 128], Option("Neighboring weights that share a scale: 32, 64 or 128.")] = 64
    levels: Annotated[
        Literal["balanced", "unbalanced"] | None,
        Option("balanced (no level is 0) or unbalanced (one is); without it balanced, with --to unbalanced."),
    ] = None
    embedding_bits: Annotated[
        Literal[2, 3, 4, 8, 16] | None,
        Option("2, 3, 4, 8, or 16 for exact; without it 4, or 8 where the layers have 4 bits or more."),
    ] = None
    to: Annotated[
        Literal["awq", "gptq", "mlx"] | None,
        Option(
            "Save in the layout of AutoAWQ, AutoGPTQ or MLX, which other programs read; without it in Pippin's own."
        ),
    ] = None
    calibration_tokens: Annotated[int, Ge(2), Option("Tokens that gptq, awq and average bits look at.", DATA)] = 16_384


@dataclass(frozen=True, kw_only=True)
class QuantizationResult:
    """A quantized model and what it cost.

    Attributes:
        model: name of the model before.
        method: how it was quantized.
        out: folder that it was saved to.
        bytes_before: of the weights on disk; 0 where they came from no file.
        bytes_after: of those that were saved.
        bits_per_weight: of the quantized matrices, with their scales.
        widths: how many matrices have how many bits.
        clipped: mean share of weights outside the range of their codes; None for "qat".
        most_clipped: the matrix with the largest such share, and the share.
        source_bits: of each weight of the model before, as it is stored.
        measured_on: what the losses below are of: "held-out data", or "a passage" where none are held out.
        loss_before: of the model before, in nats per token.
        loss_after: of the model that was saved.
        loss_rounded: "qat": of the model before it was trained, at its initial codes; None for the other methods.
        outcome: "qat": the run.
    """

    model: str
    method: Method
    out: Path
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    widths: Mapping[int, int]
    clipped: float | None
    most_clipped: tuple[str, float] | None
    source_bits: float
    measured_on: Literal["held-out data", "a passage"]
    loss_before: float
    loss_after: float
    loss_rounded: float | None = None
    outcome: TrainingOutcome | None = field(default=None, repr=False)

    @property
    def stopped(self) -> str | None:
        """Why training ended before its last step, if it did."""
        return None if self.outcome is None else self.outcome.training.stopped

    @property
    def loss_growth(self) -> float:
        """By how many nats per token the loss grew; infinite where it is no number any more."""
        return self.loss_after - self.loss_before if math.isfinite(self.loss_after) else math.inf

    @property
    def perplexities(self) -> dict[str, float]:
        """The perplexity "before", "after", and "rounded" where there is one: e to the loss."""
        losses = {"before": self.loss_before, "rounded": self.loss_rounded, "after": self.loss_after}
        return {when: _perplexity(loss) for when, loss in losses.items() if loss is not None}

    def summary(self) -> dict[str, Any]:
        """The result as JSON values; of the steps only the first and the last loss."""
        made = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.name != "outcome"}
        made = {name: value for name, value in made.items() if value is not None} | {"out": str(self.out)}
        made |= {f"perplexity_{when}": value for when, value in self.perplexities.items()}
        if self.outcome is not None:
            training = self.outcome.training
            made |= {"steps": len(training.steps), "best_step": self.outcome.best_step, "stopped": training.stopped}
            if training.losses:
                made |= {"first_loss": training.losses[0], "last_loss": training.losses[-1]}
            made |= {"seconds": training.seconds, "tokens_per_second": training.units_per_second}
        return made

    def report(self) -> Report:
        """Sizes, losses and clipped weights."""
        from pippin.core.report import Report, Row

        rows = [
            Row("weights before", self.bytes_before / 1e6, "MB"),
            Row("weights after", self.bytes_after / 1e6, "MB"),
        ]
        rows.append(Row("bits per weight, with scales", self.bits_per_weight))
        rows += [Row(f"matrices of {bits} bits", count) for bits, count in self.widths.items() if count]
        for when, value in self.perplexities.items():
            rows.append(Row(f"perplexity on {self.measured_on} {when}", value))
        if self.clipped is not None and self.most_clipped is not None:
            name, share = self.most_clipped
            rows += [Row("clipped weights", 100 * self.clipped, "%"), Row(f"most, in {name}", 100 * share, "%")]
        return Report(f"{self.model} by {self.method}", rows)


def choose_method(config: Config) -> Method:
    """The method of a config, once its settings are known to go together.

    Raises:
        InvalidArgument: both or neither of ``bits`` and ``average_bits``, or a method without what it needs.
    """
    if (config.bits is None) == (config.average_bits is None):
        raise InvalidArgument("give either bits (--bits) or average_bits (--average-bits)")
    method = config.method
    if method is None:
        method = "rtn" if not config.data else "qat" if config.bits == 2 else "gptq"
    if not config.data and (method != "rtn" or config.average_bits is not None):
        what = f"method {method!r}" if config.average_bits is None else "average_bits (--average-bits)"
        raise InvalidArgument(f"{what} looks at text; give some with data (--data FILE)")
    if method == "qat" and config.average_bits is not None:
        raise InvalidArgument("average_bits is for 'rtn', 'gptq' and 'awq'; give bits (--bits) to train")
    if config.to is not None and config.levels == "balanced":
        raise InvalidArgument(f"{config.to} folders hold unbalanced levels only; leave out levels (--levels)")
    if config.to == "awq" and config.bits != 4:
        raise InvalidArgument("awq folders have 4 bits; give bits=4 (--bits 4)")
    if config.to in ("awq", "gptq") and config.average_bits is not None:
        raise InvalidArgument(f"{config.to} folders have one number of bits; give bits (--bits), or --to mlx")
    if config.to in ("awq", "gptq") and config.embedding_bits not in (None, 16):
        raise InvalidArgument(f"{config.to} folders hold the embedding as it is; leave out embedding_bits")
    if method != "qat" and (config.steps is not None or config.resume):
        raise InvalidArgument(f"steps and resume (--steps, --resume) are for method 'qat', not for {method!r}")
    return method


def run(config: Config, *, show_progress: bool = True) -> QuantizationResult:
    """Quantize a model and save a folder that `pippin.load` opens like any other.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the model.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: "qat": the loss is not finite, or the checkpoints in the folder are of another run.
    """
    import pippin
    from pippin.language.likelihood import text_likelihood
    from pippin.language.objectives import held_out
    from pippin.language.quantized_checkpoint import save_quantized
    from pippin.shape.export.quantized_folder import save_quantized_as

    method = choose_method(config)
    settings = _settings(config)
    options.refuse_existing_run(config.out, config.resume)
    model = pippin.load(config.model, device=config.device, dtype="float32", pack=False)
    batches = read_batches(config, model, show_progress=show_progress) if config.data else None
    if batches is not None and batches.held_out:
        most = max(1, MAX_EVALUATED // (config.max_length * config.batch_size))
        batches = dataclasses.replace(batches, held_out=batches.held_out[:most])
    source_bits = stored_bits(model.source)
    bits = config.bits or config.average_bits or 0
    if source_bits < bits + 1.5:  # a format of b bits has up to b + 1 with its scales
        progress.note(
            f"{model.name} is stored in {source_bits:.2g} bits per weight already, so {bits:.3g} bits save little or "
            "nothing, and every weight is rounded a second time; take the original weights if there are any",
            show_progress=show_progress,
        )
    has_held_out = batches is not None and bool(batches.held_out)

    def measure(measured: LanguageModel, when: str) -> float:
        with progress.busy(f"loss {when} quantization", show_progress=show_progress):
            if batches is not None and batches.held_out:
                return held_out(batches.held_out)(measured.module)["loss"]
            return text_likelihood(measured, PASSAGE, max_length=min(512, measured.context_size)).per_token

    before = measure(model, "before")
    outcome, clipped = None, dict[str, float]()
    if method == "qat":
        assert batches is not None
        codes, note, outcome = _train(config, model, settings, batches, show_progress=show_progress)
    else:
        codes, clipped = _round(config, method, model, settings, batches, show_progress=show_progress)
        note = {"method": method, "settings": dataclasses.asdict(settings), "average_bits": config.average_bits}
    with progress.busy(f"saving {config.out_path.name}", show_progress=show_progress):
        if config.to is None:
            save_quantized(config.out_path, model, codes, metadata=note)
        else:
            save_quantized_as(config.to, config.out_path, model, codes)
    name, (bytes_before, bytes_after) = model.name, sizes_on_disk(model, config.out_path)
    del model
    after = measure(pippin.load(config.out_path, device=config.device), "after")
    worst = max(clipped, key=lambda matrix: clipped[matrix], default=None)
    weights = sum(matrix.codes.numel() for matrix in codes.values())
    result = QuantizationResult(
        model=name,
        method=method,
        out=config.out_path,
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        bits_per_weight=8 * sum(matrix.nbytes for matrix in codes.values()) / weights,
        widths={bits: sum(matrix.bits == bits for matrix in codes.values()) for bits in (2, 3, 4, 8)},
        clipped=None if worst is None else sum(clipped.values()) / len(clipped),
        most_clipped=None if worst is None else (worst, clipped[worst]),
        source_bits=source_bits,
        measured_on="held-out data" if has_held_out else "a passage",
        loss_before=before,
        loss_after=after,
        loss_rounded=(outcome.held_out_before or {}).get("loss") if outcome is not None else None,
        outcome=outcome,
    )
    if result.loss_growth > DESTROYED:
        warnings.warn(_destroyed(config, result), QualityLoss, stacklevel=2)
    return result


def _destroyed(config: Config, result: QuantizationResult) -> str:
    """What to do where quantization has cost too much."""
    ways = {
        "rtn": "give text to calibrate on (--data FILE), or more bits",
        "gptq": "give more bits, or train (--method qat)" if config.bits == 2 else "give more bits",
        "awq": "use --method gptq, or give more bits",
        "qat": "train longer (--steps), or give more bits",
    }
    growth = result.loss_growth
    times = f"{math.exp(growth):.3g} times as large" if growth < 100 else "beyond measure"
    return (
        f"{config.out} is much worse than {result.model}: its perplexity on {result.measured_on} is {times}; "
        f"{ways[result.method]}"
    )


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def sizes_on_disk(model: LanguageModel, out: Path) -> tuple[int, int]:
    """Bytes of the weights that a model was loaded from (0 where it came from no file), and of those in a folder."""
    source = model.source
    files = [] if source is None else [source] if source.is_file() else list(source.glob("*.safetensors"))
    return (
        sum(path.stat().st_size for path in files),
        sum(path.stat().st_size for path in out.glob("*.safetensors")),
    )


def _settings(config: Config) -> QuantizationConfig:
    from pippin.shape.quantize.config import QuantizationConfig

    embedding_bits: Any = config.embedding_bits
    if config.to in ("awq", "gptq"):
        embedding_bits = 16
    elif embedding_bits is None:
        embedding_bits = SENSITIVE_BITS if (config.bits or config.average_bits or 0) >= 4 else 4
    return QuantizationConfig(
        bits=config.bits or 4,
        levels=config.levels or ("balanced" if config.to is None else "unbalanced"),
        group=config.group_size,
        embedding_bits=None if embedding_bits == 16 else embedding_bits,
    )


def _round(
    config: Config,
    method: Method,
    model: LanguageModel,
    settings: QuantizationConfig,
    batches: TrainingBatches | None,
    *,
    show_progress: bool,
) -> tuple[dict[str, Codes], dict[str, float]]:
    """Codes by rounding, GPTQ or AWQ, and the share of weights of each matrix that were clipped."""
    from pippin.shape.quantize import awq, gptq, rtn
    from pippin.shape.quantize.calibration import matrices
    from pippin.shape.quantize.mixed_precision import choose_bits
    from pippin.shape.quantize.rtn import clipped_share

    calibration: Any = None if batches is None else _calibration(batches, config.calibration_tokens)
    linears = dict(matrices(model.module))
    passes = 1 if config.average_bits is None else 2
    with progress.bar(len(linears) * passes, method, unit="matrices", show_progress=show_progress) as bar:

        def on_matrix(name: str) -> None:
            bar.advance(1)

        bits = None
        if config.average_bits is not None:
            bits = choose_bits(model, settings, calibration, config.average_bits, on_matrix=on_matrix)
        if method == "rtn":
            codes = rtn.quantize(model, settings, bits=bits, on_matrix=on_matrix)
        else:
            quantize: Callable[..., dict[str, Codes]] = gptq.quantize if method == "gptq" else awq.quantize
            codes = quantize(model, settings, calibration, bits=bits, on_matrix=on_matrix)
    clipped = {
        name: clipped_share(linear.dense_weight(), codes[name]) for name, linear in linears.items() if name in codes
    }
    return codes, clipped


def _train(
    config: Config,
    model: LanguageModel,
    settings: QuantizationConfig,
    batches: TrainingBatches,
    *,
    show_progress: bool,
) -> tuple[dict[str, Codes], dict[str, Any], TrainingOutcome]:
    """Codes after quantization-aware training, what to note of it, and the run."""
    import pippin
    from pippin.language.methods.distillation import Distillation
    from pippin.shape.quantize import gptq, qat
    from pippin.shape.quantize.calibration import matrices

    teacher = pippin.load(config.model, device=config.device)  # as it would run, which is faster than the student
    start = None
    if not config.resume:  # a resumed run has its weights in the checkpoint
        count = len(dict(matrices(model.module)))
        with progress.bar(count, "gptq", unit="matrices", show_progress=show_progress) as bar:
            ids = _calibration(batches, config.calibration_tokens)
            solved = gptq.quantize(model, settings, ids, on_matrix=lambda name: bar.advance(1))
        start = {name: codes for name, codes in solved.items() if name.startswith("layers.")}
    model.module.requires_grad_(True)
    qat.prepare(model.module, settings, start=start)
    outcome = train(
        config,
        model.module,
        batches,
        title=f"{model.name}, {settings.bits} bits",
        objective=Distillation(teacher),
        show_progress=show_progress,
    )
    return qat.convert(model.module), qat.metadata(model.module), outcome


def _calibration(batches: TrainingBatches, tokens: int) -> Tensor:
    """Token ids from the data that is not held out [sequences, max_length]."""
    import torch

    found, count = [], 0
    for batch in batches.training:
        found.append(batch.ids)
        count += batch.ids.numel()
        if count >= tokens:
            break
    rows = torch.cat(found)
    return rows[: max(1, tokens // rows.shape[1])]
