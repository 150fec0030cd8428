"""Texts, codes and other sequences of symbols, and the small models that are trained on them."""
