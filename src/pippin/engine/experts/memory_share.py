"""What experts, or neurons, may take of a model's memory: all that is left, before each pass.

Notable here:
- what the system says is resident decides, so that cached tokens, grammars and whatever else a process holds make room
  for themselves: experts leave. They come back when it is free again
- a file beside the store has the experts that were used most; the next engine begins with them
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Final

from pippin.core.errors import CorruptedFile, PippinError
from pippin.core.files import atomic_write, make_folder
from pippin.core.formats.checkpoint import read_json
from pippin.core.store import store
from pippin.engine.experts.eviction import LeastStale
from pippin.engine.experts.expert_store import ExpertStore
from pippin.engine.experts.simulator import Prefetch
from pippin.engine.runners.native_runner import NativeRunner
from pippin.language.decoder_config import DecoderConfig
from pippin.language.memory_placement import Placement
from pippin.language.stored_neurons import PIECE

_MARGIN: Final = 24_000_000
"""Bytes that are kept for what was imported before the budget was made, and for what grows in a pass uncounted."""


class MemoryShare:
    """Divides the memory of a model between what comes from storage, its experts or neurons, and all else.

    Args:
        placement: the budget, and what is in storage.
        config: of the decoder.
        token_bytes: bytes of the keys and values of a token.
    """

    def __init__(self, placement: Placement, config: DecoderConfig, token_bytes: int) -> None:
        self._placement, self._config, self._token_bytes = placement, config, token_bytes
        self._least, self._step = placement.least_room, 2 * placement.largest_expert or PIECE
        self._given = 0
        self._workspace = self._coming = 0

    def __call__(self, tokens: int, held: int) -> int:
        """Bytes that they may take in a pass; asked again in the pass, with 0 tokens, after which it is only less.

        Args:
            tokens: new tokens of the pass.
            held: bytes that they take now.
        """
        if tokens:
            workspace = self._placement.workspace_bytes(self._config, tokens)
            self._coming = max(0, workspace - self._workspace) + tokens * self._token_bytes + _MARGIN
            self._workspace = max(self._workspace, workspace)  # which is kept for the next pass
        room = max(self._least, self._placement.budget.left + held - self._coming)
        # what is a little more this time is less the next time, and weights would come and go
        if room < self._given or (tokens and room >= self._given + self._step):
            self._given = room
        return self._given


def open_store(placement: Placement, runner: NativeRunner, share: MemoryShare) -> ExpertStore:
    """The store of a model's experts, from which a runner gets them; it begins with those that were used most before.

    Args:
        placement: the budget, and the experts in storage.
        runner: computes the model.
        share: what experts may take.

    Raises:
        CorruptedFile: a file of the experts was changed since the model was loaded from it.
    """
    placement.check_files()
    assert placement.experts is not None
    active = max((layer.experts or layer.feedforward).num_experts_per_tok for layer in runner.model.config.layers)
    total = sum(expert.packed_bytes for layer in placement.experts for expert in layer)
    capacity = max(placement.least_room, min(total, placement.budget.nbytes))
    prefetch = Prefetch(1, count=active, most_bytes=active * placement.largest_expert)
    opened = ExpertStore(placement.experts, capacity, LeastStale(), runner.place_expert, prefetch=prefetch, share=share)
    opened.warm(_read_hot(placement))
    runner.fetch_experts(opened)
    return opened


def close_store(placement: Placement, opened: ExpertStore) -> None:
    """Close a store, and keep which experts were used most, where that can be written.

    Args:
        placement: the budget, and the experts in storage.
        opened: the store.
    """
    opened.close()
    used, path = opened.cache.most_used(), _hot_path(placement)
    if used:
        # the next start is only slower without it
        with suppress(PippinError, OSError), atomic_write(make_folder(path.parent) / path.name, mode="w") as file:
            json.dump({"experts": used}, file)


def _hot_path(placement: Placement) -> Path:
    return store.home() / "experts" / f"{placement.key}.hot.json"


def _read_hot(placement: Placement) -> list[tuple[int, int]]:
    """Layer and index of the experts that were used most, which come first; none where there is no such file."""
    assert placement.experts is not None
    try:
        listed = read_json(_hot_path(placement)).get("experts", [])
        found = [(int(layer), int(expert)) for layer, expert in listed]
    except (OSError, CorruptedFile, TypeError, ValueError):  # it is written anew at the end
        return []
    sizes = [len(layer) for layer in placement.experts]
    return [(layer, expert) for layer, expert in found if 0 <= layer < len(sizes) and 0 <= expert < sizes[layer]]
