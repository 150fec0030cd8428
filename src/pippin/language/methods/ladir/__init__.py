"""LaDiR: a language model that reasons in blocks of latent thought tokens, refined by diffusion, and writes the answer.

Read in this order: `config`, `autoencoder` (the VAE over sentences), `sequence` (who attends to whom), `model` (the
reasoner), `sample` (denoising and diversity guidance), `loss` and `train` (the objectives and the stages), `data`.

Source: Kang et al. 2025, "LaDiR: Latent Diffusion Enhances LLMs for Text Reasoning", arXiv:2510.04573.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
