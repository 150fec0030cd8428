"""Generators of pictures and clips: flows, diffusion and what lies between, behind one contract."""
