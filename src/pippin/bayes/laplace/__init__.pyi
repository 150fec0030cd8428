from . import jacobians as jacobians, linearized as linearized
from .curvature import EF as EF, GGN as GGN, Hessian as Hessian
from .functional import Functional as Functional
from .kron import Kron as Kron
from .laplace import Laplace as Laplace
from .low_rank import LowRank as LowRank
from .mixture import LaplaceMixture as LaplaceMixture
from .online import (
    ContinualLaplace as ContinualLaplace,
    MarglikTrainingResult as MarglikTrainingResult,
    marglik_training as marglik_training,
)
from .structure import Diag as Diag, Full as Full
from .subnetwork_selection import ScoreOptions as ScoreOptions, select_subnetwork as select_subnetwork
