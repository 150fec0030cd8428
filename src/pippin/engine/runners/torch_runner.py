"""The runner in plain torch, for any device and any decoder; used where there are no native kernels.

Notable here:
- the new tokens of all sequences are packed end to end and share every matrix product; each attends to its own blocks
- layers after the last one with its own KV cache are computed only for tokens whose logits are returned, which is
  exact: a decoder with KV-sharing upper layers prefills in little more than the time of its lower layers
- a pass may stop after some layer and another may resume there: a model drafts with its lower layers and verifies with
  all
- recurrent layers have no blocks: their states belong to a sequence and cannot be rolled back, so such a model neither
  drafts with its lower layers nor resumes
- on CUDA, passes in which every sequence has one new token replay a graph (`pippin.engine.runners.cuda_graphs`)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.engine.cache.paged import PagedPass, PagedStore, block_bytes
from pippin.engine.model_runner import BLOCK_SIZE, KVCacheDtype, KVCacheDtypeChoice, ModelInput
from pippin.engine.runners.cuda_graphs import DecodeSteps, can_record
from pippin.language.language_model import LanguageModel
from pippin.nn.kv_cache import QuerySelection
from pippin.nn.lora import AdapterSlices


class TorchRunner:
    """Passes over one model with torch; see `pippin.engine.model_runner.Runner`.

    Args:
        model: a model that `pippin.load` returned.
        blocks: blocks in the pool.
        kv_cache_dtype: precision of keys and values; "auto" for float32 with a float32 model and bfloat16 otherwise.

    Raises:
        InvalidArgument: fewer than one block, or an unknown precision.
        NotEnoughMemory: the device cannot hold so many blocks.
    """

    # torch picks kernels, and with them the order of sums, by the shape of a product
    invariant: Final = False

    @checked
    def __init__(self, model: LanguageModel, blocks: int, kv_cache_dtype: KVCacheDtypeChoice = "auto") -> None:
        self.kv_cache_dtype = self.precision(model, kv_cache_dtype)
        self.model, self.blocks = model, blocks
        self.block_bytes = block_bytes(model.config, self.kv_cache_dtype)
        recorded = model.device.type == "cuda" and DecodeSteps.supports(model) and not model.config.recurrent_layers
        # recorded steps read slots that are not written yet, and mask them; and they need a spare block
        extra = 1 if recorded else 0
        store = PagedStore(model.config, blocks + extra, self.kv_cache_dtype, model.device, zeros=recorded)
        self._store: PagedStore | None = store
        self._steps = DecodeSteps(model, store, blocks) if recorded else None

    @staticmethod
    @checked
    def precision(model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice) -> KVCacheDtype:
        """The precision, with "auto" replaced by the one that suits the model.

        Raises:
            InvalidArgument: an unknown precision.
        """
        if kv_cache_dtype == "auto":
            return "float32" if model.dtype == torch.float32 else "bfloat16"
        return kv_cache_dtype

    @staticmethod
    def block_bytes_of(model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice = "auto") -> int:
        """Bytes of one block, without a pool."""
        return block_bytes(model.config, TorchRunner.precision(model, kv_cache_dtype))

    @torch.inference_mode()
    def forward(self, inputs: Sequence[ModelInput]) -> list[Float[Tensor, "outputs vocab"]]:
        """One pass over the new tokens of several sequences; float32 logits on the CPU.

        Raises:
            InvalidArgument: a sequence without new tokens, with too small a table or with blocks that do not exist;
                layers or residuals that do not fit the model. Nothing has been computed then.
        """
        for model_input in inputs:
            self._check(model_input)
        results: dict[int, Tensor] = {}
        if self._steps is not None and (
            single := [i for i, model_input in enumerate(inputs) if can_record(model_input)]
        ):
            results.update(zip(single, self._steps.forward([inputs[i] for i in single]).split(1), strict=True))
        groups: dict[tuple[int, int, bool], list[int]] = {}
        for index, model_input in enumerate(inputs):
            if index not in results:
                groups.setdefault((*self._layers(model_input), _wants_residual(model_input)), []).append(index)
        for (first, stop, keep_residual), members in groups.items():
            answers = self._pass([inputs[index] for index in members], range(first, stop), keep_residual)
            results.update(zip(members, answers, strict=True))
        return [results[index] for index in range(len(inputs))]

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another.

        Raises:
            InvalidArgument: there is no such block.
        """
        self._pool([source, target]).copy(source, target)

    def read(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """The contents of blocks, as bytes on the CPU.

        Raises:
            InvalidArgument: there is no such block.
        """
        return self._pool(blocks).dump(blocks)

    def write(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """Fill blocks with data that `read` returned.

        Raises:
            InvalidArgument: there is no such block, or the data is of another size.
        """
        if data.shape != (len(blocks), self.block_bytes):
            raise InvalidArgument(
                f"{len(blocks)} blocks of {self.block_bytes} bytes cannot hold data of shape {tuple(data.shape)}"
            )
        self._pool(blocks).restore(blocks, data)

    def close(self) -> None:
        """Free the pool; the runner has no blocks from then on."""
        self._store, self._steps, self.blocks = None, None, 0

    def _pool(self, blocks: Sequence[int]) -> PagedStore:
        """The pool, after a check of block numbers."""
        if self._store is None:
            raise InvalidArgument("the runner is closed")
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.blocks):
            raise InvalidArgument(f"the pool has blocks 0 to {self.blocks - 1}, not {min(blocks)} to {max(blocks)}")
        return self._store

    def _layers(self, model_input: ModelInput) -> tuple[int, int]:
        """The first layer of its pass and the one before which it stops."""
        return model_input.resume, len(self.model.config.layers) if model_input.depth is None else model_input.depth

    def _check(self, model_input: ModelInput) -> None:
        count, capacity = len(model_input.token_ids), len(model_input.block_table) * BLOCK_SIZE
        self._pool(model_input.block_table)
        if count == 0 or model_input.num_computed_tokens < 0:
            raise InvalidArgument(f"a sequence of {model_input.num_computed_tokens} tokens was given {count} new ones")
        if model_input.num_computed_tokens + count > capacity:
            raise InvalidArgument(
                f"a block table for {capacity} tokens was given {model_input.num_computed_tokens + count}"
            )
        if any(b <= a for a, b in pairwise([-1, *model_input.outputs, count])):
            raise InvalidArgument(f"outputs must be ascending and below {count}, got {list(model_input.outputs)}")
        first, stop = self._layers(model_input)
        if not 0 <= first < stop <= len(self.model.config.layers):
            raise InvalidArgument(f"layers {first} to {stop} of {len(self.model.config.layers)} cannot be computed")
        if first and model_input.residual is None:
            raise InvalidArgument(f"a pass that resumes at layer {first} needs the residual that was left there")
        if model_input.residual is not None and model_input.residual.shape != (count, self.model.config.hidden_size):
            shape = tuple(model_input.residual.shape)
            raise InvalidArgument(
                f"{count} tokens need a residual of width {self.model.config.hidden_size}, got {shape}"
            )
        recurrent = self.model.config.recurrent_layers
        if recurrent and (first, stop) != (0, len(self.model.config.layers)):
            raise InvalidArgument(f"layers {first} to {stop} cannot be computed alone: {self.model.name} has states")
        if set(model_input.states) != (set(recurrent) if model_input.num_computed_tokens else set()):
            raise InvalidArgument(
                f"a sequence of {model_input.num_computed_tokens} tokens brought the states of layers "
                f"{sorted(model_input.states)}, "
                "the model keeps "
                f"those of layers {list(recurrent)}"
            )

    def _pass(self, inputs: Sequence[ModelInput], layers: range, keep_residual: bool) -> list[Tensor]:
        """Compute the same layers for several sequences; with ``keep_residual``, fill their residuals."""
        decoder, model, store = self.model.module, self.model, self._pool([])
        starts = [0, *accumulate(len(model_input.token_ids) for model_input in inputs)]
        rows = [
            start + index for start, model_input in zip(starts, inputs, strict=False) for index in model_input.outputs
        ]
        wanted = torch.tensor(rows, dtype=torch.int64, device=model.device)
        adapters = _adapter_slices(inputs, [len(model_input.token_ids) for model_input in inputs])
        selection = None
        if not keep_residual and len(rows) < starts[-1]:
            own = [*model.config.cached_layers, *model.config.recurrent_layers]
            output_adapters = _adapter_slices(inputs, [len(model_input.outputs) for model_input in inputs])
            selection = QuerySelection(
                max((layer for layer in own if layer in layers), default=layers[0]), wanted, output_adapters
            )
        cache = PagedPass(store, inputs, model.dtype)
        x = decoder.forward_layers(
            self._first_input(inputs, layers[0], cache),
            cache,
            layers=layers,
            adapters=adapters,
            selection=selection,
            per_layer=self._per_layer_inputs(inputs),
        )
        if keep_residual:
            for model_input, (start, end) in zip(inputs, pairwise(starts), strict=True):
                assert model_input.residual is not None
                model_input.residual.copy_(x[0, start:end])
        if selection is None:
            x = x.index_select(1, wanted)
        counts = [len(model_input.outputs) for model_input in inputs]
        if not rows:
            return [torch.empty(0, model.config.vocab_size) for _ in inputs]
        logits = decoder.logits(decoder.norm(x))
        return list(logits[0].to("cpu").float().split(counts))

    def _first_input(self, inputs: Sequence[ModelInput], first: int, cache: PagedPass) -> Tensor:
        """Input of the first layer of a pass, (1, tokens, width)."""
        model = self.model
        if first == 0:
            return model.module.embed(_ids(inputs, model.device), cache.positions)
        parts = [model_input.residual for model_input in inputs if model_input.residual is not None]
        return torch.cat(parts).to(model.device, model.dtype)[None]

    def _per_layer_inputs(self, inputs: Sequence[ModelInput]) -> Tensor | None:
        """Inputs of all layers beside the hidden states, in decoders that have them."""
        module = self.model.module
        if not self.model.config.per_layer_size:
            return None
        ids = _ids(inputs, self.model.device)
        return module.per_layer_inputs(ids, module.embed(ids))


def _ids(inputs: Sequence[ModelInput], device: torch.device) -> Tensor:
    """The new tokens of all sequences, (1, tokens)."""
    return torch.tensor([[token for model_input in inputs for token in model_input.token_ids]], device=device)


def _wants_residual(model_input: ModelInput) -> bool:
    """Whether the output of the last computed layer is stored in the residual."""
    return model_input.depth is not None and model_input.residual is not None


def _adapter_slices(inputs: Sequence[ModelInput], counts: Sequence[int]) -> AdapterSlices | None:
    """The adapters of a pass, each with its range of tokens; None if there is none."""
    shares, start = [], 0
    for model_input, count in zip(inputs, counts, strict=True):
        if model_input.adapter is not None and count:
            shares.append((model_input.adapter, slice(start, start + count)))
        start += count
    return shares or None
