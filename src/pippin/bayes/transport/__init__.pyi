from .gromov import (
    cost_matrix as cost_matrix,
    distortion as distortion,
    gromov_monge_gap as gromov_monge_gap,
    gromov_wasserstein as gromov_wasserstein,
)
from .sinkhorn import TransportPlan as TransportPlan, semibalanced_sinkhorn as semibalanced_sinkhorn
