"""Synthetic data and small networks that several claims share."""
