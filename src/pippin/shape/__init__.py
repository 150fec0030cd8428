"""Shaping: adapters, quantisation, sharing of caches, export, and reports of what each costs."""
