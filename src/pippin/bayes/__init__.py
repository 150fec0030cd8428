"""What a model does not know: posteriors over weights, latent codes and simulators, and the scores that judge them."""

from pippin.bayes.acquisition import ExpectedImprovement, Grid
from pippin.bayes.baselines import DeepEnsemble, MCDropout, PlainNetwork
from pippin.bayes.bayesian_vae import BayesianVAE, ood_score, score_temperature
from pippin.bayes.curvature import EF, GGN, Hessian
from pippin.bayes.disentangle import DisentanglingElbo, Geometry
from pippin.bayes.functional import Functional
from pippin.bayes.gaussian_process import GaussianProcess
from pippin.bayes.gromov import distortion, gromov_monge_gap, gromov_wasserstein
from pippin.bayes.invariance import ParamGroup, find_scale_invariant_groups
from pippin.bayes.kron import Kron
from pippin.bayes.laplace import Laplace
from pippin.bayes.likelihood import Classification, MultiLabel, Regression, RewardModel
from pippin.bayes.linear_evidence import LinearisedEvidence, LinearisedPosterior
from pippin.bayes.lowrank import LowRank
from pippin.bayes.mixture import LaplaceMixture
from pippin.bayes.npe import NPE, FlowConfig
from pippin.bayes.online import ContinualLaplace, EvidenceTraining, train_by_evidence
from pippin.bayes.predictive import Prediction
from pippin.bayes.predictors import Predictor, gather, mix
from pippin.bayes.priors import Box, Gaussian
from pippin.bayes.rank_weights import rank_weights
from pippin.bayes.robust_posterior import MixturePosterior, RobustPosteriorEstimation
from pippin.bayes.selection import ScoreOptions, select_subnetwork
from pippin.bayes.sghmc import SGHMC, Chain
from pippin.bayes.structure import Diag, Full
from pippin.bayes.subset import All, LastLayer, Named, Subnetwork
from pippin.bayes.swag import SWAG, SWAGConfig
from pippin.bayes.temperature import TemperatureScaling, fit_temperature
from pippin.bayes.transport import semibalanced_sinkhorn
from pippin.bayes.uncertainty import Uncertainty, uncertainty
from pippin.bayes.vae import VAE, Elbo, VAEConfig
from pippin.bayes.weighted_retraining import LatentVAE, WeightedRetraining

__all__ = [
    "EF",
    "GGN",
    "NPE",
    "SGHMC",
    "SWAG",
    "VAE",
    "All",
    "BayesianVAE",
    "Box",
    "Chain",
    "Classification",
    "ContinualLaplace",
    "DeepEnsemble",
    "Diag",
    "DisentanglingElbo",
    "Elbo",
    "EvidenceTraining",
    "ExpectedImprovement",
    "FlowConfig",
    "Full",
    "Functional",
    "Gaussian",
    "GaussianProcess",
    "Geometry",
    "Grid",
    "Hessian",
    "Kron",
    "Laplace",
    "LaplaceMixture",
    "LastLayer",
    "LatentVAE",
    "LinearisedEvidence",
    "LinearisedPosterior",
    "LowRank",
    "MCDropout",
    "MixturePosterior",
    "MultiLabel",
    "Named",
    "ParamGroup",
    "PlainNetwork",
    "Prediction",
    "Predictor",
    "Regression",
    "RewardModel",
    "RobustPosteriorEstimation",
    "SWAGConfig",
    "ScoreOptions",
    "Subnetwork",
    "TemperatureScaling",
    "Uncertainty",
    "VAEConfig",
    "WeightedRetraining",
    "distortion",
    "find_scale_invariant_groups",
    "fit_temperature",
    "gather",
    "gromov_monge_gap",
    "gromov_wasserstein",
    "mix",
    "ood_score",
    "rank_weights",
    "score_temperature",
    "select_subnetwork",
    "semibalanced_sinkhorn",
    "train_by_evidence",
    "uncertainty",
]
