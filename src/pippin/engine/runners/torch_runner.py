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
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.engine.cache import apart
from pippin.engine.cache.paged import PagedPass
from pippin.engine.cache.paged_store import PagedStore, block_bytes
from pippin.engine.head_tables import HeadTables, HeadTokens, heads_alike
from pippin.engine.model_runner import BLOCK_SIZE, Capture, KVCacheDtype, KVCacheDtypeChoice, ModelInput
from pippin.engine.runners.cuda_graphs import DecodeSteps, can_record
from pippin.engine.runners.pooled_runner import PooledRunner
from pippin.language.language_model import LanguageModel
from pippin.nn.expert_mask import ExpertMaskSlices
from pippin.nn.kv_cache import QuerySelection
from pippin.nn.lora import AdapterSlices
from pippin.nn.steering import SteeringSlices, steer


@runtime_checkable
class NeuronSource(Protocol):
    """Brings neurons of feed-forward layers from storage."""

    def begin_pass(self, counts: Sequence[int], outputs: Sequence[Sequence[int]]) -> None:
        """Begin a pass over some new tokens of each sequence, of which the last layers compute some."""
        ...


class TorchRunner(PooledRunner[PagedStore]):
    """Passes over one model with torch; see `pippin.engine.model_runner.Runner`.

    Args:
        model: a model that `pippin.load` returned.
        blocks: blocks in the pool.
        kv_cache_dtype: precision of keys and values; "auto" for float32 with a float32 model and bfloat16 otherwise.
        groups: layers with their own KV cache, in groups with a block table each, the layers of a group with one
            sliding window; None for one group.

    Raises:
        InvalidArgument: fewer than one block, or an unknown precision.
        NotEnoughMemory: the device cannot hold so many blocks.
    """

    # torch picks kernels, and with them the order of sums, by the shape of a product
    invariant: Final = False

    @checked
    def __init__(
        self,
        model: LanguageModel,
        blocks: int,
        kv_cache_dtype: KVCacheDtypeChoice = "auto",
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.kv_cache_dtype = self.precision(model, kv_cache_dtype)
        self.model, self.blocks = model, blocks
        self.block_bytes = block_bytes(model.config, self.kv_cache_dtype, groups)
        self.windows = [model.config.group_window(layers) for layers in groups or [model.config.cached_layers]]
        one_table = groups is None or len(groups) == 1
        recorded = model.device.type == "cuda" and one_table and DecodeSteps.supports(model)
        # recorded steps read slots that are not written yet, and mask them; and they need a spare block
        extra = 1 if recorded else 0
        store = PagedStore(
            model.config, blocks + extra, self.kv_cache_dtype, model.device, groups=groups, zeros=recorded
        )
        self._store = store
        self._steps = DecodeSteps(model, store, blocks) if recorded else None
        self._neurons: NeuronSource | None = None
        self.heads_in_block = store.heads_in_block if heads_alike(model.config) else 0

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
        """Bytes of 16 tokens in all layers, without a pool."""
        return block_bytes(model.config, TorchRunner.precision(model, kv_cache_dtype))

    @torch.inference_mode()
    def forward(self, inputs: Sequence[ModelInput]) -> list[Float[Tensor, "outputs vocab"]]:
        """One pass over the new tokens of several sequences; float32 logits on the CPU.

        Raises:
            InvalidArgument: a sequence without new tokens, with too small a table or with blocks that do not exist;
                layers or residuals that do not fit the model. Nothing has been computed then.
        """
        self.check(inputs)
        results: dict[int, Tensor] = {}
        if self._steps is not None and (
            single := [i for i, model_input in enumerate(inputs) if can_record(model_input)]
        ):
            results.update(zip(single, self._steps.forward([inputs[i] for i in single]).split(1), strict=True))
        groups: dict[tuple[int, int, bool, bool], list[int]] = {}
        for index, model_input in enumerate(inputs):
            if index not in results:
                key = (*self._layers(model_input), _wants_residual(model_input), _wants_attention(model_input))
                groups.setdefault(key, []).append(index)
        for (first, stop, *_), members in groups.items():
            answers = self._pass([inputs[index] for index in members], range(first, stop))
            results.update(zip(members, answers, strict=True))
        return [results[index] for index in range(len(inputs))]

    def fetch_neurons(self, source: NeuronSource) -> None:
        """Tell a source what each pass computes, from the next pass on: the decoder has layers that it brings."""
        self._neurons = source

    def check(self, inputs: Sequence[ModelInput]) -> None:
        """Raise what `forward` would raise before it computes anything."""
        for model_input in inputs:
            self._check(model_input)

    def read_head(self, head_blocks: Sequence[int], tokens: int) -> HeadTokens:
        """See `Runner.read_head`."""
        return apart.read_head(self._pool([]), head_blocks, tokens)

    def write_head(self, head_blocks: Sequence[int], data: HeadTokens) -> None:
        """See `Runner.write_head`."""
        apart.write_head(self._pool([]), head_blocks, data)

    def close(self) -> None:
        """Free the pool; the runner has no blocks from then on."""
        super().close()
        self._steps = None

    def _layers(self, model_input: ModelInput) -> tuple[int, int]:
        """The first layer of its pass and the one before which it stops."""
        return model_input.resume, len(self.model.config.layers) if model_input.depth is None else model_input.depth

    def _check(self, model_input: ModelInput) -> None:
        config = self.model.config
        count, capacity = len(model_input.token_ids), min(map(len, model_input.tables)) * BLOCK_SIZE
        if model_input.heads is None:
            self._check_tables(model_input)
        else:
            capacity = self._check_heads(model_input.heads, model_input.num_computed_tokens)
        if count == 0 or model_input.num_computed_tokens < 0:
            raise InvalidArgument(f"a sequence of {model_input.num_computed_tokens} tokens was given {count} new ones")
        if model_input.num_computed_tokens + count > capacity:
            raise InvalidArgument(
                f"a block table for {capacity} tokens was given {model_input.num_computed_tokens + count}"
            )
        if any(b <= a for a, b in pairwise([-1, *model_input.outputs, count])):
            raise InvalidArgument(f"outputs must be ascending and below {count}, got {list(model_input.outputs)}")
        model_input.check(len(self.windows), config.hidden_size)
        first, stop = self._layers(model_input)
        if not 0 <= first < stop <= len(self.model.config.layers):
            raise InvalidArgument(f"layers {first} to {stop} of {len(self.model.config.layers)} cannot be computed")
        if self.model.config.tracks is not None:
            self.model.config.tracks.check_layers(range(first, stop))
        if first and model_input.residual is None:
            raise InvalidArgument(f"a pass that resumes at layer {first} needs the residual that was left there")
        if model_input.residual is not None and model_input.residual.shape != (count, self.model.config.residual_width):
            shape = tuple(model_input.residual.shape)
            raise InvalidArgument(
                f"{count} tokens need a residual of width {self.model.config.residual_width}, got {shape}"
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

    def _check_heads(self, heads: HeadTables, held: int) -> int:
        """Raise for tables that do not fit the model; the tokens for which there is room."""
        config, (least, most) = self.model.config, (heads.least_lost, int(heads.lost.max()))
        shape = (len(config.cached_layers), config.num_key_value_heads)
        if heads.tables.shape[:2] != shape or heads.lost.shape != shape or not self.heads_in_block:
            raise InvalidArgument(f"tables of heads of shape {tuple(heads.tables.shape)} do not fit heads of {shape}")
        if least < 0 or most > held:
            raise InvalidArgument(f"heads cannot lose {least} to {most} of {held} tokens")
        if int(heads.tables.max()) >= self.blocks * self.heads_in_block:
            raise InvalidArgument(f"there is no head-block {int(heads.tables.max())} in {self.blocks} blocks")
        return heads.tables.shape[2] * BLOCK_SIZE + least

    def _check_tables(self, model_input: ModelInput) -> None:
        """Raise for a block that does not exist, or that was given back although new tokens see it."""
        start = model_input.num_computed_tokens
        for window, table in zip(self.windows, model_input.tables, strict=False):
            first = 0 if window is None else max(0, start - window + 1) // BLOCK_SIZE
            self._pool(table[first : -(-(start + len(model_input.token_ids)) // BLOCK_SIZE)])

    def _pass(self, inputs: Sequence[ModelInput], layers: range) -> list[Tensor]:
        """Compute the same layers for several sequences, which want residuals and attention alike."""
        decoder, model, store = self.model.module, self.model, self._pool([])
        keep_residual, keep_all = _wants_residual(inputs[0]), _wants_attention(inputs[0])
        starts = [0, *accumulate(len(model_input.token_ids) for model_input in inputs)]
        rows = [
            start + index for start, model_input in zip(starts, inputs, strict=False) for index in model_input.outputs
        ]
        wanted = torch.tensor(rows, dtype=torch.int64, device=model.device)
        everywhere = _slices(inputs, [len(model_input.token_ids) for model_input in inputs])
        at_outputs = _slices(inputs, [len(model_input.outputs) for model_input in inputs])
        selection = None
        if not keep_residual and not keep_all and len(rows) < starts[-1]:
            own = [*model.config.cached_layers, *model.config.recurrent_layers]
            last = max((layer for layer in own if layer in layers), default=layers[0])
            selection = QuerySelection(last, wanted, *at_outputs)
        if self._neurons is not None:
            counts = [len(model_input.token_ids) for model_input in inputs]
            self._neurons.begin_pass(counts, [model_input.outputs for model_input in inputs])
        cache = PagedPass(store, inputs, model.dtype)
        adapters, steerings, experts = everywhere
        x = decoder.forward_layers(
            self._first_input(inputs, layers[0], cache),
            cache,
            layers=layers,
            adapters=adapters,
            selection=selection,
            per_layer=self._per_layer_inputs(inputs),
            steerings=steerings,
            experts=experts,
        )
        if keep_residual:
            for model_input, (start, end) in zip(inputs, pairwise(starts), strict=True):
                assert model_input.residual is not None
                model_input.residual.copy_(x[0, start:end].flatten(1))
        if selection is None:
            x = x.index_select(1, wanted)
        counts = [len(model_input.outputs) for model_input in inputs]
        if not rows:
            return [torch.empty(0, model.config.vocab_size) for _ in inputs]
        x, normalized = decoder.last_states(x)
        normalized = steer(normalized, "norm", at_outputs.steerings)
        for model_input, hidden, after in zip(inputs, x[0].split(counts), normalized[0].split(counts), strict=True):
            if model_input.capture is not None:
                _fill(model_input.capture, hidden, after)
        logits = decoder.logits(normalized)
        return list(logits[0].to("cpu").float().split(counts))

    def _first_input(self, inputs: Sequence[ModelInput], first: int, cache: PagedPass) -> Tensor:
        """Input of the first layer of a pass, (1, tokens, width)."""
        model = self.model
        if first == 0:
            # learned positions have one axis
            positions = cache.positions if cache.positions.ndim == 1 else cache.positions[0]
            x = model.module.embed(_ids(inputs, model.device), positions)
            if any(model_input.embeddings for model_input in inputs):
                x = _with_embeddings(x, inputs)
            return x
        parts = [model_input.residual for model_input in inputs if model_input.residual is not None]
        x = torch.cat(parts).to(model.device, model.dtype)[None]
        streams = model.config.num_streams
        return x if streams == 1 else x.unflatten(-1, (streams, -1))

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


def _wants_attention(model_input: ModelInput) -> bool:
    """Whether the attention that its tokens receive is collected, for which all of them are queries in every layer."""
    return model_input.capture is not None and model_input.capture.attention is not None


class _Slices(NamedTuple):
    """What applies to some tokens of a pass only, each with its range of tokens; None if there is none."""

    adapters: AdapterSlices | None
    steerings: SteeringSlices | None
    experts: ExpertMaskSlices | None


def _slices(inputs: Sequence[ModelInput], counts: Sequence[int]) -> _Slices:
    """Adapters, steerings and masks of experts of sequences of ``counts`` tokens."""
    adapters, steerings, experts, start = [], [], [], 0
    for model_input, count in zip(inputs, counts, strict=True):
        tokens = slice(start, start + count)
        if count and model_input.adapter is not None:
            adapters.append((model_input.adapter, tokens))
        if count and model_input.steering is not None:
            steerings.append((model_input.steering, tokens))
        if count and model_input.experts is not None:
            experts.append((model_input.experts, tokens))
        start += count
    return _Slices(adapters or None, steerings or None, experts or None)


def _with_embeddings(x: Float[Tensor, "1 tokens width"], inputs: Sequence[ModelInput]) -> Tensor:
    """The embeddings of all tokens, where some are given with the inputs."""
    x, start = x.clone(), 0
    for model_input in inputs:
        for at, rows in model_input.embeddings:
            x[0, start + at : start + at + len(rows)] = rows.to(x.device, x.dtype)
        start += len(model_input.token_ids)
    return x


def _fill(capture: Capture, hidden: Tensor, normalized: Tensor) -> None:
    """Copy the hidden states that are asked for."""
    if capture.hidden:
        capture.hidden_states = hidden.to("cpu", torch.float32, copy=True)
    if capture.normalized:
        capture.normalized_states = normalized.to("cpu", torch.float32, copy=True)
