"""The simplest key-value cache: every layer's keys and values in one tensor, whole batches, padded rows too."""

import torch

from pippin.nn.kv_cache import causal_mask


class DenseCache:
    """A `KVCache` with room for ``capacity`` tokens; ``padding`` counts the pads at the left of each row."""

    positions = None

    def __init__(self, config, capacity, *, batch=1, dtype=torch.float32, padding=None):
        self.length, self.padding = 0, padding
        self.index = {layer: i for i, layer in enumerate(config.cached_layers)}
        self.store = torch.empty(
            len(self.index), 2, batch, config.num_key_value_heads, capacity, config.head_dim, dtype=dtype
        )

    def append(self, layer, k, v, window):
        keys, values = self.store[self.index[layer]]
        end = self.length + k.shape[2]
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        mask = causal_mask(self.length, k.shape[2], window, self.padding, k.device)
        return keys[:, :, :end], values[:, :, :end], mask

    def advance(self, new):
        self.length += new

    def truncate(self, length):
        self.length = length
