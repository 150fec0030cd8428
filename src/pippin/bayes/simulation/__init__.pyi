from .metrics import (
    MMDResult as MMDResult,
    SBCResult as SBCResult,
    acauc as acauc,
    c2st as c2st,
    detect_misspecification as detect_misspecification,
    lpp as lpp,
    mmd_test as mmd_test,
    simulation_based_calibration as simulation_based_calibration,
)
from .npe import NPE as NPE, DensityEstimatorConfig as DensityEstimatorConfig
from .priors import BoxPrior as BoxPrior, GaussianPrior as GaussianPrior
from .rope import MixturePosterior as MixturePosterior, RobustPosteriorEstimation as RobustPosteriorEstimation
