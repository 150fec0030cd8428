"""The class that loads a model folder, by the ``model_type`` in its `config.json`.

Notable here:
- classes are listed by module and name and imported on use, so that listing the types imports none of them
- every class has ``model_type``, ``save`` and a class method ``load(path, ...)``, whose further arguments are objects
  that cannot be stored in a folder: the network of a posterior, the prior of a simulator's parameters
- language models in Hugging Face's layout are loaded by `pippin.language.language_model` and are not listed here
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from pippin.core.errors import UnsupportedModel

MODEL_TYPES: Final[Mapping[str, str]] = {
    "bert": "pippin.language.encoder:TextEncoder",
    "pippin_bayesian_vae": "pippin.bayes.latent.bayesian_vae:BayesianVAE",
    "pippin_dart": "pippin.generate.methods.dart.model:DART",
    "pippin_diffusion": "pippin.generate.diffusion.diffusion:Diffusion",
    "pippin_instruction_pruning": "pippin.language.methods.instruction_pruning.pruned_model:PrunedModel",
    "pippin_ladir": "pippin.language.methods.ladir.model:LatentReasoner",
    "pippin_laplace": "pippin.bayes.laplace.laplace:Laplace",
    "pippin_laplace_mixture": "pippin.bayes.laplace.mixture:LaplaceMixture",
    "pippin_masked_diffusion": "pippin.language.methods.masked_diffusion.model:MaskedDiffusionLM",
    "pippin_neuron_predictor": "pippin.language.neuron_predictor:NeuronPredictor",
    "pippin_npe": "pippin.bayes.simulation.npe:NPE",
    "pippin_prompt_router": "pippin.language.methods.prompt_experts.router:PromptRouter",
    "pippin_refiner": "pippin.generate.methods.simgan.model:SimRefiner",
    "pippin_robust_posterior": "pippin.bayes.simulation.rope:RobustPosteriorEstimation",
    "pippin_soup_of_experts": "pippin.language.methods.soup_of_experts.model:SoupOfExperts",
    "pippin_starflow": "pippin.generate.flows.starflow.model:StarFlow",
    "pippin_tarflow": "pippin.generate.flows.tarflow:TarFlow",
    "pippin_trained_classifier": "pippin.kits.text.trained_classifier:TrainedClassifier",
    "pippin_uncertainty": "pippin.bayes.uncertainty:Uncertainty",
    "pippin_vae": "pippin.bayes.latent.vae:VAE",
}
"""The class of each model type, as "module:name"."""


def class_of(model_type: str | None) -> Any:
    """Import and return the class that loads a model type.

    Raises:
        UnsupportedModel: the model type is unknown.

    >>> class_of("pippin_ladir").__name__
    'LatentReasoner'
    """
    if model_type is None or model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"unknown model type {model_type!r}; known types are {', '.join(MODEL_TYPES)}")
    module, name = MODEL_TYPES[model_type].split(":")
    return getattr(importlib.import_module(module), name)
