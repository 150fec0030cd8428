"""Blocks that every model is made of: linear layers, norms, rotary positions, attention, feed-forward, caches."""
