"""Weights in few bits: trained, or quantised after training."""
