from .cells import ParaGRU as ParaGRU, ParallelCell as ParallelCell, ParaLSTM as ParaLSTM
from .convolution import ShortConvolution as ShortConvolution, ShortConvolutionSpec as ShortConvolutionSpec
from .delta import delta_rule as delta_rule, delta_step as delta_step
from .gated_delta import GatedDeltaNet as GatedDeltaNet, GatedDeltaSpec as GatedDeltaSpec
from .layer import Recurrent as Recurrent, RecurrentSpec as RecurrentSpec
from .mamba2 import Mamba2 as Mamba2, Mamba2Spec as Mamba2Spec, state_space as state_space
from .newton import Newton as Newton, SolveReport as SolveReport, parallel_recurrence as parallel_recurrence
from .rg_lru import RGLRU as RGLRU, RGLRUSpec as RGLRUSpec
from .scan import linear_scan as linear_scan
from .states import RecurrentState as RecurrentState
