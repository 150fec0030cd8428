"""Synthetic and real images, and the networks and flows that are trained on them."""
