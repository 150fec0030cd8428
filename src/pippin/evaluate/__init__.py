"""Metrics, judges and benchmarks: whether a number can be believed."""
