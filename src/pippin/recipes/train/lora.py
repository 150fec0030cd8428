"""LoRA: train a low-rank adapter for a language model whose weights are frozen.

Notable here:
- the base model is loaded as for inference, with packed weights where there are kernels for them: the adapter is
  trained on exactly the weights that it will be used with, in a third of the memory
- the adapter's provenance (hashes of the data, steps, losses) is saved with it, without paths of this machine
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pippin.core import progress
from pippin.core.checks import Fraction, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, VocabularyMismatch
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.options import StrPath, paths
from pippin.recipes.train.distributed import joined
from pippin.recipes.train.text_training import (
    Injection,
    TextTrainingConfig,
    TextTrainingResult,
    TrainingOutcome,
    read_batches,
    train,
)

if TYPE_CHECKING:
    from pippin.language.adapter_files import Factors
    from pippin.language.language_model import LanguageModel
    from pippin.train.distributed import DistributedProcesses

_ADAPTER = "Adapter"


@checked
@dataclass(frozen=True, kw_only=True)
class Config(TextTrainingConfig):
    """Settings of a run."""

    lr: options.LearningRate = 1e-3
    batch_size: options.BatchSize = 4
    inject: options.Inject = 0.0
    pretrain_data: options.PretrainData = ()
    rank: Annotated[PositiveInt, Option("Rank of each pair of matrices.", _ADAPTER)] = 16
    alpha: Annotated[
        PositiveFloat | None, Option("The adapter is scaled by alpha / rank; the rank without it.", _ADAPTER)
    ] = None
    targets: Annotated[
        tuple[str, ...],
        Option(
            "all, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, with commas between.",
            _ADAPTER,
            "NAMES",
            parse=options.names,
        ),
    ] = ("all",)
    rslora: Annotated[bool, Option("Scale by alpha / sqrt(rank).", _ADAPTER)] = False
    dropout: Annotated[Fraction, Option("Probability that an input is zeroed in training.", _ADAPTER)] = 0.0
    lr_ratio: Annotated[PositiveFloat, Option("Learning rate of B over that of A (LoRA+: 16).", _ADAPTER)] = 1.0
    init_adapter: Annotated[StrPath | None, Option("Start from this adapter of the same model.", _ADAPTER, "PATH")] = (
        None
    )
    recover: Annotated[
        str | None,
        Option("The model before quantization: start from the singular vectors of what was lost.", _ADAPTER, "MODEL"),
    ] = None
    teacher: Annotated[
        str | None,
        Option("Distill this model's predictions, with weight 0.9 beside the data's 0.1.", _ADAPTER, "MODEL"),
    ] = None
    bits: Annotated[
        Literal[2, 3, 4, 8] | None,
        Option("Pack the model's own weights to 2, 3, 4 or 8 bits.", "Speed and memory"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LoRAResult(TextTrainingResult):
    """The result of a run; `out` is the folder of the adapter.

    Attributes:
        rank: of each pair of matrices.
        alpha: numerator of the adapter's scale.
    """

    rank: int
    alpha: float


def run(config: Config, *, show_progress: bool = True, processes: DistributedProcesses | None = None) -> LoRAResult:
    """Train an adapter and save it in PEFT's layout, for `pippin ask --adapter` and for PEFT.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.
        processes: the processes of a distributed run; None joins those started by torchrun, if any.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the model.
        VocabularyMismatch: ``recover`` or ``teacher`` names a model with another vocabulary.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    from pippin.language.methods.distillation import Distillation
    from pippin.shape.lora import LowRankModel
    from pippin.train import AdamW

    if config.init_adapter is not None and config.recover is not None:
        raise InvalidArgument("init_adapter and recover both initialize the adapter; give one of them")
    options.refuse_existing_run(config.out, config.resume)
    injection = Injection.of(config.pretrain_data, config.inject, config.held_out)
    with joined(processes) as processes:
        first = processes is None or processes.rank == 0
        show_progress = show_progress and first
        device = config.device if processes is None else processes.device
        base = _load_base(config.model, device, config.bits)
        objective = None
        if config.teacher is not None:
            objective = Distillation(_load_same_vocabulary(config.teacher, device, base), weight=0.9)
        adapted = LowRankModel(
            base.module,
            rank=config.rank,
            alpha=float(config.rank if config.alpha is None else config.alpha),
            targets=list(config.targets),
            rslora=config.rslora,
            dropout=config.dropout,
            lr_ratio=config.lr_ratio,
            seed=config.seed,
            init=_initial_pairs(config, base, device, show_progress=show_progress),
        )
        size = 1 if processes is None else processes.size
        batches = read_batches(config, base, injection, num_processes=size, show_progress=show_progress)
        parameters = sum(p.numel() for p in adapted.parameters())
        progress.note(
            f"{base.name}: an adapter of {parameters:,} parameters, {batches.steps} steps", show_progress=show_progress
        )
        outcome = train(
            config,
            adapted,
            batches,
            title=f"{base.name}, adapter of rank {adapted.rank}",
            optimizer=AdamW(lr=config.lr, weight_decay=0.0),
            objective=objective,
            processes=processes,
            show_progress=show_progress,
        )
        if first:
            adapted.save(config.out_path, base, metadata=_provenance(config, outcome))
    return LoRAResult(
        model=base.name,
        out=config.out_path,
        parameters=parameters,
        rank=adapted.rank,
        alpha=adapted.alpha,
        **vars(outcome),
    )


def _load_base(ref: str, device: str | None, bits: Any) -> LanguageModel:
    """The base model; dense on a CPU without native kernels, where gradients would have to unpack oneDNN's layout."""
    from pippin.core import device as devices, native
    from pippin.language.language_model import load as load_language_model

    pack = bits is not None or devices.choose(device).type != "cpu" or native.library() is not None
    return load_language_model(ref, device=device, bits=bits, pack=pack, dtype="auto")


def _load_same_vocabulary(ref: str, device: str | None, base: LanguageModel) -> LanguageModel:
    """Load the model before quantization, or a teacher.

    Raises:
        VocabularyMismatch: its vocabulary differs from that of the base model.
    """
    from pippin.language.language_model import load as load_language_model

    other = load_language_model(ref, device=device)
    different = other.tokenizer.first_difference(base.tokenizer)
    if different is not None or other.config.vocab_size != base.config.vocab_size:
        where = "rows of their output matrices" if different is None else f"token {different}"
        raise VocabularyMismatch(f"{other.name} and {base.name} differ in {where}; give a model of the same vocabulary")
    return other


def _initial_pairs(
    config: Config, base: LanguageModel, device: str | None, *, show_progress: bool
) -> dict[str, Factors] | None:
    """The initial LoRA factors; None for random ones."""
    from pippin.language.adapter_files import read_factors
    from pippin.shape.recovery import residual_pairs

    if config.init_adapter is not None:
        return read_factors(base, str(config.init_adapter))
    if config.recover is None:
        return None
    original = _load_same_vocabulary(config.recover, device, base)
    return residual_pairs(original.module, base.module, config.rank, list(config.targets), show_progress=show_progress)


def _provenance(config: Config, outcome: TrainingOutcome) -> dict[str, Any]:
    """The provenance of an adapter, stored with it."""
    from importlib.metadata import version

    from pippin.core.files import sha256_of

    files = []
    for given in paths(config.data):
        for path in sorted(p for p in given.rglob("*") if p.is_file()) if given.is_dir() else [given]:
            name = path.name if path == given else str(path.relative_to(given))
            files.append({"name": name, "sha256": sha256_of(path)})
    return {
        "pippin": version("pippin"),
        "data": files,
        "steps": len(outcome.training.steps),
        "batch_size": config.batch_size * config.gradient_accumulation_steps,
        "max_length": config.max_length,
        "learning_rate": config.lr,
        "seed": config.seed,
        "held_out_before": outcome.held_out_before,
        "held_out_after": outcome.held_out_after,
    }
