"""The runner of models that Hugging Face's transformers computes; see `pippin.language.transformers_models`.

Notable here:
- prompts are computed one sequence at a time; sequences with one new token each are decoded in one pass, padded on the
  left, unless the model was found to compute other logits then
- a model that cannot continue a sequence has its tokens as a state, and begins at the first one: right, and slow
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.engine.model_runner import BLOCK_SIZE, KVCacheDtype, KVCacheDtypeChoice, ModelInput
from pippin.engine.runners.pooled_runner import PooledRunner
from pippin.language.language_model import LanguageModel
from pippin.language.transformers_models.cache import CachePass, VectorStore, token_bytes
from pippin.language.transformers_models.network import TransformersNetwork

_DTYPES: dict[KVCacheDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TransformersRunner(PooledRunner[VectorStore]):
    """Passes over one model of transformers; see `pippin.engine.model_runner.Runner`.

    Args:
        model: a model that `pippin.load` opened through transformers.
        blocks: blocks in the pool.
        kv_cache_dtype: precision of keys and values; "auto" for float32 with a float32 model and bfloat16 otherwise.
        groups: None, or all layers in one group.

    Raises:
        InvalidArgument: fewer than one block, or a precision that this runner does not have.
        NotEnoughMemory: the device cannot hold so many blocks.
    """

    # torch picks kernels, and with them the order of sums, by the shape of a product
    invariant: Final = False

    @checked
    def __init__(
        self,
        model: LanguageModel,
        blocks: PositiveInt,
        kv_cache_dtype: KVCacheDtypeChoice = "auto",
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        assert isinstance(model.network, TransformersNetwork)
        self.kv_cache_dtype = self.precision(model, kv_cache_dtype)
        self.model, self.network, self.blocks = model, model.network, blocks
        self.windows = [None]
        dtype = _DTYPES[self.kv_cache_dtype]
        self.block_bytes = BLOCK_SIZE * token_bytes(self.network.config, dtype)
        self._store = VectorStore(self.network.config, blocks, BLOCK_SIZE, dtype, model.device)

    @staticmethod
    @checked
    def precision(model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice) -> KVCacheDtype:
        """The precision, with "auto" replaced by the one that suits the model.

        Raises:
            InvalidArgument: a precision that this runner does not have.
        """
        if kv_cache_dtype == "auto":
            return "float32" if model.dtype == torch.float32 else "bfloat16"
        if kv_cache_dtype not in _DTYPES:
            raise InvalidArgument(
                f"{model.name} is computed by transformers, whose keys and values are kept in {' or '.join(_DTYPES)}, "
                f"not in {kv_cache_dtype}"
            )
        return kv_cache_dtype

    @staticmethod
    def block_bytes_of(model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice = "auto") -> int:
        """Bytes of 16 tokens in all layers, without a pool."""
        assert isinstance(model.network, TransformersNetwork)
        dtype = _DTYPES[TransformersRunner.precision(model, kv_cache_dtype)]
        return BLOCK_SIZE * token_bytes(model.network.config, dtype)

    @torch.inference_mode()
    def forward(self, inputs: Sequence[ModelInput]) -> list[Float[Tensor, "outputs vocab"]]:
        """One pass over the new tokens of several sequences; float32 logits on the CPU.

        Raises:
            InvalidArgument: a sequence without new tokens, with too small a table or with blocks that do not exist, or
                with anything but tokens. Nothing has been computed then.
        """
        for each in inputs:
            self._check(each)
        decoding = [i for i, each in enumerate(inputs) if self.network.config.batched and _decodes(each)]
        results: dict[int, Tensor] = {}
        if decoding:
            results.update(zip(decoding, self._pass([inputs[i] for i in decoding]), strict=True))
        return [results[i] if i in results else self._pass([each])[0] for i, each in enumerate(inputs)]

    def _pass(self, inputs: Sequence[ModelInput]) -> list[Float[Tensor, "outputs vocab"]]:
        """Logits of one sequence, or of several with one new token each."""
        config = self.network.config
        follows = config.continues or (config.layers and len(inputs[0].token_ids) == 1)
        if not follows and inputs[0].num_computed_tokens:
            return [self._from_beginning(inputs[0])]
        new = [torch.tensor(each.token_ids) for each in inputs]
        if not config.continues:
            for each, ids in zip(inputs, new, strict=True):
                before = each.states.get(len(config.layers), torch.empty(0, dtype=torch.int64))
                each.states[len(config.layers)] = torch.cat([before, ids])
        outputs = list(inputs[0].outputs)
        if not config.layers:
            return [self.network.logits(torch.stack(new), rows=outputs)[0].float().cpu() if outputs else self._none()]
        view = CachePass(self._pool([]), config, inputs)
        logits = self.network.logits(torch.stack(new), view.cache, rows=outputs or [view.new - 1], mask=view.mask)
        view.remember()
        return list(logits[:, : len(outputs)].float().cpu())

    def _from_beginning(self, model_input: ModelInput) -> Float[Tensor, "outputs vocab"]:
        """Logits of a sequence that cannot be continued: all of it is computed once more."""
        known, states = model_input.num_computed_tokens, model_input.states
        whole = ModelInput(
            [*states[len(self.network.config.layers)].tolist(), *model_input.token_ids],
            0,
            model_input.block_table,
            [known + index for index in model_input.outputs],
        )
        logits = self._pass([whole])[0]
        states.update(whole.states)
        return logits

    def _none(self) -> Float[Tensor, "0 vocab"]:
        return torch.empty(0, self.network.config.vocab_size)

    def _check(self, model_input: ModelInput) -> None:
        count, known = len(model_input.token_ids), model_input.num_computed_tokens
        if count == 0 or known < 0:
            raise InvalidArgument(f"a sequence of {known} tokens was given {count} new ones")
        if known + count > len(model_input.block_table) * BLOCK_SIZE:
            raise InvalidArgument(
                f"a block table for {len(model_input.block_table) * BLOCK_SIZE} tokens was given {known + count}"
            )
        self._pool(model_input.block_table)
        if any(b <= a for a, b in pairwise([-1, *model_input.outputs, count])):
            raise InvalidArgument(f"outputs must be ascending and below {count}, got {list(model_input.outputs)}")
        recurrent = set(self.network.config.recurrent_layers) if known else set()
        if set(model_input.states) != recurrent:
            raise InvalidArgument(
                f"a sequence of {known} tokens brought the states of layers {sorted(model_input.states)}, the model "
                f"keeps those of layers {sorted(recurrent)}"
            )
        plain = (model_input.adapter, model_input.depth, model_input.residual, model_input.positions)
        other = (model_input.visible, model_input.experts, model_input.steering, model_input.capture)
        if any(part is not None for part in (*plain, *other)) or model_input.resume or model_input.embeddings:
            raise InvalidArgument(f"{self.model.name} is computed by transformers, from tokens alone")


def _decodes(model_input: ModelInput) -> bool:
    """Whether a sequence has one new token, behind others, whose logits are wanted."""
    return len(model_input.token_ids) == 1 == len(model_input.outputs) and model_input.num_computed_tokens > 0
