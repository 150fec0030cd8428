"""Choice of a runner: native kernels where weights are packed for them, else torch; transformers; several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pippin.engine.model_runner import KVCacheDtypeChoice, Runner
from pippin.engine.runners.native_runner import NativeRunner
from pippin.language.transformers_models.network import TransformersNetwork

if TYPE_CHECKING:
    from pippin.engine.runners.leading_runner import LeadingRunner
    from pippin.engine.runners.torch_runner import TorchRunner
    from pippin.engine.runners.transformers_runner import TransformersRunner
    from pippin.language.language_model import LanguageModel


def runner_class(model: LanguageModel) -> type[NativeRunner | TorchRunner | TransformersRunner | LeadingRunner]:
    """The fastest runner for this model here: native kernels if its weights are packed for them, else torch.

    Neurons in storage are brought to torch alone.

    A model that transformers computes has a runner of its own, and so has a part of one that several processes compute.
    """
    if isinstance(model.network, TransformersNetwork):
        from pippin.engine.runners.transformers_runner import TransformersRunner  # imports transformers

        return TransformersRunner
    if model.network.collectives is not None:
        from pippin.engine.runners.leading_runner import LeadingRunner

        return LeadingRunner
    in_storage = model.placement is not None and model.placement.neurons is not None
    if not in_storage and NativeRunner.supports(model):
        return NativeRunner
    from pippin.engine.runners.torch_runner import TorchRunner  # imported late: it loads 60 MB more of torch

    return TorchRunner


def make_runner(
    model: LanguageModel,
    blocks: int,
    kv_cache_dtype: KVCacheDtypeChoice = "auto",
    groups: Sequence[Sequence[int]] | None = None,
) -> Runner:
    """A runner with a new pool.

    Args:
        model: a model that `pippin.load` returned.
        blocks: blocks in the pool.
        kv_cache_dtype: precision of keys and values; "auto" for the one that suits the model.
        groups: layers with their own KV cache, in groups with a block table each (`DecoderConfig.cache_groups`); None
            for one group.

    Raises:
        InvalidArgument: fewer than one block, or an unknown precision.
        NotEnoughMemory: the device cannot hold so many blocks.
    """
    return runner_class(model)(model, blocks, kv_cache_dtype, groups)
