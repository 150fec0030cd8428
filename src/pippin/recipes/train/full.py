"""Full training: fine-tune all weights of a language model, or train from random weights.

Notable here:
- with `route_caches` the model is trained to run with any fraction of its KV caches (stochastic KV routing), and the
  held-out loss is evaluated at several fractions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, cast

from pippin.core import progress
from pippin.core.checks import NonNegativeFloat, Probability, checked
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.train.distributed import Strategy, joined
from pippin.recipes.train.text_training import Injection, TextTrainingConfig, TextTrainingResult, read_batches, train

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel
    from pippin.language.objectives import NextToken
    from pippin.train.distributed import DistributedProcesses

_EXPERTS = "Experts"
KV_SHARING_RATIOS = (1.0, 0.5, 0.25)
"""KV-sharing ratios at which a model with routed caches is evaluated."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config(TextTrainingConfig):
    """Settings of a run."""

    inject: options.Inject = 0.0
    pretrain_data: options.PretrainData = ()
    fresh: options.Fresh = False
    preset: options.Preset = None
    route_caches: Annotated[
        Probability | None,
        Option(
            "Let each layer read an earlier layer's keys and values with this probability, 0.5 say: the model then "
            "runs with a smaller cache (--kv-sharing-ratio).",
            metavar="P",
        ),
    ] = None
    balance: Annotated[
        NonNegativeFloat, Option("Mixtures of experts: weight of the loss that keeps all experts in use.", _EXPERTS)
    ] = 0.01
    router_z: Annotated[
        NonNegativeFloat, Option("Mixtures of experts: weight of the loss that keeps router logits small.", _EXPERTS)
    ] = 0.001
    strategy: Annotated[
        Strategy,
        Option(
            "What processes of torchrun or Ray divide: the batch (ddp), or the tracks of a model with parallel tracks.",
            metavar="ddp|tracks",
        ),
    ] = "ddp"
    balance_bias: Annotated[
        NonNegativeFloat,
        Option(
            "Mixtures whose routers have biases for the choice (DeepSeek 3): move them by so much after each step, "
            "such as 0.001; --balance 0 then leaves the loss alone.",
            _EXPERTS,
        ),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class FullFinetuningResult(TextTrainingResult):
    """The result of a run.

    Attributes:
        fresh: whether training started from random weights.
        held_out_by_kv_sharing_ratio: held-out loss by KV-sharing ratio; empty without ``route_caches``.
    """

    fresh: bool
    held_out_by_kv_sharing_ratio: Mapping[float, float] = field(default_factory=dict)

    def extra_rows(self) -> list[Any]:
        """The held-out loss at each KV-sharing ratio."""
        from pippin.core.report import Row

        return [
            Row(f"held-out loss with {kv_sharing_ratio:.0%} of the caches", loss, self.loss_unit)
            for kv_sharing_ratio, loss in self.held_out_by_kv_sharing_ratio.items()
        ]


def run(
    config: Config, *, show_progress: bool = True, processes: DistributedProcesses | None = None
) -> FullFinetuningResult:
    """Train all weights, and save a model for `pippin.load`.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.
        processes: the processes of a distributed run; None joins those started by torchrun, if any.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the model; tracks to divide in a single
            process, or of a model without any.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    from pippin.language.methods.kv_routing import KVRouting
    from pippin.language.parallel.track_processes import TrackProcesses

    options.refuse_existing_run(config.out, config.resume)
    injection = Injection.of(config.pretrain_data, config.inject, config.held_out)
    with joined(processes, config.strategy) as processes:
        first = processes is None or processes.rank == 0
        show_progress = show_progress and first
        device = config.device if processes is None else processes.device
        model = load_for_training(config.model, device, fresh=config.fresh, preset=config.preset, seed=config.seed)
        if isinstance(processes, TrackProcesses):
            processes.check(model.module)  # before any data is read
        routing = None if config.route_caches is None else KVRouting(config.route_caches)
        if routing is not None:
            routing.record(model.module)
        size = 1 if processes is None else processes.size
        batches = read_batches(config, model, injection, num_processes=size, show_progress=show_progress)
        parameters = sum(p.numel() for p in model.module.parameters())
        progress.note(
            f"{model.name}: {parameters / 1e6:.1f} million parameters, {batches.steps} steps",
            show_progress=show_progress,
        )
        outcome = train(
            config,
            model.module,
            batches,
            title=f"{model.name}, all weights",
            objective=routing or _objective(config),
            processes=processes,
            show_progress=show_progress,
        )
        if first:
            model.save(config.out_path)
        by_ratio = {}
        if routing is not None and batches.held_out is not None:
            by_ratio = _held_out_by_kv_sharing_ratio(model, batches.held_out)
    return FullFinetuningResult(
        model=model.name,
        out=config.out_path,
        parameters=parameters,
        fresh=config.fresh or config.preset is not None,
        held_out_by_kv_sharing_ratio=by_ratio,
        **vars(outcome),
    )


def _objective(config: Config) -> NextToken:
    """Next-token cross-entropy, with the losses of routers, which only mixtures have."""
    from pippin.language.objectives import NextToken
    from pippin.language.router_losses import RouterLosses

    return NextToken(router_losses=RouterLosses(config.balance, config.router_z, config.balance_bias))


def load_for_training(
    ref: str, device: str | None, *, fresh: bool = False, preset: str | None = None, seed: int = 0
) -> LanguageModel:
    """Load a model in float32 with all weights trainable, or create one with random weights.

    Args:
        ref: a model reference as in `pippin.load`; its tokenizer is used in any case.
        device: as in `pippin.load`; None takes the best device available.
        fresh: whether to use random weights of the same architecture.
        preset: name of another architecture in `pippin.language.presets`, with random weights.
        seed: of the random weights.
    """
    from pippin.language.language_model import load as load_language_model

    loaded = load_language_model(ref, device=device, dtype="float32", pack=False)
    if not (fresh or preset):
        loaded.module.requires_grad_(True)
        return loaded
    from pippin.language import presets
    from pippin.language.decoder import Decoder

    config = loaded.config if preset is None else presets.preset(cast(Any, preset), loaded.config.vocab_size)
    module = Decoder(config).initialize(seed=seed).to(loaded.device)
    name = f"{loaded.name} anew" if preset is None else f"{preset} with the tokenizer of {loaded.name}"
    return dataclasses.replace(loaded, name=name, network=module, source=None, adapters={})


def _held_out_by_kv_sharing_ratio(model: LanguageModel, batches: list[Any]) -> dict[float, float]:
    from pippin.language.methods.kv_routing import (
        RoutedModel,
        evenly_spaced_layers,
        nearest_sources,
    )
    from pippin.language.objectives import held_out

    measure, found = held_out(batches), {}
    for kv_sharing_ratio in KV_SHARING_RATIOS:
        routed = RoutedModel(
            model.module,
            nearest_sources(model.config, evenly_spaced_layers(model.config, kv_sharing_ratio)),
        )
        found[kv_sharing_ratio] = measure(routed)["loss"]
    return found
