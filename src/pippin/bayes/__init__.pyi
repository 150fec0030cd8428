from . import (
    laplace as laplace,
    latent as latent,
    predictors as predictors,
    simulation as simulation,
    transport as transport,
)
from .laplace.curvature import EF as EF, GGN as GGN, Hessian as Hessian
from .laplace.functional import Functional as Functional
from .laplace.kron import Kron as Kron
from .laplace.laplace import Laplace as Laplace
from .laplace.linearized.evidence import (
    LinearizedEvidence as LinearizedEvidence,
    LinearizedPosterior as LinearizedPosterior,
    NetworkEvidence as NetworkEvidence,
)
from .laplace.linearized.scale_invariance import (
    ParamGroup as ParamGroup,
    find_scale_invariant_groups as find_scale_invariant_groups,
)
from .laplace.low_rank import LowRank as LowRank
from .laplace.mixture import LaplaceMixture as LaplaceMixture
from .laplace.online import (
    ContinualLaplace as ContinualLaplace,
    MarglikTrainingResult as MarglikTrainingResult,
    marglik_training as marglik_training,
)
from .laplace.structure import Diag as Diag, Full as Full
from .laplace.subnetwork_selection import ScoreOptions as ScoreOptions, select_subnetwork as select_subnetwork
from .latent.acquisition import ExpectedImprovement as ExpectedImprovement, GridSearch as GridSearch
from .latent.bayesian_vae import (
    BayesianVAE as BayesianVAE,
    ood_score as ood_score,
    score_temperature as score_temperature,
)
from .latent.disentanglement import DisentanglingElbo as DisentanglingElbo, GeometricRegularizer as GeometricRegularizer
from .latent.gaussian_process import GaussianProcess as GaussianProcess
from .latent.sample_weights import rank_weights as rank_weights
from .latent.vae import VAE as VAE, Elbo as Elbo, VAEConfig as VAEConfig
from .latent.weighted_retraining import LatentVAE as LatentVAE, WeightedRetraining as WeightedRetraining
from .likelihood import (
    Classification as Classification,
    MultiLabel as MultiLabel,
    Regression as Regression,
    RewardModel as RewardModel,
)
from .prediction import Prediction as Prediction
from .predictors.conformal import ConformalPredictor as ConformalPredictor
from .predictors.deep_ensemble import DeepEnsemble as DeepEnsemble
from .predictors.map_network import MAPNetwork as MAPNetwork
from .predictors.mc_dropout import MCDropout as MCDropout
from .predictors.predictor import (
    Predictor as Predictor,
    mix_predictions as mix_predictions,
    predict_with_targets as predict_with_targets,
)
from .predictors.sghmc import SGHMC as SGHMC, SGHMCConfig as SGHMCConfig
from .predictors.swag import SWAG as SWAG, SWAGConfig as SWAGConfig
from .predictors.temperature_scaling import TemperatureScaling as TemperatureScaling, fit_temperature as fit_temperature
from .simulation.npe import NPE as NPE, DensityEstimatorConfig as DensityEstimatorConfig
from .simulation.priors import BoxPrior as BoxPrior, GaussianPrior as GaussianPrior
from .simulation.rope import (
    MixturePosterior as MixturePosterior,
    RobustPosteriorEstimation as RobustPosteriorEstimation,
)
from .transport.gromov import (
    distortion as distortion,
    gromov_monge_gap as gromov_monge_gap,
    gromov_wasserstein as gromov_wasserstein,
)
from .transport.sinkhorn import semibalanced_sinkhorn as semibalanced_sinkhorn
from .uncertainty import Uncertainty as Uncertainty, quantify_uncertainty as quantify_uncertainty
from .weight_subset import All as All, LastLayer as LastLayer, Named as Named, Subnetwork as Subnetwork
