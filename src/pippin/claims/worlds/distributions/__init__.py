"""Distributions of few dimensions, some with exact scores, and the networks that learn them."""
