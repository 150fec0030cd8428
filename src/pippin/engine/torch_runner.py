"""The runner in plain torch: any device, any decoder; what computes where there are no native kernels.

Notable here:
- the new tokens of all sequences lie end to end and share every matrix product; each looks at its own blocks
- layers after the last one with keys of its own are computed for the wanted tokens only, which is exact: a decoder
  whose upper layers share keys reads a prompt in little more than the time of its lower ones
- a pass may stop after some layer and another go on there: a model drafts with its lower layers and checks with all
- recurrent layers have no blocks: their states come with a sequence and stay with it, and tokens that were read cannot
  be taken back, so such a model neither drafts with its lower layers nor resumes
- on CUDA, passes in which every sequence has one new token replay a graph (`pippin.engine.graphs`)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.engine.graphs import DecodeSteps, simple
from pippin.engine.paged import DTYPES, PagedPass, PagedStore, block_bytes
from pippin.engine.runner import BLOCK, CacheType, Work
from pippin.language.load import LanguageModel
from pippin.nn.cache import Cut
from pippin.nn.lora import Shares


class TorchRunner:
    """Passes over one model with torch; see `pippin.engine.runner.Runner`.

    Args:
        model: what `pippin.load` returned.
        blocks: blocks in the pool.
        cache_type: precision of keys and values; "auto" for float32 with a float32 model and bfloat16 otherwise.

    Raises:
        InvalidArgument: fewer than one block, or an unknown precision.
        NotEnoughMemory: the device cannot hold so many blocks.
    """

    # torch picks kernels, and with them the order of sums, by the shape of a product
    invariant: Final = False

    def __init__(self, model: LanguageModel, blocks: int, cache_type: str = "auto") -> None:
        self.cache_type = self.precision(model, cache_type)
        self.model, self.blocks = model, blocks
        self.block_bytes = block_bytes(model.config, self.cache_type)
        recorded = model.device.type == "cuda" and DecodeSteps.supports(model) and not model.config.recurrent_layers
        # recorded steps read what is not written yet, and mask it; and they need a block that belongs to nobody
        extra = 1 if recorded else 0
        store = PagedStore(model.config, blocks + extra, self.cache_type, model.device, zeros=recorded)
        self._store: PagedStore | None = store
        self._steps = DecodeSteps(model, store, blocks) if recorded else None

    @staticmethod
    def precision(model: LanguageModel, cache_type: str) -> CacheType:
        """The precision that "auto" stands for; others stay as they are.

        Raises:
            InvalidArgument: an unknown precision.
        """
        if cache_type == "auto":
            return "float32" if model.dtype == torch.float32 else "bfloat16"
        if cache_type not in DTYPES:
            raise InvalidArgument(f"cache_type is {cache_type!r}; choose auto, {', '.join(DTYPES)}")
        return cache_type

    @staticmethod
    def block_bytes_of(model: LanguageModel, cache_type: str = "auto") -> int:
        """Memory of one block, before there is a pool."""
        return block_bytes(model.config, TorchRunner.precision(model, cache_type))

    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> list[Float[Tensor, "outputs vocab"]]:
        """One pass over the new tokens of several sequences; float32 logits on the CPU.

        Raises:
            InvalidArgument: a sequence without new tokens, with too small a table or with blocks that do not exist;
                layers or residuals that do not fit the model. Nothing has been computed then.
        """
        for work in works:
            self._check(work)
        results: dict[int, Tensor] = {}
        if self._steps is not None and (single := [i for i, work in enumerate(works) if simple(work)]):
            results.update(zip(single, self._steps.forward([works[i] for i in single]).split(1), strict=True))
        groups: dict[tuple[int, int, bool], list[int]] = {}
        for index, work in enumerate(works):
            if index not in results:
                groups.setdefault((*self._layers(work), _keeps(work)), []).append(index)
        for (first, stop, keep), members in groups.items():
            answers = self._pass([works[index] for index in members], range(first, stop), keep)
            results.update(zip(members, answers, strict=True))
        return [results[index] for index in range(len(works))]

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
        """Fill blocks with what `read` gave.

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

    def _layers(self, work: Work) -> tuple[int, int]:
        """The first layer of its pass and the one before which it stops."""
        return work.resume, len(self.model.config.layers) if work.depth is None else work.depth

    def _check(self, work: Work) -> None:
        count, room = len(work.ids), len(work.table) * BLOCK
        self._pool(work.table)
        if count == 0 or work.held < 0:
            raise InvalidArgument(f"a sequence of {work.held} tokens was given {count} new ones")
        if work.held + count > room:
            raise InvalidArgument(f"a table with room for {room} tokens was given {work.held + count}")
        if any(b <= a for a, b in pairwise([-1, *work.outputs, count])):
            raise InvalidArgument(f"outputs must be ascending and below {count}, got {list(work.outputs)}")
        first, stop = self._layers(work)
        if not 0 <= first < stop <= len(self.model.config.layers):
            raise InvalidArgument(f"layers {first} to {stop} of {len(self.model.config.layers)} cannot be computed")
        if first and work.residual is None:
            raise InvalidArgument(f"a pass that resumes at layer {first} needs the residual that was left there")
        if work.residual is not None and work.residual.shape != (count, self.model.config.width):
            shape = tuple(work.residual.shape)
            raise InvalidArgument(f"{count} tokens need a residual of width {self.model.config.width}, got {shape}")
        recurrent = self.model.config.recurrent_layers
        if recurrent and (first, stop) != (0, len(self.model.config.layers)):
            raise InvalidArgument(f"layers {first} to {stop} cannot be computed alone: {self.model.name} has states")
        if set(work.states) != (set(recurrent) if work.held else set()):
            raise InvalidArgument(
                f"a sequence of {work.held} tokens brought the states of layers {sorted(work.states)}, the model keeps "
                f"those of layers {list(recurrent)}"
            )

    def _pass(self, works: Sequence[Work], layers: range, keep: bool) -> list[Tensor]:
        """Compute some layers for sequences that all take the same ones; ``keep``: fill their residuals."""
        decoder, model, store = self.model.module, self.model, self._pool([])
        starts = [0, *accumulate(len(work.ids) for work in works)]
        rows = [start + index for start, work in zip(starts, works, strict=False) for index in work.outputs]
        wanted = torch.tensor(rows, dtype=torch.int64, device=model.device)
        adapters = _shares(works, [len(work.ids) for work in works])
        cut = None
        if not keep and len(rows) < starts[-1]:
            own = [*model.config.cached_layers, *model.config.recurrent_layers]
            asked = _shares(works, [len(work.outputs) for work in works])
            cut = Cut(max((layer for layer in own if layer in layers), default=layers[0]), wanted, asked)
        cache = PagedPass(store, works, model.dtype)
        x = decoder.through(self._entry(works, layers[0]), cache, layers=layers, adapters=adapters, cut=cut)
        if keep:
            for work, (start, end) in zip(works, pairwise(starts), strict=True):
                assert work.residual is not None
                work.residual.copy_(x[0, start:end])
        if cut is None:
            x = x.index_select(1, wanted)
        counts = [len(work.outputs) for work in works]
        if not rows:
            return [torch.empty(0, model.config.vocab_size) for _ in works]
        logits: Tensor = decoder.lm_head(decoder.norm(x))
        return list(logits[0].to("cpu").float().split(counts))

    def _entry(self, works: Sequence[Work], first: int) -> Tensor:
        """What enters the first layer of a pass, (1, tokens, width)."""
        model = self.model
        if first == 0:
            ids = torch.tensor([[token for work in works for token in work.ids]], device=model.device)
            return model.module.embed(ids)
        parts = [work.residual for work in works if work.residual is not None]
        return torch.cat(parts).to(model.device, model.dtype)[None]


def _keeps(work: Work) -> bool:
    """Whether what leaves the last layer is to be kept."""
    return work.depth is not None and work.residual is not None


def _shares(works: Sequence[Work], counts: Sequence[int]) -> Shares | None:
    """Which adapter works on which tokens, if any does."""
    shares, start = [], 0
    for work, count in zip(works, counts, strict=True):
        if work.adapter is not None and count:
            shares.append((work.adapter, slice(start, start + count)))
        start += count
    return shares or None
