"""The inputs of a decoder layer other than its hidden states, as one object.

Notable here:
- attention, recurrent and feed-forward layers all take this object, so that a new input for some of them is a new field
  and no new argument elsewhere
- there is one immutable object for each layer of a forward pass
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from pippin.nn.expert_mask import ExpertMaskSlices
from pippin.nn.kv_cache import KVCache, QuerySelection, VisibleKeyValues
from pippin.nn.lora import AdapterSlices
from pippin.nn.steering import SteeringSlices


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The inputs of one layer in a forward pass.

    Args:
        cache: cache of keys, values and recurrent states.
        layer: index of the layer in the cache.
        cos_sin: cosine and sine tables of the new tokens, from `Rotary.tables`; None for no rotation.
        shared: keys, values and mask of an earlier layer, for a layer without keys of its own.
        adapters: low-rank adapters, each with the tokens that it applies to.
        selection: the new tokens for which the layer computes outputs; None for all. The cache must have been narrowed
            to them.
        positions: position of each new token, (new,) or (batch, new); None where no layer needs them.
        per_layer: the input of this layer beside the hidden states, of the selected tokens; None for none.
        steerings: changes of hidden states, each with the tokens that it applies to.
        experts: masks of the experts that may be chosen, each with the tokens that it applies to.
    """

    cache: KVCache
    layer: int = 0
    cos_sin: tuple[Tensor, Tensor] | None = None
    shared: VisibleKeyValues | None = None
    adapters: AdapterSlices | None = None
    selection: QuerySelection | None = None
    positions: Tensor | None = None
    per_layer: Tensor | None = None
    steerings: SteeringSlices | None = None
    experts: ExpertMaskSlices | None = None

    def after_selection(self) -> LayerContext:
        """The context of the parts of the layer after the selection of tokens."""
        if self.selection is None:
            return self
        chosen = self.selection
        return replace(
            self, adapters=chosen.adapters, steerings=chosen.steerings, experts=chosen.experts, selection=None
        )
