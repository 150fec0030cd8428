from .acquisition import (
    ExpectedImprovement as ExpectedImprovement,
    GridSearch as GridSearch,
    PriorSampling as PriorSampling,
)
from .bayesian_vae import BayesianVAE as BayesianVAE, ood_score as ood_score, score_temperature as score_temperature
from .disentanglement import DisentanglingElbo as DisentanglingElbo, GeometricRegularizer as GeometricRegularizer
from .gaussian_process import GaussianProcess as GaussianProcess, expected_improvement as expected_improvement
from .sample_weights import (
    cem_pi_weights as cem_pi_weights,
    dbas_weights as dbas_weights,
    rank_weights as rank_weights,
    rwr_weights as rwr_weights,
)
from .vae import VAE as VAE, Elbo as Elbo, VAEConfig as VAEConfig
from .weighted_retraining import LatentVAE as LatentVAE, WeightedRetraining as WeightedRetraining
